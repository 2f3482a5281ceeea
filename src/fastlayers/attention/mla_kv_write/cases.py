"""mla_kv_write's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.attention.kv_write.cases import make_cache, make_loc
from fastlayers.attention.kv_write.cases import write_case as _case
from fastlayers.attention.mla_kv_write.layer import MLAKVWriteConfig
from fastlayers.registry.spec import Case, Cost, LayerSpec, exact, giving

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn

CASES = (
    _case("deepseek_decode", 3, MLAKVWriteConfig(512, 64, BF16), BF16, (3, 64), padded=1),
    _case("deepseek_fp8", 4, MLAKVWriteConfig(512, 64, FP8), BF16, (3, 16), strided=True),
    _case("fp32_to_fp8", 5, MLAKVWriteConfig(32, 8, FP8), FP32, (12, 1), padded=2),
    _case("odd", 5, MLAKVWriteConfig(40, 12, FP32), FP32, (2, 16), index=torch.int32),
    _case("strided", 6, MLAKVWriteConfig(64, 16, FP16), FP16, (3, 16), padded=3, strided=True),
    _case("narrower_cache", 3, MLAKVWriteConfig(32, 16, BF16), FP32, (3, 16)),
    _case("empty", 0, MLAKVWriteConfig(512, 64, BF16), BF16, (2, 16)),
    _case("deepseek_prefill", 4096, MLAKVWriteConfig(512, 64, BF16), BF16, (80, 64), False, strided=True),
)  # fmt: skip


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Values from far below e4m3's smallest step to far above its largest."""
    generator = torch.Generator().manual_seed(seed)
    shape, cfg = case.shape, case.cfg
    width = cfg.kv_lora_rank + cfg.rope_dim
    scale = torch.exp(torch.linspace(6.5, -5.0, shape["num_tokens"]))[:, None]
    fused = (torch.randn(shape["num_tokens"], width, generator=generator) * scale).to(device, shape["dtype"])
    latent, rope = fused.split((cfg.kv_lora_rank, cfg.rope_dim), -1)
    if not shape.get("strided"):
        latent, rope = latent.contiguous(), rope.contiguous()
    cache = make_cache(shape, (width,), cfg.kv_dtype, generator).to(device)
    return {"latent": latent, "rope": rope, "cache": cache, "loc": make_loc(shape, generator).to(device)}


call = giving("latent", "rope", "cache", "loc")


def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
    """Write, then read everything but page 0."""
    call(impl, inputs, context)
    return {"cache": inputs["cache"][1:].float()}


def cost(case: Case) -> Cost:
    """Memory bound: every row once in, once out."""
    cfg = case.cfg
    elements = case.shape["num_tokens"] * (cfg.kv_lora_rank + cfg.rope_dim)
    moved = elements * (case.shape["dtype"].itemsize + cfg.kv_dtype.itemsize) + 8 * case.shape["num_tokens"]
    return Cost(0.0, moved, moved)


# A write moves or rounds once.
bounds = exact("cache")
SPEC = LayerSpec(CASES, make_inputs, run, cost, bounds=bounds, mutates=("cache",), call=call, unknown="the cache")
