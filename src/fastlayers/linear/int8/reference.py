"""Int8Linear's oracle: integers multiplied in fp64, where their sums are exact."""

from __future__ import annotations

import torch

from fastlayers.linear.int8.layer import EPS, LARGEST, Int8LinearConfig


class ReferenceInt8Linear:
    """See :mod:`fastlayers.linear.int8.layer` for the formula. Returns fp32, not rounded further."""

    def __init__(self, cfg: Int8LinearConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``y`` ``[..., N]``."""
        wide = x.double()
        eps = torch.tensor(EPS, dtype=torch.float32, device=x.device).double()
        # A quotient of fp32 numbers, rounded to fp64 and then to fp32, is correctly rounded.
        scale = (wide.abs().amax(-1, keepdim=True).maximum(eps) / LARGEST).float()
        codes = (wide / scale.double()).float().round().clamp(-LARGEST, LARGEST)
        total = codes.double() @ weight.double().T
        y = total * scale.double() * weight_scale.double()
        return (y if bias is None else y + bias.double()).float()
