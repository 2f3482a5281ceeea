"""Several ``nn.Linear`` of one input as one product: their weights lie one behind the other in one buffer.

Each parameter keeps its name and value, and has a storage of its own over its part of the buffer, so that nobody who
looks for shared memory (safetensors, Accelerate, the hub) finds any. What would have to be moved away from somebody
else stays where it is: weights in shared memory, and weights that another tensor looks at. A buffer that went stale
behind our back (a parameter was replaced) is noticed by its addresses, and the single linears run instead. They also
run while something compiles or exports, so that a program holds the parameters and no buffer of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fastlayers.patching.classes import FastModule, storage_mode
from fastlayers.patching.guard import Guard, untouched
from fastlayers.weights_epoch import is_aliased

# More rows than these a CPU multiplies as fast one linear after the other, and outputs side by side cost copies.
MOST_ROWS_ON_HOST = 64


def plain(linear: Any) -> bool:
    """Return whether ``linear`` is exactly an ``nn.Linear`` that nobody hooked or wrapped, with a plain weight."""
    return type(linear) is nn.Linear and untouched(linear) and type(linear._parameters.get("weight")) is nn.Parameter


def why_apart(linears: Sequence[Any], aliases: bool = False) -> str:
    """Return why these modules cannot share one buffer, or "".

    ``aliases``: take weights that other tensors look at too; else they stay where these tensors see them change.
    """
    if len(linears) < 2:
        return "fuse_projections=False"
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
    if not aliases and any(is_aliased(p) for p in tensors):
        return "aliased: another tensor looks at the weights"
    return ""


def _join(parameters: list[nn.Parameter]) -> torch.Tensor:
    with storage_mode(parameters[0]):
        joined = torch.cat([parameter.detach() for parameter in parameters])
        start = 0
        for parameter in parameters:
            # DLPack makes a storage of these rows alone, which keeps the buffer alive.
            parameter.data = torch.from_dlpack(joined[start : start + parameter.shape[0]])
            start += parameter.shape[0]
    return joined


class Packed(Guard):
    """The buffer of several linears' weights, and whether it still is what they hold."""

    def __init__(self, module: nn.Module, names: tuple[str, ...], aliases: bool) -> None:
        linears = [getattr(module, name) for name in names]
        self.apart = why_apart(linears, aliases)
        super().__init__(module, (), {} if self.apart else dict.fromkeys(names, (nn.Linear,)))
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.nbytes = 0
        self._held: tuple[torch.Tensor, ...] = ()
        self._addresses: list[int] = []
        if self.apart:
            return
        self.weight = _join([linear.weight for linear in linears])
        if linears[0].bias is not None:
            self.bias = _join([linear.bias for linear in linears])
        self.nbytes = sum(t.nbytes for t in (self.weight, self.bias) if t is not None)
        held = [
            (linear._parameters, key, p) for linear in linears for key, p in linear._parameters.items() if p is not None
        ]
        self._tables, self._names, self._held = zip(*held, strict=True)
        self._addresses = [p.data_ptr() for p in self._held]

    def holds(self, module: Any) -> bool:
        """Return whether the buffer is what the parameters hold; while something compiles, it is not used.

        Asked after the module's own guard, which knows what is true of all modules.
        """
        if self.weight is None or torch.compiler.is_dynamo_compiling():
            return False
        if any(self._empty) or not self._same(module):
            return False
        same = all(map(is_, map(dict.get, self._tables, self._names), self._held))
        return same and [*map(torch.Tensor.data_ptr, self._held)] == self._addresses


class PackedModule(FastModule):
    """Mixin of modules with linears that read the same input."""

    _fl_packed: Packed

    def _fl_parts(self) -> tuple[str, ...]:
        """Return the names of the linears that go together."""
        raise TypeError(f"{type(self).__name__} names no linears to pack")

    def _fl_linears(self) -> list[Any]:
        return [getattr(self, name) for name in self._fl_parts()]

    def _fl_pack(self, aliases: bool = False) -> int:
        held = self.__dict__.get("_fl_packed")
        if held is not None and held.holds(self):
            return 0
        self.__dict__.pop("_fl_packed", None)
        module: Any = self
        self._fl_packed = Packed(module, self._fl_parts() if self._fl_fuse else (), aliases)
        return self._fl_packed.nbytes

    def _fl_together(self) -> str:
        """Return the names of what is one product, or ""."""
        return "" if self._fl_packed.weight is None else "+".join(self._fl_parts())

    def _fl_fused(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return all outputs side by side, or ``None``: the linears are to run one by one.

        Because the buffer is not what the parameters hold, or because nothing would be gained.
        """
        packed = self._fl_packed
        if not x.is_cuda and x.numel() > MOST_ROWS_ON_HOST * x.shape[-1]:
            return None
        if not packed.holds(self) or packed.weight is None:
            return None
        return F.linear(x, packed.weight, packed.bias)

    def _fl_side_by_side(self, x: torch.Tensor, step: Any) -> torch.Tensor:
        """Return all outputs side by side in a decode step."""
        packed = self._fl_packed
        if not packed.holds(self) or packed.weight is None or packed.weight.dtype != x.dtype:
            return torch.cat([linear(x) for linear in self._fl_linears()], dim=-1)
        both: torch.Tensor = step.linear(x, packed.weight, packed.bias)
        return both
