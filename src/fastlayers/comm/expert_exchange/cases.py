"""ExpertExchange's cases: several ranks in one process, part by part, with experts that scale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fastlayers.comm.expert_exchange.layer import ExpertExchangeConfig
from fastlayers.comm.fabric import Fabric
from fastlayers.comm.parallel import Axis
from fastlayers.registry.spec import Case, Cost, LayerSpec


def _case(
    name: str, ranks: int, tokens: int, hidden: int, experts: int, top_k: int, route: str = "random",
    dtype: torch.dtype = torch.bfloat16, small: bool = True,
) -> Case:  # fmt: skip
    cfg = ExpertExchangeConfig(Axis(ranks), hidden, dtype, max(tokens, 1), num_experts=experts, top_k=top_k)
    return Case(name, cfg, {"num_tokens": tokens, "dtype": dtype, "route": route}, small)


CASES = (
    _case("two_ranks", 2, 5, 128, 8, 2),
    _case("four_ranks", 4, 3, 72, 8, 3, dtype=torch.float16),
    _case("eight_ranks", 8, 2, 64, 16, 2, dtype=torch.float32),
    _case("all_to_one_rank", 2, 4, 64, 8, 2, "first"),
    _case("padding", 2, 4, 64, 8, 2, "none"),
    _case("empty", 2, 0, 64, 8, 2),
    _case("deepseek_v3_decode", 2, 128, 7168, 256, 8, small=False),
)


@dataclass(frozen=True)
class Simulated:
    """A workspace of one rank of several in this process."""

    fabric: Fabric
    tokens: Any


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Tokens of every rank, each with different experts; ``route``: random, the first rank's only, or some of none."""
    generator = torch.Generator().manual_seed(seed)
    cfg, tokens = case.cfg, case.shape["num_tokens"]
    n, experts = cfg.axis.size, cfg.num_experts
    x = torch.randn(n, tokens, cfg.hidden_size, generator=generator)
    scores = torch.rand(n, tokens, experts, generator=generator)
    if case.shape["route"] == "first":
        scores[..., experts // n :] = -1.0
    ids = scores.topk(cfg.top_k, -1).indices.to(torch.int32)
    if case.shape["route"] == "none":
        ids[:, tokens // 2 :] = -1
    weights = torch.rand(n, tokens, cfg.top_k, generator=generator)
    return {"x": x.to(device, case.shape["dtype"]), "ids": ids.to(device), "weights": weights.to(device)}


def experts_of(rank: int, local: int, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return one partial row each: every expert scales by its number. Rows that nobody takes are NaN."""
    scale = torch.where(ids >= 0, (1 + rank * local + ids).float() * weights, 0.0).sum(-1, keepdim=True)
    took = (ids >= 0).any(-1, keepdim=True)
    return torch.where(took, rows.float() * scale, float("nan")).to(rows.dtype)


def prepare(impl: Any, inputs: dict[str, Any]) -> Any:
    """Return the implementations of all ranks, each with an arena of its own in this process."""
    if hasattr(impl, "dispatch_all"):
        return None
    from fastlayers.comm.symmetric import local_arenas
    from fastlayers.comm.triton_tokens import TokenExchange

    cfg, found, programs = impl.cfg, [], 3
    n, sizes = cfg.axis.size, (cfg.hidden_size, cfg.top_k, cfg.dtype, cfg.slots, programs)
    for rank, arena in enumerate(local_arenas(n, TokenExchange.nbytes_for(n, *sizes), inputs["x"].device)):
        made = TokenExchange(arena, cfg.hidden_size, cfg.num_experts, cfg.top_k, cfg.dtype, cfg.slots, programs)
        found.append(type(impl)(replace(cfg, axis=Axis(n, rank), workspace=Simulated(Fabric(n), made))))
    return found


def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
    """Dispatch on all ranks, their experts, combine on all ranks."""
    x, ids, weights = inputs["x"], inputs["ids"], inputs["weights"]
    n, local = len(x), impl.cfg.num_experts // len(x)
    if context is None:
        there = impl.dispatch_all(x, ids, weights)
    else:
        for part in (1, 2, 3):
            there = [rank.dispatch(x[r], ids[r], weights[r], part=part) for r, rank in enumerate(context)]
    partial = [experts_of(rank, local, *each) for rank, each in enumerate(there)]
    if context is None:
        stacked = torch.stack(partial).view(n, n, *x.shape[1:])
        out = impl.combine_all(stacked, ids)
    else:
        for part in (1, 2):
            out = [rank.combine(partial[r], there[r][1], ids[r], part=part) for r, rank in enumerate(context)]
    return {"out": torch.stack(out), "ids": torch.stack([each[1] for each in there])}


def cost(case: Case) -> Cost:
    """Memory bound: own tokens in and out; what the link carries is not counted."""
    elements = case.shape["num_tokens"] * case.cfg.hidden_size
    moved = elements * case.shape["dtype"].itemsize * 2.0
    return Cost(float(elements * case.cfg.axis.size), moved, moved * (1 + case.cfg.axis.size))


SPEC = LayerSpec(CASES, make_inputs, run, cost, prepare=prepare)
