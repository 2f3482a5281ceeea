"""What the cases of layers that move rows between ranks share: shapes, and all ranks in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fastlayers.comm.fabric import Fabric, Workspace
from fastlayers.comm.parallel import Axis
from fastlayers.registry.spec import Case

# Name, ranks, tokens of one rank, hidden size, dtype, whether a CPU runs it in no time.
_SHAPES = (
    ("two_ranks", 2, 3, 128, torch.bfloat16, True),
    ("four_ranks", 4, 2, 72, torch.float16, True),
    ("eight_ranks", 8, 1, 64, torch.float32, True),
    ("empty", 2, 0, 64, torch.bfloat16, True),
    ("deepseek_v3_decode", 2, 64, 7168, torch.bfloat16, False),
)


def cases_of(config_class: Any) -> tuple[Case, ...]:
    """Return the cases of a layer by its configuration's class."""
    return tuple(
        Case(
            name,
            config_class(Axis(ranks), hidden, dtype, slots=max(tokens, 1)),
            {"num_tokens": tokens, "dtype": dtype},
            small,
        )
        for name, ranks, tokens, hidden, dtype, small in _SHAPES
    )


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
