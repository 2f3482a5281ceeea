"""SiluAndMul by sgl_kernel's compiled operator: one rounding, after the product."""

from __future__ import annotations

import importlib

import torch

from fastlayers.activation.silu_mul.layer import SiluMulConfig
from fastlayers.operators import operator


def _fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@operator("silu_mul_sgl_kernel(Tensor x) -> Tensor", _fake)
def _silu_mul(x: torch.Tensor) -> torch.Tensor:
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    if y.numel():
        torch.ops.sgl_kernel.silu_and_mul.default(y, x.contiguous())
    return y


class SglKernelSiluMul:
    """One launch; strided rows are copied first."""

    def __init__(self, cfg: SiluMulConfig) -> None:
        importlib.import_module("sgl_kernel")  # registers torch.ops.sgl_kernel
        self.cfg = cfg

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``y``, a new contiguous tensor of ``x``'s dtype (fp16, bf16)."""
        y: torch.Tensor = _silu_mul(x)
        return y
