"""What a trace of torch's profiler says of steps: what takes longest on the device, gaps, and waits for other ranks."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
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


def one_layer(events: Iterable[Event], layers: int) -> list[dict[str, Any]]:
    """Return the launches of one of so many equal layers, in order: median duration, and how much later each ends.

    ``later_us`` is from the end of what ended last before, so these add up to a layer where none is left out, whatever
    starts early. Empty where the launches are not a whole number a layer.
    """
    order = sorted(events, key=lambda event: event[1])
    each, rest = divmod(len(order), layers)
    if rest or not order:
        return []
    found: list[list[tuple[str, float, float]]] = [[] for _ in range(each)]
    last = order[0][1]
    for place, (name, begin, took) in enumerate(order):
        found[place % each].append((name, took, max(0.0, begin + took - last)))
        last = max(last, begin + took)
    names = [Counter(name for name, _, _ in same).most_common(1)[0][0] for same in found]
    return [
        {
            "us": round(statistics.median(took for _, took, _ in same), 2),
            "later_us": round(statistics.median(later for _, _, later in same), 2), "name": name[:90],
        }
        for name, same in zip(names, found, strict=True)
    ]  # fmt: skip


def of_replays(replay: Callable[[], Any], steps: int = 8) -> dict[str, Any]:
    """Return the :func:`summary` of a captured step that is replayed; all ranks call this."""
    return summary(events_of(replay, steps), steps)


def events_of(replay: Callable[[], Any], steps: int) -> list[Event]:
    """Return what ran on the device while a step was replayed, or called, so many times."""
    replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            replay()
        torch.cuda.synchronize()
    kinds = torch.autograd.DeviceType.CUDA
    return [
        (event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profile.events()
        if event.device_type == kinds
    ]


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
