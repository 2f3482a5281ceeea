"""Planted bugs of ``linear``."""

from __future__ import annotations

import torch

from fastlayers.linear.dense.torch import TorchLinear


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
    "half_scale": _HalfScale,
    "no_bias": _NoBias,
    "last_feature_dropped": _LastFeatureDropped,
    "rows_shifted": _RowsShifted,
    "widened_after_rounding": _WidenedAfterRounding,
}
