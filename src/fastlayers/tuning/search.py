"""The tuner: every backend and every candidate configuration of one layer shape, timed per token count.

    options   = backends that "auto" may take here  ×  (their own rule + ``candidates(cfg, num_tokens)``)
    per token count: compile all in threads, time all a little, halve, time the rest more, halve, time the rest well
    quick runs: between counts, every backend's own rule and the neighbours' winners, so that no rung is a guess
    ladder    = the fewest rungs such that at every token count the rung's time is within NOISE of the best

What was timed goes into a journal, a line per token count: an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastlayers import tuning
from fastlayers.device import Device, as_device
from fastlayers.registry import Backend, registry
from fastlayers.registry.spec import Case, spec_of
from fastlayers.runtime.streams import side_stream
from fastlayers.tuning.clock import SHORT_US, Clock, Timed, Timing, rounds_for
from fastlayers.tuning.parity import check_parity
from fastlayers.tuning.rungs import OutOfTimeError, Step, TuneError, alternatives, as_table, choose_ladder
from fastlayers.tuning.samples import ALL, QUICK, Journal, Option, Sample, earlier
from fastlayers.tuning.staleness import packages_of
from fastlayers.tuning.sweep import between, case_at, drawn_on, inputs_of, peak_flops

MAX_CANDIDATES, QUICK_CANDIDATES = ALL, QUICK
# Rounds of timing, and the part of the options that is left after each but the last.
ROUNDS, KEPT, FEWEST = (3, 6, 13), 0.25, 4
# Calls longer than this vary little: fewer rounds do. The last of short ones take more, see timing.py.
LONG_US, LONG_ROUNDS = 2000.0, (2, 3, 5)


class NothingToTuneError(TuneError):
    """One backend without parameters: there is nothing to choose."""


# ---- timing ----------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """One layer shape on one device: makes inputs, builds options, checks and times them."""

    layer: str
    cfg: Any
    place: torch.device
    clock: Clock
    threads: int = field(default_factory=lambda: min(16, os.cpu_count() or 1))
    most_candidates: int = MAX_CANDIDATES
    # Other projects' pipelines by name, made like a backend: timed beside the backends, never chosen.
    peers: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    # Called before each option is built, compiled or captured. What it raises ends the run: no option has failed.
    check_time: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.spec, self.device = spec_of(self.layer), as_device(self.place)
        self.failed: dict[Option, str] = {}
        self._checked: dict[Option, float] = {}

    def able(self) -> list[Backend]:
        """Return the backends that ``"auto"`` chooses from here, best first; the last resort is none of them."""
        automatic = [b for b in registry(self.layer).ranked if self.device.type in b.auto_on]
        return [b for b in automatic if b.why_not(self.cfg, self.device) is None]

    def options(self, tokens: int, more: Iterable[Option] = ()) -> list[Option]:
        """Return what is timed at this token count: every backend's own rule, its candidates, and ``more``."""
        found: dict[Option, None] = {}
        for backend in self.able():
            found[Option(backend.name)] = None
            candidates = getattr(backend.load(), "candidates", None)
            for config in self._some(candidates(self.cfg, tokens)) if candidates is not None else []:
                found[Option(backend.name, tuple(sorted(config.items())))] = None
        for option in more:
            found[option] = None
        return self.working(found, tokens)

    def working(self, options: Iterable[Option], tokens: int) -> list[Option]:
        """Return what did not fail and serves so many tokens: what won at 4 may be nothing for 64."""
        return [option for option in options if option not in self.failed and self.serves(option, tokens)]

    def serves(self, option: Option, tokens: int) -> bool:
        """Return whether a backend says (``serves(config, num_tokens)``) that a configuration is for so many tokens."""
        if not option.config:
            return True
        says = getattr(registry(self.layer).named(option.backend).load(), "serves", None)
        return says is None or bool(says(dict(option.config), tokens))

    def _some(self, candidates: Sequence[Mapping[str, int]]) -> list[Mapping[str, int]]:
        """Return the first candidate and at most ``most_candidates - 1`` others, from all over the list."""
        if len(candidates) <= self.most_candidates:
            return list(candidates)
        step = (len(candidates) - 1) / (self.most_candidates - 1)
        return [candidates[round(index * step)] for index in range(self.most_candidates)]

    def row(self, option: Option) -> Backend:
        """Return the registry row of an option, its configuration bound; of a peer a row that is not registered."""
        if option.backend in self.peers:
            return Backend(option.backend, self.peers[option.backend], auto_on=())
        backend = registry(self.layer).named(option.backend)
        if not option.config:
            return backend
        target = backend.load()
        return replace(backend, target=lambda cfg: target(cfg, dict(option.config)))

    def check(self, option: Option, case: Case | None = None) -> float:
        """Return the option's error against the reference on a small case (or the given one), checked once.

        Raises
        ------
        ParityError
            The option computes something else.
        """
        most = self.spec.checked_tokens
        tokens = next(count for count in range(most, 0, -1) if count == 1 or self.serves(option, count))
        small = case if case is not None else case_at(self.layer, self.cfg, tokens, context=129)

        def error() -> float:
            draw = partial(drawn_on, self.place)
            errors = check_parity(self.layer, self.row(option), small, self.place, draw=draw)
            return max(errors.values(), default=0.0)

        return self.once(option, error)

    def once(self, option: Option, error: Callable[[], float]) -> float:
        """Return an option's error, measured the first time."""
        if option not in self._checked:
            self._checked[option] = error()
        return self._checked[option]

    @torch.inference_mode()
    def ready(self, case: Case, options: Sequence[Option]) -> dict[Option, Timed]:
        """Build, compile and capture options over shared operands; those that cannot are noted in ``failed``."""
        self.check_time()
        inputs = inputs_of(self.layer, case, self.place)
        if self.place.type == "cuda" and torch.cuda.memory_reserved(self.place) > self.device.memory_bytes // 2:
            torch.cuda.empty_cache()  # what random numbers left behind; a capture cannot give it back
        packed: dict[str | Option, Any] = {}
        calls: dict[Option, Callable[[], Any]] = {}
        for option in options:
            self.check_time()
            with self.noting(option):
                impl = self.row(option).load()(self.cfg)
                # Packed weights are one for all of a backend's configurations, as in a ladder; plans are not.
                layout = option.backend if hasattr(impl, "pack") else option
                if layout not in packed:
                    packed[layout] = self.spec.prepare(impl, inputs)
                calls[option] = partial(self.spec.timed, impl, inputs, packed[layout])
        self._compile(calls)
        timed: dict[Option, Timed] = {}
        for option, call in calls.items():
            if option not in self.failed:
                self.check_time()
                with self.noting(option):
                    timed[option] = self.clock.prepare(call)
        return timed

    def noting(self, option: Option) -> _Noting:
        """Return a block in which a failure of ``option`` is noted."""
        return _Noting(self.failed, option)

    def _compile(self, calls: Mapping[Option, Callable[[], Any]]) -> None:
        """Call each once; Triton's in threads, because its compiler lets others run while it works.

        Other packages' just-in-time compilers are not all safe in threads: they go one after another.
        """

        def first(option: Option, call: Callable[[], Any]) -> None:
            self.check_time()
            with self.noting(option), torch.inference_mode(), torch.cuda.stream(side_stream(self.place)):
                call()

        if self.place.type != "cuda":
            return
        torch.cuda.synchronize(self.place)  # the operands are there before other streams read them
        alone = {option for option in calls if packages_of(self.row(option)) != ("triton",)}
        try:
            for option in alone:
                first(option, calls[option])
            with ThreadPoolExecutor(self.threads) as pool:
                for done in [pool.submit(first, *each) for each in calls.items() if each[0] not in alone]:
                    done.result()
        finally:
            torch.cuda.synchronize(self.place)  # whoever gives up lets the operands go

    def time_at(self, tokens: int, more: Iterable[Option] = ()) -> list[Sample]:
        """Return what every option takes at this token count; the slow ones are timed a little only."""
        timed = self.ready(case_at(self.layer, self.cfg, tokens), self.options(tokens, more))
        defaults = {option for option in timed if not option.config}
        found: dict[Option, Timing] = {}
        alive = list(timed)
        for index in range(len(ROUNDS)):
            fastest = min((timing.us for timing in found.values()), default=LONG_US)
            rounds = (LONG_ROUNDS if fastest > LONG_US else ROUNDS)[index]
            if fastest < SHORT_US and index == len(ROUNDS) - 1:
                rounds = rounds_for(fastest)
            measured = self.clock.measure({str(o): timed[o] for o in alive}, rounds)
            found |= {option: measured[str(option)] for option in alive}
            by_time = sorted(alive, key=lambda option: found[option].us)
            if index < len(ROUNDS) - 1:
                kept = by_time[: max(FEWEST, math.ceil(KEPT * len(by_time)))]
                # A backend's own rule stays while it may still win; neighbours' winners stay for the ladder's sake.
                stays = {o for o in defaults | set(more) if o in found and found[o].us < 1.5 * found[by_time[0]].us}
                alive = [o for o in alive if o in kept or o in stays]
        return [Sample(tokens, option, t.us, t.spread_us) for option, t in found.items()]

    def time_few(self, tokens: int, options: Iterable[Option], rounds: int) -> list[Sample]:
        """Return what these options take at this token count, without those that failed."""
        working = self.working(dict.fromkeys(options), tokens)
        timed = self.ready(case_at(self.layer, self.cfg, tokens), working)
        measured = self.clock.measure({str(option): timed[option] for option in timed}, rounds)
        return [Sample(tokens, o, measured[str(o)].us, measured[str(o)].spread_us) for o in timed]


class _Noting:
    """Notes a failure of an option instead of ending the run: candidates may ask for more than the chip has."""

    def __init__(self, failed: dict[Option, str], option: Option) -> None:
        self.failed, self.option = failed, option

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        if "CUDA error" in str(error):  # everything after it would fail as well
            return False
        self.failed[self.option] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return True


# ---- one shape, resumable --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """Where a run is: a shape's file name, token counts done and in all, and what happens now."""

    name: str
    done: int
    total: int
    now: str


def tune_shape(
    bench: Bench,
    counts: Sequence[int],
    folder: Path,
    *,
    command: str,
    said: Callable[[Progress], None] = lambda progress: None,
    until: float = math.inf,
    again: bool = False,
    fill: bool = False,
) -> Path:
    """Tune one layer shape and write its table; an interrupted run of the same code and versions is taken up.

    Of a table of the same versions what ``counts`` lack is measured, and the rest kept.

    Parameters
    ----------
    bench : Bench
    counts : sequence of int
        Token counts.
    folder : Path
        Directory of tables.
    command : str
        For the table's metadata.
    said : callable
        Told before every step.
    until : float
        Value of ``time.monotonic()`` after which no token count is begun.
    again : bool
        Measure all of ``counts``, whatever a table holds.
    fill : bool
        Where ``counts`` are far apart, also time every backend's own rule and the neighbours' winners in between.

    Returns
    -------
    Path
        The table's file.

    Raises
    ------
    TuneError
        The configuration has no tuning key, or nothing can run it. Its subclasses: there is nothing to choose, or
        the time is over.
    """
    key = tuning.key_of(bench.cfg)
    if key is None:
        raise TuneError(f"{bench.layer}: {bench.cfg} has no tuning_key(): this layer is not tuned")
    able = bench.able()
    if not able:
        raise TuneError(f"{bench.layer}: no backend that 'auto' may take runs {bench.cfg} on {bench.device}")
    if all(len(bench.options(count)) < 2 for count in counts):
        raise NothingToTuneError(f"only {able[0].name}, by its own rule, runs it here")
    path = tuning.path_of(folder, bench.layer, key, bench.device)
    about = tuning.metadata(bench.layer, able)
    header = {"kernels": about["kernels"], "versions": about["versions"], "candidates": bench.most_candidates}
    journal = Journal(path.with_suffix(".journal"), header)
    before, started = earlier(path, bench.layer, bench.device, able), time.time()
    missing = {*(counts if again else before.lacks(counts, bench.most_candidates))} - journal.searched
    for done, tokens in enumerate(counts):
        if tokens not in missing:
            continue
        if time.monotonic() > until:
            raise OutOfTimeError(f"{done} of {len(counts)} token counts are done; run again to go on")
        said(Progress(path.name, done, len(counts), f"{tokens} tokens"))
        near = [s for count in sorted(journal.samples)[-2:] for s in journal.samples[count]]
        journal.add(tokens, bench.time_at(tokens, [*_winners(near), *_lent(bench, key, tokens)]))
    # Where all is measured again, so is what lies between: it was timed for the winners of then.
    kept = [count for count in before.samples if before.candidates[count] or not (again and fill)]
    found = {count: before.samples[count] for count in kept} | journal.samples
    for tokens in between(found) if fill else ():
        if time.monotonic() > until:
            raise OutOfTimeError("all token counts are done, what lies between them is not; run again to go on")
        said(Progress(path.name, len(counts), len(counts), f"{tokens} tokens"))
        few = [*(Option(backend.name) for backend in able), *_near_winners(found, tokens)]
        journal.add(tokens, bench.time_few(tokens, few, ROUNDS[-1]), between=True)
    said(Progress(path.name, len(counts), len(counts), "checking the winners"))
    found |= journal.samples
    samples = [s for count in sorted(found) for s in found[count]]
    steps, errors = _checked_ladder(bench, samples, able)
    candidates = dict(before.candidates) | dict.fromkeys(journal.between, 0)
    candidates |= dict.fromkeys(journal.searched, bench.most_candidates)
    table = _table(bench, key, steps, samples, errors, able)
    about |= {"rules": tuning.rules(table, bench.cfg, able)}
    table |= {
        "failed": dict(before.failed) | table["failed"], "candidates": {str(n): candidates[n] for n in sorted(found)},
        "metadata": about | {"command": command, "seconds": round(time.time() - started, 1)},
    }  # fmt: skip
    tuning.write(path, table)
    journal.path.unlink(missing_ok=True)
    return path


def _lent(bench: Bench, key: str, tokens: int) -> list[Option]:
    """Return what the nearest shape's ladder would run here: so that tables tell what going without one costs."""
    able = {backend.name: backend for backend in bench.able()}
    rungs = tuning.fitted(tuning.lent_rungs(bench.layer, key, bench.device, able), bench.cfg, able, lent=True)
    return [Option.of(tuning.rung_at(rungs, tokens))] if rungs else []


def _winners(samples: list[Sample]) -> list[Option]:
    counts = {s.tokens for s in samples}
    found: dict[Option, None] = {}
    for count in counts:
        for sample in sorted((s for s in samples if s.tokens == count), key=lambda s: s.us)[:4]:
            found[sample.option] = None
    return list(found)


def _near_winners(found: Mapping[int, list[Sample]], tokens: int) -> list[Option]:
    """Return what was quickest at the token counts next to this one, which lies between them."""
    lower, higher = max(n for n in found if n < tokens), min(n for n in found if n > tokens)
    return _winners(found[lower] + found[higher])


def _checked_ladder(bench: Bench, samples: list[Sample], able: list[Backend]) -> tuple[list[Step], dict[Option, float]]:
    """Choose the ladder; an option that fails the check against the reference is left out and the rest chosen again."""
    layouts, rank = {b.name: b.weight_layout for b in able}, [b.name for b in able]
    while True:
        left = [s for s in samples if s.option not in bench.failed]
        if not left:
            reasons = "; ".join(sorted({f"{option}: {why}" for option, why in bench.failed.items()}))
            raise TuneError(f"{bench.layer} {bench.cfg}: nothing ran and agreed with the reference: {reasons}")
        steps = choose_ladder(left, layouts, rank)
        errors: dict[Option, float] = {}
        for step in steps:
            with bench.noting(step.option):
                errors[step.option] = bench.check(step.option)
        if len(errors) == len({step.option for step in steps}):
            return steps, errors


def _table(
    bench: Bench, key: str, steps: list[Step], samples: list[Sample], errors: dict[Option, float], able: list[Backend]
) -> dict[str, Any]:
    chosen = {step.option for step in steps}
    shown: list[Sample] = []
    for count in sorted({s.tokens for s in samples}):
        timed = [s for s in samples if s.tokens == count]
        best = {s.option.backend: s for s in sorted(timed, key=lambda s: -s.us)}
        limit = tuning.KEPT_WITHIN * min(s.us for s in timed)
        shown += [
            s for s in timed
            if s.us <= limit or s.option in chosen or not s.option.config or best[s.option.backend] is s
        ]  # fmt: skip

    def choose(names: frozenset[str]) -> list[Step] | None:
        try:
            others = [backend for backend in able if backend.name in names]
            chosen, more = _checked_ladder(bench, [s for s in samples if s.option.backend in names], others)
        except TuneError:
            return None
        errors.update(more)
        return chosen

    packages = {backend.name: tuning.removable_packages(backend) for backend in able}
    others = alternatives(steps, packages, choose)
    return {
        "schema": tuning.SCHEMA, "layer": bench.layer, "device": bench.device.name, "key": key, "cfg": repr(bench.cfg),
        **as_table(steps, others, samples),
        "errors": {str(option): float(f"{error:.3g}") for option, error in errors.items()},
        "failed": {str(option): why for option, why in sorted(bench.failed.items())},
        "floors": floors(bench.layer, bench.cfg, bench.device, sorted({s.tokens for s in samples})),
        "measured": [sample.as_json() for sample in shown],
    }  # fmt: skip


def floors(layer: str, cfg: Any, device: Device, counts: Sequence[int]) -> dict[str, list[float]]:
    """Return the two floors in microseconds for each token count: arithmetic, memory."""
    found = {}
    for tokens in counts:
        cost = spec_of(layer).cost(case_at(layer, cfg, tokens))
        seconds = cost.floors(device.bandwidth, peak_flops(layer, cfg, device))
        found[str(tokens)] = [round(s * 1e6, 3) for s in seconds]
    return found
