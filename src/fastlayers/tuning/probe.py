"""The short check of tuned tables that were made with other versions: does the first rung still win?

Runs where a model is warmed up on CUDA, never in a constructor nor where one is loaded, whose first answer somebody
waits for: it makes random operands of the layer's shape, times the ladder's first rung against the others and against
the time in the table, and lets them go. What came of it is kept beside the kernels, for as long as table, packages and
kernels are the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlayers import tuning
from fastlayers.registry import Choice, Ladder
from fastlayers.runtime.kernel_cache import write_whole

if TYPE_CHECKING:
    from torch import nn

    from fastlayers.tuning.clock import Clock

log = logging.getLogger(__name__)
# What a probe forgives: against another rung, and against what the table says (machines differ, too).
SLOWER_THAN_OTHERS, SLOWER_THAN_TABLE = 1.15, 1.3
ROUNDS = 5
# A probe that is not done by then leaves the rest unprobed, and says so.
SECONDS = 10.0
RECORD = "verdicts.json"

_probed: set[tuple[str, str, str]] = set()


@dataclass(frozen=True)
class Probe:
    """One probed table: the first rung's time, the best other rung's, what the table says, and the verdict in words."""

    layer: str
    table: str
    us: float
    others_us: float | None
    table_us: float | None
    verdict: str | None


def choices_of(module: Any) -> Iterator[Choice]:
    """Yield the choices a module holds as attributes (``choice``, or those of ladders, also of those in mappings)."""
    seen: set[int] = set()
    held = list(vars(module).values())
    # Ladders of phases that are built when their first step comes.
    held += [
        ladder for value in held if isinstance(value, dict) for ladder in value.values() if isinstance(ladder, Ladder)
    ]
    for value in held:
        choice = value if isinstance(value, Choice) else getattr(value, "choice", None)
        if isinstance(choice, Choice) and id(choice) not in seen:
            seen.add(id(choice))
            yield choice


def probe_tables(
    model: nn.Module, clock: Callable[[], Clock] | None = None, now: Callable[[], float] = time.monotonic
) -> list[Probe]:
    """Probe each table of other versions that serves a layer of ``model`` on CUDA, once per process; warn of losers.

    What an earlier process found is taken from its record, and returned like what is timed now.

    Parameters
    ----------
    model : nn.Module
    clock : callable, optional
        Makes what times; for tests. With it, layers on any device are probed.
    now : callable
        Seconds; for tests.
    """
    import torch

    found: list[Probe] = []
    begun, made, known, new = now(), None, _recorded(), {}
    for choice, table in _suspects(model, everywhere=clock is not None):
        state = _state(choice, table)
        if (before := known.get(state)) is not None:
            _probed.add(_name(choice))
            found.append(before)
            _warn(choice, table, before)
            continue
        if now() - begun > SECONDS:
            log.warning("tuned tables: not all of those made with other versions were probed (%.0f s)", SECONDS)
            break
        if made is None:
            made = clock() if clock is not None else _cuda_clock()
        _probed.add(_name(choice))
        try:
            probe = _probe(choice, table, made)
        except torch.OutOfMemoryError:
            log.warning("%s: %s was made with other versions; no room for its probe", choice.layer, table.path.name)
            continue
        found.append(probe)
        new[state] = probe
        _warn(choice, table, probe)
    if new:
        _record(_recorded() | new)
    return found


def _warn(choice: Choice, table: tuning.Found, probe: Probe) -> None:
    if probe.verdict is not None:
        command = f"fastlayers tune --layer {choice.layer} --shape '{tuning.shape_text(choice.cfg)}'"
        log.warning("%s: %s: %s; to renew it: %s", choice.layer, table.path.name, probe.verdict, command)


def _state(choice: Choice, found: tuning.Found) -> str:
    """Return a digest of what a probe's result depends on."""
    about = tuning.metadata(choice.layer, [rung.backend for rung in choice.rungs])
    parts = _name(choice), choice.device.sm, found.table, about["versions"], about["kernels"]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:24]


def _recorded() -> dict[str, Probe]:
    """Return what earlier processes found; a record that cannot be read says nothing."""
    try:
        found = json.loads((tuning.probed_dir() / RECORD).read_text())
        return {state: Probe(**fields) for state, fields in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _record(probes: dict[str, Probe]) -> None:
    path: Path = tuning.probed_dir() / RECORD
    try:
        write_whole(path, json.dumps({state: vars(probe) for state, probe in probes.items()}, indent=1) + "\n")
    except OSError as error:
        log.warning("%s cannot be written, its tables are probed again by the next process: %s", path, error.strerror)


def _cuda_clock() -> Clock:
    from fastlayers.tuning.clock import CudaClock

    return CudaClock()


def _name(choice: Choice) -> tuple[str, str, str]:
    return choice.layer, str(tuning.key_of(choice.cfg)), choice.device.name


def _suspects(model: nn.Module, everywhere: bool) -> Iterator[tuple[Choice, tuning.Found]]:
    seen = set(_probed)
    for module in model.modules():
        for choice in choices_of(module):
            if choice.requested != "auto" or not (everywhere or choice.device.type == "cuda") or _name(choice) in seen:
                continue
            seen.add(_name(choice))
            able = {rung.backend.name: rung.backend for rung in choice.rungs}
            table = tuning.lookup(choice.layer, choice.cfg, choice.device, able)
            if table is not None and table.exact and table.changed:
                yield choice, table


def _probe(choice: Choice, found: tuning.Found, clock: Clock) -> Probe:
    import torch

    from fastlayers.registry.spec import spec_of
    from fastlayers.tuning.sweep import case_at, inputs_of

    spec, first = spec_of(choice.layer), choice.rungs[0]
    counts, _ = tuning.times_of(found.table)
    tokens = first.max_tokens if first.max_tokens is not None else counts[-1] if counts else 1
    # Without the token counts nobody knows where the last rung took what the table says.
    table_us = first.microseconds if first.max_tokens is not None or counts else None
    case = case_at(choice.layer, choice.cfg, tokens)
    with torch.inference_mode():
        inputs = inputs_of(choice.layer, case, choice.device.type)
        calls = {}
        for index, rung in enumerate(choice.rungs):
            impl = rung.build(choice.cfg)
            context = spec.prepare(impl, inputs)
            calls[str(index)] = clock.prepare(partial(spec.timed, impl, inputs, context))
        times = clock.measure(calls, ROUNDS)
    us, others = times["0"].us, [timing.us for name, timing in times.items() if name != "0"]
    best = min(others, default=None)
    verdict = None
    if best is not None and us > SLOWER_THAN_OTHERS * best:
        verdict = f"at {tokens} tokens its {first.backend.name} takes {us:.1f} µs, another rung {best:.1f} µs"
    elif table_us is not None and us > SLOWER_THAN_TABLE * table_us:
        verdict = f"at {tokens} tokens its {first.backend.name} takes {us:.1f} µs instead of {table_us} µs"
    return Probe(choice.layer, found.path.name, us, best, table_us, verdict)
