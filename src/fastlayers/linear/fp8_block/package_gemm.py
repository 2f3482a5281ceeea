"""What FP8BlockLinear's backends around foreign GEMMs share: x is quantised by our own kernel.

It writes the scales in the layout that the GEMM reads, so no transposing kernel runs between the two.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fastlayers.linear.fp8_block.layer import FP8LinearConfig
from fastlayers.quant.coded_rows import CodedRows
from fastlayers.quant.group_quant.layer import GroupQuantConfig
from fastlayers.quant.group_quant.triton import TritonGroupQuant


def empty_product(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what a package's GEMM writes into, bf16 ``[rows of q, N]``; also the fake of its operator."""
    return q.new_empty(q.shape[0], weight.shape[0], dtype=torch.bfloat16)


class PackageGemm:
    """Two kernels: quantise, multiply; the bias, if any, is added by a third."""

    scale_layout = "col_tma4"
    row_multiple = 1

    def __init__(self, cfg: FP8LinearConfig, config: Mapping[str, int] | None = None) -> None:
        self.cfg = cfg
        quantization = GroupQuantConfig(cfg.block_size[1], scale_fmt=cfg.scale_fmt, scale_layout=self.scale_layout)
        self.quantize = TritonGroupQuant(quantization)

    def gemm(self, q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return ``y`` ``[rows of q, N]``, a new contiguous tensor."""
        raise TypeError(f"{type(self).__name__} does not say how to multiply")

    def codes_layout(self, rows: int) -> str | None:
        """Return the layout of the scales with which :meth:`product` takes codes; ``None`` where it pads rows."""
        return self.scale_layout if self.row_multiple == 1 else None

    def product(
        self, q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``y`` ``[T, N]`` of codes ``[T, K]`` and their scales."""
        y = self.gemm(q, s, weight, scale)
        if bias is not None:
            y += bias
        return y

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale_inv: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``y`` ``[..., N]``, a new contiguous tensor of ``x``'s dtype."""
        if isinstance(x, CodedRows):
            return self.product(x.codes, x.scales, weight, weight_scale_inv, bias)
        rows = x.reshape(-1, self.cfg.in_features)
        q, s = self.quantize.padded(rows, self.row_multiple)
        y = self.product(q, s, weight, weight_scale_inv, bias)[: rows.shape[0]]
        return y.view(*x.shape[:-1], self.cfg.out_features)
