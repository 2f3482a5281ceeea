"""The router's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.moe.router.layer import RouterConfig
from fastlayers.registry.spec import Case, Cost, LayerSpec, calling, zero_rows


def _case(
    name: str,
    tokens: int,
    cfg: RouterConfig,
    small: bool = True,
    dtype: torch.dtype = torch.float32,
    **shape: Any,
) -> Case:
    return Case(name, cfg, {"num_tokens": tokens, "dtype": dtype, "kind": "spread", "padded": False, **shape}, small)


def _v3(experts: int = 256, groups: int = 8, kept: int = 4, top_k: int = 8) -> RouterConfig:
    return RouterConfig(experts, top_k, "sigmoid", groups, kept, correction_bias=True, scaling_factor=2.5)


_V2 = RouterConfig(160, 6, "softmax", 8, 3, "max", "zero", renormalize=False, scaling_factor=16.0)

CASES = (
    _case("deepseek_v3_decode", 5, _v3()),
    _case("deepseek_v3_padded", 6, _v3(16, 4, 2, 4), padded=True),
    _case("deepseek_v2_decode", 4, _V2),
    _case("qwen3_moe_bf16", 4, RouterConfig(128, 8), dtype=torch.bfloat16, kind="coarse"),
    _case("qwen2_moe_unnormalised", 3, RouterConfig(60, 4, renormalize=False)),
    _case("gpt_oss", 3, RouterConfig(32, 4, "softmax_after_topk", renormalize=False)),
    _case("ties", 6, RouterConfig(24, 4, "sigmoid", 4, 2, scaling_factor=2.0), kind="ties"),
    _case(
        "all_kept_experts",
        3,
        RouterConfig(12, 6, "sigmoid", 4, 2, correction_bias=True, apply_scaling=False, scaling_factor=3.0),
    ),
    _case("nan_and_inf", 6, _v3(16, 4, 2, 4), kind="nan"),
    _case("nan_and_inf_softmax", 6, RouterConfig(10, 4), kind="nan"),
    _case("strided_odd", 3, RouterConfig(37, 5), strided=True),
    _case("one_expert", 2, RouterConfig(1, 1)),
    _case("empty", 0, _v3(16, 4, 2, 4)),
    _case("deepseek_v3_prefill", 4096, _v3(), small=False),
    _case("qwen3_moe_prefill", 4096, RouterConfig(128, 8), small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Scores far enough apart that no rounding decides a choice, or tied exactly.

    The choice scores of a row are a permutation of evenly spaced values with jitter; the bias moves a choice
    by more than that spacing, so that weights taken from biased scores, or a forgotten bias, show.
    """
    generator = torch.Generator().manual_seed(seed)
    cfg, tokens, kind = case.cfg, case.shape["num_tokens"], case.shape["kind"]
    experts = cfg.num_experts

    def uniform(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator, dtype=torch.float64)

    rank = uniform(tokens, experts).argsort(-1).double()
    spread = (rank + 0.7 * uniform(tokens, experts)) / experts
    bias = None
    if kind == "ties":
        logits = torch.randint(0, 4, (tokens, experts), generator=generator).double()
    elif cfg.scoring == "sigmoid":
        spread = _distinct_groups(case, 0.2 + 0.6 * spread)
        offset = 0.3 * uniform(experts) - 0.15
        bias = offset.float() if cfg.correction_bias else None
        probability = spread - offset if bias is not None else spread
        logits = torch.log(probability / (1 - probability))
    else:
        logits = 6.0 * spread - 3.0
        if kind == "coarse":  # exact in bf16: equal values tie, others are at least 1/32 apart
            logits = (logits * 32).round() / 32
    if kind == "nan" and tokens:
        logits[0, ::2], logits[1, 1::3], logits[2, :] = float("nan"), float("inf"), float("nan")
        logits[3, :], logits[4, 3] = float("-inf"), float("-inf")
    logits = logits.to(device, case.shape["dtype"])
    if case.shape.get("strided"):
        logits = torch.cat([logits, torch.full_like(logits, 9.0)], -1)[:, :experts]
    valid = (
        torch.tensor([max(0, tokens - 2 - seed % 2)], dtype=torch.int32, device=device)
        if case.shape["padded"]
        else None
    )
    return {"logits": logits, "bias": None if bias is None else bias.to(device), "num_valid": valid}


def _distinct_groups(case: Case, choice: torch.Tensor) -> torch.Tensor:
    """Replace rows in which two groups score nearly the same by a row in which none do."""
    cfg = case.cfg
    if not cfg.grouped or not choice.shape[0]:
        return choice
    group = choice.view(-1, cfg.num_groups, cfg.group_size).topk(2, dim=-1).values.sum(-1).sort(-1).values
    good = (group.diff(dim=-1) > 1e-5).all(-1)
    first = int(good.int().argmax())
    return torch.where(good.unsqueeze(-1), choice, choice[first])


def cost(case: Case) -> Cost:
    """Memory bound: logits in, ids and weights out."""
    tokens, cfg = case.shape["num_tokens"], case.cfg
    moved = tokens * (cfg.num_experts * case.shape["dtype"].itemsize + 8 * cfg.top_k)
    return Cost(float(tokens * cfg.num_experts * (4 + cfg.top_k)), moved, moved)


def examples(layer: Any, count: int) -> list[tuple[Any, ...]]:
    """Return the layer's arguments for so many tokens: all valid, and a count on the device."""
    x = zero_rows(layer, count, layer.hidden_size, layer.weight.dtype)
    return [(x,), (x, torch.ones(1, dtype=torch.int32, device=x.device))]


# Ids are compared for equality, in order.
run = calling("logits", "bias", "num_valid", outputs=("topk_weights", "topk_ids"))
SPEC = LayerSpec(CASES, make_inputs, run, cost, examples=examples)
