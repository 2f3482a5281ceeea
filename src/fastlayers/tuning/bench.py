"""Benchmark rows: every backend of a layer on one case, checked first, then timed in turns, with both floors."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastlayers as fl
from fastlayers.device import OPTIONAL_PACKAGES, as_device, package
from fastlayers.errors import UnknownNameError
from fastlayers.registry import registry
from fastlayers.registry.spec import EXACT, Bound, Case
from fastlayers.runtime import builds
from fastlayers.tuning.clock import Timed, measure_enough
from fastlayers.tuning.parity import compare
from fastlayers.tuning.provenance import loop_ms, provenance
from fastlayers.tuning.samples import Option
from fastlayers.tuning.search import Bench
from fastlayers.tuning.sweep import inputs_of, peak_flops

# A peer rounds where its authors chose to: bf16 before and after the activation, as sglang's experts do, moves the
# e4m3 codes and with them the result by 0.018. It must compute the same layer; a wrong scale or expert is far off.
PEER_BOUND = Bound(0.04, 0.2)


def describe_run(device: torch.device | str) -> dict[str, Any]:
    """Return what the numbers depend on: command, sources, versions, device."""
    found = {name: package(name, load=False).version for name in OPTIONAL_PACKAGES}
    program = Path(sys.argv[0])  # of `python -m PACKAGE` it is the file that begins it
    return {
        "command": " ".join(["fastlayers" if program.name == "__main__.py" else program.name, *sys.argv[1:]]),
        **provenance(), "built": builds.summary(),
        "fastlayers": fl.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "packages": {name: version for name, version in found.items() if version is not None},
        "device": str(as_device(device)), "threads": torch.get_num_threads(), "loop_ms": loop_ms(),
    }  # fmt: skip


def auto_option(bench: Bench, tokens: int) -> Option:
    """Return what ``"auto"`` runs for this many tokens where all that it takes is built: the rung of its ladder."""
    rung = registry(bench.layer).choose(bench.cfg, bench.device, built_only=False).rung_for(tokens)
    return Option(rung.backend.name, rung.config)


def chosen_options(bench: Bench, against: Sequence[str] = ()) -> list[Option]:
    """Return every backend that ``"auto"`` chooses from; with ``against`` all that run whose names begin so.

    Raises
    ------
    UnknownNameError
        A name in ``against`` that no backend of this layer begins with.
    """
    ranked = registry(bench.layer).ranked
    for wanted in against:
        if not any(backend.name.startswith(wanted) for backend in ranked):
            known = ", ".join(backend.name for backend in ranked)
            raise UnknownNameError(f"{bench.layer}: no backend {wanted!r}; known: {known}")
    if not against:
        return [Option(backend.name) for backend in bench.able()]
    named = [backend for backend in ranked if any(backend.name.startswith(wanted) for wanted in against)]
    return [Option(b.name) for b in named if b.why_not(bench.cfg, bench.device) is None]


# No backend's name.
_COPY = "a copy"


def _prepared_copy(bench: Bench, num_bytes: float) -> Timed:
    return bench.clock.prepare(copy_of(num_bytes, bench.place))


@torch.inference_mode()
def check_peer(bench: Bench, option: Option, case: Case) -> float:
    """Return a peer's largest relative RMS error against the layer's fp32 reference, on the case itself.

    Integers must be equal. What is compared of a peer that has ``judged(own, expected, inputs)`` is what that returns.

    Raises
    ------
    ParityError
        The error exceeds ``PEER_BOUND``: the peer computes something else, and its time would say nothing.
    """
    rows = (bench.row(option), registry(bench.layer).named("reference"))
    peer, reference = (row.load()(bench.cfg) for row in rows)
    actual, expected = (_outputs(bench, impl, case) for impl in (peer, reference))
    if hasattr(peer, "judged"):
        actual, expected = peer.judged(actual, expected, inputs_of(bench.layer, case, bench.place))
    where, errors = f"{bench.layer}/{option}/{case.name}", []
    for name, wanted in expected.items():
        bound = PEER_BOUND if wanted.is_floating_point() else EXACT
        errors.append(compare(f"{where}: {name}", actual[name], wanted, bound))
    return max(errors, default=0.0)


def _outputs(bench: Bench, impl: Any, case: Case) -> dict[str, torch.Tensor]:
    # Inputs of its own, the same values each time: a peer may work in place.
    inputs = inputs_of(bench.layer, case, bench.place)
    return bench.spec.run(impl, inputs, bench.spec.prepare(impl, inputs))


def copy_of(num_bytes: float, place: torch.device) -> Callable[[], object]:
    """Return a copy that reads and writes so many bytes in all."""
    source = torch.ones(max(2, int(num_bytes)) // 2, dtype=torch.uint8, device=place)
    return partial(torch.empty_like(source).copy_, source)


def rows_of(
    bench: Bench,
    case: Case,
    tokens: int,
    *,
    against: Sequence[str] = (),
    also: Sequence[Option] = (),
    rounds: int | None = None,
    whole: bool = False,
    copy: bool = False,
) -> list[dict[str, Any]]:
    """Check and time ``"auto"``, other backends and the bench's peers on one case, in turns; a row each, fastest first.

    Parameters
    ----------
    bench : Bench
        Of the case's layer and configuration.
    case : Case
    tokens : int
        By which the ladder is asked.
    against : sequence of str
        Beginnings of backends' names; default: all.
    also : sequence of Option
        Timed beside them.
    rounds : int, optional
        Default: more the shorter the calls are.
    whole : bool
        Check on the case itself; otherwise on a small one, once per backend.
    copy : bool
        Time a copy that moves the case's compulsory bytes as well: ``copy_us`` in every row.
    """
    auto = auto_option(bench, tokens)
    options = list(dict.fromkeys([auto, *chosen_options(bench, against), *also]))
    errors: dict[Option, float] = {}
    for option in options:
        with bench.noting(option):
            errors[option] = bench.check(option, case if whole else None)
    peers = [Option(name) for name in bench.peers if Option(name) not in bench.failed]
    for option in peers:
        with bench.noting(option):
            errors[option] = bench.once(option, partial(check_peer, bench, option, case))
    timed = bench.ready(case, [option for option in (*options, *peers) if option not in bench.failed])
    cost, device = bench.spec.cost(case), bench.device
    calls = {str(option): call for option, call in timed.items()}
    calls |= {_COPY: _prepared_copy(bench, cost.min_bytes)} if copy else {}
    clock = bench.clock
    found = clock.measure(calls, rounds) if rounds else measure_enough(clock, calls, beside=(_COPY,))
    arithmetic, memory = (s * 1e6 for s in cost.floors(device.bandwidth, peak_flops(bench.layer, bench.cfg, device)))
    rows = []
    for option in timed:
        us = found[str(option)].us
        rows.append(
            {
                "layer": bench.layer, "case": case.name, "tokens": tokens, "backend": option.backend,
                "config": dict(option.config), "auto": option == auto, "us": round(us, 2),
                "spread_us": round(found[str(option)].spread_us, 2), "tflops": round(cost.flops / us / 1e6, 3),
                "gb_per_s": round(cost.min_bytes / us / 1e3, 1), "arithmetic_floor_us": round(arithmetic, 3),
                "memory_floor_us": round(memory, 3), "of_arithmetic": round(arithmetic / us, 4),
                "of_memory": round(memory / us, 4), "error": float(f"{errors[option]:.3g}"),
            }
            | ({"peer": True} if option in peers else {})
            | ({"copy_us": round(found[_COPY].us, 2)} if copy else {})
        )  # fmt: skip
    return sorted(rows, key=lambda row: row["us"])
