"""FP8BlockLinear's oracle: dequantised activations times dequantised weights, in fp32."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fastlayers.linear.fp8_block.layer import FP8LinearConfig
from fastlayers.quant.group_quant.layer import GroupQuantConfig
from fastlayers.quant.group_quant.reference import ReferenceGroupQuant


class ReferenceFP8Linear:
    """See :mod:`fastlayers.linear.fp8_block.layer` for the formula. Returns fp32, not rounded."""

    def __init__(self, cfg: FP8LinearConfig) -> None:
        self.cfg = cfg
        self.quantize = ReferenceGroupQuant(GroupQuantConfig(cfg.block_size[1], scale_fmt=cfg.scale_fmt))

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale_inv: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``y`` ``[..., N]``."""
        k, (block_rows, block_columns) = self.cfg.in_features, self.cfg.block_size
        rows = F.pad(x.reshape(-1, k), (0, self.cfg.padded_in - k))
        q, s = self.quantize(rows)
        activations = (q * s.repeat_interleave(block_columns, 1))[:, :k]
        n_block = torch.arange(self.cfg.out_features, device=x.device) // block_rows
        k_block = torch.arange(k, device=x.device) // block_columns
        weights = weight.float() * weight_scale_inv[n_block][:, k_block]
        y = activations @ weights.T
        y = y if bias is None else y + bias.float()
        return y.view(*x.shape[:-1], self.cfg.out_features)
