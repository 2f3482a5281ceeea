"""RMSNorm's oracle: fp32, one step a line."""

from __future__ import annotations

import torch

from fastlayers.norm.rms_norm.layer import RMSNormConfig


class ReferenceRMSNorm:
    """See :mod:`fastlayers.norm.rms_norm.layer` for the formula. Returns fp32 tensors."""

    def __init__(self, cfg: RMSNormConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(y, new_residual)``."""
        summed = x if residual is None else x + residual
        normalised = summed.float() / torch.sqrt(summed.float().pow(2).mean(-1, keepdim=True) + self.cfg.eps)
        gain = weight.float() + 1.0 if self.cfg.rounding == "one_plus" else weight.float()
        return normalised * gain, None if residual is None else summed.float()
