"""Counters and histograms of the engine, under the names of :data:`~fastlayers_server.engine.protocol.COUNTERS`."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from fastlayers_server.engine.protocol import COUNTERS, HISTOGRAMS


class Metrics:
    """Totals since the start."""

    def __init__(self) -> None:
        self.counters = {name: defaultdict[str, float](float) for name in COUNTERS}
        self._counts = {name: [0] * (len(bounds) + 1) for name, bounds in HISTOGRAMS.items()}
        self._sums = dict.fromkeys(HISTOGRAMS, 0.0)

    def add(self, name: str, key: str = "", value: float = 1) -> None:
        """Count."""
        if value:
            self.counters[name][key] += value

    def observe(self, name: str, value: float) -> None:
        """Put a value into a histogram."""
        self._counts[name][bisect_left(HISTOGRAMS[name], value)] += 1
        self._sums[name] += value

    @property
    def histograms(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """Counts and sums, as :class:`~fastlayers_server.engine.protocol.Stats` has them."""
        return {name: (tuple(counts), self._sums[name]) for name, counts in self._counts.items()}
