"""WeightOnlyLinear's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.linear.case_inputs import normal, token_rows
from fastlayers.linear.weight_only.layer import WeightOnlyLinearConfig, quantize_weight_only
from fastlayers.quant.packed_codes import pack_nibbles, unpack_nibbles
from fastlayers.registry.spec import Case, Cost, LayerSpec, calling

FP16, FP32 = torch.float16, torch.float32


def _case(
    name: str, tokens: int, k: int, n: int, format: str = "w4a16", group: int = 128, zero: bool = False,
    order: bool = False, bias: bool = False, dtype: torch.dtype = torch.bfloat16, small: bool = True,
    strided: bool = False,
) -> Case:  # fmt: skip
    cfg = WeightOnlyLinearConfig(k, n, bias, dtype, format, group, zero, order)
    return Case(name, cfg, {"num_tokens": tokens, "strided": strided}, small)


CASES = (
    _case("awq_decode", 3, 256, 72, zero=True),
    _case("awq_one_token", 1, 384, 40, zero=True, bias=True),
    _case("awq_rows", 70, 128, 72, zero=True),
    _case("awq_tiles", 40, 256, 72, zero=True),
    _case("gptq_32", 5, 96, 40, group=32),
    _case("gptq_32_fp32", 5, 96, 37, group=32, bias=True, dtype=FP32),
    _case("gptq_64_fp16", 2, 192, 48, group=64, zero=True, dtype=FP16),
    _case("gptq_act_order", 6, 128, 40, group=32, zero=True, order=True),
    _case("gptq_act_order_rows", 66, 128, 40, group=32, zero=True, order=True),
    _case("group_96", 3, 192, 33, group=96),
    _case("channel", 2, 160, 40, group=0, bias=True),
    _case("channel_zero", 9, 96, 40, group=0, zero=True),
    _case("split_k_bias", 6, 1152, 40, bias=True),
    _case("empty", 0, 128, 64),
    _case("strided_input", 7, 128, 48, strided=True),
    _case("int8_channel", 3, 97, 40, "w8a16", 0, bias=True),
    _case("int8_rows", 20, 200, 33, "w8a16", 0, dtype=FP32),
    _case("int8_groups", 2, 256, 40, "w8a16", 64, zero=True),
    _case("int8_groups_rows", 70, 192, 40, "w8a16", 64, zero=True, bias=True),
    _case("fp8_channel", 3, 130, 40, "fp8_w8a16", 0, dtype=FP16),
    _case("fp8_rows", 18, 96, 40, "fp8_w8a16", 0, bias=True),
    _case("qwen3_8b_qkv_awq", 1, 4096, 6144, zero=True, small=False),
    _case("qwen3_8b_gate_up_awq", 4, 4096, 24576, zero=True, small=False),
    _case("qwen3_8b_down_gptq", 64, 12288, 4096, small=False),
    _case("qwen3_8b_down_int8", 1, 12288, 4096, "w8a16", 0, small=False),
    _case("qwen3_8b_qkv_fp8", 16, 4096, 6144, "fp8_w8a16", 0, bias=True, small=False),
    _case("qwen3_8b_gate_up_gptq_32", 1024, 4096, 24576, group=32, small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Tokens, input and output features of different size; weights off centre where zero points are stored."""
    random = normal(device, seed)
    cfg, tokens = case.cfg, case.shape["num_tokens"]
    k, n = cfg.in_features, cfg.out_features
    x = random(tokens, k + 24 if case.shape["strided"] else k) * torch.exp(random(tokens, 1))
    weight = (random(n, k) + 0.5 * random(n, 1) * cfg.zero_point) * torch.exp(0.5 * random(n, 1)) / k**0.5
    weight = weight * torch.exp(0.5 * random(1, k))
    order: torch.Tensor | None = None
    if cfg.act_order:
        order = torch.randperm(k, generator=torch.Generator().manual_seed(seed)).to(device) // cfg.group_size
        # Columns as they lie in the file: those of a group are anywhere.
        places = order.argsort(stable=True)
        stored, scale, zero = quantize_weight_only(weight[:, places], "w4a16", cfg.group_size, cfg.zero_point)
        stored = pack_nibbles(unpack_nibbles(stored)[:, places.argsort()])
        order = order.to(torch.int32)
    else:
        stored, scale, zero = quantize_weight_only(weight, cfg.format, cfg.group_size, cfg.zero_point)
    bias = random(n).to(cfg.dtype) if cfg.bias else None
    return {
        "x": x.to(cfg.dtype)[:, :k], "weight": stored, "weight_scale": scale, "weight_zero": zero,
        "group_index": order, "bias": bias,
    }  # fmt: skip


def cost(case: Case) -> Cost:
    """Codes, scales and x once in, y once out."""
    cfg, tokens = case.cfg, case.shape["num_tokens"]
    k, n = cfg.in_features, cfg.out_features
    moved = n * k / (2 if cfg.format == "w4a16" else 1) + n * cfg.groups * (6 if cfg.zero_point else 4)
    moved += 4 * k * cfg.act_order + cfg.dtype.itemsize * tokens * (k + n)
    return Cost(2.0 * tokens * k * n, moved, moved)


run = calling("x", "weight", "weight_scale", "weight_zero", "group_index", "bias")
SPEC = LayerSpec(CASES, make_inputs, run, cost, examples=token_rows, eight_bits=lambda cfg: False, heavy=3)
