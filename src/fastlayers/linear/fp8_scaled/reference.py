"""FP8ScaledLinear's oracle: codes as fp64 numbers, one product."""

from __future__ import annotations

import torch

from fastlayers.linear.fp8_scaled.layer import EPS, FP8ScaledLinearConfig
from fastlayers.quant.block_quant import E4M3, E4M3_MAX


def reference_scale(wide: torch.Tensor, kind: str) -> torch.Tensor:
    """Return fp64 ``sx`` (an fp32 number) of fp64 ``wide`` ``[..., T, K]``: ``[..., T, 1]`` or ``[..., 1, 1]``."""
    eps = torch.tensor(EPS, dtype=torch.float32, device=wide.device).double()
    if wide.numel() == 0:
        return torch.ones_like(wide[..., :1])
    absmax = wide.abs().amax(-1, keepdim=True) if kind == "token" else wide.abs().amax((-2, -1), keepdim=True)
    # A quotient of fp32 numbers, rounded to fp64 and then to fp32, is correctly rounded.
    return (absmax.maximum(eps) / E4M3_MAX).float().double()


class ReferenceFP8ScaledLinear:
    """See :mod:`fastlayers.linear.fp8_scaled.layer` for the formula. Returns fp32, not rounded further."""

    def __init__(self, cfg: FP8ScaledLinearConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``y`` ``[..., N]``."""
        wide = x.reshape(-1, self.cfg.in_features).double()
        scale = reference_scale(wide, self.cfg.activation_scale) if input_scale is None else input_scale.double()
        codes = (wide / scale).float().clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).double()
        y = (codes @ weight.double().T) * scale * weight_scale.double()
        y = y if bias is None else y + bias.double()
        return y.float().view(*x.shape[:-1], self.cfg.out_features)
