"""Planted bugs of SiluAndMul."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastlayers.activation.silu_mul.torch import TorchSiluMul


class Swapped(TorchSiluMul):
    """Applies SiLU to the up half."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., : self.size] * F.silu(x[..., self.size :])


class Sigmoid(TorchSiluMul):
    """Forgets to multiply by the gate."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x[..., : self.size]) * x[..., self.size :]


class HalfScale(TorchSiluMul):
    """Returns half of it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) * 0.5


class Interleaved(TorchSiluMul):
    """Takes gate and up from alternating columns."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x[..., 0::2]) * x[..., 1::2]


MUTANTS = {
    "swapped": Swapped,
    "sigmoid": Sigmoid,
    "half_scale": HalfScale,
    "interleaved": Interleaved,
}
