"""FP8 experts of a prompt: our own first product, which gathers tokens' rows, and deep_gemm's second one.

    place → quantise → gathered gate · up, activated, in codes → deep_gemm's product → combine

deep_gemm's first product reads rows in the order of experts, which a launch writes, and leaves the activation to
another. The second one's rows are those of experts already: there deep_gemm is ahead of our own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fastlayers.errors import check_choice, check_keys
from fastlayers.linear.fp8_block.deep_gemm import token_counts
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.experts_operator import ExpertsBackend, experts_operator
from fastlayers.moe.fused_moe.packages import deep_gemm
from fastlayers.moe.fused_moe.token_chunks import token_chunks
from fastlayers.moe.fused_moe.triton.gathered_gate_up import PLANS, Plan, gathered_gate_up
from fastlayers.moe.fused_moe.triton.permute import place
from fastlayers.moe.fused_moe.triton.quantize import quantize
from fastlayers.moe.fused_moe.triton.reduce import combine
from fastlayers.moe.fused_moe.weights import MoEWeights

# Rows of a tile of the second product, of which an expert's first row is a multiple: a whole block of the first.
ALIGN = max(deep_gemm.ALIGNMENTS)


@experts_operator("fused_moe_deep_gemm_gathered")
def _fused_moe(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: MoEWeights, cfg: FusedMoEConfig,
    numbers: list[int],
) -> torch.Tensor:  # fmt: skip
    assert packed.w13_scale is not None
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    plan, ue8m0 = Plan(*numbers), cfg.scale_fmt == "ue8m0"
    for chunk, weights, ids, out in token_chunks(x, topk_weights, topk_ids, y, deep_gemm.MAX_TOKENS):
        rows = place(ids, cfg.num_experts, cfg.num_shared, align=ALIGN, tokens_of_rows=True)
        codes, scale = quantize(chunk, None, cfg.all_experts, cfg.quant, ue8m0)
        a, s = gathered_gate_up(codes, scale, packed.w13, packed.w13_scale, rows, plan, ue8m0)
        average = deep_gemm.average_rows(chunk.shape[0], cfg)
        o = deep_gemm.grouped_product(a, s, packed.w2, packed.w2_scale, rows, ALIGN, average)
        combine(o, weights, ids, None, rows, cfg.num_shared, cfg.scaling_factor, out)
    return y


class DeepGemmGatheredFusedMoE(ExpertsBackend):
    """Five launches, seven for many tokens; one operator.

    Tuned: the rows of the first product's blocks, its warps and stages.
    """

    experts = _fused_moe
    token_counts = staticmethod(token_counts)

    def __init__(self, cfg: FusedMoEConfig, config: Mapping[str, int] | None = None) -> None:
        super().__init__(cfg)
        if config:
            check_keys("fused_moe", "config of the deep_gemm_gathered backend", config, Plan._fields)
            check_choice("fused_moe", "config['m']", config["m"], deep_gemm.ALIGNMENTS)
        plan = Plan(**config) if config else PLANS[0]
        self.numbers = list(plan)

    @staticmethod
    def candidates(cfg: FusedMoEConfig, num_tokens: int) -> list[dict[str, int]]:
        """Return what the tuner tries for ``num_tokens``, the own rule first."""
        return [plan._asdict() for plan in PLANS]
