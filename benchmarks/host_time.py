"""Time steps that are not captured: ``python benchmarks/host_time.py [MODEL ...] [--out FILE] [--profile]``.

A forward of 16 tokens (one prompt) of models of real dimensions with random weights: milliseconds on the clock, of the
device (sum of its kernels), kernels, and Python's calls in one decoder layer as cProfile counts them. The clock's are
the median of those rounds, on several cores of the host one by one, in which nobody shared the core: on one that is
shared, a loop that is Python's alone takes up to twice as long, too, and one is timed right before and behind each
round. ``by_core_ms`` and ``loop_by_core_ms`` are the medians of all rounds of each core.
With ``--patch``, the same models of Hugging Face: a decode step of ``generate`` at batch 1, stock and with
``fl.patch(model)`` without graphs, by turns in one process, and the memory that either takes at most. One JSON line a
row; the first describes the run.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from generate import MODELS, prompts_of, randomize
from patch_gpu import CONFIGS, build, step_ms

import fastlayers as fl
from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.tuning.bench import describe_run
from fastlayers.tuning.provenance import loop_ms
from fastlayers_models.auto import family_of

ROUNDS, CORES = 60, 7
# Turns of the empty loop, a quarter of a millisecond; how much longer than the least one they take on a shared core.
TURNS, SHARED = 20_000, 1.15
PATCHED = [name for name in CONFIGS if name != "tiny"]


class Round(NamedTuple):
    """Milliseconds of a call that was waited for, and of the longer of two loops, right before and behind it."""

    wall_ms: float
    loop_ms: float


def rounds(call: Callable[[], Any], count: int = ROUNDS) -> list[Round]:
    """Return so many rounds, after three that do not count."""
    found = []
    for _ in range(count + 3):
        torch.cuda.synchronize()
        before = loop_ms(TURNS, 1)
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took = 1000 * (time.perf_counter() - begin)
        found.append(Round(took, max(before, loop_ms(TURNS, 1))))
    return found[3:]


def by_core(call: Callable[[], Any]) -> list[list[Round]]:
    """Return the rounds of a call on several cores of the host, one by one."""
    allowed = os.sched_getaffinity(0)
    cores, found = sorted(allowed), []
    apart = -(-len(cores) // CORES)
    try:
        for core in cores[os.getpid() % apart :: apart]:  # not those of another that measures beside this one
            os.sched_setaffinity(0, {core})
            found.append(rounds(call))
    finally:
        os.sched_setaffinity(0, allowed)
    return found


def unshared(cores: Sequence[Sequence[Round]]) -> list[float]:
    """Return the milliseconds of those rounds in which nobody else kept the core busy."""
    every = [each for core in cores for each in core]
    least = min(each.loop_ms for each in every)
    return [each.wall_ms for each in every if each.loop_ms <= SHARED * least]


def device_time(call: Callable[[], Any]) -> tuple[float, int]:
    """Return milliseconds of all kernels of a call, and their number."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    kernels = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.device_time for event in kernels) / 1000, len(kernels)


def calls_in_layer(model: Any, call: Callable[[], Any]) -> tuple[int, pstats.Stats]:
    """Return how many Python and C functions the second decoder layer calls."""
    layer, seen = model.decoder.layers[1], cProfile.Profile()
    forward = layer.forward

    def counted(*arguments: Any) -> Any:
        seen.enable()
        try:
            return forward(*arguments)
        finally:
            seen.disable()

    layer.forward = counted
    call()
    del layer.forward
    stats = pstats.Stats(seen)
    return stats.total_calls, stats  # type: ignore[attr-defined]


def median(values: Iterable[float]) -> float:
    """Return the median, as a row tells it."""
    return round(statistics.median(values), 2)


def measure_model(name: str, profile: bool) -> dict[str, Any]:
    """Return the row of one model."""
    family: Any = family_of(MODELS[name])
    model = family(family.config_class.from_hf(MODELS[name]), device="cuda")
    randomize(model)
    size, tokens = model.page_size, 16
    spec = fl.kv_cache_spec(model, page_size=size, dtype=model.kv_dtype)
    caches = spec.allocate(8, model.device)
    state = AttentionState(8, 512, 4, size, model.device)
    ids = torch.tensor(prompts_of(1, tokens, model.config.vocab_size)[0], device="cuda")

    @torch.inference_mode()
    def forward() -> Any:
        meta = state.plan(AttentionBatch((tokens,), (0,), [[1]]), num_pages=8)
        return model.compute_logits(model(ids, meta, caches)[-1:])

    for _ in range(3):
        forward()
    walls = by_core(forward)
    own = unshared(walls)
    device, kernels = device_time(forward)
    calls, stats = calls_in_layer(model, forward)
    if profile:
        whole = cProfile.Profile()
        whole.runcall(forward)
        torch.cuda.synchronize()
        pstats.Stats(whole).sort_stats("tottime").print_stats(45)
        stats.sort_stats("ncalls").print_stats(40)
    return {
        "model": name, "tokens": tokens, "wall_ms": median(own), "own_rounds": len(own),
        "rounds": sum(map(len, walls)), "by_core_ms": [median(each.wall_ms for each in core) for core in walls],
        "loop_by_core_ms": [median(each.loop_ms for each in core) for core in walls],
        "device_ms": round(device, 2), "kernels": kernels, "layers": model.config.num_hidden_layers,
        "calls_in_a_layer": calls,
    }  # fmt: skip


def measure_patch(name: str) -> dict[str, Any]:
    """Return milliseconds of a decode step of Hugging Face's model, stock and patched without graphs, by turns."""
    model = build(name)
    ids = torch.tensor(prompts_of(1, 128, model.config.vocab_size), device="cuda")
    stock, patched = [], []
    step_ms(model, ids, {})
    for _ in range(3):
        stock.append(step_and_peak(model, ids))
        report = fl.patch(model)
        step_ms(model, ids, {})
        patched.append(step_and_peak(model, ids))
        if any(report.fallbacks().values()):
            raise SystemExit(f"{name}: {report.summary()}")
        fl.unpatch(model)
    (a, before), (b, after) = (map(statistics.median, zip(*runs, strict=True)) for runs in (stock, patched))
    return {
        "model": name, "stock_ms": round(a, 2), "patched_ms": round(b, 2), "ratio": round(b / a, 3),
        "stock_gib": round(before / 2**30, 2), "memory_ratio": round(after / before, 4),
    }  # fmt: skip


def step_and_peak(model: Any, ids: torch.Tensor) -> tuple[float, int]:
    """Return milliseconds of a decode step, and the most bytes that were allocated meanwhile."""
    torch.cuda.reset_peak_memory_stats()
    took = step_ms(model, ids, {})
    return took, torch.cuda.max_memory_allocated()


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; with --patch of {', '.join(CONFIGS)}")
    parser.add_argument("--patch", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = [{
        **describe_run("cuda"), "command": "python " + " ".join(sys.argv)
    }]  # fmt: skip
    print(json.dumps(rows[0]), flush=True)
    for name in asked.models or (PATCHED if asked.patch else list(MODELS)):
        rows.append(measure_patch(name) if asked.patch else measure_model(name, asked.profile))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    if asked.out:
        with open(asked.out, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
