"""The 16-bit experts of a token or a few as matrix-vector products: two launches.

    in    a[pair] = act(x[row of pair] @ w13[expert of pair]^T)          programs: rows of w13 × pairs
    out   y[t] = factor * sum over j of weight[t, j] * a[t, j] @ w2^T    programs: outputs × tokens

A program of the second product holds BLOCK_N outputs of all pairs of its token, so that nothing is added up later; it
asks for its first weights while the first product ends. Tiles are rows of weights × BLOCK_K columns, AHEAD of them in
registers. Weights are read once a step: L2 gives them up first, and keeps keys, router and norms for the next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.fused_moe.launch_config import LaunchConfig
from fastlayers.moe.fused_moe.triton.activation import activation_of
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents

# What a thread reads at a time, 16 bytes: it adds these products of the second one before it keeps their sum, for which
# it then needs an eighth of the registers.
FOLD = tl.constexpr(8)


@triton.jit
def _tile(rows, k, K, EVEN_K: tl.constexpr, EVICT: tl.constexpr):
    if EVEN_K:
        return tl.load(rows + k[None, :], eviction_policy=EVICT)
    else:
        return tl.load(rows + k[None, :], mask=k[None, :] < K, other=0.0, eviction_policy=EVICT)


@triton.jit
def _second_tile(rows, k, I, here):
    """Return a tile of the second product's weights: of rows that are some."""
    return tl.load(rows + k[None, :], mask=here[:, None] & (k < I)[None, :], other=0.0, eviction_policy="evict_first")


@kernel
def vector_in_kernel(
    x_ptr, w_ptr, bias_ptr, ids_ptr, a_ptr, num_routed, I, K, x_stride, alpha, limit,
    TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr, OAI: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCKS: tl.constexpr, AHEAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N gate rows and as many up rows of a pair's expert by its token, and apply the activation."""
    pair, depth = tl.program_id(1), tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = column < I
    # Rows beyond the edge read the last one again; their results are never stored.
    inside = tl.minimum(column, I - 1)
    gate_row = inside * 2 if INTERLEAVED else inside
    up_row = gate_row + 1 if INTERLEAVED else inside + I
    await_inputs(PDL)
    release_dependents(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if (expert < 0) | (expert >= num_routed):
        return
    gate_rows = w_ptr + (expert * 2 * I + gate_row)[:, None] * K
    up_rows = w_ptr + (expert * 2 * I + up_row)[:, None] * K
    x_row = x_ptr + (pair // TOP_K).to(tl.int64) * x_stride
    gates = ()
    ups = ()
    xs = ()
    for i in tl.static_range(AHEAD):
        k = i * BLOCK_K + depth
        gates = gates + (_tile(gate_rows, k, K, EVEN_K, "evict_first"),)  # type: ignore[assignment]
        ups = ups + (_tile(up_rows, k, K, EVEN_K, "evict_first"),)  # type: ignore[assignment]
        xs = xs + (_tile(x_row, k, K, EVEN_K, ""),)  # type: ignore[assignment]
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.static_range(BLOCKS):
        if i + AHEAD < BLOCKS:
            k = (i + AHEAD) * BLOCK_K + depth
            gates = gates + (_tile(gate_rows, k, K, EVEN_K, "evict_first"),)  # type: ignore[assignment]
            ups = ups + (_tile(up_rows, k, K, EVEN_K, "evict_first"),)  # type: ignore[assignment]
            xs = xs + (_tile(x_row, k, K, EVEN_K, ""),)  # type: ignore[assignment]
        x = xs[i].to(tl.float32)  # type: ignore[var-annotated]
        gate += x * gates[i].to(tl.float32)
        up += x * ups[i].to(tl.float32)
    gate_sum, up_sum = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if HAS_BIAS:
        gate_sum += tl.load(bias_ptr + expert * 2 * I + gate_row).to(tl.float32)
        up_sum += tl.load(bias_ptr + expert * 2 * I + up_row).to(tl.float32)
    inner = activation_of(gate_sum, up_sum, alpha, limit, OAI)
    tl.store(a_ptr + pair.to(tl.int64) * I + column, cast(inner, a_ptr.dtype.element_ty), mask=known)


@kernel
def vector_out_kernel(
    a_ptr, w_ptr, bias_ptr, ids_ptr, weights_ptr, y_ptr, num_routed, D, I, factor,
    TOP_K: tl.constexpr, SPAN: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N outputs of a token: rows of a tile are outputs × SPAN pairs, of which TOP_K are some."""
    ROWS: tl.constexpr = BLOCK_N * SPAN
    token = tl.program_id(1).to(tl.int64)
    row, depth = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    slot, column = row % SPAN, tl.program_id(0) * BLOCK_N + row // SPAN
    pair = token * TOP_K + slot
    # Ids and weights of the experts were there before the kernel in front began.
    expert = tl.load(ids_ptr + pair, mask=slot < TOP_K, other=-1).to(tl.int64)
    here = (expert >= 0) & (expert < num_routed) & (column < D)
    out_row = tl.where(here, expert * D + column, 0)
    rows = w_ptr + out_row[:, None] * I
    held = ()
    for i in tl.static_range(AHEAD):
        held = held + (_second_tile(rows, i * BLOCK_K + depth, I, here),)  # type: ignore[assignment]
    weight = tl.load(weights_ptr + pair, mask=here, other=0.0)
    bias = tl.zeros([ROWS], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + out_row, mask=here, other=0.0).to(tl.float32)
    await_inputs(PDL)
    release_dependents(PDL)
    acc = tl.zeros([ROWS, BLOCK_K // FOLD], tl.float32)
    for i in tl.static_range(BLOCKS):
        k = i * BLOCK_K + depth
        # The rows of dropped pairs were never written.
        a = tl.load(a_ptr + pair[:, None] * I + k[None, :], mask=here[:, None] & (k < I)[None, :], other=0.0)
        if i + AHEAD < BLOCKS:
            held = held + (_second_tile(rows, (i + AHEAD) * BLOCK_K + depth, I, here),)  # type: ignore[assignment]
        product = a.to(tl.float32) * held[i].to(tl.float32)
        acc += tl.sum(tl.reshape(product, [ROWS, BLOCK_K // FOLD, FOLD]), axis=2)
    each = (tl.sum(acc, axis=1) + bias) * weight
    total = tl.sum(tl.reshape(each, [BLOCK_N, SPAN]), axis=1) * factor
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(y_ptr + token * D + column, cast(total, y_ptr.dtype.element_ty), mask=column < D)


@lru_cache(maxsize=4096)
def _launches(
    tokens: int, top_k: int, routed: int, hidden: int, inner: int, x_stride: int, plan: LaunchConfig, oai: bool,
    alpha: float, limit: float, factor: float, bias1: bool, bias2: bool, interleaved: bool, device: torch.device,
) -> tuple[Callable[..., None], Callable[..., None]]:  # fmt: skip
    """Return what launches both products of one shape."""
    first, second, launch = plan.first, plan.second, dependent_launch(device)
    blocks1, blocks2 = cdiv(hidden, first.k), cdiv(inner, second.k)
    into = vector_in_kernel.at(
        (cdiv(inner, first.n), tokens * top_k), routed, inner, hidden, x_stride, alpha, limit,
        TOP_K=top_k, HAS_BIAS=bias1, INTERLEAVED=interleaved, OAI=oai, EVEN_K=hidden % first.k == 0, BLOCKS=blocks1,
        AHEAD=min(blocks1, first.stages), BLOCK_N=first.n, BLOCK_K=first.k, num_warps=first.warps, **launch,
    )  # fmt: skip
    out = vector_out_kernel.at(
        (cdiv(hidden, second.n), tokens), routed, hidden, inner, factor,
        TOP_K=top_k, SPAN=next_power_of_2(top_k), HAS_BIAS=bias2, BLOCKS=blocks2, AHEAD=min(blocks2, second.stages),
        BLOCK_N=second.n, BLOCK_K=second.k, num_warps=second.warps, **launch,
    )  # fmt: skip
    return into, out


def vector_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: MoEWeights, y: torch.Tensor,
    plan: LaunchConfig, oai: bool, alpha: float, limit: float, factor: float, interleaved: bool,
) -> None:  # fmt: skip
    """Write ``y`` ``[T, D]`` for unquantised ``x`` ``[T, D]``; no shared experts."""
    (routed, hidden, inner), (tokens, top_k) = packed.w2.shape, ids.shape
    bias1, bias2 = packed.w13_bias, packed.w2_bias
    into, out = _launches(
        tokens, top_k, routed, hidden, inner, x.stride()[0], plan, oai, alpha, limit, factor, bias1 is not None,
        bias2 is not None, interleaved, x.device,
    )  # fmt: skip
    a = x.new_empty(tokens * top_k, inner)
    into(x, packed.w13, x if bias1 is None else bias1, ids, a)
    out(a, packed.w2, x if bias2 is None else bias2, ids, weights, y)
