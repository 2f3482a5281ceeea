"""What a trace of torch's profiler says of steps: what takes longest on the device, gaps, and waits for other ranks."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

Event = tuple[str, float, float]  # name, begin and duration in microseconds
# Kernels between ranks, by parts of their names.
BETWEEN_RANKS = "_push_sum_kernel", "_exchange_kernel", "_dispatch_kernel", "_combine_kernel", "nccl"


def summary(events: Iterable[Event], steps: int, most: int = 14) -> dict[str, Any]:
    """Return microseconds a step of all work, of gaps and of the kernels that take longest, with their calls a step.

    A kernel between ranks ends when the last rank has come: what its calls take beyond the quickest of that name
    (``wait_us``) is mostly waiting, where all of them are of as many rows. Kernels that start early lie over each
    other, so ``work_us`` may be more than ``busy_us``.
    """
    found: dict[str, list[float]] = defaultdict(list)
    spans = []
    for name, begin, took in events:
        found[name].append(took)
        spans.append((begin, begin + took))
    if not spans:
        return {"no_profile": "nothing ran on the device"}
    spans.sort()
    busy, end = 0.0, spans[0][0]
    for begin, until in spans:
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
    between = {name: times for name, times in found.items() if any(part in name for part in BETWEEN_RANKS)}

    def a_step(value: float) -> float:
        return round(value / steps, 2)

    longest = sorted(found.items(), key=lambda row: -sum(row[1]))[:most]
    return {
        "steps": steps, "span_us": a_step(end - spans[0][0]), "busy_us": a_step(busy),
        "gaps_us": a_step(end - spans[0][0] - busy), "work_us": a_step(sum(map(sum, found.values()))),
        "kernels": a_step(len(spans)), "between_ranks_us": a_step(sum(map(sum, between.values()))),
        "wait_us": a_step(sum(sum(times) - len(times) * min(times) for times in between.values())),
        "longest": [
            {"us": a_step(sum(times)), "calls": a_step(len(times)), "median_us": round(statistics.median(times), 2),
             "name": name[:90]}
            for name, times in longest
        ],
    }  # fmt: skip


def of_replays(replay: Callable[[], Any], steps: int = 8) -> dict[str, Any]:
    """Return the :func:`summary` of a captured step that is replayed; all ranks call this."""
    replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            replay()
        torch.cuda.synchronize()
    kinds = torch.autograd.DeviceType.CUDA
    return summary(
        [
            (event.name, event.time_range.start, event.time_range.elapsed_us())
            for event in profile.events()
            if event.device_type == kinds
        ],
        steps,
    )


def of_trace(path: Path) -> dict[str, Any]:
    """Return the :func:`summary` of a trace file, whose steps are the launches of captured graphs."""
    events = json.loads(path.read_text())["traceEvents"]
    steps = sum(event.get("name") == "cudaGraphLaunch" for event in events)
    work = [
        (event["name"], event["ts"], event["dur"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return summary(work, steps) if steps else {"no_profile": "no captured step ran meanwhile"}
