"""RMSNorm by sgl_kernel's compiled operators.

Called through ``torch.ops``: the package's Python wrappers hand over to FlashInfer where that is installed.
"""

from __future__ import annotations

import importlib

import torch

from fastlayers.norm.rms_norm.in_place import InPlaceRMSNorm, normalise
from fastlayers.norm.rms_norm.layer import RMSNormConfig, empty_outputs
from fastlayers.operators import operator


@operator("rms_norm_sgl_kernel", empty_outputs)
def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float, one_plus: bool
) -> list[torch.Tensor]:
    ops = torch.ops.sgl_kernel
    plain = ops.gemma_rmsnorm if one_plus else ops.rmsnorm
    fused = ops.gemma_fused_add_rmsnorm if one_plus else ops.fused_add_rmsnorm
    return normalise(
        x, residual,
        lambda y, rows: plain.default(y, rows, weight, eps, False),
        lambda y, summed: fused.default(y, summed, weight, eps, False),
    )  # fmt: skip


class SglKernelRMSNorm(InPlaceRMSNorm):
    """One launch without a residual; with one, two copies before it."""

    rms_norm = _rms_norm

    def __init__(self, cfg: RMSNormConfig) -> None:
        importlib.import_module("sgl_kernel")  # registers torch.ops.sgl_kernel
        super().__init__(cfg)
