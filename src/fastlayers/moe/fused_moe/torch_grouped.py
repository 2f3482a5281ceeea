"""bf16 experts by torch's grouped products (CUTLASS on Hopper), with our own kernels around them.

Offsets lie on the device: nothing waits for the host. On a CPU :mod:`fastlayers.moe.fused_moe.torch` does the same in
torch operations.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.experts_operator import ExpertsBackend, experts_operator
from fastlayers.moe.fused_moe.token_chunks import token_chunks
from fastlayers.moe.fused_moe.triton.activation import activate
from fastlayers.moe.fused_moe.triton.permute import ROW_SCALES, place, scatter
from fastlayers.moe.fused_moe.triton.reduce import combine
from fastlayers.moe.fused_moe.weights import MoEWeights

MAX_TOKENS = 8192


@experts_operator("fused_moe_torch_grouped")
def _fused_moe(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: MoEWeights, cfg: FusedMoEConfig,
    numbers: list[int],
) -> torch.Tensor:  # fmt: skip
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for chunk, weights, ids, out in token_chunks(x, topk_weights, topk_ids, y, MAX_TOKENS):
        rows = place(ids, cfg.num_experts, cfg.num_shared)
        xs, _ = scatter(chunk, rows, "none", False, ROW_SCALES)
        h = F.grouped_mm(xs, packed.w13.mT, offs=rows.groups[2])
        a, _ = activate(h, ids, packed.w13_bias, rows, cfg, ROW_SCALES)
        o = F.grouped_mm(a, packed.w2.mT, offs=rows.groups[2])
        combine(o, weights, ids, packed.w2_bias, rows, cfg.num_shared, cfg.scaling_factor, out)
    return y


class TorchGroupedFusedMoE(ExpertsBackend):
    """Four launches of ours and torch's two products (one more for many tokens), one operator."""

    experts = _fused_moe
