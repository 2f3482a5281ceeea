"""Several ``nn.Linear`` of one input as one product: their weights lie one behind the other in one buffer.

Each parameter keeps its name and value, and has a storage of its own over its part of the buffer, so that nobody who
looks for shared memory (safetensors, Accelerate, the hub) finds any. What would have to be moved away from somebody
else stays where it is: weights in shared memory, and weights that another tensor looks at. A buffer that went stale
behind our back (a parameter was replaced) is noticed by its addresses, and the single linears run instead. They also
run while something compiles or exports, so that a program holds the parameters and no buffer of ours.
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


def why_apart(linears: Sequence[Any], aliases: bool = False) -> str:
    """Return why these modules cannot share one buffer, or "".

    ``aliases``: take weights that other tensors look at too; else they stay where these tensors see them change.
    """
    if not all(plain(linear) for linear in linears):
        return "not plain linears"
    tensors = [p for linear in linears for p in linear._parameters.values() if p is not None]
    first = linears[0].weight
    if first.device.type == "meta" or any(type(p) is not nn.Parameter for p in tensors):
        return "not plain parameters"
    alike = (
        len({(p.dtype, p.device, p.is_inference()) for p in tensors}) == 1
        and len({linear.weight.shape[1] for linear in linears}) == 1
        and len({linear.bias is None for linear in linears}) == 1
    )
    if not alike:
        return "weights of several shapes, dtypes or devices"
    if len({id(p) for p in tensors}) < len(tensors) or not all(p.is_contiguous() for p in tensors):
        return "tied or transposed weights"
    if first.device.type == "cpu" and any(p.is_shared() for p in tensors):
        return "weights in shared memory"
    if not aliases and any(_aliased(p) for p in tensors):
        return "aliased: another tensor looks at the weights"
    return ""


def _aliased(parameter: torch.Tensor) -> bool:
    """Return whether another tensor has the storage of ``parameter``: it would not see later changes."""
    storage = parameter.untyped_storage()
    # The parameter, and the storage object of this line.
    return int(torch._C._storage_Use_Count(storage._cdata)) > 2


def _join(parameters: list[nn.Parameter]) -> torch.Tensor:
    with storage_mode(parameters[0]):
        joined = torch.cat([parameter.detach() for parameter in parameters])
        start = 0
        for parameter in parameters:
            # DLPack makes a storage of these rows alone, which keeps the buffer alive.
            parameter.data = torch.from_dlpack(joined[start : start + parameter.shape[0]])
            start += parameter.shape[0]
    return joined


class PackedModule(FastModule):
    """Mixin of modules with linears that read the same input."""

    _fl_weight: torch.Tensor | None
    _fl_bias: torch.Tensor | None
    # Why the weights are not in one buffer; "" if they are.
    _fl_apart: str

    def _fl_parts(self) -> tuple[str, ...]:
        """Return the names of the linears that go together."""
        raise TypeError(f"{type(self).__name__} names no linears to pack")

    def _fl_linears(self) -> list[Any]:
        return [getattr(self, name) for name in self._fl_parts()]

    def _fl_pack(self, aliases: bool = False) -> int:
        linears = self._fl_linears()
        held = self.__dict__.get("_fl_weight")
        self._fl_apart = "" if self._fl_fuse else "fuse_projections=False"
        self._fl_apart = self._fl_apart or why_apart(linears, True)
        if held is not None and not self._fl_apart and _holds(held, [linear.weight for linear in linears]):
            return 0
        self._fl_apart = self._fl_apart or why_apart(linears, aliases)
        self._fl_weight = self._fl_bias = None
        if self._fl_apart:
            return 0
        self._fl_weight = _join([linear.weight for linear in linears])
        moved = self._fl_weight.numel() * self._fl_weight.element_size()
        if linears[0].bias is not None:
            self._fl_bias = _join([linear.bias for linear in linears])
            moved += self._fl_bias.numel() * self._fl_bias.element_size()
        return moved

    def _fl_fused(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return all outputs side by side, or ``None`` if the packed storage is not what the parameters hold."""
        packed = self._fl_packed()
        return None if packed is None else F.linear(x, *packed)

    def _fl_packed(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return the packed weight and bias, or ``None`` if they are not what the parameters hold."""
        weight, bias = self._fl_weight, self._fl_bias
        if weight is None or torch.compiler.is_compiling():
            return None
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
