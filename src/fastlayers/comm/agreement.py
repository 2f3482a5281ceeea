"""What ranks agree on about a model's layers: which backends compute them, by tables that all ranks have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastlayers.comm.parallel import Axis, ParallelSpec
from fastlayers.comm.processes import naming_lost
from fastlayers.layer import Layer
from fastlayers.registry.choice import Rung
from fastlayers.runtime.kernel_cache import write_whole


def axis_of(module: Any) -> Axis | None:
    """Return the axis over whose ranks (processes) a model, or what holds one as ``model``, is split; else ``None``."""
    held = [module, getattr(module, "model", None)]
    inner = [each for top in held if isinstance(top, nn.Module) for each in top.modules()]
    for each in [*held, *inner]:
        parallel = getattr(each, "parallel", None)
        if isinstance(parallel, ParallelSpec):
            group = parallel.tp.group
            processes = torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)
            return parallel.tp if parallel.tp.size > 1 and processes else None
    return None


def chosen(model: nn.Module) -> dict[str, str]:
    """Return the backends of all layers, by name of the module."""
    found: dict[str, list[str]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Layer) and hasattr(layer, "choice"):
            ladders = ", ".join("|".join(map(_shown, choice.rungs)) for choice in layer.choices)
            kinds = found.setdefault(re.sub(r"\d+", "N", name), [])
            kinds += [ladders] if ladders not in kinds else []
    return {f"backend of {name}": " or ".join(kinds) for name, kinds in found.items()}


def _shown(rung: Rung) -> str:
    limit = "" if rung.max_tokens is None else f":{rung.max_tokens}"
    return rung.backend.name + limit + (str(rung.config) if rung.config else "")


def share_tables(written: Sequence[Path], folder: Path, axis: Axis) -> list[Path]:
    """Give the tuned tables that the first rank wrote into ``folder`` to all ranks, which call this; return them.

    Ranks that time for themselves would choose differently now and then, and what all of them compute would differ.
    """
    import torch.distributed as dist

    told: list[Any] = [[(path.relative_to(folder).as_posix(), path.read_text()) for path in written]]
    assert axis.group is not None
    with naming_lost(axis, "sharing tuned tables"):
        dist.broadcast_object_list(told, group=axis.group, group_src=0)
    for name, text in told[0]:
        path = folder / name
        if not path.is_file() or path.read_text() != text:  # of one host all ranks have it already
            write_whole(path, text)
    return [folder / name for name, _ in told[0]]
