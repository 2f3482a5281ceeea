"""Cases, inputs, cost and bounds of SiLU·mul·quantise."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.activation.silu_mul_quant.layer import SiluMulQuantConfig
from fastlayers.registry.spec import BOUNDS, Bound, Case, Cost, LayerSpec, giving, zero_rows

BF16 = torch.bfloat16


def _case(
    name: str,
    tokens: int,
    cfg: SiluMulQuantConfig,
    dtype: torch.dtype = BF16,
    padding: int = 0,
    small: bool = True,
) -> Case:
    return Case(name, cfg, {"num_tokens": tokens, "dtype": dtype, "padding": padding}, small)


CASES = (
    _case("moe_expert", 3, SiluMulQuantConfig(512)),
    _case("ragged_group", 5, SiluMulQuantConfig(300)),
    _case("column_scales", 5, SiluMulQuantConfig(256, scale_layout="col")),
    _case("tma_scales_ue8m0", 5, SiluMulQuantConfig(256, scale_layout="col_tma4", scale_fmt="ue8m0")),
    _case("fp16_strided", 3, SiluMulQuantConfig(96, 32), torch.float16, padding=8),
    _case("fp32_ue8m0", 2, SiluMulQuantConfig(128, 64, scale_fmt="ue8m0"), torch.float32),
    _case("empty", 0, SiluMulQuantConfig(128, scale_layout="col_tma4")),
    _case("deepseek_v3_dense_decode", 64, SiluMulQuantConfig(18432, scale_layout="col_tma4"), small=False),
    _case("deepseek_v3_shared_prefill", 4096, SiluMulQuantConfig(2048, scale_layout="col_tma4"), small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Every group has its own scale; the first token's first group is zero, another one overflows no e4m3."""
    generator = torch.Generator().manual_seed(seed)
    tokens, cfg = case.shape["num_tokens"], case.cfg
    gate = 3 * torch.randn(tokens, cfg.size, generator=generator)
    up = torch.randn(tokens, cfg.size, generator=generator)
    spread = torch.exp(2 * torch.randn(tokens, cfg.groups, generator=generator))
    up = up * spread.repeat_interleave(cfg.group_size, 1)[:, : cfg.size]
    up[:1, : cfg.group_size] = 0
    rows = torch.cat((gate, up, torch.zeros(tokens, case.shape["padding"])), -1).to(device, case.shape["dtype"])
    return {"x": rows[:, : 2 * cfg.size]}


call = giving("x")


def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
    """Call the backend; codes are judged dequantised."""
    q, s = call(impl, inputs, context)
    wide = s.repeat_interleave(impl.cfg.group_size, 1)[:, : q.shape[1]]
    return {"y": q.float() * wide, "scale": s.contiguous()}


def cost(case: Case) -> Cost:
    """Memory bound: two values in, one byte out, and the scales."""
    tokens, cfg = case.shape["num_tokens"], case.cfg
    moved = tokens * (2.0 * cfg.size * case.shape["dtype"].itemsize + cfg.size + 4 * cfg.groups)
    return Cost(10.0 * tokens * cfg.size, moved, moved)


def bounds(case: Case) -> dict[str, Bound]:
    """Codes may fall one e4m3 step apart; a scale is a value of the model's dtype.

    One step at the largest code is 32 of 448. A silu that rounds the other way (another exp) moves few.
    """
    return {"y": Bound(1e-2, 0.08), "scale": BOUNDS[case.shape["dtype"]]}


def examples(layer: Any, count: int) -> list[tuple[Any, ...]]:
    """Return the layer's arguments for so many tokens."""
    return [(zero_rows(layer, count, 2 * layer.cfg.size),)]


SPEC = LayerSpec(CASES, make_inputs, run, cost, bounds=bounds, call=call, examples=examples)
