"""Planted bugs of RMSNorm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fastlayers.norm.rms_norm.layer import RMSNormConfig
from fastlayers.norm.rms_norm.torch import TorchRMSNorm


class ResidualForgotten(TorchRMSNorm):
    """Normalises x without the residual."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> Any:
        y, summed = super().__call__(x, weight, residual)
        return (y, summed) if residual is None else (super().__call__(x, weight, None)[0], summed)


class StaleResidual(TorchRMSNorm):
    """Returns the old residual."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> Any:
        y, _ = super().__call__(x, weight, residual)
        return y, None if residual is None else residual.clone()


class WrongAxis(TorchRMSNorm):
    """Takes the mean over tokens."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> Any:
        y, summed = super().__call__(x, weight, residual)
        wide = (x if summed is None else summed).float()
        return (wide * torch.rsqrt(wide.pow(2).mean(0) + self.eps) * weight.float()).to(x.dtype), summed


class HalfScale(TorchRMSNorm):
    """Returns half of it."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> Any:
        y, summed = super().__call__(x, weight, residual)
        return y * 0.5, summed


class WeightNotCentred(TorchRMSNorm):
    """Scales by the weight where the family scales by one plus the weight."""

    def __init__(self, cfg: RMSNormConfig) -> None:
        super().__init__(replace(cfg, rounding="cast_then_scale"))


MUTANTS = {
    "residual_forgotten": ResidualForgotten,
    "stale_residual": StaleResidual,
    "wrong_axis": WrongAxis,
    "half_scale": HalfScale,
    "weight_not_centred": WeightNotCentred,
}
