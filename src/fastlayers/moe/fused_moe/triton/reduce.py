"""The end of the experts: a token's rows are added in the order of its experts, in fp32 and rounded once.

reduce     rows of aligned pairs, weighed already       pair_sum   the same of pairs by themselves
combine    rows of another package's GEMM, which have neither weight nor bias
           y[t] = factor * sum over j of w[t,j] * (o[row_of[t,j]] + b2)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.fused_moe.triton.permute import Rows
from fastlayers.runtime.launch import Part, kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents


@kernel
def reduce_kernel(
    partial_ptr, ids_ptr, y_ptr, D, num_experts, factor,
    PER_TOKEN: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add a token's valid pairs (each in SPLITS parts) in order, apply the factor once, round once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    await_inputs(PDL)
    release_dependents(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + j
        expert = tl.load(ids_ptr + pair)
        # The rows of dropped pairs were never written.
        valid = (expert >= 0) & (expert < num_experts)
        for split in tl.static_range(SPLITS):
            row = partial_ptr + (pair * SPLITS + split) * D
            total += tl.load(row + column, mask=column < tl.where(valid, D, 0), other=0.0)
    tl.store(y_ptr + token * D + column, cast(total * factor, y_ptr.dtype.element_ty), mask=inside)


@kernel
def pair_sum_kernel(
    partial_ptr, ids_ptr, y_ptr, D, num_routed, factor,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add a token's valid pairs (each in SPLITS parts) in order, apply the factor once, round once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # The ids were there before the kernel in front began.
    slot = tl.arange(0, SPAN)
    ids = tl.load(ids_ptr + token * TOP_K + slot, mask=slot < TOP_K, other=-1)
    valid = ((ids >= 0) & (ids < num_routed)).to(tl.int32)
    any_valid = tl.max(valid, axis=0)
    await_inputs(PDL)
    release_dependents(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K + SHARED):
        pair = token * (TOP_K + SHARED) + j
        # The rows of dropped pairs were never written.
        written = tl.sum(tl.where(slot == j, valid, 0), axis=0) if j < TOP_K else any_valid
        end = tl.where(written != 0, D, 0)
        for split in tl.static_range(SPLITS):
            total += tl.load(partial_ptr + (pair * SPLITS + split) * D + column, mask=column < end, other=0.0)
    tl.store(y_ptr + token * D + column, cast(total * factor, y_ptr.dtype.element_ty), mask=column < D)


@kernel
def combine_kernel(
    o_ptr, row_ptr, weights_ptr, ids_ptr, bias_ptr, y_ptr, hidden, factor,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weigh and add a token's rows in order, apply the factor once, round once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(row_ptr + token * (TOP_K + SHARED) + j).to(tl.int64)
        valid = inside & (row >= 0)
        out = tl.load(o_ptr + row * hidden + column, mask=valid, other=0.0).to(tl.float32)
        if HAS_BIAS:
            expert = tl.load(ids_ptr + token * TOP_K + j).to(tl.int64)
            out += tl.load(bias_ptr + expert * hidden + column, mask=valid, other=0.0).to(tl.float32)
        weight = tl.load(weights_ptr + token * TOP_K + j)
        total += tl.where(valid, out * weight, 0.0)
    total = total * factor
    for j in tl.static_range(SHARED):
        row = tl.load(row_ptr + token * (TOP_K + SHARED) + TOP_K + j).to(tl.int64)
        total += tl.load(o_ptr + row * hidden + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    tl.store(y_ptr + token * hidden + column, cast(total, y_ptr.dtype.element_ty), mask=inside)


@lru_cache(maxsize=4096)
def launch_reduce(
    tokens: int, hidden: int, per_token: int, experts: int, factor: float, splits: int, device: torch.device,
    parts: tuple[tuple[int, Part], ...] | None = None,
) -> Callable[..., None]:  # fmt: skip
    """Return what writes the sums of each token's pairs, called with the rows of pairs, the ids and the sums."""
    block = min(256 if tokens <= 64 else 1024, next_power_of_2(hidden))
    return reduce_kernel.at(
        (tokens, cdiv(hidden, block)), hidden, experts, factor, parts=parts,
        PER_TOKEN=per_token, SPLITS=splits, BLOCK=block, num_warps=max(1, block // 256), **dependent_launch(device),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _launch_pairs(
    tokens: int, hidden: int, routed: int, factor: float, top_k: int, shared: int, splits: int, device: torch.device
) -> Callable[..., None]:
    width = min(256, next_power_of_2(hidden))
    return pair_sum_kernel.at(
        (tokens, cdiv(hidden, width)), hidden, routed, factor,
        TOP_K=top_k, SHARED=shared, SPAN=next_power_of_2(top_k), SPLITS=splits, BLOCK=width,
        num_warps=max(1, width // 128), **dependent_launch(device),
    )  # fmt: skip


def reduce(
    partial: torch.Tensor, ids: torch.Tensor, y: torch.Tensor, experts: int, factor: float, splits: int = 1
) -> None:
    """Write the sums of each token's pairs to ``y``."""
    launch_reduce(*y.shape, ids.shape[1], experts, factor, splits, y.device)(partial, ids, y)


def pair_sum(
    partial: torch.Tensor, ids: torch.Tensor, y: torch.Tensor, routed: int, factor: float, top_k: int, shared: int,
    splits: int,
) -> None:  # fmt: skip
    """Write the sums of each token's pairs to ``y``, where no alignment has marked the dropped ones."""
    _launch_pairs(*y.shape, routed, factor, top_k, shared, splits, y.device)(partial, ids, y)


def combine(
    o: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None, rows: Rows,
    shared: int, factor: float, y: torch.Tensor,
) -> None:  # fmt: skip
    """Write the weighted sums of the second product's rows ``[rows, D]`` to ``y`` ``[T, D]``."""
    tokens, hidden = y.shape
    block = min(1024, next_power_of_2(hidden))
    combine_kernel[(tokens, cdiv(hidden, block))](
        o, rows.row_of, weights, ids, o if bias is None else bias, y, hidden, factor,
        TOP_K=ids.shape[1], SHARED=shared, HAS_BIAS=bias is not None, BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
