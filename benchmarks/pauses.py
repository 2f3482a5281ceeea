"""What a full collection does to tokens of a server: ``python benchmarks/pauses.py [--json FILE]``, without a GPU.

The server's engine over a device that takes ``--tick-ms`` a step and computes nothing, 64 requests that decode, and
five million objects that live as long as the process. Milliseconds between tokens over some ticks, in whose middle the
collector goes through everything once, as it does when enough has survived it: with what the start made left to it
(``--no-freeze-gc``), and frozen, as ``/freeze_gc`` and a server's start do. The collector's own time is its callbacks'.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rows import command
from server_host import PAGE, VOCABULARY, Hollow

from fastlayers.tuning.provenance import provenance
from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.protocol import Control, Sampling, Submit, encode, pack_ids
from fastlayers_server.engine.scheduler import Scheduler

ROWS = 64


def engine(tick: float) -> Engine:
    """Return an engine of which :data:`ROWS` requests decode."""
    limits = SchedulerConfig(VOCABULARY, 4096, ROWS * 65, PAGE, (1,), max_running=ROWS)
    made = Engine(Scheduler(limits), Hollow(tick, 0.0), encode, overlap=True)  # type: ignore[arg-type]
    for rid in range(1, ROWS + 1):
        ids = [5 + (rid * 31 + place) % 1000 for place in range(300)]
        made.post(Submit(rid, pack_ids(ids), Sampling(0.0), 3000, ignore_eos=True))
    while len(made.scheduler.running.requests) < ROWS or made.scheduler.queue.count:
        made.tick()
    return made


def measured(made: Engine, count: int, frozen: bool) -> dict[str, Any]:
    """Return the milliseconds between ticks, of which one is behind a full collection."""
    pauses: list[tuple[int, float]] = []
    begun = 0.0

    def watch(phase: str, info: Mapping[str, int]) -> None:
        nonlocal begun
        if phase == "start":
            begun = time.perf_counter()
        else:
            pauses.append((info["generation"], 1e3 * (time.perf_counter() - begun)))

    gaps: list[float] = []
    gc.callbacks.append(watch)
    try:
        last = time.perf_counter()
        for index in range(count):
            if index == count // 2:
                gc.collect()
            made.tick()
            now = time.perf_counter()
            gaps.append(1e3 * (now - last))
            last = now
    finally:
        gc.callbacks.remove(watch)
    full = [ms for generation, ms in pauses if generation == 2]
    cuts = statistics.quantiles(gaps, n=100)
    return {
        "frozen": frozen, "ticks": count, "median_ms": round(cuts[49], 3), "p99_ms": round(cuts[98], 3),
        "longest_ms": round(max(gaps), 2), "full_collections": len(full), "full_collection_ms": round(max(full), 2),
        "others": len(pauses) - len(full), "longest_other_ms": round(max([0.0, *(m for g, m in pauses if g < 2)]), 2),
    }  # fmt: skip


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=5_000_000)
    parser.add_argument("--ticks", type=int, default=1000)
    parser.add_argument("--tick-ms", type=float, default=6.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    made = engine(given.tick_ms / 1e3)
    held = [[number] for number in range(given.objects)]
    rows = [measured(made, given.ticks, False)]
    made.post(Control(1, "freeze_gc"))
    made.tick()
    rows.append(measured(made, given.ticks, True))
    gc.unfreeze()
    found = {"command": command()} | provenance() | {
        "cores": os.cpu_count(), "objects": len(held), "requests": ROWS, "tick_ms": given.tick_ms, "rows": rows
    }  # fmt: skip
    text = json.dumps(found, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
