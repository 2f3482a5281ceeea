"""Int8Linear on sgl_kernel's ``int8_scaled_mm`` (CUTLASS): int32 sums, scales and bias in the epilogue."""

from __future__ import annotations

from fastlayers.linear.int8.triton import Int8Codes
from fastlayers.linear.sgl_scaled_gemm import scaled_gemm


class SglKernelInt8Linear(Int8Codes):
    """Two kernels: quantise, multiply."""

    multiply = staticmethod(scaled_gemm)
