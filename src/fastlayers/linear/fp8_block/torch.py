"""FP8BlockLinear in native torch: weights stay e4m3, a slab of rows at a time becomes fp32 for the product.

One byte a weight is stored and nothing is cached between calls. A slab is about 2 MB of fp32: on a
CPU it is multiplied while it is still in the cache; on CUDA (the last resort there) slabs are larger.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fastlayers.linear.fp8_block.layer import FP8LinearConfig
from fastlayers.quant.block_quant import decode_blocks, decode_e4m3
from fastlayers.quant.group_quant.layer import GroupQuantConfig
from fastlayers.quant.group_quant.torch import TorchGroupQuant

SLAB_ELEMENTS = {"cpu": 2**19, "cuda": 2**25}


class TorchFP8Linear:
    """Any device. Products and sums are fp32: e4m3 values times their scales, rounded once to the dtype."""

    def __init__(self, cfg: FP8LinearConfig) -> None:
        self.cfg = cfg
        self.quantize = TorchGroupQuant(GroupQuantConfig(cfg.block_size[1], scale_fmt=cfg.scale_fmt))

    def slab_rows(self, device_type: str) -> int:
        """Return how many weight rows are decoded at a time: whole blocks, or an even part of one block."""
        block_rows = self.cfg.block_size[0]
        wanted = SLAB_ELEMENTS.get(device_type, 2**19) // self.cfg.in_features
        if wanted >= block_rows:
            return wanted // block_rows * block_rows
        return max(rows for rows in range(1, block_rows + 1) if block_rows % rows == 0 and rows <= max(1, wanted))

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale_inv: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``y`` ``[..., N]``, a new tensor of ``x``'s dtype."""
        k, n, block_size = self.cfg.in_features, self.cfg.out_features, self.cfg.block_size
        rows = x.reshape(-1, k)
        if self.cfg.padded_in != k:
            rows = F.pad(rows, (0, self.cfg.padded_in - k))
        codes, scales = self.quantize(rows)
        groups = decode_e4m3(codes).view(*scales.shape, block_size[1])
        activations = groups.mul_(scales[..., None]).view(rows.shape)[:, :k]
        y = x.new_empty((rows.shape[0], n))
        step = self.slab_rows(x.device.type)
        for start in range(0, n, step):
            stop = min(n, start + step)
            slab_scales = weight_scale_inv[start // block_size[0] : -(-stop // block_size[0])]
            slab = decode_blocks(weight[start:stop], slab_scales, block_size)
            y[:, start:stop] = F.linear(activations, slab)
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], n)
