"""FP8BlockLinear's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.linear.case_inputs import normal, token_rows
from fastlayers.linear.fp8_block.layer import FP8LinearConfig
from fastlayers.quant.block_quant import quantize_block_weight
from fastlayers.registry.spec import Case, Cost, LayerSpec, calling

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(name: str, tokens: int, cfg: FP8LinearConfig, small: bool = True, strided: bool = False) -> Case:
    return Case(name, cfg, {"num_tokens": tokens, "strided": strided}, small)


CASES = (
    _case("one_block", 4, FP8LinearConfig(128, 128)),
    _case("ragged_rows", 3, FP8LinearConfig(256, 192, bias=True)),
    _case("ragged_columns", 5, FP8LinearConfig(320, 128)),
    _case("ragged_both_fp32", 5, FP8LinearConfig(200, 136, bias=True, dtype=FP32)),
    _case("odd_fp16", 2, FP8LinearConfig(136, 77, bias=True, dtype=FP16)),
    _case("split_k_bias", 1, FP8LinearConfig(1088, 96, bias=True)),
    _case("split_k_tile", 18, FP8LinearConfig(1088, 96, bias=True)),
    _case("narrow_strided", 2, FP8LinearConfig(384, 160, bias=True), strided=True),
    _case("two_row_tiles", 70, FP8LinearConfig(128, 72)),
    _case("ue8m0", 3, FP8LinearConfig(256, 128, scale_fmt="ue8m0")),
    _case("small_blocks", 6, FP8LinearConfig(96, 80, block_size=(32, 32))),
    _case("empty", 0, FP8LinearConfig(128, 128, bias=True)),
    _case("strided_input", 4, FP8LinearConfig(128, 64), strided=True),
    _case("deepseek_v3_qkv_a", 64, FP8LinearConfig(7168, 2112), small=False),
    _case("deepseek_v3_qkv_a_one", 1, FP8LinearConfig(7168, 2112), small=False),
    _case("deepseek_v3_o_tp8", 3, FP8LinearConfig(2048, 7168), small=False),
    _case("deepseek_v3_down_tp8", 130, FP8LinearConfig(2304, 7168, bias=True), small=False),
    _case("qwen3_30b_qkv", 9, FP8LinearConfig(2048, 5120), small=False),
    _case("deepseek_v3_q_b", 129, FP8LinearConfig(1536, 24576), small=False),
    _case("deepseek_v3_o_decode", 7, FP8LinearConfig(16384, 7168), small=False),
    _case("deepseek_v3_gate_up", 1024, FP8LinearConfig(7168, 36864), small=False),
    _case("deepseek_v3_kv_a", 33, FP8LinearConfig(7168, 576), small=False),
    _case("qwen3_8b_gate_up", 256, FP8LinearConfig(4096, 24576), small=False),
    _case("qwen3_8b_down_fp32", 16, FP8LinearConfig(12288, 4096, dtype=FP32), small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Tokens with outliers, and weight blocks of different size, so that a scale taken next door shows."""
    random = normal(device, seed)
    cfg, tokens = case.cfg, case.shape["num_tokens"]
    k, n = cfg.in_features, cfg.out_features
    width = k + 40 if case.shape["strided"] else k
    x = random(tokens, width) * torch.exp(random(tokens, 1)) * torch.exp(random(1, width))
    blocks = torch.exp(random(*cfg.grid)).repeat_interleave(cfg.block_size[0], 0)[:n]
    blocks = blocks.repeat_interleave(cfg.block_size[1], 1)[:, :k]
    weight, scale = quantize_block_weight(random(n, k) * blocks / k**0.5, cfg.block_size)
    bias = random(n).to(cfg.dtype) if cfg.bias else None
    return {"x": x.to(cfg.dtype)[:, :k], "weight": weight, "weight_scale_inv": scale, "bias": bias}


def cost(case: Case) -> Cost:
    """e4m3 weights and x once in, y once out; this dataflow writes and reads x's codes and scales as well."""
    cfg, tokens = case.cfg, case.shape["num_tokens"]
    k, n = cfg.in_features, cfg.out_features
    moved = n * k + 4 * cfg.grid[0] * cfg.grid[1] + cfg.dtype.itemsize * tokens * (k + n)
    codes = 2 * tokens * (cfg.padded_in + 4 * cfg.grid[1])
    return Cost(2.0 * tokens * k * n, moved, moved + codes)


run = calling("x", "weight", "weight_scale_inv", "bias")
SPEC = LayerSpec(CASES, make_inputs, run, cost, examples=token_rows, eight_bits=lambda cfg: True, heavy=2)
