"""Several ``nn.Linear`` of one input as one product: their weights in one storage, the parameters as slices of it.

The parameters keep their names and values; only ``.data`` points elsewhere. A storage that went stale behind our
back (a parameter was replaced) is noticed by its addresses, and the single linears run instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fastlayers.patching.classes import FastModule, storage_mode


def plain(linear: Any) -> bool:
    """Return whether ``linear`` is exactly an ``nn.Linear`` that nobody hooked or wrapped."""
    return (
        type(linear) is nn.Linear
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
        and "forward" not in linear.__dict__
    )


def packable(linears: Sequence[Any]) -> bool:
    """Return whether these modules can share one storage."""
    if len(linears) < 2 or not all(plain(linear) for linear in linears):
        return False
    weights = [linear.weight for linear in linears]
    first = weights[0]
    return (
        all(type(w) is nn.Parameter and w.dtype == first.dtype and w.device == first.device for w in weights)
        and first.device.type != "meta"
        and len({w.shape[1] for w in weights}) == 1
        and len({id(w) for w in weights}) == len(weights)
        and len({linear.bias is None for linear in linears}) == 1
        and len({p.is_inference() for linear in linears for p in linear.parameters()}) == 1
    )


def _join(parameters: list[nn.Parameter]) -> torch.Tensor:
    with storage_mode(parameters[0]):
        joined = torch.cat([parameter.detach() for parameter in parameters])
        start = 0
        for parameter in parameters:
            parameter.data = joined[start : start + parameter.shape[0]]
            start += parameter.shape[0]
    return joined


def _separate(parameter: Any) -> None:
    with storage_mode(parameter):
        parameter.data = parameter.detach().clone()


class PackedModule(FastModule):
    """Mixin of modules with linears that read the same input."""

    _fl_weight: torch.Tensor | None
    _fl_bias: torch.Tensor | None

    def _fl_parts(self) -> tuple[str, ...]:
        """Return the names of the linears that go together."""
        raise TypeError(f"{type(self).__name__} names no linears to pack")

    def _fl_linears(self) -> list[Any]:
        return [getattr(self, name) for name in self._fl_parts()]

    def _fl_pack(self) -> int:
        linears = self._fl_linears()
        held = self.__dict__.get("_fl_weight")
        if held is not None and packable(linears) and _holds(held, [linear.weight for linear in linears]):
            return 0
        self._fl_weight = self._fl_bias = None
        if not self._fl_fuse or not packable(linears):
            return 0
        self._fl_weight = _join([linear.weight for linear in linears])
        moved = self._fl_weight.numel() * self._fl_weight.element_size()
        if linears[0].bias is not None:
            self._fl_bias = _join([linear.bias for linear in linears])
            moved += self._fl_bias.numel() * self._fl_bias.element_size()
        return moved

    def _fl_unpack(self) -> None:
        if self.__dict__.get("_fl_weight") is not None:
            for linear in self._fl_linears():
                if type(linear) is nn.Linear:
                    _separate(linear.weight)
                    if linear.bias is not None:
                        _separate(linear.bias)

    def _fl_fused(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return all outputs side by side, or ``None`` if the packed storage is not what the parameters hold."""
        packed = self._fl_packed()
        return None if packed is None else F.linear(x, *packed)

    def _fl_packed(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return the packed weight and bias, or ``None`` if they are not what the parameters hold."""
        weight, bias = self._fl_weight, self._fl_bias
        if weight is None:
            return None
        if not torch.compiler.is_compiling():
            linears = self._fl_linears()
            if not all(plain(linear) for linear in linears) or not _holds(weight, [p.weight for p in linears]):
                return None
            if bias is not None and not _holds(bias, [p.bias for p in linears]):
                return None
        return weight, bias

    def _fl_side_by_side(self, x: torch.Tensor, step: Any) -> torch.Tensor:
        """Return all outputs side by side in a decode step."""
        packed = self._fl_packed()
        if packed is None or packed[0].dtype != x.dtype:
            return torch.cat([linear(x) for linear in self._fl_linears()], dim=-1)
        both: torch.Tensor = step.linear(x, *packed)
        return both


def _holds(joined: torch.Tensor, parameters: list[torch.Tensor]) -> bool:
    address = joined.data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != address or parameter.dtype != joined.dtype:
            return False
        address += parameter.numel() * parameter.element_size()
    return True
