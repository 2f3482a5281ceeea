"""Who waits, and who is next: priority classes, in each by arrival or by cached prefix, within bounds."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from weakref import ReferenceType, ref

from fastlayers_server.engine.request import WAITING, Request

WINDOW = 128  # how far "lpm" looks
PATIENCE = 8  # how often a request may be passed over


def _place(request: Request) -> tuple[int, bool, int]:
    """Return the order of requests; whoever lost its slot comes before its class, and nothing of it changes here."""
    return request.priority, request.cached < 0, request.seq


class WaitingQueue:
    """Waiting requests: smaller priorities first, in a class first come first served, or the longest hit first.

    Parameters
    ----------
    hit : callable, optional
        Tokens of a request that are cached: order by it ("lpm").

    Attributes
    ----------
    tokens : int
        Of their prompts.
    ends : deque of float
        When requests ended, the latest ones; from which follows how long others wait.
    """

    def __init__(self, hit: Callable[[Request], int] | None = None) -> None:
        self._hit = hit
        self._order: list[Request] = []
        # Who ended goes before its deadline: that may be hours later.
        self._deadlines: list[tuple[float, int, ReferenceType[Request]]] = []
        self.tokens = 0
        self.ends: deque[float] = deque(maxlen=64)

    @property
    def count(self) -> int:
        """How many wait."""
        return len(self._order)

    def push(self, request: Request) -> None:
        """Queue a request: behind its class, or before it if it lost its slot."""
        insort(self._order, request, key=_place)
        self.tokens += request.prompt_len
        if request.cached >= 0:
            request.passed = PATIENCE
        elif request.submit.deadline:
            heapq.heappush(self._deadlines, (request.submit.deadline, request.seq, ref(request)))

    def remove(self, request: Request) -> None:
        """Take a request out."""
        del self._order[bisect_left(self._order, _place(request), key=_place)]
        self.tokens -= request.prompt_len

    def head(self) -> Request | None:
        """Return who is next, without taking it."""
        if self._hit is None or not self._order:
            return self._order[0] if self._order else None
        window = [r for r in self._order[:WINDOW] if r.priority == self._order[0].priority]
        return next((r for r in window if r.passed >= PATIENCE), None) or max(window, key=self._hit)

    def take(self, request: Request) -> None:
        """Take the head; whoever stood before it was passed over."""
        self.remove(request)
        for before in self._order[: bisect_left(self._order, _place(request), key=_place)]:
            before.passed += 1

    def retry_after(self, now: float) -> float:
        """Return the seconds after which a queue that is full will have room."""
        ends = self.ends
        rate = len(ends) / max(now - ends[0], 1e-3) if ends else 1.0
        return min(60.0, max(1.0, self.count / rate))

    def expired(self, now: float) -> Iterator[Request]:
        """Yield the requests whose deadline passed while they waited for the first time."""
        while self._deadlines and self._deadlines[0][0] < now:
            request = heapq.heappop(self._deadlines)[2]()
            if request is not None and request.state == WAITING and request.cached < 0:
                yield request

    def __iter__(self) -> Iterator[Request]:
        return iter(self._order)
