"""FP8 experts by sgl_kernel's CUTLASS products ("expert specialisation"), with our own kernels around them.

The package sorts the experts into three classes by their rows, on the device, and launches a product for each: no
row is padded, the grid knows no worst case. Inputs and scales are rows ordered by expert. What is placed where is our
own :func:`~fastlayers.moe.fused_moe.triton.permute.place`: the package's orders pairs by atomics.

The first product is rounded to bf16 before the activation, in fp32, quantises it.
"""

from __future__ import annotations

import torch

from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.token_chunks import token_chunks
from fastlayers.moe.fused_moe.triton.activation import activate
from fastlayers.moe.fused_moe.triton.permute import ROW_SCALES, Rows, place, scatter
from fastlayers.moe.fused_moe.triton.reduce import combine
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.operators import like_x, operator

MAX_TOKENS = 8192
# What the package asks for, in bytes.
WORKSPACE = 90000


def _product(
    a: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, rows: Rows,
    second: bool, workspace: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return ``a[r] · weight[expert of r]^T`` for the rows in use ``[rows, N]`` in bf16."""
    d = torch.empty(a.shape[0], weight.shape[1], dtype=torch.bfloat16, device=a.device)
    assert rows.sizes is not None and rows.strides is not None
    deep, wide = (rows.strides[2], rows.strides[0]) if second else (rows.strides[0], rows.strides[1])
    torch.ops.sgl_kernel.es_fp8_blockwise_scaled_grouped_mm.default(
        d, a, weight.mT, scale, weight_scale.mT, deep, deep, wide, rows.sizes[int(second)], rows.groups[1], workspace
    )
    return d


@operator("fused_moe_sgl_kernel", like_x)
def _fused_moe(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor,
    w13_scale: torch.Tensor, w2_scale: torch.Tensor, num_shared: int, ue8m0: bool, factor: float,
) -> torch.Tensor:  # fmt: skip
    experts, hidden, inner = w2.shape
    scale_fmt = "ue8m0" if ue8m0 else "float"
    cfg = FusedMoEConfig(
        hidden, inner, experts - num_shared, topk_ids.shape[1], num_shared, "fp8_block", scale_fmt,
        scaling_factor=factor,
    )  # fmt: skip
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=x.device)
    for chunk, weights, ids, out in token_chunks(x, topk_weights, topk_ids, y, MAX_TOKENS):
        rows = place(ids, cfg.num_experts, num_shared, sizes=(hidden, inner))
        xq, xs = scatter(chunk, rows, cfg.quant, ue8m0, ROW_SCALES)
        h = _product(xq, xs, w13, w13_scale, rows, False, workspace)
        del xq, xs
        a, s = activate(h, ids, None, rows, cfg, ROW_SCALES)
        del h
        o = _product(a, s, w2, w2_scale, rows, True, workspace)
        combine(o, weights, ids, None, rows, num_shared, factor, out)
    return y


class SglKernelFusedMoE:
    """Four launches of ours and eight of the package (one more for many tokens), one operator."""

    def __init__(self, cfg: FusedMoEConfig) -> None:
        self.arguments = cfg.num_shared, cfg.scale_fmt == "ue8m0", cfg.scaling_factor

    def pack(self, weights: MoEWeights) -> MoEWeights:
        """Return the weights as they are: the products read the parameters' layout."""
        return weights

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: MoEWeights
    ) -> torch.Tensor:
        """Return ``y`` ``[T,D]`` in the dtype of ``x``, a new tensor."""
        y: torch.Tensor = _fused_moe(
            x, topk_weights, topk_ids, packed.w13, packed.w2, packed.w13_scale, packed.w2_scale, *self.arguments,
        )  # fmt: skip
        return y
