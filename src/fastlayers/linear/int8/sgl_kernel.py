"""Int8Linear on sgl_kernel's ``int8_scaled_mm`` (CUTLASS): int32 sums, scales and bias in the epilogue."""

from __future__ import annotations

import torch

from fastlayers.linear.int8.layer import EPS, Int8LinearConfig
from fastlayers.linear.int8.triton import token_quant_int8
from fastlayers.linear.sgl_scaled_gemm import scaled_gemm


class SglKernelInt8Linear:
    """Two kernels: quantise, multiply."""

    def __init__(self, cfg: Int8LinearConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``y`` ``[..., N]``, a new contiguous tensor of ``x``'s dtype."""
        q, s = token_quant_int8(x.reshape(-1, self.cfg.in_features), EPS)
        y: torch.Tensor = scaled_gemm(q, s, weight, weight_scale, bias, x.dtype)
        return y.view(*x.shape[:-1], self.cfg.out_features)
