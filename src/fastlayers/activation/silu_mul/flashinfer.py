"""SiluAndMul by FlashInfer (compiled at first use): one rounding, after the product."""

from __future__ import annotations

import importlib

import torch

from fastlayers.activation.silu_mul.layer import SiluMulConfig, empty_output
from fastlayers.operators import operator


@operator("silu_mul_flashinfer", empty_output)
def _silu_mul(x: torch.Tensor) -> torch.Tensor:
    y = empty_output(x)
    if y.numel():
        importlib.import_module("flashinfer").silu_and_mul(x.contiguous(), out=y, enable_pdl=False)
    return y


class FlashInferSiluMul:
    """One launch; strided rows are copied first."""

    def __init__(self, cfg: SiluMulConfig) -> None:
        self.cfg = cfg

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``y``, a new contiguous tensor of ``x``'s dtype (fp16, bf16)."""
        y: torch.Tensor = _silu_mul(x)
        return y
