"""ScatterRows's cases: several ranks in one process, part by part."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.comm.row_cases import cases_of, prepare
from fastlayers.comm.scatter_rows.layer import ScatterRowsConfig
from fastlayers.registry.spec import Case, Cost, LayerSpec

CASES = cases_of(ScatterRowsConfig)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Rows of every rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.cfg.axis.size, case.cfg.axis.size * case.shape["num_tokens"], case.cfg.hidden_size)
    return {"x": torch.randn(*shape, generator=generator).to(device, case.shape["dtype"])}


def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
    """Call all ranks part by part; every rank's result is an output, written in the second."""
    x = inputs["x"]
    if hasattr(impl, "of_all"):
        return {"rows": impl.of_all(x).view(len(x), -1, x.shape[-1])}
    found = [[rank(rows, part=part) for rank, rows in zip(context, x, strict=True)] for part in (1, 2, 3)]
    return {"rows": torch.stack(found[1])}


def cost(case: Case) -> Cost:
    """Memory bound: own rows in and the result out; what the link carries is not counted."""
    elements = case.shape["num_tokens"] * case.cfg.hidden_size
    moved = elements * case.shape["dtype"].itemsize * (1.0 + case.cfg.axis.size)
    return Cost(float(elements * case.cfg.axis.size), moved, moved * 2.0)


SPEC = LayerSpec(CASES, make_inputs, run, cost, prepare=prepare)
