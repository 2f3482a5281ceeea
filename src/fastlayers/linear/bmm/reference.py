"""Bmm's oracle: operands dequantised to fp64, one product."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fastlayers.linear.bmm.layer import BLOCK_EPS, GROUP, BmmConfig
from fastlayers.linear.fp8_scaled.reference import reference_scale
from fastlayers.quant.block_quant import E4M3, E4M3_MAX
from fastlayers.quant.group_quant.layer import GroupQuantConfig
from fastlayers.quant.group_quant.reference import ReferenceGroupQuant


class ReferenceBmm:
    """See :mod:`fastlayers.linear.bmm.layer` for the formula. Returns fp32, not rounded further."""

    def __init__(self, cfg: BmmConfig) -> None:
        self.cfg = cfg
        self.quantize = ReferenceGroupQuant(GroupQuantConfig(GROUP, eps=BLOCK_EPS))

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``y`` ``[H, T, N]``; ``out`` gets it rounded."""
        wide, weights = x.double(), weight.double()
        heads, tokens, k = x.shape
        if weight_scale is not None and self.cfg.format == "fp8_tensor":
            scale = reference_scale(wide.reshape(-1, k), "tensor")
            wide = (wide / scale).float().clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).double() * scale
            weights = weights * weight_scale.double()[:, None, None]
        elif weight_scale is not None:
            codes, scales = self.quantize(F.pad(x, (0, -k % GROUP)).reshape(heads * tokens, k + -k % GROUP))
            values = codes.double() * scales.double().repeat_interleave(GROUP, 1)
            wide = values[:, :k].reshape(heads, tokens, k)
            rows = torch.arange(weight.shape[1], device=x.device) // GROUP
            columns = torch.arange(k, device=x.device) // GROUP
            weights = weights * weight_scale.double()[:, rows][:, :, columns]
        y = torch.einsum("htk,hnk->htn", wide, weights).float()
        if out is not None:
            out.copy_(y)
        return y
