"""Int8Linear's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.linear.case_inputs import normal, token_rows
from fastlayers.linear.int8.layer import Int8LinearConfig, quantize_channel_weight
from fastlayers.registry.spec import Case, Cost, LayerSpec, calling

FP16, FP32 = torch.float16, torch.float32


def _case(name: str, tokens: int, cfg: Int8LinearConfig, small: bool = True, strided: bool = False) -> Case:
    return Case(name, cfg, {"num_tokens": tokens, "strided": strided}, small)


CASES = (
    _case("decode", 3, Int8LinearConfig(128, 96)),
    _case("odd_bias_fp32", 5, Int8LinearConfig(97, 37, bias=True, dtype=FP32)),
    _case("one_token_fp16", 1, Int8LinearConfig(72, 40, bias=True, dtype=FP16)),
    _case("split_k_bias", 2, Int8LinearConfig(1100, 64, bias=True)),
    _case("deep_fp32", 2, Int8LinearConfig(2200, 24, dtype=FP32)),
    _case("two_row_tiles", 70, Int8LinearConfig(64, 72)),
    _case("empty", 0, Int8LinearConfig(128, 64, bias=True)),
    _case("strided_input", 4, Int8LinearConfig(64, 48), strided=True),
    _case("qwen3_8b_qkv", 64, Int8LinearConfig(4096, 6144, bias=True), small=False),
    _case("qwen3_8b_down", 129, Int8LinearConfig(12288, 4096), small=False),
    _case("deepseek_v3_qkv_a", 7, Int8LinearConfig(7168, 2112), small=False),
    _case("deepseek_v3_gate_up", 1024, Int8LinearConfig(7168, 36864), small=False),
    _case("sglang_2048x3072_fp32", 128, Int8LinearConfig(3072, 2048, dtype=FP32), small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Tokens and output channels of different size; a token of zeros and one of the largest codes."""
    random = normal(device, seed)
    cfg, tokens = case.cfg, case.shape["num_tokens"]
    k, n = cfg.in_features, cfg.out_features
    x = random(tokens, k + 40 if case.shape["strided"] else k) * torch.exp(2 * random(tokens, 1))
    if tokens > 1:
        x[0] = 0.0
        x[1] = 3.0
    weight, scale = quantize_channel_weight(random(n, k) * torch.exp(random(n, 1)) / k**0.5)
    weight[0] = 127
    bias = random(n).to(cfg.dtype) if cfg.bias else None
    return {"x": x.to(cfg.dtype)[:, :k], "weight": weight, "weight_scale": scale, "bias": bias}


def cost(case: Case) -> Cost:
    """int8 weights and x once in, y once out; this dataflow writes and reads x's codes and scales as well."""
    cfg, tokens = case.cfg, case.shape["num_tokens"]
    k, n = cfg.in_features, cfg.out_features
    moved = n * k + 4 * n + cfg.dtype.itemsize * tokens * (k + n)
    return Cost(2.0 * tokens * k * n, moved, moved + 2 * tokens * (k + 4))


run = calling("x", "weight", "weight_scale", "bias")
SPEC = LayerSpec(CASES, make_inputs, run, cost, examples=token_rows, eight_bits=lambda cfg: True, heavy=6)
