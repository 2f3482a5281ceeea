"""RMSNorm in native torch operations, rounding exactly where the model family rounds."""

from __future__ import annotations

import torch

from fastlayers.norm.rms_norm.layer import RMSNormConfig


class TorchRMSNorm:
    """Any device; bit-equal to the Hugging Face modules of the same rounding."""

    def __init__(self, cfg: RMSNormConfig) -> None:
        self.eps, self.rounding = cfg.eps, cfg.rounding

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(y, new_residual)``, both new tensors of ``x``'s dtype."""
        summed = x if residual is None else x + residual
        wide = summed.float()
        normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.rounding == "cast_then_scale":
            y = weight * normalised.to(x.dtype)
        elif self.rounding == "scale_then_cast":
            y = (weight * normalised).to(x.dtype)
        else:
            y = (normalised * (1.0 + weight.float())).to(x.dtype)
        return y, None if residual is None else summed
