"""From times to rungs: the fewest that are within the noise of the best at every token count, and what else to keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastlayers.errors import FastlayersError
from fastlayers.tuning.samples import Option, Sample

# A win below this is noise, and so is one below the spread of the runs, up to MOST_SPREAD: measured again, what was
# taken shall not be slower by the 3 % that "never slower" allows.
NOISE, MOST_SPREAD = 0.015, 0.02


class TuneError(FastlayersError, RuntimeError):
    """A shape cannot be tuned here."""


class OutOfTimeError(TuneError):
    """The time that a run was given is over: the tuner keeps its journal, a warm-up's probe nothing."""


@dataclass(frozen=True)
class Step:
    """One rung as the tuner chose it."""

    max_tokens: int | None
    option: Option
    us: float


def choose_ladder(samples: Iterable[Sample], layouts: Mapping[str, str], rank: Sequence[str]) -> list[Step]:
    """Return the ladder: fewest rungs whose every measured point is within the noise of the best.

    Parameters
    ----------
    samples : iterable of Sample
        An option without a sample at a token count cannot serve it.
    layouts : mapping
        Backend name to weight layout. A ladder has one; the one with the smallest mean (of logarithms) wins.
    rank : sequence of str
        Backend names, best first: decides between equals.
    """
    found = list(samples)
    best: tuple[float, list[Step]] | None = None
    counts = sorted({s.tokens for s in found})
    for layout in dict.fromkeys(layouts[name] for name in rank if name in layouts):
        of_layout = [s for s in found if layouts.get(s.option.backend) == layout]
        if {s.tokens for s in of_layout} != set(counts):
            continue
        steps, times = _cover(of_layout, counts, rank)
        mean = sum(map(math.log, times)) / len(times)
        if best is None or mean < best[0] - 1e-9:
            best = (mean, steps)
    if best is None:
        raise TuneError("no backend was timed at every token count")
    return best[1]


def _cover(samples: list[Sample], counts: list[int], rank: Sequence[str]) -> tuple[list[Step], list[float]]:
    by_count = {count: {s.option: s for s in samples if s.tokens == count} for count in counts}
    good: dict[int, set[Option]] = {}
    for count, row in by_count.items():
        top = min(row.values(), key=lambda s: s.us)
        limit = top.us * (1 + max(NOISE, min(MOST_SPREAD, top.spread_us / top.us)))
        good[count] = {option for option, s in row.items() if s.us <= limit}
    steps: list[Step] = []
    times: list[float] = []
    position = 0
    while position < len(counts):
        reach: dict[Option, int] = {}
        for option in good[counts[position]]:
            end = position
            while end < len(counts) and option in good[counts[end]]:
                end += 1
            reach[option] = end

        def key(option: Option, reach: dict[Option, int] = reach, start: int = position) -> tuple[Any, ...]:
            span = counts[start : reach[option]]
            whole = sum(math.log(by_count[c][option].us) for c in span)
            return -reach[option], bool(option.config), rank.index(option.backend), whole

        chosen = min(reach, key=key)
        end = reach[chosen]
        times += [by_count[c][chosen].us for c in counts[position:end]]
        last = None if end == len(counts) else counts[end - 1]
        steps.append(Step(last, chosen, by_count[counts[end - 1]][chosen].us))
        position = end
    return steps, times


def as_rows(steps: Iterable[Step]) -> list[dict[str, Any]]:
    """Return a ladder as a table holds it."""
    return [
        {"max_tokens": step.max_tokens, "backend": step.option.backend, "microseconds": round(step.us, 2)}
        | ({"config": dict(step.option.config)} if step.option.config else {})
        for step in steps
    ]


def best_times(samples: Iterable[Sample]) -> dict[str, Any]:
    """Return the token counts and each backend's best time at each of them (``None``: none), as a table holds them."""
    best: dict[str, dict[int, float]] = {}
    for sample in samples:
        row = best.setdefault(sample.option.backend, {})
        row[sample.tokens] = min(sample.us, row.get(sample.tokens, math.inf))
    counts = sorted({count for row in best.values() for count in row})
    times = {name: [round(row[count], 2) if count in row else None for count in counts] for name, row in best.items()}
    return {"tokens": counts, "times": times}


def alternatives(
    ladder: Sequence[Step],
    packages: Mapping[str, Sequence[str]],
    choose: Callable[[frozenset[str]], list[Step] | None],
) -> list[list[Step]]:
    """Return the ladders for machines that lack packages which ``ladder`` needs, the best first.

    Parameters
    ----------
    ladder : sequence of Step
    packages : mapping
        Backend name to the packages behind it that a machine may lack.
    choose : callable
        ``choose(backends)`` returns the ladder of these backends alone, ``None`` if there is none.
    """
    found: dict[tuple[tuple[int | None, Option], ...], list[Step]] = {}
    seen: set[frozenset[str]] = set()
    waiting = [(frozenset[str](), list(ladder))]
    while waiting:
        lacking, steps = waiting.pop(0)
        for package in sorted({package for step in steps for package in packages.get(step.option.backend, ())}):
            more = lacking | {package}
            if more in seen:
                continue
            seen.add(more)
            left = frozenset(name for name, needed in packages.items() if not more & set(needed))
            if left and (other := choose(left)) is not None:
                found.setdefault(tuple((step.max_tokens, step.option) for step in other), other)
                waiting.append((more, other))
    return list(found.values())


def as_table(steps: Iterable[Step], others: Iterable[Iterable[Step]], samples: Iterable[Sample]) -> dict[str, Any]:
    """Return a ladder, its :func:`alternatives` and what they were chosen by, as a table holds them."""
    return {"ladder": as_rows(steps), "alternatives": [as_rows(other) for other in others], **best_times(samples)}
