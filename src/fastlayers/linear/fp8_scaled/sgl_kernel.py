"""FP8ScaledLinear on sgl_kernel's ``fp8_scaled_mm`` (CUTLASS): scales and bias in the epilogue."""

from __future__ import annotations

import torch

from fastlayers.linear.fp8_scaled.layer import FP8ScaledLinearConfig
from fastlayers.linear.fp8_scaled.triton import quant_e4m3
from fastlayers.linear.sgl_scaled_gemm import scaled_gemm


class SglKernelFP8ScaledLinear:
    """Two kernels (a scale for the whole call: three); every row of codes comes with its scale, equal or not."""

    def __init__(self, cfg: FP8ScaledLinearConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``y`` ``[..., N]``, a new contiguous tensor of ``x``'s dtype."""
        q, s = quant_e4m3(x.reshape(-1, self.cfg.in_features), self.cfg.activation_scale, input_scale)
        y: torch.Tensor = scaled_gemm(q, s, weight, weight_scale, bias, x.dtype)
        return y.view(*x.shape[:-1], self.cfg.out_features)
