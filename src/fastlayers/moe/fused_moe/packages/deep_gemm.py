"""The experts by deep_gemm's grouped products on Hopper, with our own kernels around them.

    place → scatter (quantise) → product 1 → activation (quantise) → product 2 → combine

*Contiguous*: rows of an expert start at multiples of the products' tile (64 or 128 rows), and the products read each
expert's end on the device, so that neither padding nor the worst case costs anything. *Masked*: as many rows for
each expert as there are tokens, with the counts on the device; for few tokens.

The first product is rounded to bf16 before the activation, in fp32, quantises it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fastlayers.integers import cdiv
from fastlayers.linear.fp8_block.deep_gemm import token_counts
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.experts_operator import ExpertsBackend, experts_operator
from fastlayers.moe.fused_moe.token_chunks import token_chunks
from fastlayers.moe.fused_moe.triton.activation import activate
from fastlayers.moe.fused_moe.triton.permute import COLUMN_SCALES, Rows, place, scatter
from fastlayers.moe.fused_moe.triton.reduce import combine
from fastlayers.moe.fused_moe.weights import MoEWeights

# Tokens of one chunk: contiguous buffers of DeepSeek-V3 stay below 2 GiB, masked ones below 4 GiB.
MAX_TOKENS, MAX_MASKED_TOKENS = 8192, 256
ALIGNMENTS = (64, 128)


@contextmanager
def _alignment(rows: int) -> Iterator[Any]:
    """Yield the package while its products take tiles of ``rows`` rows: a setting of the process, put back."""
    import deep_gemm

    native = deep_gemm._C
    before = native.get_mk_alignment_for_contiguous_layout()
    native.set_mk_alignment_for_contiguous_layout(rows)
    try:
        yield deep_gemm
    finally:
        native.set_mk_alignment_for_contiguous_layout(before)


def average_rows(tokens: int, cfg: FusedMoEConfig) -> int:
    """Return how many rows a routed expert has of so many tokens, rounded up."""
    return cdiv(tokens * cfg.top_k, cfg.num_experts)


def grouped_product(
    a: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None,
    rows: Rows, align: int, expected: int,
) -> torch.Tensor:  # fmt: skip
    """Return ``a[r] · weight[expert of r]^T`` for the rows in use ``[rows, N]`` in bf16."""
    experts, width = weight.shape[:2]
    d = torch.empty(rows.total, width, dtype=torch.bfloat16, device=a.device)
    with _alignment(align) as package:
        if rows.masked:
            shape = (experts, rows.capacity)
            package.fp8_m_grouped_gemm_nt_masked(
                (a.unflatten(0, shape), scale), (weight, weight_scale), d.unflatten(0, shape), rows.groups[0], expected
            )
        elif weight_scale is None:
            package.m_grouped_bf16_gemm_nt_contiguous(a, weight, d, rows.groups[2], use_psum_layout=True)
        else:
            package.m_grouped_fp8_gemm_nt_contiguous(
                (a, scale), (weight, weight_scale), d, rows.groups[2], use_psum_layout=True
            )
    return d


def _chunk(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: MoEWeights, cfg: FusedMoEConfig,
    align: int, masked: bool, y: torch.Tensor,
) -> None:  # fmt: skip
    """Compute ``y`` of one chunk's tokens; ``align`` 0: by the expected rows of an expert."""
    tokens, experts = x.shape[0], cfg.all_experts
    average = average_rows(tokens, cfg)
    align = align or ALIGNMENTS[average > ALIGNMENTS[0]]
    # A masked expert's rows end with a whole tile: nothing of the next expert is written.
    capacity = -(-tokens // align) * align if masked else None
    rows = place(ids, cfg.num_experts, cfg.num_shared, align=align, capacity=capacity)
    ue8m0, layout = cfg.scale_fmt == "ue8m0", COLUMN_SCALES
    xq, xs = scatter(x, rows, cfg.quant, ue8m0, layout)
    h = grouped_product(xq, xs, packed.w13, packed.w13_scale, rows, align, average)
    del xq, xs
    a, s = activate(h, ids, packed.w13_bias, rows, cfg, layout)
    del h
    o = grouped_product(a, s, packed.w2, packed.w2_scale, rows, align, average)
    combine(o, weights, ids, packed.w2_bias, rows, experts - cfg.num_experts, cfg.scaling_factor, y)


@experts_operator("fused_moe_deep_gemm")
def _fused_moe(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: MoEWeights, cfg: FusedMoEConfig,
    numbers: list[int],
) -> torch.Tensor:  # fmt: skip
    align, masked = numbers
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    max_tokens = MAX_MASKED_TOKENS if masked else MAX_TOKENS
    for chunk, weights, ids, out in token_chunks(x, topk_weights, topk_ids, y, max_tokens):
        _chunk(chunk, weights, ids, packed, cfg, align, bool(masked), out)
    return y


class DeepGemmFusedMoE(ExpertsBackend):
    """Six launches, seven for many tokens; one operator. The JIT compiles for each shape and class of M.

    Tuned: ``align``, the rows of a tile (64 or 128).
    """

    experts = _fused_moe
    masked = False
    token_counts = staticmethod(token_counts)

    def __init__(self, cfg: FusedMoEConfig, config: Mapping[str, int] | None = None) -> None:
        super().__init__(cfg)
        self.numbers = [(config or {}).get("align", 0), int(self.masked)]

    @staticmethod
    def candidates(cfg: FusedMoEConfig, num_tokens: int) -> list[dict[str, int]]:
        """Return what the tuner tries for ``num_tokens``, the own rule first."""
        first = average_rows(num_tokens, cfg) > ALIGNMENTS[0]
        return [{"align": ALIGNMENTS[first]}, {"align": ALIGNMENTS[not first]}]


class DeepGemmMaskedFusedMoE(DeepGemmFusedMoE):
    """The masked layout; more than 256 tokens run in several chunks."""

    masked = True
