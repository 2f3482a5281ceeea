"""Linear's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.linear.case_inputs import normal, token_rows
from fastlayers.linear.dense.layer import LinearConfig
from fastlayers.registry.spec import Case, Cost, LayerSpec, calling


def _case(
    name: str, tokens: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, bias: bool = False,
    out_dtype: torch.dtype | None = None, small: bool = True, strided: bool = False,
) -> Case:  # fmt: skip
    return Case(name, LinearConfig(k, n, bias, dtype, out_dtype), {"num_tokens": tokens, "strided": strided}, small)


CASES = (
    _case("qkv_decode", 3, 96, 128),
    _case("odd_bias", 5, 37, 97, torch.float32, bias=True),
    _case("one_token", 1, 65, 48, torch.float16, bias=True),
    _case("split_k_bias", 2, 40, 1056, bias=True),
    _case("two_row_tiles", 70, 33, 40),
    _case("whole_steps_bias", 9, 72, 1024, bias=True),
    _case("empty", 0, 64, 64, bias=True),
    _case("strided_input", 7, 48, 72, strided=True),
    _case("fp32_logits", 4, 100, 64, out_dtype=torch.float32, bias=True),
    _case("deepseek_v3_qkv_a", 16, 2112, 7168, small=False),
    _case("deepseek_v3_qkv_a_bias", 19, 2112, 7168, bias=True, small=False),
    _case("deepseek_v3_q_b", 1024, 24576, 1536, small=False),
    _case("qwen3_8b_qkv", 129, 6144, 4096, bias=True, small=False),
    _case("gpt_oss_qkv", 64, 5120, 2880, bias=True, small=False),
    _case("deepseek_v3_logits", 8, 129280, 7168, out_dtype=torch.float32, small=False),
    _case("deepseek_v3_gate", 33, 256, 7168, torch.float32, small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Tokens, input and output features of different size, so that a swapped or dropped one shows."""
    random = normal(device, seed)
    tokens, k, n, dtype = (
        case.shape["num_tokens"],
        case.cfg.in_features,
        case.cfg.out_features,
        case.cfg.dtype,
    )
    width = k + 24 if case.shape["strided"] else k
    x = (random(tokens, width) * torch.exp(random(tokens, 1))).to(dtype)[:, :k]
    weight = (random(n, k) * torch.exp(0.5 * random(n, 1)) * torch.exp(0.5 * random(1, k)) / k**0.5).to(dtype)
    return {"x": x, "weight": weight, "bias": random(n).to(dtype) if case.cfg.bias else None}


def cost(case: Case) -> Cost:
    """Weight and input read once, output written once."""
    cfg, tokens = case.cfg, case.shape["num_tokens"]
    moved = cfg.dtype.itemsize * (cfg.out_features + tokens) * cfg.in_features
    moved += cfg.y_dtype.itemsize * tokens * cfg.out_features
    return Cost(2.0 * tokens * cfg.in_features * cfg.out_features, moved, moved)


run = calling("x", "weight", "bias")
SPEC = LayerSpec(CASES, make_inputs, run, cost, examples=token_rows, heavy=3)
