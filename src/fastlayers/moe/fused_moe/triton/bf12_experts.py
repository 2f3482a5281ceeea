"""Experts of few tokens whose bfloat16 weights are stored in 12 bits (``quant/bf12.py``).

    in    a[pair] = act(x[token of pair] @ w13[expert]^T)         programs: inner columns × blocks of pairs of one expert
    out   rows[pair] = weight[pair] * a[pair] @ w2[expert]^T      programs: outputs × blocks
    one   y = factor * sum over pairs of weight * a @ w2^T        programs: outputs, of one token's pairs

A block is eight pairs that the alignment put together, or a pair by itself (PAIRS). Weights of the second product are
asked for while the first one runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlayers.moe.fused_moe.triton.activation import activation_of
from fastlayers.quant.bf12_mma import ask, multiply, summed
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, release_dependents


@triton.jit
def _pairs_of(sorted_ptr, block, place, pairs, PAIRS: tl.constexpr):
    """Return which pair is at a place of a block, and whether there is one; else the first pair stands for it."""
    if PAIRS:
        return block + place * 0, place == 0
    else:
        pair = tl.load(sorted_ptr + block * 8 + place)
        here = pair < pairs
        return tl.where(here, pair, tl.load(sorted_ptr + block * 8)), here


@triton.jit
def _expert_of(expert_ptr, total_ptr, block, num_experts, PAIRS: tl.constexpr):
    """Return a block's expert; one of none where there is nothing to do."""
    expert = tl.load(expert_ptr + block).to(tl.int64)
    if not PAIRS:
        expert = tl.where(block * 8 < tl.load(total_ptr), expert, -1)
    return tl.where(expert < num_experts, expert, -1)


@triton.jit
def _outliers(columns_ptr, values_ptr, row, OUTLIERS: tl.constexpr):
    place = row[:, None] * OUTLIERS + tl.arange(0, OUTLIERS)[None, :]
    return tl.load(columns_ptr + place), tl.load(values_ptr + place).to(tl.float32)


@kernel(do_not_specialize=("num_experts", "pairs"))
def bf12_in_kernel(
    x_ptr, words_ptr, scale_ptr, columns_ptr, values_ptr, a_ptr, sorted_ptr, expert_ptr, total_ptr, num_experts, pairs,
    x_stride, alpha, limit,
    TOP_K: tl.constexpr, INNER: tl.constexpr, STEPS: tl.constexpr, OUTLIERS: tl.constexpr, OAI: tl.constexpr,
    SHARES: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a block's tokens by W / SHARES tiles of gate rows and as many of up rows, apply the activation."""
    PARTS: tl.constexpr = W // SHARES
    GROUPS: tl.constexpr = INNER // (16 * PARTS)
    block, first = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS * PARTS
    e, n = tl.arange(0, 128)[None, None, :], tl.arange(0, 8)
    await_inputs(PDL)
    release_dependents(PDL)
    expert = _expert_of(expert_ptr, total_ptr, block, num_experts, PAIRS)
    if expert < 0:
        return
    half = tl.arange(0, 2)[:, None, None] * (INNER // 16)
    tile = expert * (INNER // 8) + half + first + tl.arange(0, W)[None, :, None] // SHARES
    words, held = ask(words_ptr, tile, STEPS, SHARES, W, AHEAD)
    inner = tl.arange(0, 32 * PARTS)
    row = expert * (2 * INNER) + inner // (16 * PARTS) * INNER + first * 16 + inner % (16 * PARTS)
    scale = tl.load(scale_ptr + row)
    outlying, values = _outliers(columns_ptr, values_ptr, row, OUTLIERS)
    pair, _ = _pairs_of(sorted_ptr, block, e // 16, pairs, PAIRS)
    x_rows = (x_ptr.to(tl.pointer_type(tl.int32)) + (pair // TOP_K).to(tl.int64) * (x_stride // 2),)
    pair, here = _pairs_of(sorted_ptr, block, n, pairs, PAIRS)
    token = (pair // TOP_K).to(tl.int64)
    gathered = tl.load(x_ptr + token[None, :, None] * x_stride + outlying[:, None, :])
    found = multiply(words, held, x_rows, words_ptr, STEPS, 2, SHARES, W, 1, AHEAD, False)
    both = summed(found[0], 2, SHARES, W) * scale[:, None]
    both += tl.sum(gathered.to(tl.float32) * values[:, None, :], axis=2)
    gate, up = tl.split(tl.permute(tl.reshape(both, [2, 16 * PARTS, 8]), (1, 2, 0)))
    column = first * 16 + tl.arange(0, 16 * PARTS)
    target = a_ptr + pair.to(tl.int64)[None, :] * INNER + column[:, None]
    result = cast(activation_of(gate, up, alpha, limit, OAI), a_ptr.dtype.element_ty)
    tl.store(target, result, mask=here[None, :] & (column >= 0)[:, None])


@kernel(do_not_specialize=("num_experts", "pairs"))
def bf12_out_kernel(
    a_ptr, words_ptr, scale_ptr, columns_ptr, values_ptr, weights_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr,
    num_experts, pairs,
    HIDDEN: tl.constexpr, STEPS: tl.constexpr, OUTLIERS: tl.constexpr, R: tl.constexpr, SHARES: tl.constexpr,
    W: tl.constexpr, AHEAD: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a block's inner rows by R · W / SHARES tiles of outputs, weigh; fp32 rows of pairs."""
    PARTS: tl.constexpr = W // SHARES
    TILES: tl.constexpr = R * PARTS
    INNER: tl.constexpr = STEPS * 64
    GROUPS: tl.constexpr = HIDDEN // (16 * TILES)
    block, first = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS * TILES
    e, n = tl.arange(0, 128)[None, None, :], tl.arange(0, 8)
    # The alignment was there before the kernel in front began.
    expert = _expert_of(expert_ptr, total_ptr, block, num_experts, PAIRS)
    if expert < 0:
        await_inputs(PDL)
        release_dependents(PDL)
        return
    tile = tl.arange(0, R)[:, None, None] * PARTS + tl.arange(0, W)[None, :, None] // SHARES
    words, held = ask(words_ptr, expert * (HIDDEN // 16) + first + tile, STEPS, SHARES, W, AHEAD)
    column = first * 16 + tl.arange(0, TILES * 16)
    row = expert * HIDDEN + column
    scale = tl.load(scale_ptr + row)
    outlying, values = _outliers(columns_ptr, values_ptr, row, OUTLIERS)
    lane, _ = _pairs_of(sorted_ptr, block, e // 16, pairs, PAIRS)
    pair, here = _pairs_of(sorted_ptr, block, n, pairs, PAIRS)
    weight = tl.load(weights_ptr + pair, mask=here, other=0.0)
    await_inputs(PDL)
    release_dependents(PDL)
    x_rows = (a_ptr.to(tl.pointer_type(tl.int32)) + lane.to(tl.int64) * (INNER // 2),)
    gathered = tl.load(a_ptr + pair.to(tl.int64)[None, :, None] * INNER + outlying[:, None, :])
    found = multiply(words, held, x_rows, words_ptr, STEPS, R, SHARES, W, 1, AHEAD, False)
    y = summed(found[0], R, SHARES, W) * scale[:, None]
    y = (y + tl.sum(gathered.to(tl.float32) * values[:, None, :], axis=2)) * weight[None, :]
    target = out_ptr + pair.to(tl.int64)[None, :] * HIDDEN + column[:, None]
    tl.store(target, y, mask=here[None, :] & (column >= 0)[:, None])


@kernel(do_not_specialize=("num_experts",))
def bf12_one_kernel(
    a_ptr, words_ptr, scale_ptr, columns_ptr, values_ptr, weights_ptr, y_ptr, expert_ptr, num_experts, factor,
    TOP_K: tl.constexpr, SPAN: tl.constexpr, HIDDEN: tl.constexpr, STEPS: tl.constexpr, OUTLIERS: tl.constexpr,
    SHARES: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write 16 outputs of one token: SHARES warps for each of SPAN = W / SHARES pairs, of which TOP_K are some."""
    INNER: tl.constexpr = STEPS * 64
    first = tl.program_id(0)
    e, slot = tl.arange(0, 128)[None, None, :], tl.arange(0, SPAN)
    # Ids and weights of the experts were there before the kernel in front began.
    expert = tl.load(expert_ptr + slot, mask=slot < TOP_K, other=-1).to(tl.int64)
    here = (expert >= 0) & (expert < num_experts)
    weight = tl.load(weights_ptr + slot, mask=here, other=0.0)
    warp = tl.arange(0, W)[None, :, None] // SHARES
    mine = tl.load(expert_ptr + warp, mask=warp < TOP_K, other=-1).to(tl.int64)
    mine = tl.where((mine >= 0) & (mine < num_experts), mine, 0)
    words, held = ask(words_ptr, mine * (HIDDEN // 16) + first, STEPS, SHARES, W, AHEAD)
    row = (tl.where(here, expert, 0) * HIDDEN + first * 16)[:, None] + tl.arange(0, 16)[None, :]
    scale = tl.load(scale_ptr + row)
    place = row[:, :, None] * OUTLIERS + tl.arange(0, OUTLIERS)[None, None, :]
    outlying, values = tl.load(columns_ptr + place), tl.load(values_ptr + place).to(tl.float32)
    await_inputs(PDL)
    release_dependents(PDL)
    # The rows of dropped pairs were never written: another's stands for them.
    x_rows = (a_ptr.to(tl.pointer_type(tl.int32)) + tl.minimum(warp, TOP_K - 1) * (INNER // 2) + e * 0,)
    gathered = tl.load(a_ptr + (slot * INNER)[:, None, None] + outlying, mask=here[:, None, None], other=0.0)
    found = multiply(words, held, x_rows, words_ptr, STEPS, 1, SHARES, W, 1, AHEAD, False)
    # Rows of tiles: pairs × 16 outputs; of the eight tokens all are one.
    sums = tl.sum(tl.where((tl.arange(0, 8) == 0)[None, :], summed(found[0], 1, SHARES, W), 0.0), axis=1)
    each = tl.reshape(sums, [SPAN, 16]) * scale + tl.sum(gathered.to(tl.float32) * values, axis=2)
    total = tl.sum(tl.where(here[:, None], each * weight[:, None], 0.0), axis=0) * factor
    tl.store(y_ptr + first * 16 + tl.arange(0, 16), cast(total, y_ptr.dtype.element_ty))
