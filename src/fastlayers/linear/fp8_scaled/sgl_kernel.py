"""FP8ScaledLinear on sgl_kernel's ``fp8_scaled_mm`` (CUTLASS): scales and bias in the epilogue."""

from __future__ import annotations

from fastlayers.linear.fp8_scaled.triton import ScaledE4M3Codes
from fastlayers.linear.sgl_scaled_gemm import scaled_gemm


class SglKernelFP8ScaledLinear(ScaledE4M3Codes):
    """Two kernels (a scale for the whole call: three)."""

    multiply = staticmethod(scaled_gemm)
