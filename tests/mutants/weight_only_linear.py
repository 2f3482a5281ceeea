"""Planted bugs of ``weight_only_linear``."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.linear.weight_only.torch import TorchWeightOnlyLinear


class _Changed(TorchWeightOnlyLinear):
    """Changes one operand."""

    def __call__(self, x: torch.Tensor, *operands: Any) -> torch.Tensor:
        weight, scale, zero, index, bias = operands
        return super().__call__(x, *self.change(weight, scale, zero, index, bias))

    def change(self, weight: Any, scale: Any, zero: Any, index: Any, bias: Any) -> tuple[Any, ...]:
        raise NotImplementedError


class _NextGroupsScale(_Changed):
    def change(self, weight: Any, scale: Any, zero: Any, index: Any, bias: Any) -> tuple[Any, ...]:
        return weight, scale.roll(1, 0) if len(scale) > 1 else scale.roll(1, 1), zero, index, bias


class _ZeroOneOff(_Changed):
    def change(self, weight: Any, scale: Any, zero: Any, index: Any, bias: Any) -> tuple[Any, ...]:
        zero = torch.full(scale.shape, {"w4a16": 9}.get(self.cfg.format, 1)) if zero is None else zero + 1
        return weight, scale, zero.to(torch.int16), index, bias


class _HalvesSwapped(_Changed):
    def change(self, weight: Any, scale: Any, zero: Any, index: Any, bias: Any) -> tuple[Any, ...]:
        swapped = (weight >> 4) | (weight << 4) if weight.dtype == torch.uint8 else weight.roll(1, -1)
        return swapped, scale, zero, index, bias


class _GroupsInOrder(_Changed):
    """Ignores the file's order of input features."""

    def change(self, weight: Any, scale: Any, zero: Any, index: Any, bias: Any) -> tuple[Any, ...]:
        return weight, scale, zero, None, bias


class _NoBias(_Changed):
    def change(self, weight: Any, scale: Any, zero: Any, index: Any, bias: Any) -> tuple[Any, ...]:
        return weight, scale, zero, index, None


MUTANTS = {
    "next_groups_scale": _NextGroupsScale,
    "zero_one_off": _ZeroOneOff,
    "halves_swapped": _HalvesSwapped,
    "groups_in_order": _GroupsInOrder,
    "no_bias": _NoBias,
}
