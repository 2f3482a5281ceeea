"""SiluAndMul in native torch operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastlayers.activation.silu_mul.layer import SiluMulConfig


class TorchSiluMul:
    """Any device; bit-equal to the Hugging Face MLPs."""

    def __init__(self, cfg: SiluMulConfig) -> None:
        self.size = cfg.size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``y``, a new tensor of ``x``'s dtype."""
        return F.silu(x[..., : self.size]) * x[..., self.size :]
