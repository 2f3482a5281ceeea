"""SiluAndMul's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.activation.silu_mul.layer import SiluMulConfig
from fastlayers.registry.spec import Case, Cost, LayerSpec, calling, zero_rows


def _case(name: str, tokens: int, size: int, dtype: torch.dtype, padding: int = 0, small: bool = True) -> Case:
    shape = {"num_tokens": tokens, "dtype": dtype, "padding": padding}
    return Case(name, SiluMulConfig(size, dtype), shape, small)


CASES = (
    _case("moe_expert", 3, 2048, torch.bfloat16),
    _case("odd_size", 5, 97, torch.float32),
    _case("strided_odd", 4, 130, torch.float16, padding=6),
    _case("one_token", 1, 1, torch.float32),
    _case("empty", 0, 128, torch.bfloat16),
    _case("deepseek_v3_dense_decode", 64, 18432, torch.bfloat16, small=False),
    _case("deepseek_v3_shared_prefill", 4096, 2048, torch.bfloat16, small=False),
    _case("qwen3_8b_prefill", 4096, 12288, torch.bfloat16, small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Gates reach into both tails of SiLU; rows differ in size, and up is not symmetric to gate."""
    generator = torch.Generator().manual_seed(seed)
    tokens, size = case.shape["num_tokens"], case.cfg.size
    gate = 3 * torch.randn(tokens, size, generator=generator)
    up = torch.randn(tokens, size, generator=generator) * torch.exp(torch.randn(tokens, 1, generator=generator))
    rows = torch.cat((gate, up, torch.zeros(tokens, case.shape["padding"])), -1).to(device, case.shape["dtype"])
    return {"x": rows[:, : 2 * size]}


def cost(case: Case) -> Cost:
    """Memory bound: two values in, one out."""
    elements = case.shape["num_tokens"] * case.cfg.size
    moved = 3.0 * elements * case.shape["dtype"].itemsize
    return Cost(6.0 * elements, moved, moved)


def examples(layer: Any, count: int) -> list[tuple[Any, ...]]:
    """Return the layer's arguments for so many tokens."""
    return [(zero_rows(layer, count, 2 * layer.cfg.size),)]


run = calling("x")
SPEC = LayerSpec(CASES, make_inputs, run, cost, examples=examples)
