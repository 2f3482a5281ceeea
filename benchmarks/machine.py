"""The machine under a benchmark: whether it stands, whether its memory grows, who takes its processors. Linux only."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from fastlayers_server.stalls import Stalls


class Machine:
    """Whether the machine itself stands, while this process has nothing else to do: how late it is, what memory grows.

    Virtual machines may be given memory only when somebody touches it, and processors when others leave them.
    """

    LOOK = 0.02

    def __enter__(self) -> Machine:
        self.stalls, self.grown, self.longest = Stalls(), [], 0.0  # type: Stalls, list[list[float]], float
        self.begin, self._over = time.monotonic(), threading.Event()
        self._before = self._figures()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._after = self._figures()

    def _look(self) -> None:
        total, before = self._before["mem_total_mib"], time.monotonic()
        while not self._over.wait(self.LOOK):
            late = time.monotonic() - before - self.LOOK
            self.longest = max(self.longest, late)
            self.stalls.late("machine", late)
            now = memory()["MemTotal"]
            if now != total:
                self.grown.append([round(time.monotonic() - self.begin, 2), round(now - total, 1)])
                total = now
            before = time.monotonic()

    @staticmethod
    def _figures() -> dict[str, float]:
        found = memory()
        figures = {"mem_total_mib": found["MemTotal"], "mem_free_mib": found["MemFree"]}
        stolen = Path("/proc/stat").read_text().split(maxsplit=9)[8]
        figures["stolen_s"] = int(stolen) / os.sysconf("SC_CLK_TCK")
        for what in ("cpu", "io", "memory"):
            path = Path("/proc/pressure") / what  # not every kernel has it
            if path.is_file():
                figures[f"{what}_waited_s"] = int(path.read_text().split()[4].partition("=")[2]) / 1e6
        return figures

    def told(self) -> dict[str, Any]:
        """Return the figures before, what they grew by, and when memory did (seconds since the begin, MiB)."""
        grew = {name: round(value - self._before[name], 3) for name, value in self._after.items()}
        longest = round(1e3 * self.longest, 1)
        return {"lag_max_ms": longest, "before": self._before, "grew": grew, "memory_grew": self.grown}


def memory() -> dict[str, float]:
    """Return the machine's memory in MiB, by the kernel's names."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.partition(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.endswith("kB")}


def touch(gib: float) -> float:
    """Touch so much memory, if less is free, and let it go; return the seconds: some machines give it only then."""
    begin = time.monotonic()
    if memory()["MemFree"] < 1024 * gib:
        np.empty(int(gib * 2**30), np.uint8)[::4096] = 1
    return round(time.monotonic() - begin, 2)
