"""Shapes without a table: at warm-up the backends that can serve them are timed, so that nothing is guessed.

Fewer points than a tuner's and no search: each backend's own rule, and what the ladder would run that is lent by the
nearest shape or a kin device, at the token counts of a quick table, at powers of two between them and on both sides of
that ladder's edges. The result is a table like any other, kept for this device and these versions, and serves until
kernels or versions change or a tuned table comes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastlayers import tuning
from fastlayers.attention.context_buckets import CONTEXTS
from fastlayers.registry import Backend, Choice
from fastlayers.runtime import builds
from fastlayers.tuning.probe import choices_of
from fastlayers.tuning.rungs import OutOfTimeError, Step, TuneError, alternatives, as_table, choose_ladder
from fastlayers.tuning.samples import Option, Sample

if TYPE_CHECKING:
    from torch import nn

    from fastlayers.tuning.search import Bench

log = logging.getLogger(__name__)
# Rounds of each point, and the seconds after which the rest keep the ladder that they have.
ROUNDS, SECONDS = 5, 60.0
# How names of layers end whose weights are most of what a step reads.
PRODUCTS = ("linear", "moe", "bmm")


class Probed(list[Path]):
    """The tables that were written.

    Attributes
    ----------
    left : int
        Shapes that still have none because the time was over.
    shapes : int
        Shapes that had none.
    """

    left, shapes = 0, 0


def shapes_without_a_table(model: nn.Module, everywhere: bool = False, longest: int | None = None) -> Iterator[Choice]:
    """Yield one choice for each shape on CUDA whose ladder is another shape's or device's, or a rank.

    Of decode each context, up to ``longest`` tokens where that is given.
    """
    seen: set[tuple[str, str]] = set()
    for module in model.modules():
        for choice in choices_of(module):
            if choice.requested != "auto" or not (everywhere or choice.device.type == "cuda"):
                continue
            for cfg in _contexts(choice.cfg, getattr(module, "rotary", None), longest):
                key = tuning.key_of(cfg)
                if key is None or (choice.layer, key) in seen:
                    continue
                seen.add((choice.layer, key))
                able = {rung.backend.name: rung.backend for rung in choice.rungs}
                found = tuning.lookup(choice.layer, cfg, choice.device, able)
                if found is None or not found.exact:
                    yield replace(choice, cfg=cfg)


def _contexts(cfg: Any, rotary: Any, longest: int | None) -> Iterable[Any]:
    if getattr(cfg, "phase", "") != "decode" or not hasattr(cfg, "context"):
        return (cfg,)
    positions = min(getattr(rotary, "max_position", max(CONTEXTS)), longest or math.inf)
    return (replace(cfg, context=context) for context in CONTEXTS if context <= max(positions, CONTEXTS[0]))


def _lateness(choice: Choice) -> tuple[int, int]:
    """Return when a shape's turn is: what costs steps of decoding most comes first, for the time may not suffice."""
    phase = getattr(choice.cfg, "phase", "")
    if phase:
        return 0 if phase == "decode" else 3, getattr(choice.cfg, "context", 0)
    return 1 if choice.layer.endswith(PRODUCTS) else 2, 0


def probe_shapes(
    model: nn.Module,
    *,
    build: bool = True,
    longest: int | None = None,
    bench: Callable[[Choice], Bench] | None = None,
    said: Callable[[str], None] = lambda label: None,
    now: Callable[[], float] = time.monotonic,
) -> Probed:
    """Time and write a table for each shape of ``model`` that has none, for ``SECONDS`` at most; return the files.

    The shape under way when the time is over is given up: it has a whole table or none.

    Parameters
    ----------
    model : nn.Module
    build : bool
        Also time what has to be built first.
    longest : int, optional
        Tokens of the longest request, where that is known: decode behind many more is not probed.
    bench : callable, optional
        Makes what times a choice's shape; for tests. With it, shapes on any device are probed.
    said : callable
        Told before each shape.
    now : callable
        Seconds; for tests.
    """
    found, begun = Probed(), now()
    waiting = sorted(shapes_without_a_table(model, bench is not None, longest), key=_lateness)
    found.shapes = len(waiting)

    def check_time() -> None:
        if now() - begun > SECONDS:
            raise OutOfTimeError("not all shapes were probed")

    for done, choice in enumerate(waiting):
        try:
            check_time()
            said(f"{choice.layer} {tuning.key_of(choice.cfg)}")
            made = bench(choice) if bench is not None else _bench(choice)
            path = probe_shape(made, choice, build, check_time)
        except OutOfTimeError:
            found.left = len(waiting) - done
            sentence = "not all shapes without a tuned table were probed (%.0f s): %d of %d are left"
            log.warning(sentence, SECONDS, found.left, len(waiting))
            break
        except (torch.OutOfMemoryError, TuneError) as error:
            first = (str(error).splitlines() or [""])[0]
            log.warning("%s %s was not probed: %s", choice.layer, tuning.key_of(choice.cfg), first)
            continue
        found += [path] if path is not None else []
    return found


def _bench(choice: Choice) -> Bench:
    from fastlayers.tuning.clock import CudaClock
    from fastlayers.tuning.search import Bench

    place = torch.device("cuda", torch.cuda.current_device())
    return Bench(choice.layer, choice.cfg, place, CudaClock(place))


def probe_shape(
    bench: Bench, choice: Choice, build: bool = True, check_time: Callable[[], None] = lambda: None
) -> Path | None:
    """Time one shape and write its table; ``None`` where there is nothing to choose from.

    ``check_time`` is called between measurements, and between options that are made ready for one.

    Raises
    ------
    TuneError
        No backend ran at every token count.
    OutOfTimeError
        ``check_time`` did: nothing is written.
    """
    from fastlayers.tuning.sweep import between, tokens_of

    # Weights stay as they are packed: only what shares the layout of what is chosen now.
    layouts = {rung.backend.weight_layout for rung in choice.rungs}
    able = [backend for backend in bench.able() if backend.weight_layout in layouts]
    if not build:
        able = [row for row in able if builds.unbuilt(bench.layer, row, bench.cfg, bench.device) is None]
    key = str(tuning.key_of(bench.cfg))
    names = {backend.name: backend for backend in able}
    lent = tuning.fitted(tuning.lent_rungs(bench.layer, key, bench.device, names), bench.cfg, names, lent=True)
    options = dict.fromkeys([Option(backend.name) for backend in able] + [Option.of(row) for row in lent])
    if len(options) < 2:
        return None
    edges = [row["max_tokens"] for row in lent if row["max_tokens"] is not None]
    quick = tokens_of(bench.layer, bench.cfg, quick=True)
    counts = sorted({*quick, *between(quick), *(n for edge in edges for n in (edge, edge + 1) if n <= quick[-1])})
    samples: list[Sample] = []
    bench.check_time = check_time
    for tokens in counts:
        row = [Option.of(tuning.rung_at(lent, tokens))] if lent else []
        samples += bench.time_few(tokens, [*(Option(name) for name in names), *row], ROUNDS)
    table = _table(bench, key, samples, able)
    path = tuning.path_of(tuning.probed_dir(), bench.layer, key, bench.device)
    try:
        tuning.write(path, table)
    except OSError as error:
        log.warning("%s cannot be written, %s %s keeps its ladder: %s", path, bench.layer, key, error.strerror)
        return None
    return path


def _table(bench: Bench, key: str, samples: Sequence[Sample], able: Sequence[Backend]) -> dict[str, Any]:
    layouts, rank = {row.name: row.weight_layout for row in able}, [row.name for row in able]

    def choose(names: frozenset[str]) -> list[Step] | None:
        try:
            return choose_ladder([s for s in samples if s.option.backend in names], layouts, rank)
        except TuneError:
            return None

    steps = choose_ladder(samples, layouts, rank)
    others = alternatives(steps, {row.name: tuning.removable_packages(row) for row in able}, choose)
    table = {
        "schema": tuning.SCHEMA, "layer": bench.layer, "device": bench.device.name, "key": key, "cfg": repr(bench.cfg),
        **as_table(steps, others, samples),
    }  # fmt: skip
    about = {"command": "fl.warmup", "rules": tuning.rules(table, bench.cfg, able)}
    return table | {"metadata": tuning.metadata(bench.layer, able) | about}
