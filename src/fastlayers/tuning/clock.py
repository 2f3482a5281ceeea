"""How everything here is timed: benchmarks, ``fastlayers tune``, ``fastlayers bench`` and the probe of tuned tables.

On CUDA a call is captured in a graph, several times over, each time after a kernel that reads a buffer larger than
the L2 cache: operands are cold, and nothing dirty is left to be written back while the call runs. The same graph
without the calls is timed beside it and subtracted. All calls of one measurement take turns, so that a clock that
drifts drifts for all of them. On a CPU a call is a call.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fastlayers.runtime.streams import side_lock, side_stream

Call = Callable[[], object]
FLUSH_BYTES = 160 << 20
# Runs of a call, least and most: one of a few microseconds varies by a tenth, so that telling 2 % apart needs many.
ROUNDS, MOST_ROUNDS, SHORT_US = 15, 200, 100.0
# What is run more often: calls of at most so many times the fastest one's time, for at most so long in all.
NEAR, MORE_SECONDS = 2.0, 2.0


@dataclass(frozen=True)
class Timing:
    """Median microseconds of one call, half the distance between its quartiles, and how many runs these are from."""

    us: float
    spread_us: float
    runs: int

    @staticmethod
    def of(found: Sequence[float]) -> Timing:
        """Summarise runs."""
        if len(found) < 4:
            return Timing(statistics.median(found), (max(found) - min(found)) / 2, len(found))
        low, middle, high = statistics.quantiles(found, n=4)
        return Timing(middle, (high - low) / 2, len(found))


class Timed(Protocol):
    """A call that is ready to be timed."""

    def run(self) -> float:
        """Return the microseconds of one call, now."""


class Clock(Protocol):
    """Times calls on one device."""

    def prepare(self, call: Call) -> Timed:
        """Warm ``call`` up and make it ready to be timed."""

    def measure(self, calls: Mapping[str, Timed], rounds: int, seconds: float = ...) -> dict[str, Timing]:
        """Run ``calls`` in turns and return the median and spread of each.

        ``rounds`` times; after ``seconds`` (default: no limit) no further round begins if there are ``ROUNDS`` already.
        """


def take_turns(
    calls: Mapping[str, Timed],
    rounds: int,
    *,
    skip: int = 0,
    before: Callable[[], None] | None = None,
    seconds: float = math.inf,
) -> dict[str, Timing]:
    """Return the timing of each call; a round runs every one once, every other round backwards.

    The first ``skip`` rounds do not count; ``before`` runs at the beginning of each. After ``seconds`` no further round
    begins once ``ROUNDS`` of them count.
    """
    end = time.perf_counter() + seconds
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        if turn >= skip + ROUNDS and time.perf_counter() > end:
            break
        if before is not None:
            before()
        names = list(calls)[:: 1 if turn % 2 == 0 else -1]
        for name in names:
            microseconds = calls[name].run()
            if turn >= skip:
                found[name].append(microseconds)
    return {name: Timing.of(runs) for name, runs in found.items()}


def rounds_for(us: float) -> int:
    """Return how often calls are run of which the fastest takes ``us`` microseconds."""
    return min(MOST_ROUNDS, max(ROUNDS, round(ROUNDS * SHORT_US / us)))


def measure_enough(clock: Clock, calls: Mapping[str, Timed], *, beside: Collection[str] = ()) -> dict[str, Timing]:
    """Run ``calls`` in turns; those that are nearly as fast as the fastest once more, more often the shorter they are.

    The others keep their first timing: they are told apart already, and would take most of the time. Calls named in
    ``beside`` are timed for comparison and do not count as the fastest.
    """
    found = clock.measure(calls, ROUNDS)
    best = min((timing.us for name, timing in found.items() if name not in beside), default=SHORT_US)
    more = rounds_for(best)
    if more <= ROUNDS:
        return found
    near = {name: call for name, call in calls.items() if found[name].us <= NEAR * best}
    return found | clock.measure(near, more, MORE_SECONDS)


@dataclass
class _HostTimed:
    call: Call

    def run(self) -> float:
        begin = time.perf_counter()
        self.call()
        return (time.perf_counter() - begin) * 1e6


class HostClock:
    """Times calls on the CPU."""

    def prepare(self, call: Call) -> Timed:
        """Call it once."""
        call()
        return _HostTimed(call)

    def measure(self, calls: Mapping[str, Timed], rounds: int, seconds: float = math.inf) -> dict[str, Timing]:
        """Run ``calls`` in turns."""
        return take_turns(calls, rounds, seconds=seconds)


@dataclass
class _CudaTimed:
    graph: torch.cuda.CUDAGraph
    begin: torch.cuda.Event
    end: torch.cuda.Event
    calls: int
    flush: _CudaTimed | None
    keep: object = None
    last: float = 0.0

    def replay(self) -> float:
        self.begin.record()
        self.graph.replay()
        self.end.record()
        self.end.synchronize()
        self.last = self.begin.elapsed_time(self.end) * 1e3
        return self.last

    def run(self) -> float:
        """Return the microseconds of one call, less the flushes as they were timed last."""
        flushes = self.flush.last if self.flush is not None else 0.0
        return (self.replay() - flushes) / self.calls


class CudaClock:
    """Times calls on a CUDA device, see the head of this file.

    Parameters
    ----------
    device : torch.device
    cold : bool
        Read ``FLUSH_BYTES`` before every call. Without it operands stay in the cache where they fit.
    """

    def __init__(self, device: torch.device | str = "cuda", cold: bool = True) -> None:
        self.device, self.cold = torch.device(device), cold
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = side_stream(self.device)
        self._buffer = torch.ones(4096, FLUSH_BYTES // 4 // 4096, device=self.device) if cold else None
        self._target = torch.empty(4096, device=self.device)
        self._flushes: dict[int, _CudaTimed] = {}

    def prepare(self, call: Call) -> Timed:
        """Warm up with three calls on a side stream, then capture as many as the clock's resolution asks for."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                call()
            begin, end = self._events()
            begin.record()
            call()
            end.record()
        end.synchronize()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        about = begin.elapsed_time(end) * 1e3
        calls = next(count for limit, count in _CALLS if about < limit)
        if self.cold and calls not in self._flushes:
            self._flushes[calls] = self._capture(None, calls, None)
        return self._capture(call, calls, self._flushes.get(calls))

    def measure(self, calls: Mapping[str, Timed], rounds: int, seconds: float = math.inf) -> dict[str, Timing]:
        """Run ``calls`` in turns; the first round does not count, each begins with the flushes alone."""
        return take_turns(calls, rounds + 1, skip=1, before=self._time_flushes, seconds=seconds)

    def _time_flushes(self) -> None:
        for flush in self._flushes.values():
            flush.replay()

    def _events(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def _flush(self) -> None:
        if self._buffer is not None:
            torch.amax(self._buffer, 1, out=self._target)

    def _capture(self, call: Call | None, calls: int, flush: _CudaTimed | None) -> _CudaTimed:
        self._flush()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with side_lock, torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            for _ in range(calls):
                self._flush()
                if call is not None:
                    call()
        timed = _CudaTimed(graph, *self._events(), calls, flush, call)
        timed.replay()
        return timed


# An eager call costs up to 30 µs of host time, so the first limit is above that.
_CALLS = ((60.0, 12), (150.0, 6), (500.0, 3), (float("inf"), 1))


def clock_for(device: torch.device | str, cold: bool = True) -> Clock:
    """Return the clock of a device."""
    place = torch.device(device)
    return CudaClock(place, cold) if place.type == "cuda" else HostClock()


def measure_captures(
    calls: Mapping[str, Call], device: torch.device, captures: int, rounds: int
) -> dict[str, list[float]]:
    """Return the median microseconds of so many captures of each call, all of them in turns; one on a CPU.

    Captures of the same launches differ by where their buffers lie.
    """
    clock, count = clock_for(device), captures if device.type == "cuda" else 1
    ready = {f"{name} {index}": clock.prepare(call) for index in range(count) for name, call in calls.items()}
    found = clock.measure(ready, rounds)
    return {name: [found[f"{name} {index}"].us for index in range(count)] for name in calls}
