"""Planted bugs of ``fp8_scaled_linear``."""

from __future__ import annotations

import torch

from fastlayers.linear.fp8_scaled.torch import TorchFP8ScaledLinear

Optional = torch.Tensor | None


class _Changed(TorchFP8ScaledLinear):
    """Calls the torch backend with changed arguments."""

    def change(self, weight_scale: torch.Tensor, bias: Optional) -> tuple[torch.Tensor, Optional]:
        return weight_scale, bias

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, input_scale: Optional, bias: Optional
    ) -> torch.Tensor:
        weight_scale, bias = self.change(weight_scale, bias)
        return super().__call__(x, weight, weight_scale, input_scale, bias)


class _HalfScale(_Changed):
    def change(self, weight_scale: torch.Tensor, bias: Optional) -> tuple[torch.Tensor, Optional]:
        return weight_scale * 0.5, bias


class _FirstChannelsScale(_Changed):
    """Takes a channel-scaled weight for a tensor-scaled one."""

    def change(self, weight_scale: torch.Tensor, bias: Optional) -> tuple[torch.Tensor, Optional]:
        return weight_scale[:1].expand_as(weight_scale), bias


class _NextChannelsScale(_Changed):
    def change(self, weight_scale: torch.Tensor, bias: Optional) -> tuple[torch.Tensor, Optional]:
        return weight_scale.roll(1), bias


class _NoBias(_Changed):
    def change(self, weight_scale: torch.Tensor, bias: Optional) -> tuple[torch.Tensor, Optional]:
        return weight_scale, None


class _OneScaleForAllTokens(TorchFP8ScaledLinear):
    def scale(self, rows: torch.Tensor, input_scale: Optional) -> torch.Tensor:
        found = super().scale(rows, input_scale)
        return found.amax(0, keepdim=True) if found.dim() == 2 and len(found) else found


class _StaticIgnored(TorchFP8ScaledLinear):
    """Finds the scale of the call instead of taking the stored one: nothing saturates."""

    def scale(self, rows: torch.Tensor, input_scale: Optional) -> torch.Tensor:
        return super().scale(rows, None) if input_scale is None else rows.abs().amax().reshape(1) / 448.0


class _ReciprocalScale(TorchFP8ScaledLinear):
    """Takes the stored scale for its reciprocal, as APIs that want 1/scale do."""

    def scale(self, rows: torch.Tensor, input_scale: Optional) -> torch.Tensor:
        return super().scale(rows, None if input_scale is None else 1.0 / input_scale)


MUTANTS = {
    "half_scale": _HalfScale,
    "first_channels_scale": _FirstChannelsScale,
    "next_channels_scale": _NextChannelsScale,
    "no_bias": _NoBias,
    "one_scale_for_all_tokens": _OneScaleForAllTokens,
    "static_ignored": _StaticIgnored,
    "reciprocal_scale": _ReciprocalScale,
}
