"""FP8 experts by sgl_kernel's CUTLASS products ("expert specialisation"), with our own kernels around them.

The package sorts the experts into three classes by their rows, on the device, and launches a product for each: no
row is padded, the grid knows no worst case. Inputs and scales are rows ordered by expert. What is placed where is our
own :func:`~fastlayers.moe.fused_moe.triton.permute.place`: the package's orders pairs by atomics.

The first product is rounded to bf16 before the activation, in fp32, quantises it.
"""

from __future__ import annotations

import torch

from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.experts_operator import ExpertsBackend, experts_operator
from fastlayers.moe.fused_moe.token_chunks import token_chunks
from fastlayers.moe.fused_moe.triton.activation import activate
from fastlayers.moe.fused_moe.triton.permute import ROW_SCALES, Rows, place, scatter
from fastlayers.moe.fused_moe.triton.reduce import combine
from fastlayers.moe.fused_moe.weights import MoEWeights

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


@experts_operator("fused_moe_sgl_kernel")
def _fused_moe(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: MoEWeights, cfg: FusedMoEConfig,
    numbers: list[int],
) -> torch.Tensor:  # fmt: skip
    _, hidden, inner = packed.w2.shape
    assert packed.w13_scale is not None and packed.w2_scale is not None
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=x.device)
    for chunk, weights, ids, out in token_chunks(x, topk_weights, topk_ids, y, MAX_TOKENS):
        rows = place(ids, cfg.num_experts, cfg.num_shared, sizes=(hidden, inner))
        xq, xs = scatter(chunk, rows, cfg.quant, cfg.scale_fmt == "ue8m0", ROW_SCALES)
        h = _product(xq, xs, packed.w13, packed.w13_scale, rows, False, workspace)
        del xq, xs
        a, s = activate(h, ids, None, rows, cfg, ROW_SCALES)
        del h
        o = _product(a, s, packed.w2, packed.w2_scale, rows, True, workspace)
        combine(o, weights, ids, None, rows, cfg.num_shared, cfg.scaling_factor, out)
    return y


class SglKernelFusedMoE(ExpertsBackend):
    """Four launches of ours and eight of the package (one more for many tokens), one operator."""

    experts = _fused_moe
