"""One token's experts with bf12 weights (:mod:`fastlayers.quant.bf12`) as matrix-vector products: two launches.

What :mod:`fastlayers.moe.fused_moe.triton.pair_vector` does, over words of three runs:

    in    a[pair] = act(x @ w13[expert of pair]^T)                 programs: rows of w13 × pairs
    out   y = factor * sum over pairs of weight * a[pair] @ w2^T   programs: outputs
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.triton.activation import activation_of
from fastlayers.operators import operator
from fastlayers.quant.bf12 import BF12Weights, run_of
from fastlayers.quant.bf12_tiles import add_products, outliers_of, outlying_sum, row_words, words_at
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents


@kernel(do_not_specialize=("num_experts",))
def bf12_in_kernel(
    x_ptr, words_ptr, scale_ptr, columns_ptr, values_ptr, ids_ptr, a_ptr, num_experts, I, CHUNKS, alpha, limit,
    OAI: tl.constexpr, MASKED: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr, OUTLIERS: tl.constexpr,
    RUN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N gate rows and as many up rows of a pair's expert by the token, and apply the activation."""
    G = CHUNKS * 8  # so that rows are known to begin at 16 bytes
    pair, group = tl.program_id(1), tl.arange(0, BLOCK_G)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the edge read the last one again; their results are never stored.
    inside = tl.minimum(column, I - 1)
    await_inputs(PDL)
    release_dependents(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    gate_row = expert * 2 * I + inside
    up_row = gate_row + I
    gate_rows, up_rows = row_words(words_ptr, gate_row, G), row_words(words_ptr, up_row, G)
    gates = ()
    ups = ()
    for i in tl.static_range(AHEAD):
        at = i * BLOCK_G + group
        gates = gates + (words_at(gate_rows, at, (at < G)[None, :], RUN, MASKED),)  # type: ignore[assignment]
        ups = ups + (words_at(up_rows, at, (at < G)[None, :], RUN, MASKED),)  # type: ignore[assignment]
    gate_scale, up_scale = tl.load(scale_ptr + gate_row), tl.load(scale_ptr + up_row)
    gate_columns, gate_values = outliers_of(columns_ptr, values_ptr, gate_row, OUTLIERS)
    up_columns, up_values = outliers_of(columns_ptr, values_ptr, up_row, OUTLIERS)
    gate_x, up_x = tl.load(x_ptr + gate_columns), tl.load(x_ptr + up_columns)
    gate = tl.zeros([BLOCK_N, BLOCK_G], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_G], tl.float32)
    for i in tl.static_range(BLOCKS):
        if i + AHEAD < BLOCKS:
            at = (i + AHEAD) * BLOCK_G + group
            gates = gates + (words_at(gate_rows, at, (at < G)[None, :], RUN, MASKED),)  # type: ignore[assignment]
            ups = ups + (words_at(up_rows, at, (at < G)[None, :], RUN, MASKED),)  # type: ignore[assignment]
        at = i * BLOCK_G + group
        gate = add_products(gate, gates[i], x_ptr, at, (at < G)[None, :], RUN, MASKED)
        up = add_products(up, ups[i], x_ptr, at, (at < G)[None, :], RUN, MASKED)
    gate_sum = tl.sum(gate, axis=1) * gate_scale + outlying_sum(gate_x, gate_values)
    up_sum = tl.sum(up, axis=1) * up_scale + outlying_sum(up_x, up_values)
    inner = activation_of(gate_sum, up_sum, alpha, limit, OAI)
    tl.store(a_ptr + pair * I + column, cast(inner, a_ptr.dtype.element_ty), mask=column < I)


@kernel(do_not_specialize=("num_experts",))
def bf12_out_kernel(
    a_ptr, words_ptr, scale_ptr, columns_ptr, values_ptr, ids_ptr, weights_ptr, y_ptr, num_experts, D, CHUNKS, factor,
    TOP_K: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr, OUTLIERS: tl.constexpr,
    RUN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N outputs: rows of a tile are outputs × SPAN pairs, of which TOP_K are some."""
    ROWS: tl.constexpr = BLOCK_N * SPAN
    G = CHUNKS * 8
    row, group = tl.arange(0, ROWS), tl.arange(0, BLOCK_G)
    pair, column = row % SPAN, tl.program_id(0) * BLOCK_N + row // SPAN
    # Ids and weights of the experts were there before the kernel in front began.
    expert = tl.load(ids_ptr + pair, mask=pair < TOP_K, other=-1).to(tl.int64)
    here = (expert >= 0) & (expert < num_experts) & (column < D)
    out_row = tl.where(here, expert * D + column, 0)
    rows = row_words(words_ptr, out_row, G)
    held = ()
    for i in tl.static_range(AHEAD):
        at = i * BLOCK_G + group
        held = held + (words_at(rows, at, here[:, None] & (at < G)[None, :], RUN, True),)  # type: ignore[assignment]
    weight = tl.load(weights_ptr + pair, mask=here, other=0.0)
    scale = tl.load(scale_ptr + out_row)
    outlying, values = outliers_of(columns_ptr, values_ptr, out_row, OUTLIERS)
    await_inputs(PDL)
    release_dependents(PDL)
    # The rows of dropped pairs were never written.
    a_rows = a_ptr + (pair * (8 * G))[:, None]
    gathered = tl.load(a_rows + outlying, mask=here[:, None], other=0.0)
    acc = tl.zeros([ROWS, BLOCK_G], tl.float32)
    for i in tl.static_range(BLOCKS):
        if i + AHEAD < BLOCKS:
            at = (i + AHEAD) * BLOCK_G + group
            more = here[:, None] & (at < G)[None, :]
            held = held + (words_at(rows, at, more, RUN, True),)  # type: ignore[assignment]
        at = i * BLOCK_G + group
        acc = add_products(acc, held[i], a_rows, at, here[:, None] & (at < G)[None, :], RUN, True)
    each = (tl.sum(acc, axis=1) * scale + outlying_sum(gathered, values)) * weight
    total = tl.sum(tl.reshape(tl.where(here, each, 0.0), [BLOCK_N, SPAN]), axis=1) * factor
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(y_ptr + column, cast(total, y_ptr.dtype.element_ty), mask=column < D)


class Plan(NamedTuple):
    """Rows and groups of a program, warps and tiles held, of the first product and of the second."""

    n1: int
    g1: int
    warps1: int
    ahead1: int
    n2: int
    g2: int
    warps2: int
    ahead2: int


# As whole decode steps were fastest on an H200: see benchmarks/notes/bf12.md.
PLAN = Plan(2, 128, 1, 2, 2, 32, 1, 1)


@lru_cache(maxsize=4096)
def _launches(
    top_k: int, experts: int, hidden: int, inner: int, outliers: tuple[int, int], oai: bool, alpha: float,
    limit: float, factor: float, plan: Plan, device: torch.device,
) -> tuple[Callable[..., None], Callable[..., None]]:  # fmt: skip
    """Return what launches both products of one token."""
    launch, groups1, groups2 = dependent_launch(device), hidden // 8, inner // 8
    blocks1, blocks2 = cdiv(groups1, plan.g1), cdiv(groups2, plan.g2)
    into = bf12_in_kernel.at(
        (cdiv(inner, plan.n1), top_k), experts, inner, hidden // 64, alpha, limit,
        OAI=oai, MASKED=groups1 % plan.g1 != 0, BLOCKS=blocks1, AHEAD=min(plan.ahead1, blocks1), OUTLIERS=outliers[0],
        RUN=run_of(hidden), BLOCK_N=plan.n1, BLOCK_G=plan.g1, num_warps=plan.warps1, **launch,
    )  # fmt: skip
    out = bf12_out_kernel.at(
        (cdiv(hidden, plan.n2),), experts, hidden, inner // 64, factor,
        TOP_K=top_k, SPAN=next_power_of_2(top_k), BLOCKS=blocks2, AHEAD=min(plan.ahead2, blocks2),
        OUTLIERS=outliers[1], RUN=run_of(inner), BLOCK_N=plan.n2, BLOCK_G=plan.g2, num_warps=plan.warps2, **launch,
    )  # fmt: skip
    return into, out


def _fake(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(x)


@operator("fused_moe_bf12", _fake)
def _experts_bf12(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, words13: torch.Tensor, scale13: torch.Tensor,
    columns13: torch.Tensor, values13: torch.Tensor, words2: torch.Tensor, scale2: torch.Tensor,
    columns2: torch.Tensor, values2: torch.Tensor, experts: int, oai: bool, alpha: float, limit: float, factor: float,
    plan: list[int],
) -> torch.Tensor:  # fmt: skip
    top_k, hidden = topk_ids.shape[1], x.shape[1]
    inner = words2.shape[1] // 3 * 8
    outliers = columns13.shape[1], columns2.shape[1]
    into, out = _launches(
        top_k, experts, hidden, inner, outliers, oai, alpha, limit, factor, Plan(*plan), x.device
    )  # fmt: skip
    a, y, x, ids = x.new_empty(top_k, inner), x.new_empty(1, hidden), x.contiguous(), topk_ids.contiguous()
    into(x, words13, scale13, columns13, values13, ids, a)
    out(a, words2, scale2, columns2, values2, ids, topk_weights.contiguous(), y)
    return y


def experts_bf12(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, w13: BF12Weights, w2: BF12Weights,
    experts: int, oai: bool, alpha: float, limit: float, factor: float, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return ``y`` ``[1, D]`` of one token ``x`` ``[1, D]``; weights are ``[E · 2I, D]`` and ``[E · D, I]``."""
    y: torch.Tensor = _experts_bf12(
        x, topk_weights, topk_ids, *w13, *w2, experts, oai, alpha, limit, factor, list(plan or PLAN)
    )
    return y


class BF12Experts:
    """A backend's call with weights of its own: one token, whatever weights it is given."""

    def __init__(self, w13: BF12Weights, w2: BF12Weights, cfg: FusedMoEConfig) -> None:
        self.w13, self.w2, self.cfg, self.nbytes = w13, w2, cfg, w13.nbytes + w2.nbytes

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: object
    ) -> torch.Tensor:
        """Return ``y`` ``[1, D]``, a new tensor."""
        cfg = self.cfg
        oai = cfg.activation == "swiglu_oai"
        return experts_bf12(
            x, topk_weights, topk_ids, self.w13, self.w2, cfg.num_experts, oai, cfg.alpha, cfg.limit,
            cfg.scaling_factor,
        )  # fmt: skip
