"""NVFP4 quantisation's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.quant.nvfp4_quant.layer import GROUP, NVFP4QuantConfig
from fastlayers.registry.spec import Case, Cost, LayerSpec, exact

Config = NVFP4QuantConfig


def _case(
    name: str, counts: tuple[int, ...], features: int, layout: str = "linear", dtype: torch.dtype = torch.bfloat16,
    small: bool = True, **more: Any,
) -> Case:  # fmt: skip
    shape = {"num_tokens": sum(counts) + more.get("behind", 0), "features": features, "dtype": dtype}
    return Case(name, Config(len(counts), layout), shape | {"counts": counts, **more}, small)


CASES = (
    _case("one", (5,), 64),
    _case("experts", (3, 0, 6, 1), 96, strided=True),
    _case("swizzled", (7,), 112, "swizzled"),
    _case("swizzled_experts", (2, 131, 0, 5), 80, "swizzled", torch.float32),
    _case("rows_of_nobody", (4, 3), 64, "swizzled", torch.float16, behind=3),
    _case("empty", (0, 0), 64, "swizzled"),
    _case("many_experts", (1, 0, 2) * 11, 48),
    _case("deepseek_v3_experts", (16,) * 256, 7168, "swizzled", small=False),
    _case("deepseek_v3_prefill", (1024, 0, 3, 2045, 1024), 7168, "swizzled", small=False),
    _case("one_prefill", (8191,), 2048, small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Groups and experts of very different size; a group of zeros, of subnormal scales, and ties between two codes."""
    random = torch.Generator().manual_seed(seed)
    counts, features = case.shape["counts"], case.shape["features"]
    rows = case.shape["num_tokens"]
    width = features + (24 if case.shape.get("strided") else 0)
    x = torch.randn(rows, width, generator=random)
    size = torch.exp(2 * torch.randn(rows, -(-width // GROUP), generator=random))
    x *= size.repeat_interleave(GROUP, 1)[:, :width]
    if rows > 1:
        x[0, :GROUP] = 0.0
        x[0, GROUP : 2 * GROUP] *= 1e-5
        # With a global scale of 1 and 6 as the largest, the group's scale is 1: midpoints between codes.
        ties = torch.tensor(
            [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -5.0, 0.26, -0.24, 0.0, 1.0]
        )
        x[1, 2 * GROUP : 3 * GROUP] = ties
        x[1, :GROUP] = float("inf") if seed % 2 else 1e4
    scale = torch.exp2(torch.arange(len(counts)) % 5 - 2.0)
    scale[0] = 1.0
    offsets = torch.tensor((0, *counts), dtype=torch.int32).cumsum(0).to(torch.int32)
    return {
        "x": x.to(device, case.shape["dtype"])[:, :features], "global_scale": scale.to(device),
        "offsets": offsets.to(device),
    }  # fmt: skip


def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
    """All codes and scale bytes."""
    codes, scales = impl(inputs["x"], inputs["global_scale"], inputs["offsets"])
    return {"codes": codes.float(), "scales": scales.float()}


def cost(case: Case) -> Cost:
    """Memory bound: x in, half a byte a value and one a group out."""
    values = case.shape["num_tokens"] * case.shape["features"]
    moved = values * (case.shape["dtype"].itemsize + 0.5 + 1 / GROUP)
    return Cost(4.0 * values, moved, moved)


def at_tokens(shape: dict[str, Any], cfg: Any, tokens: int, context: int) -> dict[str, Any]:
    """Return the shape with other rows, spread over the experts."""
    each = tokens // cfg.num_experts
    counts = (tokens - each * (cfg.num_experts - 1), *(each,) * (cfg.num_experts - 1))
    return shape | {"counts": counts, "num_tokens": tokens + shape.get("behind", 0)}


# Every step is correctly rounded, so codes are equal, not close.
bounds = exact("codes", "scales")
SPEC = LayerSpec(CASES, make_inputs, run, cost, bounds=bounds, unknown="the width of its input", at_tokens=at_tokens)
