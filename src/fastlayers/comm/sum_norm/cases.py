"""SumNorm's cases: several ranks in one process, which all push before any reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fastlayers.comm.fabric import Fabric, Workspace
from fastlayers.comm.parallel import Axis
from fastlayers.comm.row_cases import prepare as exchanges
from fastlayers.comm.sum_norm.layer import SumNormConfig
from fastlayers.registry.spec import Case, Cost, LayerSpec


def _case(
    name: str, ranks: int, tokens: int, hidden: int, residual: bool = True, rounding: str = "cast_then_scale",
    dtype: torch.dtype = torch.bfloat16, small: bool = True, spread: bool = False,
) -> Case:  # fmt: skip
    cfg = SumNormConfig(Axis(ranks), hidden, dtype, max(tokens, 1), rounding=rounding, spread=spread)
    return Case(name, cfg, {"num_tokens": tokens, "residual": residual, "dtype": dtype}, small)


CASES = (
    _case("two_ranks", 2, 3, 256),
    _case("four_ranks", 4, 2, 72, rounding="scale_then_cast"),
    _case("eight_ranks", 8, 1, 136, rounding="one_plus"),
    _case("first_layer", 2, 2, 64, residual=False, dtype=torch.float32),
    _case("empty", 2, 0, 128),
    _case("spread_two_ranks", 2, 6, 256, spread=True),
    _case("spread_four_ranks", 4, 4, 72, rounding="one_plus", dtype=torch.float16, spread=True),
    _case("spread_first_layer", 2, 2, 64, residual=False, dtype=torch.float32, spread=True),
    _case("deepseek_v3_prefill", 2, 2048, 7168, small=False, spread=True),
    _case("deepseek_v3_decode", 2, 64, 7168, small=False),
    _case("deepseek_v3_many", 2, 512, 7168, small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Partial sums of every rank, of very different size by row."""
    generator = torch.Generator().manual_seed(seed)
    tokens, hidden, dtype = case.shape["num_tokens"], case.cfg.hidden_size, case.shape["dtype"]

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    x = (random(case.cfg.axis.size, tokens, hidden) * torch.exp(random(1, tokens, 1))).to(device, dtype)
    residual = random(tokens, hidden).to(device, dtype) if case.shape["residual"] else None
    return {"x": x, "residual": residual, "weight": (1 + 0.3 * random(hidden)).to(device, dtype)}


def prepare(impl: Any, inputs: dict[str, Any]) -> Any:
    """Return the implementations of all ranks, each with an arena of its own in this process."""
    if hasattr(impl, "of_all"):
        return None
    if impl.cfg.operator == "exchange":
        return exchanges(impl, inputs)
    from fastlayers.comm.symmetric import local_arenas
    from fastlayers.comm.triton_push import PushSum

    cfg, found = impl.cfg, []
    n, size = cfg.axis.size, PushSum.nbytes_for(cfg.axis.size, cfg.hidden_size, cfg.dtype, cfg.slots)
    for rank, arena in enumerate(local_arenas(n, size, inputs["x"].device)):
        push = PushSum(arena, cfg.hidden_size, cfg.dtype, cfg.slots)
        own = replace(cfg, axis=Axis(n, rank), workspace=Workspace(Fabric(n), arena, push))
        found.append(type(impl)(own))
    return found


def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
    """Call all ranks: first they push, then they read. Every rank's result is an output."""
    x, residual, weight = inputs["x"], inputs["residual"], inputs["weight"]
    if hasattr(impl, "of_all"):
        y, h = impl.of_all(x, residual, weight)
        if impl.cfg.spread:
            return {"y": y.expand(len(x), *y.shape), "h": h.unflatten(0, (len(x), -1))}
        return {"y": y.expand(len(x), *y.shape), "h": h.expand(len(x), *h.shape)}
    if impl.cfg.spread:
        own = [None] * len(x) if residual is None else residual.unflatten(0, (len(x), -1))
        parts: list[Any] = []
        for part in (1, 2, 3):
            found = [rank(rows, mine, weight, part=part) for rank, rows, mine in zip(context, x, own, strict=True)]
            parts.append(found)
        # Own rows are written in the second part, all rows are there after the third, in the same place.
        return {"y": torch.stack([y for y, _ in parts[2]]), "h": torch.stack([h for _, h in parts[1]])}
    for rank, part in zip(context, x, strict=True):
        rank(part, residual, weight, part=1)
    found = [rank(part, residual, weight, part=2) for rank, part in zip(context, x, strict=True)]
    return {"y": torch.stack([y for y, _ in found]), "h": torch.stack([h for _, h in found])}


def cost(case: Case) -> Cost:
    """Memory bound: own rows and the residual in, both results out; what the link carries is not counted."""
    elements = case.shape["num_tokens"] * case.cfg.hidden_size
    moved = elements * case.shape["dtype"].itemsize
    return Cost(float(elements * (case.cfg.axis.size + 4)), moved * 4.0, moved * (4.0 + 2 * case.cfg.axis.size))


SPEC = LayerSpec(CASES, make_inputs, run, cost, prepare=prepare)
