"""Planted bugs of ``int8_linear``."""

from __future__ import annotations

import torch

from fastlayers.linear.int8.torch import TorchInt8Linear

Bias = torch.Tensor | None


class _HalfScale(TorchInt8Linear):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Bias) -> torch.Tensor:
        return super().__call__(x, weight, scale * 0.5, bias)


class _NextChannelsScale(TorchInt8Linear):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Bias) -> torch.Tensor:
        return super().__call__(x, weight, scale.roll(1), bias)


class _OneScaleForAllTokens(TorchInt8Linear):
    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = super().quantize(rows)
        return codes, scale.amax().expand_as(scale) if len(scale) else scale


class _Truncated(TorchInt8Linear):
    """Cuts codes towards zero instead of rounding them."""

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, scale = super().quantize(rows)
        return (rows.float() / scale).to(torch.int8), scale


class _Int16Sum(TorchInt8Linear):
    """Lets the sum wrap at 16 bits."""

    def multiply(self, codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().multiply(codes, weight).to(torch.int16).to(torch.int32)


class _NoBias(TorchInt8Linear):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Bias) -> torch.Tensor:
        return super().__call__(x, weight, scale, None)


MUTANTS = {
    "half_scale": _HalfScale,
    "next_channels_scale": _NextChannelsScale,
    "one_scale_for_all_tokens": _OneScaleForAllTokens,
    "truncated": _Truncated,
    "int16_sum": _Int16Sum,
    "no_bias": _NoBias,
}
