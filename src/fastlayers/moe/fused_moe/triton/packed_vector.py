"""The experts of a token or a few over nibbles in groups as matrix-vector products: two launches.

    in    a[pair] = act(x[row of pair] @ w13[expert of pair]^T)          programs: rows of w13 × pairs
    out   y[t] = factor * sum over j of weight[t, j] * a[t, j] @ w2^T    programs: outputs × tokens

The launches are those of :mod:`fastlayers.moe.fused_moe.triton.pair_vector`, codes are read as linears read them
(:mod:`fastlayers.linear.weight_only.triton_codes`): codes less their zero points are multiplied, exactly, and sums of a
group's are scaled in fp32. Of the first product a tile is a row of weights, of the second an output's row for each
pair: so x, or the pairs' inner rows, lie in registers as all tiles of a program do, and are read once for them. A
thread has 16 bytes of a tile, which lie in one group: it adds up their products before it scales the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.linear.weight_only.layer import ZERO
from fastlayers.linear.weight_only.triton_codes import halves_of
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.launch_config import LaunchConfig, Tile
from fastlayers.moe.fused_moe.triton.activation import activated
from fastlayers.moe.fused_moe.triton.pair_vector_fp8 import joined
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents

# Bytes that a thread reads at a time.
WIDTH = 16


@triton.jit
def _load(pointers, inside, EVEN: tl.constexpr, EVICT: tl.constexpr):
    if EVEN:
        return tl.load(pointers, eviction_policy=EVICT)
    else:
        return tl.load(pointers, mask=inside, other=0, eviction_policy=EVICT)


@triton.jit
def _scales(scale_ptr, zero_ptr, at, inside, ZERO: tl.constexpr, HAS_ZERO: tl.constexpr, EVEN: tl.constexpr):
    """Return scales and zero points at places, 0 and any where there are none.

    Without a dimension for the codes, along which a thread would read the same zero point for each of them.
    """
    scale = _load(scale_ptr + at, inside, EVEN, "")
    if HAS_ZERO:
        return scale, _load(zero_ptr + at, inside, EVEN, "").to(tl.float32)
    else:
        return scale, tl.full(scale.shape, ZERO, tl.float32)


@triton.jit
def _scaled(low_x, high_x, packed, scale, zero, dtype: tl.constexpr, FOLD: tl.constexpr):
    """Return fp32 sums of FOLD bytes' products each, scaled; x in fp32, of low halves and of high ones."""
    axis: tl.constexpr = len(packed.shape) - 1
    low, high = halves_of(packed, tl.expand_dims(zero, axis), dtype)
    parts: tl.constexpr = packed.shape[:-1] + [packed.shape[-1] // FOLD, FOLD]
    # Two sums, so that each product is added as it is made: one instruction.
    less = tl.sum(tl.reshape(low_x * low.to(tl.float32), parts), axis=axis + 1)
    more = tl.sum(tl.reshape(high_x * high.to(tl.float32), parts), axis=axis + 1)
    return (less + more) * tl.expand_dims(scale, axis)


@kernel
def packed_vector_in_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, ids_ptr, a_ptr, num_experts, I, K, x_stride, w_stride, alpha, limit,
    TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, OAI: tl.constexpr, ZERO: tl.constexpr, HAS_ZERO: tl.constexpr,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr, FOLD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N gate rows and as many up rows of a pair's expert by its token, and apply the activation."""
    RUN: tl.constexpr = min(GROUP, BLOCK_K)
    RUNS: tl.constexpr = BLOCK_K // RUN
    first, pair = tl.program_id(0) * BLOCK_N, tl.program_id(1).to(tl.int64)
    run, byte = tl.arange(0, RUNS)[:, None], tl.arange(0, RUN // 2)[None, :]
    # Input features of a tile's codes in low halves; those in high halves are 16 further.
    low = run * RUN + (byte // 16) * 32 + byte % 16
    await_inputs(PDL)
    release_dependents(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    x_row = x_ptr + pair // TOP_K * x_stride
    # Gate rows, then up rows. An expert's groups of scales are as many as those of a row.
    rows = w_ptr + (expert * 2 * I + first) * w_stride + run * (RUN // 2) + byte
    scales = expert * (K // GROUP) * 2 * I + first
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    held = ()
    for i in tl.static_range(BLOCKS + AHEAD):
        if i < BLOCKS:
            k = i * BLOCK_K + low
            group = (i * BLOCK_K + tl.arange(0, RUNS) * RUN) // GROUP
            tiles = ()
            for row in tl.static_range(2 * BLOCK_N):
                place = row + I - BLOCK_N if row >= BLOCK_N else row
                packed = _load(rows + place * w_stride + i * (BLOCK_K // 2), k < K, EVEN_K, "evict_first")
                at = scales + group.to(tl.int64) * (2 * I) + place
                scale, zero = _scales(scale_ptr, zero_ptr, at, group < K // GROUP, ZERO, HAS_ZERO, EVEN_K)
                tiles = tiles + ((packed, scale, zero),)  # type: ignore[assignment]
            x = _load(x_row + k, k < K, EVEN_K, ""), _load(x_row + k + 16, k < K, EVEN_K, "")
            held = held + ((x, tiles),)  # type: ignore[assignment]
        if i >= AHEAD:
            x, tiles = held[i - AHEAD]
            low_x = x[0].to(tl.float32)  # type: ignore[var-annotated]
            high_x = x[1].to(tl.float32)
            made = ()
            for row in tl.static_range(2 * BLOCK_N):
                part = _scaled(low_x, high_x, tiles[row][0], tiles[row][1], tiles[row][2], dtype, FOLD)
                if i > AHEAD:
                    part += sums[row]  # noqa: F821
                made = made + (part,)
            sums = made
    flat = ()
    for row in tl.static_range(2 * BLOCK_N):
        flat = flat + (tl.reshape(sums[row], [BLOCK_K // 2 // FOLD]),)  # type: ignore[assignment, has-type]
    halves = tl.sum(joined(flat, 2 * BLOCK_N), axis=0)
    column, inner = activated(halves, bias_ptr, expert, first, I, alpha, limit, BLOCK_N, HAS_BIAS, OAI)
    tl.store(a_ptr + pair * I + column, cast(inner, a_ptr.dtype.element_ty))


@triton.jit
def _second_tile(
    rows, scale_ptr, zero_ptr, scales, real, k, output: tl.constexpr, block: tl.constexpr, D, I, w_stride,
    ZERO: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return codes ``[SPAN, RUNS, bytes]`` of an output, with scales and zero points ``[SPAN, RUNS]``."""
    inside = real[:, None, None] & (block * BLOCK_K + k < I)
    packed = _load(rows + (output * w_stride + block * (BLOCK_K // 2)), inside, False, "evict_first")
    group = (block * BLOCK_K + tl.arange(0, BLOCK_K // RUN) * RUN)[None, :] // GROUP
    at = scales + group.to(tl.int64) * D + output
    scale, zero = _scales(scale_ptr, zero_ptr, at, real[:, None] & (group < I // GROUP), ZERO, HAS_ZERO, False)
    return packed, scale, zero


@kernel
def packed_vector_out_kernel(
    a_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, ids_ptr, weights_ptr, y_ptr, num_experts, D, I, w_stride, factor,
    TOP_K: tl.constexpr, SPAN: tl.constexpr, HAS_BIAS: tl.constexpr, ZERO: tl.constexpr, HAS_ZERO: tl.constexpr,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr, FOLD: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N outputs of a token: rows of a tile are those of one output for SPAN pairs, of which TOP_K are some.

    Tiles are numbered by columns, then outputs; AHEAD of them are in registers.
    """
    RUN: tl.constexpr = min(GROUP, BLOCK_K)
    RUNS: tl.constexpr = BLOCK_K // RUN
    first, token = tl.program_id(0) * BLOCK_N, tl.program_id(1).to(tl.int64)
    slot = tl.arange(0, SPAN)
    pair = token * TOP_K + slot
    run, byte = tl.arange(0, RUNS)[None, :, None], tl.arange(0, RUN // 2)[None, None, :]
    low = run * RUN + (byte // 16) * 32 + byte % 16
    # Ids and weights of the experts were there before the kernel in front began.
    expert = tl.load(ids_ptr + pair, mask=slot < TOP_K, other=-1).to(tl.int64)
    real = (expert >= 0) & (expert < num_experts)
    expert = tl.where(real, expert, 0)
    here = real[:, None, None]
    rows = w_ptr + (expert[:, None, None] * D + first) * w_stride + run * (RUN // 2) + byte
    scales = expert[:, None] * (I // GROUP) * D + first
    held = ()
    for i in tl.static_range(AHEAD):
        tile = _second_tile(rows, scale_ptr, zero_ptr, scales, real, low, i % BLOCK_N, i // BLOCK_N, D, I,
                            w_stride, ZERO, HAS_ZERO, GROUP, RUN, BLOCK_K)  # fmt: skip
        held = held + (tile,)  # type: ignore[assignment]
    weight = tl.load(weights_ptr + pair, mask=real, other=0.0)
    column = first + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert[:, None] * D + column[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    await_inputs(PDL)
    release_dependents(PDL)
    dtype: tl.constexpr = a_ptr.dtype.element_ty
    a_rows = a_ptr + pair[:, None, None] * I
    for block in tl.static_range(BLOCKS):
        k = block * BLOCK_K + low
        # The rows of dropped pairs were never written.
        low_a = _load(a_rows + k, here & (k < I), False, "").to(tl.float32)
        high_a = _load(a_rows + k + 16, here & (k < I), False, "").to(tl.float32)
        made = ()
        for output in tl.static_range(BLOCK_N):
            if block * BLOCK_N + output + AHEAD < BLOCKS * BLOCK_N:
                tile = _second_tile(
                    rows, scale_ptr, zero_ptr, scales, real, low, (output + AHEAD) % BLOCK_N,
                    block + (output + AHEAD) // BLOCK_N, D, I, w_stride, ZERO, HAS_ZERO, GROUP, RUN, BLOCK_K,
                )  # fmt: skip
                held = held + (tile,)  # type: ignore[assignment]
            tile = held[block * BLOCK_N + output]
            part = _scaled(low_a, high_a, tile[0], tile[1], tile[2], dtype, FOLD)
            if block > 0:
                part += sums[output]  # type: ignore[has-type]  # noqa: F821
            made = made + (part,)  # type: ignore[assignment]
        sums = made
    flat = ()
    for output in tl.static_range(BLOCK_N):
        flat = flat + (tl.reshape(sums[output], [SPAN, BLOCK_K // 2 // FOLD]),)  # type: ignore[assignment]
    each = tl.sum(joined(flat, BLOCK_N), axis=1)
    if HAS_BIAS:
        each += bias
    total = tl.sum(each * weight[:, None], axis=0) * factor
    tl.store(y_ptr + token * D + column, cast(total, y_ptr.dtype.element_ty))


def _depth(tile: Tile, columns: int, rows: int) -> tuple[int, int]:
    """Return the columns of a tile of so many rows, no more than a row has, and the bytes whose products are added."""
    depth = min(tile.k, next_power_of_2(columns))
    return depth, max(1, min(WIDTH, rows * depth // 2 // (32 * tile.warps)))


@lru_cache(maxsize=4096)
def _launches(
    tokens: int, top_k: int, experts: int, x_stride: int, stride1: int, stride2: int, plan: LaunchConfig,
    cfg: FusedMoEConfig, bias1: bool, bias2: bool, device: torch.device,
) -> tuple[Callable[..., None], Callable[..., None]]:  # fmt: skip
    """Return what launches both products of one shape."""
    first, second, launch, span = plan.first, plan.second, dependent_launch(device), next_power_of_2(top_k)
    hidden, inner = cfg.hidden_size, cfg.intermediate_size
    (depth1, fold1), (depth2, fold2) = _depth(first, hidden, 1), _depth(second, inner, span)
    blocks1, blocks2 = cdiv(hidden, depth1), cdiv(inner, depth2)
    both = {"TOP_K": top_k, "ZERO": ZERO[cfg.quant], "HAS_ZERO": cfg.zero_point, "GROUP": cfg.group_size} | launch
    into = packed_vector_in_kernel.at(
        (inner // first.n, tokens * top_k), experts, inner, hidden, x_stride, stride1, cfg.alpha, cfg.limit,
        HAS_BIAS=bias1, OAI=cfg.activation == "swiglu_oai", EVEN_K=hidden % depth1 == 0, BLOCKS=blocks1,
        AHEAD=min(blocks1, first.stages) - 1, FOLD=fold1, BLOCK_N=first.n, BLOCK_K=depth1, num_warps=first.warps,
        **both,
    )  # fmt: skip
    out = packed_vector_out_kernel.at(
        (hidden // second.n, tokens), experts, hidden, inner, stride2, cfg.scaling_factor,
        SPAN=span, HAS_BIAS=bias2, BLOCKS=blocks2, AHEAD=min(blocks2 * second.n, second.stages), FOLD=fold2,
        BLOCK_N=second.n, BLOCK_K=depth2, num_warps=second.warps, **both,
    )  # fmt: skip
    return into, out


def packed_vector_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: MoEWeights, y: torch.Tensor, plan: LaunchConfig,
    cfg: FusedMoEConfig,
) -> None:  # fmt: skip
    """Write ``y`` ``[T, D]``; ``ids`` and ``weights`` ``[T, k]`` include shared experts."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    (tokens, top_k), bias1, bias2 = ids.shape, packed.w13_bias, packed.w2_bias
    into, out = _launches(
        tokens, top_k, packed.w2.shape[0], x.stride(0), packed.w13.stride(1), packed.w2.stride(1), plan, cfg,
        bias1 is not None, bias2 is not None, x.device,
    )  # fmt: skip
    a = x.new_empty(tokens * top_k, cfg.intermediate_size)
    # Whatever tensor stands where there is none.
    zero1, zero2 = (weights if zero is None else zero for zero in (packed.w13_zero, packed.w2_zero))
    into(x, packed.w13, packed.w13_scale, zero1, x if bias1 is None else bias1, ids, a)
    out(a, packed.w2, packed.w2_scale, zero2, x if bias2 is None else bias2, ids, weights, y)
