"""AllReduce's cases: several ranks in one process, which all push before any reads."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.comm.all_reduce.layer import AllReduceConfig
from fastlayers.comm.parallel import Axis
from fastlayers.comm.sum_norm.cases import prepare
from fastlayers.registry.spec import Case, Cost, LayerSpec


def _case(name: str, ranks: int, tokens: int, hidden: int, dtype: torch.dtype, small: bool = True) -> Case:
    cfg = AllReduceConfig(Axis(ranks), hidden, dtype, slots=max(tokens, 1))
    return Case(name, cfg, {"num_tokens": tokens, "dtype": dtype}, small)


CASES = (
    _case("two_ranks", 2, 3, 128, torch.bfloat16),
    _case("four_ranks", 4, 2, 72, torch.float16),
    _case("eight_ranks", 8, 1, 64, torch.float32),
    _case("empty", 2, 0, 64, torch.bfloat16),
    _case("qwen3_8b_decode", 2, 64, 4096, torch.bfloat16, small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Partial sums of every rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.cfg.axis.size, case.shape["num_tokens"], case.cfg.hidden_size)
    return {"x": torch.randn(*shape, generator=generator).to(device, case.shape["dtype"])}


def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
    """Call all ranks: first they push, then they read. Every rank's result is an output."""
    x = inputs["x"]
    if hasattr(impl, "of_all"):
        total = impl.of_all(x)
        return {"sum": total.expand(len(x), *total.shape)}
    for rank, part in zip(context, x, strict=True):
        rank(part, part=1)
    return {"sum": torch.stack([rank(part, part=2) for rank, part in zip(context, x, strict=True)])}


def cost(case: Case) -> Cost:
    """Memory bound: own rows in, the sum out; what the link carries is not counted."""
    elements = case.shape["num_tokens"] * case.cfg.hidden_size
    moved = elements * case.shape["dtype"].itemsize
    return Cost(float(elements * case.cfg.axis.size), moved * 2.0, moved * (2.0 + 2 * case.cfg.axis.size))


SPEC = LayerSpec(CASES, make_inputs, run, cost, prepare=prepare)
