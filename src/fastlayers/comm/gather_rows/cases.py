"""GatherRows's cases: several ranks in one process, part by part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fastlayers.comm.fabric import Fabric, Workspace
from fastlayers.comm.gather_rows.layer import GatherRowsConfig
from fastlayers.comm.parallel import Axis
from fastlayers.registry.spec import Case, Cost, LayerSpec


def _case(name: str, ranks: int, tokens: int, hidden: int, dtype: torch.dtype, small: bool = True) -> Case:
    """``tokens``: of one rank."""
    cfg = GatherRowsConfig(Axis(ranks), hidden, dtype, slots=max(tokens, 1))
    return Case(name, cfg, {"num_tokens": tokens, "dtype": dtype}, small)


CASES = (
    _case("two_ranks", 2, 3, 128, torch.bfloat16),
    _case("four_ranks", 4, 2, 72, torch.float16),
    _case("eight_ranks", 8, 1, 64, torch.float32),
    _case("empty", 2, 0, 64, torch.bfloat16),
    _case("deepseek_v3_decode", 2, 64, 7168, torch.bfloat16, small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Rows of every rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.cfg.axis.size, case.shape["num_tokens"], case.cfg.hidden_size)
    return {"x": torch.randn(*shape, generator=generator).to(device, case.shape["dtype"])}


def prepare(impl: Any, inputs: dict[str, Any]) -> Any:
    """Return the implementations of all ranks, each with an arena of its own in this process."""
    if hasattr(impl, "of_all"):
        return None
    from fastlayers.comm.symmetric import local_arenas
    from fastlayers.comm.triton_exchange import Exchange

    cfg, found, programs = impl.cfg, [], 4
    n, size = cfg.axis.size, Exchange.nbytes_for(cfg.axis.size, cfg.hidden_size, cfg.dtype, cfg.slots, programs)
    for rank, arena in enumerate(local_arenas(n, size, inputs["x"].device)):
        exchange = Exchange(arena, cfg.hidden_size, cfg.dtype, cfg.slots, programs)
        own = replace(cfg, axis=Axis(n, rank), workspace=Workspace(Fabric(n), arena, None, exchange))
        found.append(type(impl)(own))
    return found


def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
    """Call all ranks part by part; every rank's result is an output, written in the second."""
    x = inputs["x"]
    if hasattr(impl, "of_all"):
        whole = impl.of_all(x)
        return {"rows": whole.expand(len(x), *whole.shape)}
    found = [[rank(rows, part=part) for rank, rows in zip(context, x, strict=True)] for part in (1, 2, 3)]
    return {"rows": torch.stack(found[1])}


def cost(case: Case) -> Cost:
    """Memory bound: own rows in and the result out; what the link carries is not counted."""
    elements = case.shape["num_tokens"] * case.cfg.hidden_size
    moved = elements * case.shape["dtype"].itemsize * (1.0 + case.cfg.axis.size)
    return Cost(0.0, moved, moved * 2.0)


SPEC = LayerSpec(CASES, make_inputs, run, cost, prepare=prepare)
