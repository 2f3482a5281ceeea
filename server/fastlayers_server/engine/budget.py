"""How many prompt tokens an extend may bring, so that those who decode beside it do not stall."""

from __future__ import annotations

NEARLY = 1.25  # a larger chunk that costs so much more at most is worth it where no chunk meets the target
# A queue is a backlog from so many requests on, and so many for each row: then those who wait matter more.
BACKLOG, BACKLOG_SHARE = 8, 0.25


class Budget:
    """A table of measured step times, and the chunk that follows from it.

    Parameters
    ----------
    max_tokens : int
        The chunk where nothing decodes, or nothing was measured.
    target : float
        Seconds for an extend and the decode step beside it.

    Attributes
    ----------
    extend, decode : dict of int to float
        Seconds by new tokens, and by rows.
    """

    def __init__(self, max_tokens: int, target: float) -> None:
        self.max_tokens, self.target = max_tokens, target
        self.extend: dict[int, float] = {}
        self.decode: dict[int, float] = {}
        self._chunks: dict[int, int] = {}

    def measured(self, extend: dict[int, float], decode: dict[int, float]) -> None:
        """Take the step times of the warm-up."""
        self.extend, self.decode = dict(sorted(extend.items())), dict(sorted(decode.items()))
        self._chunks.clear()

    def chunk(self, rows: int, waiting: int = 0) -> int:
        """Return the largest chunk beside so many decoding rows.

        With a backlog it is ``max_tokens``: every decode step beside a small chunk is one that fewer rows share.
        """
        if not rows or not self.extend or waiting >= max(BACKLOG, BACKLOG_SHARE * rows):
            return self.max_tokens
        if rows not in self._chunks:
            self._chunks[rows] = self._fitting(rows)
        return self._chunks[rows]

    def _fitting(self, rows: int) -> int:
        beside = next((seconds for size, seconds in self.decode.items() if size >= rows), 0.0)
        limit = self.target - beside
        if min(self.extend.values()) > limit:
            # Launch-bound: every chunk is too long, and a larger one hardly longer.
            limit = NEARLY * min(self.extend.values())
        return min(self.max_tokens, max(tokens for tokens, seconds in self.extend.items() if seconds <= limit))
