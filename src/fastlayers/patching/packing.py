"""Several ``nn.Linear`` of one input as one product: their weights lie one behind the other in one buffer.

Each parameter keeps its name and value, and has a storage of its own over its part of the buffer, so that nobody who
looks for shared memory (safetensors, Accelerate, the hub) finds any. What would have to be moved away from somebody
else stays where it is: weights in shared memory, and weights that another tensor looks at. A buffer that went stale
behind our back (a parameter was replaced) is noticed by its addresses, and the single linears run instead. A program
of torch.compile takes parameters and buffer, and asks at each call; one that is exported holds no buffer of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fastlayers.operators import operator
from fastlayers.patching.classes import FastModule, storage_mode
from fastlayers.patching.comparison import Answer, never
from fastlayers.patching.guard import Guard, untouched
from fastlayers.weights_epoch import is_aliased

# More rows than these a CPU multiplies as fast one linear after the other, and outputs side by side cost copies.
MOST_ROWS_ON_HOST = 64
_FORWARD = nn.Linear.forward
_ALIASED = "aliased: another tensor looks at the weights"


def plain(linear: Any) -> bool:
    """Return whether ``linear`` is exactly an ``nn.Linear`` that nobody hooked or wrapped, with a plain weight."""
    if nn.Linear.forward is not _FORWARD:
        return False
    return type(linear) is nn.Linear and untouched(linear) and type(linear._parameters.get("weight")) is nn.Parameter


def why_apart(linears: Sequence[Any]) -> str:
    """Return why these modules cannot share one buffer, or ""."""
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
    if any(is_aliased(p) for p in tensors):
        return _ALIASED
    return ""


def _join(parameters: list[nn.Parameter]) -> nn.Parameter:
    with storage_mode(parameters[0]):
        joined = torch.cat([parameter.detach() for parameter in parameters])
        start = 0
        for parameter in parameters:
            # DLPack makes a storage of these rows alone, which keeps the buffer alive.
            parameter.data = torch.from_dlpack(joined[start : start + parameter.shape[0]])
            start += parameter.shape[0]
        # As a parameter the compiler takes it for what stays where it is; no module has it among its own.
        return nn.Parameter(joined, requires_grad=False)


class Packed(Guard):
    """The buffer of several linears' weights, and whether it still is what they hold."""

    def __init__(self, module: nn.Module, names: tuple[str, ...], again: bool) -> None:
        linears = [getattr(module, name) for name in names]
        self.apart = why_apart(linears)
        # Whoever loads holds the tensors meanwhile: the next call finds out whether somebody keeps them.
        self.later = again and self.apart == _ALIASED
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        self.nbytes, together = 0, [] if self.apart else linears
        if together:
            self.weight = _join([linear.weight for linear in together])
            self.bias = None if together[0].bias is None else _join([linear.bias for linear in together])
            self.nbytes = sum(t.nbytes for t in (self.weight, self.bias) if t is not None)
        weights = [(linear, key) for key in ("weight", "bias") for linear in together]
        super().__init__(module, (), dict.fromkeys(names if together else (), (nn.Linear,)), (), self.apart, weights)
        # Whether the module's own guard stands, too.
        self.whole: Answer = never

    def join(self, guard: Guard) -> None:
        """Take up the module's own guard: :attr:`whole` answers for both."""
        self.whole = guard.joined(self)


@operator("packed_linear", lambda x, weight, bias, parts: x.new_empty((*x.shape[:-1], weight.shape[0])))
def _packed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: list[torch.Tensor]
) -> torch.Tensor:
    """Return all outputs side by side; by one product if ``weight`` and ``bias`` are what ``parts`` look at.

    ``parts``: the linears' weights, then their biases. A compiled program asks here, at each call, what its guards do
    not see: where the parameters lie.
    """
    count = len(parts) if bias is None else len(parts) // 2
    biases = [None] * count if bias is None else parts[count:]
    if _lie_in(weight, parts[:count]) and (bias is None or _lie_in(bias, parts[count:])):
        return F.linear(x, weight, bias)
    return torch.cat([F.linear(x, w, b) for w, b in zip(parts[:count], biases, strict=True)], dim=-1)


def _lie_in(buffer: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    """Return whether ``buffer`` is these tensors, one behind the other."""
    at = buffer.data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.dtype != buffer.dtype or not part.is_contiguous():
            return False
        at += part.nbytes
    return at == buffer.data_ptr() + buffer.nbytes


class PackedModule(FastModule):
    """Mixin of modules with linears that read the same input; what they are called with does not matter."""

    _fl_packed: Packed

    def _fl_parts(self) -> tuple[str, ...]:
        """Return the names of the linears that go together."""
        raise TypeError(f"{type(self).__name__} names no linears to pack")

    def _fl_linears(self) -> list[Any]:
        return [getattr(self, name) for name in self._fl_parts()]

    def _fl_watch(self, trusted: bool = False, why: str = "") -> None:
        super()._fl_watch(trusted, why)
        if "_fl_packed" in self.__dict__:
            self._fl_packed.join(self._fl_guard)

    def _fl_pack(self, again: bool = False) -> int:
        held = self.__dict__.get("_fl_packed")
        if held is not None and held.weight is not None and held.holds(self):
            return 0
        self.__dict__.pop("_fl_packed", None)
        module: Any = self
        self._fl_packed = Packed(module, self._fl_parts() if self._fl_fuse else (), again)
        self._fl_packed.join(self._fl_guard)
        return self._fl_packed.nbytes

    def _fl_together(self) -> str:
        """Return the names of what is one product, or ""."""
        return "" if self._fl_packed.weight is None else "+".join(self._fl_parts())

    def _fl_ready(self, x: torch.Tensor, *beside: Any) -> int:
        """Return 0: the original's code is to run; 1: ours; 2: ours, and the buffer is what the parameters hold.

        Counts a fallback where it is 0. ``beside``: as for :meth:`_fl_why_not`.
        """
        packed: Packed | None = self.__dict__.get("_fl_packed")
        slow = torch.compiler.is_dynamo_compiling() or packed is None or self.training or torch.is_grad_enabled()  # type: ignore[attr-defined]
        slow = slow or not packed.whole(self) or x.is_meta  # type: ignore[union-attr]
        return int(self._fl_usable(x, *beside)) if slow else 2

    def _fl_fused(self, x: torch.Tensor, ready: int = 1) -> torch.Tensor | None:
        """Return all outputs side by side, or ``None``: the linears are to run one by one.

        Because the buffer is not what the parameters hold, or because nothing would be gained. ``ready``: what
        :meth:`_fl_ready` found.
        """
        packed = self._fl_packed
        if packed.later and not torch.compiler.is_compiling():
            packed = self._fl_settled(x)
        if packed.weight is None or (not x.is_cuda and x.numel() > MOST_ROWS_ON_HOST * x.shape[-1]):
            return None
        if ready < 2 and not packed.holds(self):
            return None
        if torch.compiler.is_dynamo_compiling():
            return self._fl_traced(x, packed.weight, packed.bias)
        return F.linear(x, packed.weight, packed.bias)

    def _fl_settled(self, x: torch.Tensor) -> Packed:
        """Return the buffer of what was loaded, at the first call since, unless somebody kept the tensors."""
        self._fl_packed.later = False
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):  # a captured step keeps its addresses
            self._fl_pack()
        return self._fl_packed

    def _fl_traced(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        linears = self._fl_linears()
        rows = sum(linear.weight.shape[0] for linear in linears)
        # Under autocast a program casts what torch's operators take, and nothing for ours.
        if rows != weight.shape[0] or torch.is_autocast_enabled(x.device.type):
            return None
        if any((linear.bias is None) is not (bias is None) for linear in linears):
            return None  # somebody added or removed one
        biases = [] if bias is None else [linear.bias for linear in linears]
        both: torch.Tensor = _packed_linear(x, weight, bias, [linear.weight for linear in linears] + biases)
        return both

    def _fl_side_by_side(self, x: torch.Tensor, step: Any) -> torch.Tensor:
        """Return all outputs side by side in a decode step."""
        packed = self._fl_packed
        if packed.weight is None or packed.weight.dtype != x.dtype or not packed.holds(self):
            return torch.cat([linear(x) for linear in self._fl_linears()], dim=-1)
        both: torch.Tensor = step.linear(x, packed.weight, packed.bias)
        return both
