"""Group quantisation's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.quant.group_quant.layer import PACKED, GroupQuantConfig, packed_bytes, unpacked_scales
from fastlayers.registry.spec import EXACT, Bound, Case, Cost, LayerSpec, giving

# One step at the largest e4m3 code is 32 of 448; it may happen to few values. A scale's unit is 2^-23.
ONE_CODE, ONE_UNIT = Bound(5e-3, 0.072), Bound(2.4e-7, 2.4e-7)
E4M3, INT8 = torch.float8_e4m3fn, torch.int8


def _case(
    name: str, tokens: int, features: int, cfg: GroupQuantConfig, dtype: torch.dtype = torch.bfloat16,
    small: bool = True, strided: bool = False,
) -> Case:  # fmt: skip
    return Case(name, cfg, {"num_tokens": tokens, "features": features, "dtype": dtype, "strided": strided}, small)


CASES = (
    _case("row", 3, 512, GroupQuantConfig()),
    _case("col", 5, 384, GroupQuantConfig(scale_layout="col")),
    _case("col_tma4", 6, 256, GroupQuantConfig(scale_layout="col_tma4")),
    _case("ue8m0_fp32", 4, 256, GroupQuantConfig(scale_fmt="ue8m0"), torch.float32),
    _case("group_64_fp16", 3, 192, GroupQuantConfig(64), torch.float16),
    _case("group_16_int8", 7, 48, GroupQuantConfig(16, INT8)),
    _case("int8", 4, 256, GroupQuantConfig(128, INT8, eps=1e-4), torch.float32),
    _case("int8_ue8m0", 2, 128, GroupQuantConfig(64, INT8, "ue8m0")),
    _case("empty", 0, 256, GroupQuantConfig(scale_layout="col_tma4")),
    _case("strided_latent", 5, 256, GroupQuantConfig(), strided=True),
    _case("many_pairs", 33, 8192, GroupQuantConfig()),
    _case("inexact_col_tma4", 7, 384, GroupQuantConfig(scale_layout="col_tma4", exact=False)),
    _case("inexact_row_group_64", 3, 256, GroupQuantConfig(64, exact=False)),
    _case("packed", 6, 640, GroupQuantConfig(scale_fmt="ue8m0", scale_layout=PACKED)),
    _case("packed_whole_fp32", 5, 512, GroupQuantConfig(64, scale_fmt="ue8m0", scale_layout=PACKED), torch.float32),
    _case("packed_empty", 0, 256, GroupQuantConfig(scale_fmt="ue8m0", scale_layout=PACKED)),
    _case("inexact_prefill", 4099, 7168, GroupQuantConfig(scale_layout="col", exact=False), small=False),
    _case("deepseek_v3_decode", 16, 7168, GroupQuantConfig(scale_layout="col_tma4"), small=False),
    _case("deepseek_v3_prefill", 8191, 7168, GroupQuantConfig(scale_layout="col_tma4"), small=False),
    _case("deepseek_v3_packed", 2048, 7168, GroupQuantConfig(scale_fmt="ue8m0", scale_layout=PACKED), small=False),
    _case("deepseek_v3_ue8m0", 2048, 18432, GroupQuantConfig(scale_fmt="ue8m0"), small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Groups of very different size; a zero group, a tiny one, a huge one, and ties between two codes."""
    generator = torch.Generator().manual_seed(seed)
    tokens, features, group = case.shape["num_tokens"], case.shape["features"], case.cfg.group
    width = features + 32 if case.shape["strided"] else features
    x = torch.randn(tokens, width, generator=generator)
    x[:, :features] *= torch.exp(2 * torch.randn(tokens, features // group, generator=generator)).repeat_interleave(
        group, 1
    )
    if tokens > 1:
        x[0, :group] = 0.0
        x[0, group : 2 * group] = 1e-20
        x[1, :group] *= 1e4
        # With absmax 127 or 448 the scale is 1 and these are midpoints between int8 or e4m3 codes.
        largest = 127.0 if case.cfg.dtype == INT8 else 448.0
        ties = torch.tensor([largest, 0.5, 1.5, 2.5, -3.5, 17.0, 19.0, -21.0, 0.001953125, 0.0029296875])
        x[1, features - group : features - group + 10] = ties
        x[1, features - group + 10 : features] = 0.0
    return {"x": x.to(device, case.shape["dtype"])[:, :features], "group": group}


call = giving("x")


def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
    """Dequantised values, the scales, and the scales' strides (meaningful with more than one row).

    Of packed scales also what stands behind the last group.
    """
    q, s = call(impl, inputs, context)
    rows, features = inputs["x"].shape
    strides = torch.tensor(s.stride() if rows > 1 else (0, 0))
    if s.dtype == torch.int32:
        groups = features // inputs["group"]
        behind = packed_bytes(s)[:, groups:].float()
        s = unpacked_scales(s, groups)
        dequantised = q.float().view(rows, groups, inputs["group"]) * s[..., None]
        return {"dequantised": dequantised.view(rows, features), "scales": s, "strides": strides, "behind": behind}
    dequantised = q.float().view(rows, s.shape[1], features // s.shape[1]) * s[..., None]
    return {"dequantised": dequantised.view(rows, features), "scales": s, "strides": strides}


def bounds(case: Case) -> dict[str, Bound]:
    """Every step is correctly rounded, so codes and scales are equal, not close; inexact: few codes one apart."""
    if not case.cfg.exact:
        return {"dequantised": ONE_CODE, "scales": ONE_UNIT}
    return {"dequantised": EXACT, "scales": EXACT, "behind": EXACT}


def cost(case: Case) -> Cost:
    """Memory bound: x in, one byte per value and four per group out."""
    elements = case.shape["num_tokens"] * case.shape["features"]
    moved = elements * (case.shape["dtype"].itemsize + 1 + 4 / case.cfg.group)
    return Cost(3.0 * elements, moved, moved)


SPEC = LayerSpec(CASES, make_inputs, run, cost, bounds=bounds, call=call, unknown="the width of its input")
