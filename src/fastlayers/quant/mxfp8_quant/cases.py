"""MXFP8 quantisation's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.quant.mxfp8_quant.layer import GROUP, MXFP8QuantConfig
from fastlayers.registry.spec import Case, Cost, LayerSpec, exact


def _case(
    name: str, tokens: int, features: int, alignment: int, dtype: torch.dtype = torch.bfloat16, small: bool = True,
    strided: bool = False,
) -> Case:  # fmt: skip
    shape = {"num_tokens": tokens, "features": features, "dtype": dtype, "strided": strided}
    return Case(name, MXFP8QuantConfig(alignment), shape, small)


CASES = (
    _case("whole", 5, 256, 32),
    _case("gpt_oss_padded", 3, 2880, 256),
    _case("ragged_group", 4, 105, 128, torch.float32),
    _case("one_feature", 2, 1, 64, torch.float32),
    _case("padded_fp16", 7, 160, 128, torch.float16),
    _case("empty", 0, 96, 128),
    _case("strided", 6, 96, 128, strided=True),
    _case("gpt_oss_decode", 16, 2880, 128, small=False),
    _case("gpt_oss_prefill", 8191, 2880, 256, small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Groups of very different size; one of zeros, one of tiny values, powers of two, and ties between two codes."""
    generator = torch.Generator().manual_seed(seed)
    tokens, features = case.shape["num_tokens"], case.shape["features"]
    # What lies behind a strided row would show if it were read as the tail.
    width = features + 40 if case.shape["strided"] else features
    x = torch.randn(tokens, width, generator=generator)
    groups = -(-width // GROUP)
    size = torch.exp(4 * torch.randn(tokens, groups, generator=generator))
    x *= size.repeat_interleave(GROUP, 1)[:, :width]
    if tokens > 1 and features >= 3 * GROUP:
        x[0, :GROUP] = 0.0
        # The quotient is subnormal; the values are not, because the interpreter misreads subnormal bf16.
        x[0, GROUP : 2 * GROUP] = torch.linspace(-1, 1, GROUP).sign() * torch.linspace(1.5, 5, GROUP) * 1e-37
        x[1, :GROUP] *= 1e4
        # The largest value is 448 or 256 (scales 1): then these are midpoints between e4m3 codes.
        ties = [448.0, 17.0, 19.0, -21.0, 0.0009765625, 0.0029296875, 1.0625, -1.1875]
        x[1, GROUP : GROUP + len(ties)] = torch.tensor(ties)
        x[1, GROUP + len(ties) : 2 * GROUP] = 0.0
        # A scale that is a power of two must not be rounded to the next one.
        x[1, 2 * GROUP : 3 * GROUP] = torch.tensor(ties[1:] + [896.0] * (GROUP - len(ties) + 1))
    return {"x": x.to(device, case.shape["dtype"])[:, :features]}


def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
    """All codes and scale bytes, those of the tail included."""
    q, scales = impl(inputs["x"])
    return {"codes": q.float(), "scales": scales}


def cost(case: Case) -> Cost:
    """Memory bound: x in, one byte per padded value and one per group out."""
    tokens, features = case.shape["num_tokens"], case.shape["features"]
    padded = case.cfg.padded(features)
    moved = tokens * (features * case.shape["dtype"].itemsize + padded * (1 + 1 / GROUP))
    return Cost(3.0 * tokens * features, moved, moved)


# Every step is correctly rounded, so codes are equal, not close.
bounds = exact("codes", "scales")
SPEC = LayerSpec(CASES, make_inputs, run, cost, bounds=bounds, unknown="the width of its input")
