"""Rows that were quantised before they came: what a product of FP8 blocks takes in place of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class CodedRows:
    """e4m3 ``codes [T, K]`` and fp32 ``scales [T, K / 128]``, as ``GroupQuant`` makes them.

    The memory of the scales is the layout for which the reader was asked (``codes_layout``). They may be views of what
    the next exchange between ranks overwrites.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """Of the rows."""
        return self.codes.shape

    @property
    def requires_grad(self) -> bool:
        """Codes never do."""
        return False

    def numel(self) -> int:
        """Return the number of values."""
        return self.codes.numel()


def layout_of_codes(reader: Any, rows: int) -> str | None:
    """Return the layout of scales in which ``reader`` takes so many rows as codes; ``None``: it takes rows only.

    It is a linear that says so (``codes_layout``), or a module of which only the linear that it names (``reads``) sees
    the input. Where a hook looks at that linear's input, it sees rows.
    """
    linear: Any = getattr(reader, reader.reads, None) if hasattr(reader, "reads") else reader
    if not hasattr(linear, "codes_layout") or linear._forward_pre_hooks or linear._forward_hooks:
        return None
    found: str | None = linear.codes_layout(rows)
    return found


def codes_behind(layer: nn.Module, mlp: str) -> Callable[[str, int], str | None]:
    """Return what a layer's communicator asks for a hook's rows: what attention, or the ``mlp`` of that name, takes."""
    return partial(_behind, layer, {"prepare_attn": "self_attn", "prepare_mlp": mlp})


def _behind(layer: nn.Module, readers: dict[str, str], hook: str, rows: int) -> str | None:
    return layout_of_codes(getattr(layer, readers[hook]), rows)
