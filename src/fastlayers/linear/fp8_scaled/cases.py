"""FP8ScaledLinear's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.linear.case_inputs import normal, token_rows
from fastlayers.linear.fp8_scaled.layer import FP8ScaledLinearConfig, quantize_scaled_weight
from fastlayers.registry.spec import Case, Cost, LayerSpec, calling

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Config = FP8ScaledLinearConfig


def _case(
    name: str, tokens: int, cfg: Config, small: bool = True, strided: bool = False, weight_scale: str = "channel"
) -> Case:
    return Case(name, cfg, {"num_tokens": tokens, "strided": strided, "weight_scale": weight_scale}, small)


CASES = (
    _case("decode", 3, Config(128, 96)),
    _case("per_tensor_weight", 3, Config(128, 64, bias=True), weight_scale="tensor"),
    _case("whole_call", 5, Config(136, 48, bias=True, activation_scale="tensor")),
    _case("static", 4, Config(128, 40, activation_scale="static"), weight_scale="tensor"),
    _case("static_fp32", 2, Config(97, 37, True, FP32, "static")),
    _case("odd_bias_fp32", 5, Config(97, 37, bias=True, dtype=FP32)),
    _case("one_token_fp16", 1, Config(72, 40, bias=True, dtype=FP16)),
    _case("split_k_bias", 2, Config(1100, 64, bias=True)),
    _case("two_row_tiles", 70, Config(64, 72)),
    _case("empty", 0, Config(128, 64, bias=True, activation_scale="tensor")),
    _case("strided_input", 4, Config(64, 48), strided=True),
    _case("llama3_8b_qkv", 64, Config(4096, 6144), small=False),
    _case(
        "llama3_8b_down_static", 129, Config(14336, 4096, activation_scale="static"), small=False, weight_scale="tensor"
    ),
    _case("llama3_405b_gate_up", 1024, Config(16384, 53248), small=False),
    _case("qwen2_5_7b_qkv", 7, Config(3584, 4608, bias=True, activation_scale="tensor"), small=False),
    _case("llama3_8b_down_fp32", 16, Config(14336, 4096, dtype=FP32), small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Tokens and output channels of different size, and a token of zeros; a static scale that some values exceed."""
    random = normal(device, seed)
    cfg, tokens = case.cfg, case.shape["num_tokens"]
    k, n = cfg.in_features, cfg.out_features
    spread = 0.5 if cfg.activation_scale != "token" else 2.0
    x = random(tokens, k + 40 if case.shape["strided"] else k) * torch.exp(spread * random(tokens, 1))
    if tokens > 1:
        x[0] = 0.0
    weight, scale = quantize_scaled_weight(random(n, k) * torch.exp(random(n, 1)) / k**0.5, case.shape["weight_scale"])
    bias = random(n).to(cfg.dtype) if cfg.bias else None
    static = 0.004 + 0.001 * random(1).abs() if cfg.activation_scale == "static" else None
    return {
        "x": x.to(cfg.dtype)[:, :k], "weight": weight, "weight_scale": scale.expand(n).contiguous(),
        "input_scale": static, "bias": bias,
    }  # fmt: skip


def cost(case: Case) -> Cost:
    """e4m3 weights and x once in, y once out; this dataflow writes and reads x's codes and scales as well."""
    cfg, tokens = case.cfg, case.shape["num_tokens"]
    k, n = cfg.in_features, cfg.out_features
    moved = n * k + 4 * n + cfg.dtype.itemsize * tokens * (k + n)
    again = cfg.dtype.itemsize * tokens * k if cfg.activation_scale == "tensor" else 0
    return Cost(2.0 * tokens * k * n, moved, moved + 2 * tokens * (k + 4) + again)


run = calling("x", "weight", "weight_scale", "input_scale", "bias")
SPEC = LayerSpec(CASES, make_inputs, run, cost, examples=token_rows, eight_bits=lambda cfg: True, heavy=7)
