"""Rows that were quantised before they came: what a product of FP8 blocks takes in place of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook as any_global_hook

from fastlayers.quant.group_quant.layer import empty_scales


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

    def clone(self) -> CodedRows:
        """Return a copy, its scales in memory of the same layout."""
        (rows, groups), apart = self.scales.shape, self.scales.stride(1)
        if apart < max(rows, 2):  # by rows
            return CodedRows(self.codes.clone(), self.scales.clone())
        scales = self.scales.new_empty(groups, apart).t()[:rows]
        return CodedRows(self.codes.clone(), scales.copy_(self.scales))


def empty_codes(x: torch.Tensor, layout: str) -> list[torch.Tensor]:
    """Return where codes and scales of rows like ``x`` ``[T, K]`` go."""
    rows, features = x.shape
    return [x.new_empty(rows, features, dtype=torch.float8_e4m3fn), empty_scales(x, rows, features // 128, layout)]


def layout_of_codes(reader: Any, rows: int) -> str | None:
    """Return the layout of scales in which ``reader`` takes so many rows as codes; ``None``: it takes rows only.

    It is a linear that says so (``codes_layout``) and trusts its caller, or a module of which only the linear that it
    names (``reads``) sees the input. Where a hook or a wrapped ``forward`` looks at the input of either, it sees rows.
    """
    linear = linear_of(reader)
    if linear is None or not getattr(linear, "trusted", False) or watched(linear) or watched(reader):
        return None
    found: str | None = linear.codes_layout(rows)
    return found


def linear_of(reader: Any) -> Any:
    """Return the linear that alone sees a reader's input, if it is one that may take codes; else ``None``."""
    if hasattr(reader, "codes_layout"):
        return reader
    kind: Any = type(reader)
    reads = _reads_of(kind)
    linear = None if reads is None else getattr(reader, reads, None)
    return linear if hasattr(linear, "codes_layout") else None


@lru_cache
def _reads_of(kind: Any) -> str | None:
    """Return what a class says that it reads, where it computes as the class that says so does."""
    owner = next((each for each in kind.__mro__ if "forward" in vars(each)), kind)
    found: str | None = vars(owner).get("reads")
    return found


def watched(module: nn.Module) -> bool:
    """Return whether somebody looks at what goes in or out of a module, or computes in its place."""
    return bool(module._forward_pre_hooks or module._forward_hooks) or "forward" in vars(module) or any_global_hook()


def codes_behind(layer: nn.Module, mlp: str) -> CodesBehind:
    """Return what a layer's communicator asks for a hook's rows: what attention, or the ``mlp`` of that name, takes."""
    return CodesBehind(layer, {"prepare_attn": "self_attn", "prepare_mlp": mlp})


@dataclass(frozen=True, eq=False)
class CodesBehind:
    """``(hook, rows)`` -> the layout of scales in which whoever reads what that hook returns takes it as codes."""

    layer: nn.Module
    readers: dict[str, str]

    def __call__(self, hook: str, rows: int) -> str | None:
        """Return the layout; ``None``: rows."""
        return layout_of_codes(getattr(self.layer, self.readers[hook]), rows)

    def may(self, hook: str) -> bool:
        """Return whether the answer can be other than ``None`` for any number of rows."""
        return linear_of(getattr(self.layer, self.readers[hook])) is not None


@dataclass(frozen=True, eq=False)
class CodingNorm:
    """A norm on one rank whose rows come as codes where what reads them takes codes.

    Parameters
    ----------
    norm : RMSNorm, or any callable
    ask : callable
        ``ask(rows)`` returns the layout of scales, or ``None``.
    """

    norm: Any
    ask: Callable[[int], str | None]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Return what ``norm`` does, ``y`` as :class:`CodedRows` where it may be."""
        layout = self.ask(x.shape[0])
        coded = None if layout is None else getattr(self.norm, "coded", None)
        found = None if coded is None else coded(x, residual, layout)
        if found is None:
            return self.norm(x) if residual is None else self.norm(x, residual)
        return found[0] if residual is None else found
