"""What RMSNorm's package backends share: their fused pair works in place, so both of its inputs are copied first."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastlayers.norm.rms_norm.layer import RMSNormConfig
from fastlayers.operators import Operator

# Writes into its first argument: (y, rows) for the norm alone, (y, summed) for the pair, which overwrites both.
Kernel = Callable[[torch.Tensor, torch.Tensor], object]


def normalise(x: torch.Tensor, residual: torch.Tensor | None, plain: Kernel, fused: Kernel) -> list[torch.Tensor]:
    """Return ``[y]``, or ``[y, x + residual]``, as new contiguous tensors; the inputs stay as they are."""
    rows = x.reshape(-1, x.shape[-1])
    if residual is None:
        y = torch.empty_like(rows, memory_format=torch.contiguous_format)
        if rows.shape[0]:
            plain(y, rows)
        return [y.view(x.shape)]
    y = rows.clone(memory_format=torch.contiguous_format)
    summed = residual.reshape(rows.shape).clone(memory_format=torch.contiguous_format)
    if rows.shape[0]:
        fused(y, summed)
    return [y.view(x.shape), summed.view(x.shape)]


class InPlaceRMSNorm:
    """A package's backend; ``rms_norm``: its operator."""

    rms_norm: Operator

    def __init__(self, cfg: RMSNormConfig) -> None:
        self.eps, self.one_plus = cfg.eps, cfg.rounding == "one_plus"

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(y, new_residual)``, both new contiguous tensors of ``x``'s dtype."""
        y, *summed = self.rms_norm(x, weight, residual, self.eps, self.one_plus)
        return y, summed[0] if summed else None
