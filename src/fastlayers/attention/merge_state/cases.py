"""merge_state's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.attention.merge_state.layer import MergeStateConfig
from fastlayers.registry.spec import Case, Cost, LayerSpec, calling


def _case(name: str, tokens: int, heads: int, head_dim: int, dtype: torch.dtype, small: bool = True) -> Case:
    shape = {"num_tokens": tokens, "num_heads": heads, "dtype": dtype, "strided": name.startswith("strided")}
    return Case(name, MergeStateConfig(head_dim), shape, small)


CASES = (
    _case("deepseek_v3_chunk", 5, 4, 128, torch.bfloat16),
    _case("odd", 7, 3, 40, torch.float32),
    _case("strided", 4, 3, 64, torch.float16),
    _case("latent_512", 2, 2, 512, torch.float32),
    _case("empty", 0, 4, 64, torch.bfloat16),
    _case("deepseek_v3_prefill", 4096, 128, 128, torch.bfloat16, small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Weights from equal to one-sided; -inf on either side and on both, +inf too; unseen outputs hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    tokens, heads, dtype = case.shape["num_tokens"], case.shape["num_heads"], case.shape["dtype"]

    def output() -> torch.Tensor:
        width = 2 * heads if case.shape["strided"] else heads
        return torch.randn(tokens, width, case.cfg.head_dim, generator=generator).to(device, dtype)[:, :heads]

    lse = 3.0 * torch.randn(2, tokens, heads, generator=generator)
    unseen = torch.rand(2, tokens, heads, generator=generator) < 0.2
    if tokens:
        unseen[:, 0, 0] = True
        unseen[0, -1, -1], unseen[1, -1, -1] = True, False
    lse[unseen] = -torch.inf
    lse[1, :, heads - 1 :][unseen[1, :, heads - 1 :]] = torch.inf
    lse = lse.to(device)
    o_a, o_b = output(), output()
    o_a[unseen[0].to(device)] = torch.nan
    return {"o_a": o_a, "lse_a": lse[0], "o_b": o_b, "lse_b": lse[1]}


def cost(case: Case) -> Cost:
    """Memory bound: two outputs in, one out."""
    rows = case.shape["num_tokens"] * case.shape["num_heads"]
    moved = 3.0 * rows * (case.cfg.head_dim * case.shape["dtype"].itemsize + 4)
    return Cost(3.0 * rows * case.cfg.head_dim, moved, moved)


run = calling("o_a", "lse_a", "o_b", "lse_b", outputs=("o", "lse"))
SPEC = LayerSpec(CASES, make_inputs, run, cost, unknown="the number of heads")
