"""Where a process stood still: what took longer than it may, when that was, and what the process did meanwhile."""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from threading import Event
from typing import Any

LONG = 0.1  # seconds
KEPT = 64
LOOK_SECONDS = 0.02  # between two looks at an event loop
_frozen = Event()


class Stalls:
    """The last stalls of a process, and how many there were; any thread may note one.

    Parameters
    ----------
    clock : callable
        Seconds that all processes of a machine share.

    Attributes
    ----------
    counts : Counter
        By where it stood.
    last : deque of dict
        "where", "at" (the clock, when it was over), "ms", and what else is known.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self.last: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._clock, self._used = clock, resource.getrusage(resource.RUSAGE_SELF)

    def note(self, where: str, seconds: float, expected: float = 0.0, **about: Any) -> None:
        """Keep what took :data:`LONG` more than was to be expected."""
        if seconds - expected > LONG:
            self.counts[where] += 1
            self.last.append({"where": where, "at": round(self._clock(), 3), "ms": round(1e3 * seconds, 1), **about})

    def late(self, where: str, seconds: float) -> None:
        """Note how late somebody is who looks all the time, with what the process spent since the last look.

        Much processor time: it computed. System time and faults: memory was handed out. Neither: it waited for a disk,
        a lock, or a processor.
        """
        before, self._used = self._used, resource.getrusage(resource.RUSAGE_SELF)
        if seconds > LONG:
            spent = {
                "user_ms": round(1e3 * (self._used.ru_utime - before.ru_utime), 1),
                "system_ms": round(1e3 * (self._used.ru_stime - before.ru_stime), 1),
                "faults": self._used.ru_minflt - before.ru_minflt,
                "read_faults": self._used.ru_majflt - before.ru_majflt,
                "preempted": self._used.ru_nivcsw - before.ru_nivcsw,
            }
            self.note(where, seconds, **spent)


class Collections:
    """Tells the seconds of each garbage collection of this process, while it is inside ``with``.

    Parameters
    ----------
    told : callable
        ``told(generation, seconds)``
    """

    def __init__(self, told: Callable[[int, float], None]) -> None:
        self._told, self._began = told, 0.0

    def __enter__(self) -> None:
        gc.callbacks.append(self._called)

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._called)

    def _called(self, phase: str, info: Mapping[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        elif self._began:
            self._told(info["generation"], now - self._began)


def freeze() -> dict[str, Any]:
    """Keep what lives now out of this process's collections; return its counts before and after, and of how many.

    :func:`thaw` gives it back.
    """
    before = gc.get_count()
    gc.collect()
    gc.freeze()
    _frozen.set()
    return {"before": list(before), "after": list(gc.get_count()), "frozen": gc.get_freeze_count()}


def thaw() -> None:
    """Give back to this process's collections what :func:`freeze` took; what others froze stays where nobody called it.

    A server's or an engine's end is not always the process's: without this what it leaves would never be collected.
    """
    if _frozen.is_set():
        _frozen.clear()
        gc.unfreeze()


async def watch_loop(told: Callable[[float], None], period: float = LOOK_SECONDS) -> None:
    """Tell how late this event loop is, each so many seconds, until cancelled."""
    while True:
        begin = time.perf_counter()
        await asyncio.sleep(period)
        told(time.perf_counter() - begin - period)
