"""Try how decode over latents is cut and multiplied: ``python benchmarks/trials/mla_parts.py --out FILE`` on a GPU.

The Triton backend alone: each configuration with requests cut evenly and by their lengths, by turns, at equal and at
drawn lengths. ``apart``: how far a row's results are from the first one's. One JSON line a row.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton.language as tl

from fastlayers.attention.mla import launch_config
from fastlayers.attention.mla import triton as mla_triton
from fastlayers.registry.spec import spec_of
from fastlayers.tuning.bench import describe_run
from fastlayers.tuning.clock import CudaClock
from fastlayers.tuning.sweep import inputs_of

sys.path.insert(0, str(Path(__file__).parents[1]))
import performance

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
KNOBS = {
    "16x32 4 3": (16, 32, 4, 3, 2), "16x32 8 3": (16, 32, 8, 3, 2), "16x64 8 2": (16, 64, 8, 2, 1),
    "16x64 8 3": (16, 64, 8, 3, 1),
}  # fmt: skip
# Ranks (heads are 128 over them), cache, requests, rows each in the mean, drawn.
POINTS = (
    (8, E4M3, 64, 4096, False), (8, E4M3, 128, 4096, False), (8, E4M3, 64, 4096, True), (8, E4M3, 16, 4096, False),
    (8, E4M3, 16, 4096, True), (8, E4M3, 1, 4096, False), (8, E4M3, 64, 1024, False), (8, BF16, 64, 4096, False),
    (8, BF16, 64, 4096, True), (8, BF16, 16, 4096, False), (8, BF16, 128, 1024, False), (1, BF16, 64, 4096, False),
    (1, BF16, 64, 4096, True), (1, E4M3, 64, 4096, True),
)  # fmt: skip


def forget() -> None:
    """Make launches anew."""
    launch_config.decode_launch.cache_clear()
    mla_triton._decode_launches.cache_clear()


@torch.inference_mode()
def main() -> None:
    """Check and time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--at-once", type=int, choices=(8, 16), help="values of an e4m3 cache that a thread copies at once"
    )
    parser.add_argument("--points", type=int, default=len(POINTS), help="so many of them")
    options = parser.parse_args()
    if options.at_once:
        mla_triton.AT_ONCE = tl.constexpr(options.at_once)
    lines: list[dict[str, Any]] = []

    def say(row: dict[str, Any]) -> None:
        lines.append(row)
        print(json.dumps(row), flush=True)
        if options.out:
            options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))

    say(describe_run(torch.device("cuda")) | {"run": "parts of latents, trial", "at_once": options.at_once or 8})
    spec, clock = spec_of("mla"), CudaClock("cuda")
    for tp, kv, count, context, drawn in POINTS[: options.points]:
        base = next(c for c in performance.layers_of(performance.DEEPSEEK, tp, "mla") if c.phase == "decode")
        cfg = replace(base, kv_dtype=kv)
        item = performance.Item("", "mla", cfg, (count,), (context,), ragged=drawn)
        inputs = inputs_of("mla", item.case(count, context), torch.device("cuda"))
        names = {"own": None} | (KNOBS if tp == 8 and kv == E4M3 else {})
        ready, wanted = {}, None
        for name, knobs in names.items():
            for cut, many in (("by length", launch_config.MANY_REQUESTS), ("evenly", 1 << 30)):
                config = None if knobs is None else dict(zip(launch_config.KNOBS, knobs, strict=True))
                with mock.patch.object(launch_config, "MANY_REQUESTS", many):
                    forget()
                    impl = mla_triton.TritonMLA(cfg, config)
                    step = spec.prepare(impl, inputs)
                    found = spec.run(impl, inputs, step)["o"].float()
                    wanted = found if wanted is None else wanted
                    apart = float((found - wanted).norm() / wanted.norm())
                    ready[f"{name}, {cut}"] = clock.prepare(partial(spec.timed, impl, inputs, step)), apart
        times = clock.measure({name: call for name, (call, _) in ready.items()}, options.rounds)
        for name, timing in times.items():
            say({
                "heads": cfg.num_heads, "cache": str(kv).removeprefix("torch."), "requests": count, "rows": context,
                "drawn": drawn, "name": name, "us": round(timing.us, 2), "spread": round(timing.spread_us, 2),
                "apart": ready[name][1],
            })  # fmt: skip
        del inputs, ready, times
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
