"""Who waits, and who is next: priority classes, in each by arrival or by cached prefix, within bounds."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from weakref import ReferenceType, ref

from fastlayers_server.engine.request import WAITING, Request

WINDOW = 128  # how far "lpm" looks
PATIENCE = 8  # how often a request may be passed over


class WaitingQueue:
    """Waiting requests: smaller priorities first, in a class first come first served, or the longest hit first.

    Parameters
    ----------
    hit : callable, optional
        Tokens of a request that are cached: order by it ("lpm").

    Attributes
    ----------
    ends : deque of float
        When requests ended, the latest ones; from which follows how long others wait.
    """

    def __init__(self, hit: Callable[[Request], int] | None = None) -> None:
        self._hit = hit
        self._classes: dict[int, deque[Request]] = {}
        # Who ended goes before its deadline: that may be hours later.
        self._deadlines: list[tuple[float, int, ReferenceType[Request]]] = []
        self.count = self.tokens = 0
        self.ends: deque[float] = deque(maxlen=64)

    def push(self, request: Request) -> None:
        """Queue a request behind its class."""
        self._classes.setdefault(request.priority, deque()).append(request)
        self._counted(request, 1)
        if request.submit.deadline:
            heapq.heappush(self._deadlines, (request.submit.deadline, request.seq, ref(request)))

    def push_front(self, request: Request) -> None:
        """Queue a request that lost its slot before its class."""
        request.passed = PATIENCE
        self._classes.setdefault(request.priority, deque()).appendleft(request)
        self._counted(request, 1)

    def remove(self, request: Request) -> None:
        """Take a request out; its class, too, if it was the last: clients choose among 2³² of them."""
        waiting = self._classes[request.priority]
        waiting.remove(request)
        if not waiting:
            del self._classes[request.priority]
        self._counted(request, -1)

    def head(self) -> Request | None:
        """Return who is next, without taking it."""
        if not self._classes:
            return None
        waiting = self._classes[min(self._classes)]
        if self._hit is None:
            return waiting[0]
        window = list(islice(waiting, WINDOW))
        return next((r for r in window if r.passed >= PATIENCE), None) or max(window, key=self._hit)

    def take(self, request: Request) -> None:
        """Take the head; whoever stood before it was passed over."""
        if self._hit is not None:
            for before in self._classes[request.priority]:
                if before is request:
                    break
                before.passed += 1
        self.remove(request)

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
        for priority in sorted(self._classes):
            yield from self._classes[priority]

    def _counted(self, request: Request, sign: int) -> None:
        self.count += sign
        self.tokens += sign * request.prompt_len
