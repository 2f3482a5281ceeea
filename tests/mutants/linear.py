"""Planted bugs of ``linear``."""

from __future__ import annotations

import torch

from fastlayers.linear.dense.torch import TorchLinear
from fastlayers.registry import Backend


class _HalfScale(TorchLinear):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().__call__(x, weight * 0.5, bias)


class _NoBias(TorchLinear):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().__call__(x, weight, None)


class _LastFeatureDropped(TorchLinear):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().__call__(x[..., :-1], weight[:, :-1], bias)


class _RowsShifted(TorchLinear):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().__call__(x.roll(1, 0), weight, bias)


class _WidenedAfterRounding(TorchLinear):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().__call__(x, weight, bias).to(x.dtype).to(self.wide)


MUTANTS = {
    "half_scale": Backend("mutant_half_scale", _HalfScale, auto_on=()),
    "no_bias": Backend("mutant_no_bias", _NoBias, auto_on=()),
    "last_feature_dropped": Backend("mutant_last_feature_dropped", _LastFeatureDropped, auto_on=()),
    "rows_shifted": Backend("mutant_rows_shifted", _RowsShifted, auto_on=()),
    "widened_after_rounding": Backend("mutant_widened_after_rounding", _WidenedAfterRounding, auto_on=()),
}
