"""RMSNorm by FlashInfer's CUDA kernels (compiled at first use)."""

from __future__ import annotations

import importlib

import torch

from fastlayers.norm.rms_norm.in_place import InPlaceRMSNorm, normalise
from fastlayers.norm.rms_norm.layer import empty_outputs
from fastlayers.operators import operator


@operator("rms_norm_flashinfer", empty_outputs)
def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float, one_plus: bool
) -> list[torch.Tensor]:
    package = importlib.import_module("flashinfer")
    plain = package.gemma_rmsnorm if one_plus else package.rmsnorm
    fused = package.gemma_fused_add_rmsnorm if one_plus else package.fused_add_rmsnorm
    return normalise(
        x, residual,
        lambda y, rows: plain(rows, weight, eps, out=y, enable_pdl=False),
        lambda y, summed: fused(y, summed, weight, eps, enable_pdl=False),
    )  # fmt: skip


class FlashInferRMSNorm(InPlaceRMSNorm):
    """One launch without a residual; with one, two copies before it."""

    rms_norm = _rms_norm
