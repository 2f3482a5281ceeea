"""Rotary embedding's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.registry.spec import Case, Cost, LayerSpec, calling
from fastlayers.rotary.layer import RotaryConfig
from fastlayers.rotary.scaling import build_tables

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _case(
    name: str,
    cfg: RotaryConfig,
    tokens: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    *,
    width: int = 0,
    max_position: int = 64,
    axes: int = 1,
    positions: torch.dtype = torch.int64,
    small: bool = True,
) -> Case:
    shape = {
        "num_tokens": tokens,
        "heads": heads,
        "dtype": dtype,
        "width": width or cfg.head_dim,
        "max_position": max_position,
        "axes": axes,
        "positions": positions,
    }
    return Case(name, cfg, shape, small)


def _real(
    name: str,
    cfg: RotaryConfig,
    tokens: int,
    heads: tuple[int, int],
    width: int = 0,
    max_position: int = 32768,
    axes: int = 1,
) -> Case:
    return _case(name, cfg, tokens, heads, BF16, width=width, max_position=max_position, axes=axes, small=False)


CASES = (
    _case("deepseek_v3", RotaryConfig(64, 64, True, False), 3, (4, 1), BF16, width=192),
    _case("deepseek_v2", RotaryConfig(64, 64, True, True), 3, (4, 1), FP32, width=192, positions=torch.int32),
    _case("llama", RotaryConfig(128, 128), 2, (5, 2), BF16),
    _case("gpt_oss_odd_tokens", RotaryConfig(64, 64), 5, (3, 1), FP16),
    _case("partial_odd_dim", RotaryConfig(80, 24), 3, (3, 2), FP32, width=96),
    _case("partial_interleaved", RotaryConfig(40, 24, True, True), 2, (2, 2), FP32),
    _case("half_to_interleaved", RotaryConfig(16, 16, False, True), 2, (2, 1), FP32),
    _case("queries_only", RotaryConfig(64, 64, True, False), 2, (2, 0), BF16),
    _case("empty", RotaryConfig(64, 64), 0, (2, 1), BF16),
    _case("last_position", RotaryConfig(32, 32), 2, (2, 1), FP32, max_position=2),
    _case("mrope_chunked", RotaryConfig(32, 32, False, False, (4, 6, 6)), 3, (2, 1), FP32, axes=3),
    _case("mrope_interleaved", RotaryConfig(32, 32, False, False, (6, 5, 5), True), 3, (2, 1), FP32, axes=3),
    _case("mrope_text", RotaryConfig(32, 32, False, False, (4, 6, 6)), 3, (2, 1), BF16),
    _real(
        "deepseek_v3_prefill",
        RotaryConfig(64, 64, True, False),
        4096,
        (128, 1),
        width=192,
        max_position=163840,
    ),
    _real("deepseek_v3_decode", RotaryConfig(64, 64, True, False), 64, (128, 1), width=192, max_position=163840),
    _real("qwen3_prefill", RotaryConfig(128, 128), 4096, (32, 8), max_position=40960),
    _real("gpt_oss_prefill", RotaryConfig(64, 64), 4096, (64, 8), max_position=131072),
    _real("qwen_vl_prefill", RotaryConfig(128, 128, False, False, (16, 24, 24)), 4096, (28, 4), axes=3),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Queries are the tail of wider heads (as in MLA), so strides are not the shape's."""
    generator = torch.Generator().manual_seed(seed)
    shape = case.shape
    tokens, width, dim = shape["num_tokens"], shape["width"], case.cfg.head_dim

    def heads(count: int) -> torch.Tensor:
        x = torch.randn(tokens, count, width, generator=generator)
        x = x * torch.exp(torch.randn(tokens, count, 1, generator=generator))
        return x.to(device, shape["dtype"])[..., width - dim :]

    size = (3, tokens) if shape["axes"] == 3 else (tokens,)
    positions = torch.randint(shape["max_position"], size, generator=generator)
    if tokens:
        positions[..., -1] = shape["max_position"] - 1
    cos, sin = build_tables(case.cfg.rotary_dim, 10000.0, None, shape["max_position"])
    return {
        "q": heads(shape["heads"][0]),
        "k": heads(shape["heads"][1]) if shape["heads"][1] else None,
        "cos": cos.to(device),
        "sin": sin.to(device),
        "positions": positions.to(device, shape["positions"]),
    }


def cost(case: Case) -> Cost:
    """Memory bound: every head once in, once out, and the rows of two tables."""
    shape = case.shape
    tokens, size = shape["num_tokens"], shape["dtype"].itemsize
    elements = tokens * sum(shape["heads"]) * case.cfg.head_dim
    moved = 2.0 * elements * size + tokens * (case.cfg.rotary_dim * 4 + 8 * shape["axes"])
    return Cost(3.0 * elements, moved, moved)


run = calling("q", "k", "cos", "sin", "positions", outputs=("q", "k"))
SPEC = LayerSpec(CASES, make_inputs, run, cost, unknown="the number of heads")
