"""GatherRows's cases: several ranks in one process, part by part."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.comm.gather_rows.layer import GatherRowsConfig
from fastlayers.comm.parallel import Axis
from fastlayers.comm.row_cases import cases_of, prepare
from fastlayers.registry.spec import Case, Cost, LayerSpec


def _quantised(name: str, ranks: int, tokens: int, hidden: int, dtype: torch.dtype, layout: str, small: bool) -> Case:
    cfg = GatherRowsConfig(Axis(ranks), hidden, dtype, max(tokens, 1), payload="fp8_128", scale_layout=layout)
    return Case(name, cfg, {"num_tokens": tokens, "dtype": dtype}, small)


CASES = (
    *cases_of(GatherRowsConfig),
    _quantised("fp8_two_ranks", 2, 3, 384, torch.bfloat16, "row", True),
    _quantised("fp8_four_ranks", 4, 1, 128, torch.float16, "col_tma4", True),
    _quantised("fp8_eight_ranks", 8, 1, 256, torch.float32, "col", True),
    _quantised("fp8_empty", 2, 0, 128, torch.bfloat16, "row", True),
    _quantised("deepseek_v3_prefill", 2, 2048, 7168, torch.bfloat16, "col_tma4", False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Rows of every rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.cfg.axis.size, case.shape["num_tokens"], case.cfg.hidden_size)
    return {"x": torch.randn(*shape, generator=generator).to(device, case.shape["dtype"])}


def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
    """Call all ranks part by part; every rank's result is an output, written in the second."""
    x = inputs["x"]
    if hasattr(impl, "of_all"):
        found = [impl.of_all(x)] * len(x)
    else:
        parts = [[rank(rows, part=part) for rank, rows in zip(context, x, strict=True)] for part in (1, 2, 3)]
        found = parts[1]
    if impl.cfg.payload == "plain":
        return {"rows": torch.stack(found)}
    codes, scales = zip(*found, strict=True)
    return {"codes": torch.stack([each.float() for each in codes]), "scales": torch.stack(scales)}


def cost(case: Case) -> Cost:
    """Memory bound: own rows in and the result out; what the link carries is not counted."""
    elements = case.shape["num_tokens"] * case.cfg.hidden_size
    sent = case.shape["dtype"].itemsize if case.cfg.payload == "plain" else 1 + 4 / 128
    moved = elements * (case.shape["dtype"].itemsize + sent * case.cfg.axis.size)
    return Cost(0.0, moved, moved * 2.0)


SPEC = LayerSpec(CASES, make_inputs, run, cost, prepare=prepare)
