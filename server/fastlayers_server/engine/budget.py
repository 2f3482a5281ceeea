"""How many prompt tokens an extend may bring, so that those who decode beside it do not stall."""

from __future__ import annotations

NEARLY = 1.25  # a larger chunk that costs so much more at most is worth it where no chunk meets the target
# A queue is a backlog from so many requests on, or so many for each row, up to a limit: then who waits matters more.
BACKLOG, BACKLOG_SHARE, BACKLOG_ANYWAY = 8, 0.25, 16
# A chunk may make a step so many times as long as one of its rows alone; more where more than so many wait.
LONGER, PATIENT = 3.0, 8
# Of the seconds that a step may take, what is planned for: requests have longer contexts than the steps measured.
CAUTION = 0.95


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
        self.extend: dict[int, float] = {}
        self.decode: dict[int, float] = {}
        self.beside: dict[int, float] = {}
        self._chunks: dict[tuple[int, int], int] = {}

    def measured(
        self, extend: dict[int, float], decode: dict[int, float], beside: dict[int, float] | None = None
    ) -> None:
        """Take the step times of the warm-up."""
        self.extend, self.decode = dict(sorted(extend.items())), dict(sorted(decode.items()))
        self.beside = dict(sorted((beside or {}).items()))
        self._chunks.clear()

    def decode_seconds(self, rows: int) -> float:
        """Return what a decode step of so many rows takes; 0.0 where nothing was measured."""
        return _of(self.decode, rows)

    def backlog(self, rows: int, waiting: int) -> bool:
        """Whether so many wait that whole steps serve all best; it takes measured times to know better."""
        return bool(self.extend) and waiting >= max(BACKLOG, min(BACKLOG_SHARE * rows, BACKLOG_ANYWAY))

    def chunk(self, rows: int, waiting: int = 0) -> int:
        """Return the largest chunk beside so many decoding rows.

        Few who wait are served in chunks that make a tick at most three times a decode step, so that nobody who
        decodes sees a gap; with a backlog it is ``max_tokens``: every decode step beside a small chunk is one that
        fewer rows share.
        """
        if not rows or not self.extend or not self.target or self.backlog(rows, waiting):
            return self.max_tokens
        key = rows, max(waiting, PATIENT)
        if key not in self._chunks:
            self._chunks[key] = self._fitting(*key)
        return self._chunks[key]

    def _fitting(self, rows: int, waiting: int) -> int:
        alone = self.decode_seconds(rows)
        beside = _of(self.beside, rows) if self.beside else alone
        limit = min(CAUTION * self.target - beside, CAUTION * LONGER * alone * waiting / PATIENT - beside)
        if min(self.extend.values()) > limit:
            # Launch-bound: every chunk is too long, and a larger one hardly longer.
            limit = NEARLY * min(self.extend.values())
        found = max(tokens for tokens, seconds in self.extend.items() if seconds <= limit)
        if self.beside:
            found = max(found - rows, min(self.extend))  # the step is as long as its chunk and rows together
        return min(self.max_tokens, found)


def _of(seconds: dict[int, float], rows: int) -> float:
    return next((took for size, took in seconds.items() if size >= rows), 0.0)
