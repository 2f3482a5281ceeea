"""How many prompt tokens an extend may bring, so that those who decode beside it do not stall; when it is planned."""

from __future__ import annotations

from bisect import bisect_right

from fastlayers_server.engine.config import LEAST

NEARLY = 1.25  # a larger chunk that costs so much more at most is worth it where no chunk meets the target
# A queue is a backlog from so many requests on, or so many for each row, up to a limit: then who waits matters more.
BACKLOG, BACKLOG_SHARE, BACKLOG_ANYWAY = 8, 0.25, 16
# A chunk may make a step so many times as long as one of its rows alone; more where more than so many wait.
LONGER, PATIENT = 2.3, 8
# While no more wait than run, a whole step of a backlog may take so many times the target, its rows included.
STALL = 3.5
Seconds = dict[int, float]  # of steps, by tokens or rows
# Of the seconds that a step may take, what is planned for: steps of served requests take longer than those measured.
CAUTION = 0.92


class Budget:
    """A table of measured step times, and the chunk that follows from it.

    Parameters
    ----------
    max_tokens : int
        The chunk where nothing decodes, or nothing was measured.
    target : float
        Seconds for an extend and the decode step beside it, at most; 0: as many as it takes.

    Attributes
    ----------
    extend, decode, beside : dict of int to float
        Seconds by new tokens, and by rows; what rows add to an extend that they are part of, empty where none are.
    """

    def __init__(self, max_tokens: int, target: float) -> None:
        self.max_tokens, self.target = max_tokens, target
        self.extend: Seconds = {}
        self.decode: Seconds = {}
        self.beside: Seconds = {}
        self._chunks: dict[tuple[int, int], int] = {}

    def measured(self, extend: Seconds, decode: Seconds, beside: Seconds | None = None) -> None:
        """Take the step times of the warm-up."""
        self.extend, self.decode = dict(sorted(extend.items())), dict(sorted(decode.items()))
        self.beside = dict(sorted((beside or {}).items()))
        self._chunks.clear()

    def decode_seconds(self, rows: int) -> float:
        """Return what a decode step of so many rows takes; 0.0 where nothing was measured."""
        return next((took for size, took in self.decode.items() if size >= rows), 0.0)

    def backlog(self, rows: int, waiting: int) -> bool:
        """Whether so many wait that whole steps serve all best; it takes measured times to know better."""
        return bool(self.extend) and waiting >= max(BACKLOG, min(BACKLOG_SHARE * rows, BACKLOG_ANYWAY))

    def chunk(self, rows: int, waiting: int = 0, mixed: bool = False) -> int:
        """Return the largest chunk beside so many decoding rows.

        Few who wait are served in chunks that make a tick less than three times a decode step, so that nobody who
        decodes sees a gap; with a backlog it is ``max_tokens`` or :meth:`whole`: every decode step beside a small chunk
        is one that fewer rows share. With ``mixed`` ones, which a backlog does not have, no step has more tokens than
        ``max_tokens``, for which kernels were warmed up.
        """
        key, found = (rows, max(waiting, PATIENT)), self.max_tokens
        if rows and self.extend and self.target and not self.backlog(rows, waiting):
            if key not in self._chunks:
                self._chunks[key] = self._fitting(*key)
            found = self._chunks[key]
        return min(found, max(self.max_tokens - rows, LEAST)) if mixed else found

    def whole(self, rows: int) -> int:
        """Return the prompt tokens of a whole step that so many decoding rows have to wait for."""
        if not rows or not self.target:
            return self.max_tokens
        limit = CAUTION * STALL * self.target - self.decode_seconds(rows)
        sizes = range(1 + min(self.max_tokens, max(self.extend)))
        return max(min(self.extend), bisect_right(sizes, limit, key=lambda size: _between(self.extend, size)) - 1)

    def _fitting(self, rows: int, waiting: int) -> int:
        alone = _between(self.decode, rows)
        beside = _between(self.beside, rows) if self.beside else self.decode_seconds(rows)
        limit = min(CAUTION * self.target, LONGER * alone * waiting / PATIENT) - beside
        if min(self.extend.values()) > limit:
            # Launch-bound: every chunk is too long, and a larger one hardly longer.
            limit = NEARLY * min(self.extend.values())
        found = max(tokens for tokens, seconds in self.extend.items() if seconds <= limit)
        if self.beside:
            found = max(found - rows, min(self.extend))  # the step is as long as its chunk and rows together
        return min(self.max_tokens, found)

    def apart(self, tokens: int, rows: int) -> float:
        """Return what an extend and a decode step behind it take; inf where that was not measured."""
        extend, decode = _between(self.extend, tokens) if tokens else 0.0, _between(self.decode, rows) if rows else 0.0
        return extend + decode if (extend or not tokens) and (decode or not rows) else float("inf")

    def seconds(self, tokens: int, rows: int) -> float:
        """Return what a step of rows takes, or of rows and prompt tokens in one; 0.0 where that was not measured."""
        if not tokens:
            return _between(self.decode, rows)
        return _between(self.extend, tokens + rows) + _between(self.beside, rows) if self.beside else 0.0


def _between(seconds: Seconds, size: int) -> float:
    """Return the seconds of a size that lies between two that were measured; 0.0 beyond them."""
    below, took_below = 0, 0.0
    for above, took in seconds.items():
        if above >= size:
            share = (size - below) / (above - below) if below else 1.0
            return took_below + (took - took_below) * share
        below, took_below = above, took
    return 0.0


class Patience:
    """How long a step in flight is left alone before the next one is planned.

    The later, the more of those who arrive are in the next one; too late, and the device waits. So the share of its
    expected seconds grows a little with each step, and shrinks where the device was found idle.

    Attributes
    ----------
    share : float
    """

    LEAD = 0.003  # seconds from a plan to its first kernel
    LEAST, MORE, LESS = 0.3, 0.0005, 0.05

    def __init__(self) -> None:
        self.share = 0.8

    def left(self, expected: float, since: float) -> float:
        """Return how many seconds are left to wait, of a step that began ``since`` seconds ago."""
        return self.share * expected - self.LEAD - since

    def found(self, idle: bool) -> None:
        """Learn whether the device had nothing left to do when the next step was launched."""
        self.share = max(self.LEAST, self.share - self.LESS) if idle else min(1.0, self.share + self.MORE)
