"""The experts' kernels of ``decode_round4.py``: the library's with one thing changed each.

A kernel has the arguments of the one whose place it takes, in that order, and constants of its own behind them. EVICT:
what L2 does with weights that were read, "" or "evict_first".
"""

from __future__ import annotations

import triton
import triton.language as tl
from trials.decode_round4_triton import tile_of

from fastlayers.moe.fused_moe.triton.activation import activation_of
from fastlayers.moe.fused_moe.triton.grouped_gemm import _load_pairs, _load_weights, program_tile
from fastlayers.moe.fused_moe.triton.mxfp4_hopper import _first, _store_inner, _tiles_of
from fastlayers.moe.fused_moe.triton.mxfp4_mma import (
    UNFOLD,
    _step_by_words,
    inner_bias,
    scales_of,
    tokens_of,
    zeros_of,
)
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dot, release_dependents


@kernel
def vector_in_kernel(
    x_ptr, w_ptr, bias_ptr, ids_ptr, a_ptr, num_routed, I, K, x_stride, alpha, limit,
    TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr, OAI: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCKS: tl.constexpr, AHEAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVICT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As the library's first product of one token, without bias: gate and up rows are given up by L2 first."""
    tl.static_assert(not HAS_BIAS and not INTERLEAVED)
    pair, depth = tl.program_id(1), tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_row = tl.minimum(column, I - 1)
    await_inputs(PDL)
    release_dependents(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if (expert < 0) | (expert >= num_routed):
        return
    gate_rows = w_ptr + (expert * 2 * I + gate_row)[:, None] * K
    up_rows = w_ptr + (expert * 2 * I + gate_row + I)[:, None] * K
    x_row = x_ptr + (pair // TOP_K).to(tl.int64) * x_stride
    gates = ()
    ups = ()
    xs = ()
    for i in tl.static_range(AHEAD):
        k = i * BLOCK_K + depth
        gates = gates + (tile_of(gate_rows, k, K, EVEN_K, EVICT),)  # type: ignore[assignment]
        ups = ups + (tile_of(up_rows, k, K, EVEN_K, EVICT),)  # type: ignore[assignment]
        xs = xs + (tile_of(x_row, k, K, EVEN_K, ""),)  # type: ignore[assignment]
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.static_range(BLOCKS):
        if i + AHEAD < BLOCKS:
            k = (i + AHEAD) * BLOCK_K + depth
            gates = gates + (tile_of(gate_rows, k, K, EVEN_K, EVICT),)  # type: ignore[assignment]
            ups = ups + (tile_of(up_rows, k, K, EVEN_K, EVICT),)  # type: ignore[assignment]
            xs = xs + (tile_of(x_row, k, K, EVEN_K, ""),)  # type: ignore[assignment]
        x = xs[i].to(tl.float32)  # type: ignore[var-annotated]
        gate += x * gates[i].to(tl.float32)
        up += x * ups[i].to(tl.float32)
    inner = activation_of(tl.sum(gate, axis=1), tl.sum(up, axis=1), alpha, limit, OAI)
    tl.store(a_ptr + pair.to(tl.int64) * I + column, cast(inner, a_ptr.dtype.element_ty), mask=column < I)


@kernel
def vector_out_kernel(
    a_ptr, w_ptr, bias_ptr, ids_ptr, weights_ptr, y_ptr, num_routed, D, I, factor,
    TOP_K: tl.constexpr, SPAN: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FOLD: tl.constexpr, EVICT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As the library's second product, without bias; a thread adds FOLD neighbours before it keeps their sum."""
    tl.static_assert(not HAS_BIAS)
    ROWS: tl.constexpr = BLOCK_N * SPAN
    token = tl.program_id(1).to(tl.int64)
    row, depth = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    slot, column = row % SPAN, tl.program_id(0) * BLOCK_N + row // SPAN
    pair = token * TOP_K + slot
    expert = tl.load(ids_ptr + pair, mask=slot < TOP_K, other=-1).to(tl.int64)
    here = (expert >= 0) & (expert < num_routed) & (column < D)
    rows = w_ptr + tl.where(here, expert * D + column, 0)[:, None] * I
    held = ()
    for i in tl.static_range(AHEAD):
        k = i * BLOCK_K + depth
        some = here[:, None] & (k < I)[None, :]
        held = held + (tl.load(rows + k[None, :], mask=some, other=0.0, eviction_policy=EVICT),)  # type: ignore[assignment]
    weight = tl.load(weights_ptr + pair, mask=here, other=0.0)
    await_inputs(PDL)
    release_dependents(PDL)
    acc = tl.zeros([ROWS, BLOCK_K // FOLD], tl.float32)
    for i in tl.static_range(BLOCKS):
        k = i * BLOCK_K + depth
        a = tl.load(a_ptr + pair[:, None] * I + k[None, :], mask=here[:, None] & (k < I)[None, :], other=0.0)
        if i + AHEAD < BLOCKS:
            k = (i + AHEAD) * BLOCK_K + depth
            some = here[:, None] & (k < I)[None, :]
            held = held + (tl.load(rows + k[None, :], mask=some, other=0.0, eviction_policy=EVICT),)  # type: ignore[assignment]
        product = a.to(tl.float32) * held[i].to(tl.float32)
        if FOLD == 1:
            acc += product
        else:
            acc += tl.sum(tl.reshape(product, [ROWS, BLOCK_K // FOLD, FOLD]), axis=2)
    each = tl.sum(acc, axis=1) * weight
    total = tl.sum(tl.reshape(each, [BLOCK_N, SPAN]), axis=1) * factor
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(y_ptr + token * D + column, cast(total, y_ptr.dtype.element_ty), mask=column < D)


@triton.jit
def _words_of(words, scales, step, STEPS: tl.constexpr, W: tl.constexpr):
    return tl.load(words + step * 32, mask=step < STEPS, other=0), scales_of(scales + step * 64, step < STEPS, W)


@triton.jit
def _ask_some(w_ptr, s_ptr, tile, LENGTH: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr):
    """Return where codes and scales of tiles ``[R,1,1]`` lie, and a tuple each of a warp's first AHEAD steps."""
    STEPS: tl.constexpr = (LENGTH + 63) // 64
    warp, e = tl.arange(0, W)[None, :, None], tl.arange(0, 128)[None, None, :]
    words = w_ptr + (tile * 4 + e // 32) * ((LENGTH + 127) // 128 * 64) + e % 32
    scales = s_ptr + (tile // 16 * 8 + tile % 8) * (STEPS * 64) + tile // 8 % 2 * 32 + e // 16 * 4 + e % 4
    held = ()
    held_scales = ()
    for i in tl.static_range(AHEAD):
        word, scale = _words_of(words, scales, i * W + warp, STEPS, W)
        held = held + (word,)  # type: ignore[assignment]
        held_scales = held_scales + (scale,)  # type: ignore[assignment]
    return words, scales, held, held_scales


@triton.jit
def _multiply_ahead(
    words, scales, held, held_scales, x_ptr, row, w_ptr, LENGTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Do what ``multiply_held`` does, in the same order, with AHEAD steps on their way."""
    STEPS: tl.constexpr = (LENGTH + 63) // 64
    HALVES: tl.constexpr = LENGTH // 32
    TURNS: tl.constexpr = (STEPS + W - 1) // W
    warp, e = tl.arange(0, W)[None, :, None], tl.arange(0, 128)[None, None, :]
    zeros = zeros_of(w_ptr + warp * 128 + e, W)
    x_rows = x_ptr + row.to(tl.int64) * (LENGTH // 2) + e % 16 + zeros
    acc = tl.broadcast_to(zeros.to(tl.float32, bitcast=True), [R, W, 128])
    for i in tl.static_range(TURNS):
        step = i * W + warp
        if i + AHEAD < TURNS:
            word, scale = _words_of(words, scales, step + AHEAD * W, STEPS, W)
            held = held + (word,)
            held_scales = held_scales + (scale,)
        x0 = tl.broadcast_to(tokens_of(x_rows + step * 32, step < STEPS, W), [R, W, 128])
        x1 = tl.broadcast_to(tokens_of(x_rows + step * 32 + 16, step * 2 + 1 < HALVES, W), [R, W, 128])
        acc = _step_by_words(held[i], held_scales[i], x0, x1, acc, R, W)
    return tl.sum(acc, axis=1) * UNFOLD


@kernel(do_not_specialize=("num_experts",))
def ahead_gate_up_kernel(
    x_ptr, w_ptr, ws_ptr, bias_ptr, out_ptr, ids_ptr, num_experts, alpha, limit,
    PER_TOKEN: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``held_gate_up_kernel``, with AHEAD of a warp's steps asked for before the wait."""
    LAST: tl.constexpr = (2 * INNER + 15) // 16 - 1
    pair, expert, here, first = _tiles_of(ids_ptr, num_experts, 2 * INNER, R)
    w_ptr += expert * ((2 * INNER + 63) // 64 * 16 * ((HIDDEN + 127) // 128 * 64))
    ws_ptr += expert * ((2 * INNER + 255) // 256 * 8 * ((HIDDEN + 63) // 64 * 64))
    tiles = tl.minimum(first + tl.arange(0, R)[:, None, None], LAST)
    words, scales, held, held_scales = _ask_some(w_ptr, ws_ptr, tiles, HIDDEN, W, AHEAD)
    tile = first + tl.arange(0, R)[:, None]
    bias = inner_bias(bias_ptr + expert * 2 * INNER, tile, INNER, HAS_BIAS)
    await_inputs(PDL)
    release_dependents(PDL)
    if not here:
        return
    row = tl.zeros([1, 1, 128], tl.int32) + pair // PER_TOKEN
    both = _multiply_ahead(words, scales, held, held_scales, x_ptr, row, w_ptr, HIDDEN, R, W, AHEAD)
    _store_inner(both, bias, out_ptr, tile, pair, alpha, limit, INNER, R)


@kernel(do_not_specialize=("num_experts",))
def ahead_down_kernel(
    a_ptr, w_ptr, ws_ptr, bias_ptr, weights_ptr, out_ptr, ids_ptr, num_experts,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``held_down_kernel``, with AHEAD of a warp's steps asked for before the wait."""
    LAST: tl.constexpr = (HIDDEN + 15) // 16 - 1
    pair, expert, here, first = _tiles_of(ids_ptr, num_experts, HIDDEN, R)
    w_ptr += expert * ((HIDDEN + 63) // 64 * 16 * ((INNER + 127) // 128 * 64))
    ws_ptr += expert * ((HIDDEN + 255) // 256 * 8 * ((INNER + 63) // 64 * 64))
    tiles = tl.minimum(first + tl.arange(0, R)[:, None, None], LAST)
    words, scales, held, held_scales = _ask_some(w_ptr, ws_ptr, tiles, INNER, W, AHEAD)
    e = tl.arange(0, 128)[None, :]
    row = (first + tl.arange(0, R)[:, None]) * 16 + e // 2 % 2 * 8 + e // 16
    weight = tl.load(weights_ptr + pair)
    bias = tl.zeros([R, 128], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * HIDDEN + row, mask=row < HIDDEN, other=0.0)
    await_inputs(PDL)
    release_dependents(PDL)
    if not here:
        return
    token = tl.zeros([1, 1, 128], tl.int32) + pair
    sums = _multiply_ahead(words, scales, held, held_scales, a_ptr, token, w_ptr, INNER, R, W, AHEAD)
    tl.store(out_ptr + pair.to(tl.int64) * HIDDEN + row, (sums + bias) * weight, mask=_first(pair) & (row < HIDDEN))


@kernel(do_not_specialize=("num_pairs", "tiles_m"))
def down_kernel(
    a_ptr, as_ptr, w_ptr, ws_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr,
    num_pairs, tiles_m, D, I, a_stride,
    QUANT: tl.constexpr, WIDE: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As the library's of plain experts without bias: the alignment and routing weights are read before the wait.

    The kernel in front releases this one behind its own wait, so whatever ran before that one has ended.
    """
    tl.static_assert(QUANT == 0 and not HAS_BIAS)
    tile_m, tile_n = program_tile(tiles_m, tl.cdiv(D, BLOCK_N), BAND)
    empty = tile_m * BLOCK_M >= tl.load(total_ptr)
    # Behind the blocks in use nothing was written: what lies there is never used as an index.
    expert = tl.where(empty, 0, tl.load(expert_ptr + tile_m)).to(tl.int64)
    pair = tl.where(empty, num_pairs, tl.load(sorted_ptr + tile_m * BLOCK_M + tl.arange(0, BLOCK_M)))
    real = pair < num_pairs
    row = tl.where(real, pair, 0).to(tl.int64)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    a_rows = a_ptr + row[:, None] * a_stride + depth[None, :]
    w_rows = w_ptr + expert * D * I + (column % D)[None, :] * I + depth[:, None]
    weight = tl.load(weights_ptr + row)
    await_inputs(PDL)
    release_dependents(PDL)
    if empty:
        return
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(0, tl.cdiv(I, BLOCK_K)):
        k = block * BLOCK_K + depth
        a = _load_pairs(a_rows + block * BLOCK_K, k[None, :], I, real[:, None], EVEN_K)
        acc = dot(a, _load_weights(w_rows + block * BLOCK_K, k[:, None], I, EVEN_K), acc)
    out = out_ptr + row[:, None] * D + column[None, :]
    tl.store(out, acc * weight[:, None], mask=real[:, None] & (column < D)[None, :])
