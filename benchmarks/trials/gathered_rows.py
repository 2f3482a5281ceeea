"""Try a first product that gathers rows, of FP8 prompts: ``python benchmarks/trials/gathered_rows.py --out FILE``.

Whole experts by deep_gemm, and with the first product gathered by each of its plans; of 4,096 and 8,192 tokens also the
parts of both. One JSON line a way, all of a point by turns, weights cold: ``error`` is, of whole experts, the largest
distance to deep_gemm's result, of the result's largest value. Needs a GPU. What was predicted:
``benchmarks/notes/fused_moe_triton.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastlayers.moe.fused_moe.cases import make_inputs, prepare, run
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.packages import deep_gemm
from fastlayers.moe.fused_moe.packages.deep_gemm_gathered import ALIGN, DeepGemmGatheredFusedMoE
from fastlayers.moe.fused_moe.triton.activation import activate
from fastlayers.moe.fused_moe.triton.gathered_gate_up import PLANS, Plan, gathered_gate_up
from fastlayers.moe.fused_moe.triton.permute import COLUMN_SCALES, place, scatter
from fastlayers.moe.fused_moe.triton.quantize import quantize
from fastlayers.moe.fused_moe.triton.reduce import combine
from fastlayers.registry.spec import Case
from fastlayers.tuning.clock import clock_for

sys.path.insert(0, str(Path(__file__).parents[1]))
from rows import Rows as Lines
from rows import arguments, finish

ROUNDS = 30
MODELS = {
    "DeepSeek-V3 tp8": FusedMoEConfig(
        7168, 256, 256, 8, num_shared=1, quant="fp8_block", scaling_factor=2.5, dtype=torch.bfloat16
    ),
    "Qwen3-30B-A3B": FusedMoEConfig(2048, 768, 128, 8, quant="fp8_block", dtype=torch.bfloat16),
}
TOKENS = 4096, 8192, 2048, 1024, 512
BOUND = 0.05


def parts(cfg: FusedMoEConfig, inputs: Any, plans: tuple[Plan, ...]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what the whole is made of, each by itself."""
    x, ids = inputs["x"], inputs["topk_ids"]
    placed = partial(place, ids, cfg.num_experts, cfg.num_shared, align=ALIGN, tokens_of_rows=True)
    quantised = partial(quantize, x, None, cfg.all_experts, "fp8_block", False)
    rows, (codes, scale) = placed(), quantised()
    yield "place", placed
    yield "quantise", quantised
    scattered = partial(scatter, x, rows, "fp8_block", False, COLUMN_SCALES)
    yield "scatter", scattered
    average = deep_gemm.average_rows(len(x), cfg)
    xq, xs = scattered()
    first = partial(deep_gemm.grouped_product, xq, xs, inputs["w13"], inputs["w13_scale"], rows, ALIGN, average)
    yield "deep_gemm's first product", first
    yield "activation", partial(activate, first(), ids, None, rows, cfg, COLUMN_SCALES)
    for plan in plans:
        product = partial(gathered_gate_up, codes, scale, inputs["w13"], inputs["w13_scale"], rows, plan, False)
        yield f"first product {plan.m} x {plan.warps}", product
    a, s = product()
    second = partial(deep_gemm.grouped_product, a, s, inputs["w2"], inputs["w2_scale"], rows, ALIGN, average)
    yield "second product", second
    yield (
        "combine",
        partial(combine, second(), inputs["topk_weights"], ids, None, rows, cfg.num_shared, 1.0, torch.empty_like(x)),
    )


def points(lines: Lines, device: str) -> list[Any]:
    """Measure; return what is wrong."""
    clock, bad = clock_for(device), []
    for tokens in TOKENS:
        for name, cfg in MODELS.items():
            if lines.late(model=name, tokens=tokens):
                continue
            torch.cuda.empty_cache()
            inputs = make_inputs(
                Case("prompt", cfg, {"num_tokens": tokens, "dtype": cfg.dtype, "load": "uniform"}),
                torch.device(device), 3,
            )  # fmt: skip
            scores = torch.rand(tokens, cfg.num_experts, device=device)
            inputs["topk_ids"] = scores.topk(cfg.top_k, dim=1).indices.int().contiguous()
            package = deep_gemm.DeepGemmFusedMoE(cfg)
            ways = {"deep_gemm": partial(run, package, inputs, prepare(package, inputs))}
            for plan in PLANS:
                ours = DeepGemmGatheredFusedMoE(cfg, plan._asdict())
                ways[f"gathered {plan.m} x {plan.warps}"] = partial(run, ours, inputs, prepare(ours, inputs))
            wanted = ways["deep_gemm"]()["y"].float()
            errors = {
                way: float((call()["y"].float() - wanted).abs().max() / wanted.abs().max())
                for way, call in ways.items()
            }
            more = dict(parts(cfg, inputs, PLANS)) if tokens in TOKENS[:2] else {}
            times = clock.measure({way: clock.prepare(call) for way, call in (ways | more).items()}, ROUNDS, 4.0)
            for way, timing in times.items():
                row = {"model": name, "tokens": tokens, "way": way, "us": round(timing.us, 2)}
                row |= {"spread_us": round(timing.spread_us, 2)}
                if way in errors:
                    row["error"] = round(errors[way], 5)
                    bad += [row] if not errors[way] < BOUND else []
                lines.put(row)
    return bad


def main() -> None:
    """Run the command line."""
    options = arguments(__doc__, 120.0).parse_args()
    finish(points(Lines(options), options.device))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
