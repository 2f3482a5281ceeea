"""The alignment's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.moe.align.layer import MoEAlignConfig
from fastlayers.registry.spec import Case, Cost, LayerSpec, giving


def _case(
    name: str, tokens: int, top_k: int, experts: int, block: int, kind: str = "spread", small: bool = True
) -> Case:
    return Case(name, MoEAlignConfig(experts, block), {"num_tokens": tokens, "top_k": top_k, "kind": kind}, small)


CASES = (
    _case("tiny", 9, 4, 8, 16),
    _case("deepseek_v3_slice", 3, 8, 64, 16),
    _case("filtered", 13, 4, 6, 4, "filtered"),
    _case("all_filtered", 5, 2, 4, 16, "none"),
    _case("one_expert", 21, 2, 5, 8, "one"),
    _case("exact_blocks", 16, 2, 2, 16, "even"),
    _case("several_chunks", 300, 4, 3, 32, "filtered"),
    _case("empty", 0, 8, 16, 16),
    _case("deepseek_v3_decode", 64, 8, 257, 16, small=False),
    _case("deepseek_v3_prefill", 8192, 8, 257, 128, "filtered", small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Uneven load: low experts get most pairs, the middle one none."""
    generator = torch.Generator().manual_seed(seed)
    tokens, top_k, kind = case.shape["num_tokens"], case.shape["top_k"], case.shape["kind"]
    experts = case.cfg.num_experts
    share = torch.linspace(2.0, 0.2, experts)
    if experts > 2:
        share[experts // 2] = 0.0
    if kind == "one":
        ids = torch.full((tokens, top_k), experts - 1 - seed % 2)
    elif kind == "none":
        ids = torch.full((tokens, top_k), -1)
    elif kind == "even":
        ids = torch.arange(tokens * top_k).view(tokens, top_k) % experts
    else:
        draws = torch.multinomial(share, max(1, tokens * top_k), replacement=True, generator=generator)
        ids = draws[: tokens * top_k].view(tokens, top_k)
    if kind == "filtered":  # -1, and ids of experts that are not here
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
        ids[torch.rand(ids.shape, generator=generator) < 0.1] = experts
    return {"topk_ids": ids.to(device, torch.int32)}


call = giving("topk_ids")


def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
    """Call the backend; what is undefined (from num_post_pad on) is made equal. All integers must match."""
    sorted_ids, expert_ids, total = call(impl, inputs, context)
    position = torch.arange(sorted_ids.shape[0], device=sorted_ids.device)
    first = position[:: max(1, sorted_ids.shape[0] // max(1, expert_ids.shape[0]))]
    return {
        "sorted_ids": torch.where(position < total, sorted_ids, -7),
        "expert_ids": torch.where(first < total, expert_ids, -7),
        "num_post_pad": total,
    }


def cost(case: Case) -> Cost:
    """Memory bound, and launch bound in practice: ids in, sorted pairs out."""
    pairs = case.shape["num_tokens"] * case.shape["top_k"]
    return Cost(float(pairs), 8.0 * pairs, 8.0 * pairs * 2)


SPEC = LayerSpec(CASES, make_inputs, run, cost, call=call)
