"""Bmm in native torch: ``torch.bmm``; FP8 weights are decoded to fp32 for the product."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fastlayers.linear.bmm.layer import BLOCK_EPS, GROUP, BmmConfig
from fastlayers.linear.dense.torch import reads_beyond_rows
from fastlayers.linear.fp8_scaled.torch import dynamic_scale, encode
from fastlayers.quant.block_quant import BLOCK, decode_blocks, decode_e4m3
from fastlayers.quant.group_quant.layer import GroupQuantConfig
from fastlayers.quant.group_quant.torch import TorchGroupQuant


class TorchBmm:
    """Any device, no synchronisation. A transposed or strided operand is what ``torch.bmm`` takes as it is."""

    def __init__(self, cfg: BmmConfig) -> None:
        self.cfg, self.odd = cfg, reads_beyond_rows(cfg.in_features, cfg.dtype)
        self.quantize = TorchGroupQuant(GroupQuantConfig(GROUP, eps=BLOCK_EPS))

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``y`` ``[H, T, N]``: ``out``, or a new tensor."""
        if weight_scale is None:
            if self.odd and not x.is_cuda:
                x, weight = x.contiguous(), weight.contiguous()
            transposed = weight.transpose(1, 2)
            return torch.bmm(x, transposed) if out is None else torch.bmm(x, transposed, out=out)
        multiply = self.per_tensor if self.cfg.format == "fp8_tensor" else self.per_block
        y = multiply(x, weight, weight_scale)
        return y.to(x.dtype) if out is None else out.copy_(y)

    def per_tensor(self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
        """Return fp32 ``y``; one scale for ``x``."""
        wide = x.float()
        scale = dynamic_scale(wide.reshape(1, -1, wide.shape[-1]), "tensor") if wide.numel() else wide.new_ones(1)
        codes = decode_e4m3(encode(wide, scale).contiguous())
        y = torch.bmm(codes, decode_e4m3(weight.contiguous()).transpose(1, 2))
        return y.mul_(scale).mul_(weight_scale[:, None, None])

    def per_block(self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
        """Return fp32 ``y``; ``x`` has a scale per token and 128 features."""
        heads, tokens, k = x.shape
        codes, scales = self.quantize(F.pad(x, (0, -k % GROUP)).reshape(heads * tokens, k + -k % GROUP))
        values = decode_e4m3(codes).view(*scales.shape, GROUP).mul_(scales[..., None])
        values = values.view(heads, tokens, k + -k % GROUP)[..., :k]
        return torch.bmm(values, decode_blocks(weight.contiguous(), weight_scale, BLOCK).transpose(1, 2))
