"""What ranks compare before a model's first step: :func:`facts_of`."""

from __future__ import annotations

from typing import Any

import torch

import fastlayers as fl


def facts_of(model: str, context: Any) -> dict[str, Any]:
    """Return what must be equal on all ranks: their steps are made of the same collectives only then.

    ``context`` is the :class:`~fastlayers_models.blocks.ModelContext` that the model was built with.
    """
    facts: dict[str, Any] = {"fastlayers": fl.__version__, "torch": torch.__version__, "model": model}
    facts |= {"dtype": context.dtype, "kv_dtype": context.kv_dtype, "page_size": context.page_size}
    config = {f"config.{name}": value for name, value in vars(context.config).items() if name != "quant"}
    across = context.seam or context.moves
    chosen = across.chosen if across is not None else {}
    return facts | config | {f"backend of {name}": value for name, value in chosen.items()}
