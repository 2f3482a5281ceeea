"""RMSNorm's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.norm.rms_norm.layer import RMSNormConfig
from fastlayers.registry.spec import Case, Cost, LayerSpec, calling, zero_rows


def _case(
    name: str,
    tokens: int,
    hidden: int,
    residual: bool,
    dtype: torch.dtype,
    rounding: str = "cast_then_scale",
    small: bool = True,
) -> Case:
    shape = {"num_tokens": tokens, "residual": residual, "dtype": dtype, "strided": name.startswith("strided")}
    return Case(name, RMSNormConfig(hidden, 1e-6, rounding, dtype), shape, small)


CASES = (
    _case("qwen3_8b_decode", 3, 4096, True, torch.bfloat16),
    _case("odd_hidden", 5, 97, False, torch.float32),
    _case("odd_hidden_residual", 7, 97, True, torch.float16),
    _case("empty", 0, 128, True, torch.bfloat16),
    _case("strided_latent", 6, 512, False, torch.bfloat16),
    _case("gpt_oss", 4, 2880, True, torch.bfloat16, "scale_then_cast"),
    _case("one_plus", 4, 256, True, torch.bfloat16, "one_plus"),
    _case("deepseek_v3_prefill", 4096, 7168, True, torch.bfloat16, small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Rows of very different size, so that a norm over the wrong axis shows."""
    generator = torch.Generator().manual_seed(seed)
    tokens, hidden, dtype = case.shape["num_tokens"], case.cfg.hidden_size, case.shape["dtype"]

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    width = hidden + 64 if case.shape["strided"] else hidden
    x = (random(tokens, width) * torch.exp(random(tokens, 1))).to(device, dtype)[:, :hidden]
    residual = random(tokens, hidden).to(device, dtype) if case.shape["residual"] else None
    return {"x": x, "weight": (1 + 0.3 * random(hidden)).to(device, dtype), "residual": residual}


def cost(case: Case) -> Cost:
    """Memory bound: every row once in, once out."""
    elements = case.shape["num_tokens"] * case.cfg.hidden_size
    moved = elements * case.shape["dtype"].itemsize * (4 if case.shape["residual"] else 2)
    return Cost(4.0 * elements, moved, moved)


def examples(layer: Any, count: int) -> list[tuple[Any, ...]]:
    """Return the layer's arguments for so many tokens, with and without a residual."""
    x = zero_rows(layer, count, layer.cfg.hidden_size)
    return [(x,), (x, x.clone())]


run = calling("x", "weight", "residual", outputs=("y", "residual"))
SPEC = LayerSpec(CASES, make_inputs, run, cost, examples=examples)
