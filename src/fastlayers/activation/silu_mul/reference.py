"""SiluAndMul's oracle: fp32, one step a line."""

from __future__ import annotations

import torch

from fastlayers.activation.silu_mul.layer import SiluMulConfig


class ReferenceSiluMul:
    """See :mod:`fastlayers.activation.silu_mul.layer` for the formula. Returns fp32, without roundings."""

    def __init__(self, cfg: SiluMulConfig) -> None:
        self.size = cfg.size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``y``."""
        gate, up = x[..., : self.size].float(), x[..., self.size :].float()
        return gate * torch.sigmoid(gate) * up
