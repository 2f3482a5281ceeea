"""bf16 experts by torch's grouped products (CUTLASS on Hopper), with our own kernels around them.

Offsets lie on the device: nothing waits for the host. On a CPU :mod:`fastlayers.moe.fused_moe.torch` does the same in
torch operations.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.token_chunks import token_chunks
from fastlayers.moe.fused_moe.triton.activation import activate
from fastlayers.moe.fused_moe.triton.permute import ROW_SCALES, place, scatter
from fastlayers.moe.fused_moe.triton.reduce import combine
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.operators import like_x, operator

MAX_TOKENS = 8192


@operator("fused_moe_torch_grouped", like_x)
def _fused_moe(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor,
    w13_bias: torch.Tensor | None, w2_bias: torch.Tensor | None, num_shared: int, activation: str, alpha: float,
    limit: float, factor: float, interleaved: bool,
) -> torch.Tensor:  # fmt: skip
    experts, hidden, inner = w2.shape
    cfg = FusedMoEConfig(
        hidden, inner, experts - num_shared, topk_ids.shape[1], num_shared, activation=activation, alpha=alpha,
        limit=limit, bias=w13_bias is not None, scaling_factor=factor, interleaved=interleaved,
    )  # fmt: skip
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for chunk, weights, ids, out in token_chunks(x, topk_weights, topk_ids, y, MAX_TOKENS):
        rows = place(ids, cfg.num_experts, num_shared)
        xs, _ = scatter(chunk, rows, "none", False, ROW_SCALES)
        h = F.grouped_mm(xs, w13.mT, offs=rows.groups[2])
        a, _ = activate(h, ids, w13_bias, rows, cfg, ROW_SCALES)
        o = F.grouped_mm(a, w2.mT, offs=rows.groups[2])
        combine(o, weights, ids, w2_bias, rows, num_shared, factor, out)
    return y


class TorchGroupedFusedMoE:
    """Four launches of ours and torch's two products (one more for many tokens), one operator."""

    def __init__(self, cfg: FusedMoEConfig) -> None:
        self.arguments = (
            cfg.num_shared, cfg.activation, cfg.alpha, cfg.limit, cfg.scaling_factor, cfg.interleaved,
        )  # fmt: skip

    def pack(self, weights: MoEWeights) -> MoEWeights:
        """Return the weights as they are: the products read the parameters' layout."""
        return weights

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: MoEWeights
    ) -> torch.Tensor:
        """Return ``y`` ``[T,D]``, a new tensor."""
        y: torch.Tensor = _fused_moe(
            x, topk_weights, topk_ids, packed.w13, packed.w2, packed.w13_bias, packed.w2_bias, *self.arguments
        )
        return y
