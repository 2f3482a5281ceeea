"""Products of MXFP4 weights with blocks of 8, 16 or 32 tokens of one expert: each warp has rows of its own.

The operands are those of :mod:`fastlayers.moe.fused_moe.triton.mxfp4.mma`. Codes are decoded once for all tokens of a
block, of which only the groups of eight that have pairs are multiplied. They go from memory into the registers that
the instructions read; those of the first steps are asked for before the wait: which pairs a block has was written
before the kernel in front began. The warps of a program take the same columns of different rows, so that they find the
tokens in L1 together. Tokens lie as fragments there, 256 words for each step of a group of eight: two halves of 32
columns, each the 16 bytes of every lane, one after another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlayers.moe.fused_moe.triton.grouped_gemm import block_is_empty
from fastlayers.moe.fused_moe.triton.mxfp4.mma import (
    CODES,
    OPERANDS,
    UNFOLD,
    column_at,
    inner_bias,
    inner_columns,
    inner_of,
    place_of,
    plain,
    scales_of,
    tokens_of,
    zeros_of,
)
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import INTERPRET, await_inputs, cast, release_dependents

_CODE1, _CODE2, _CODE3, _CODE4 = CODES
_OPERANDS1, _OPERANDS2, _OPERANDS3, _OPERANDS4 = OPERANDS


def fragment_columns(columns: int) -> int:
    """Return how many columns a row of so many takes as part of fragments."""
    return -(-columns // 64) * 64


@triton.jit
def _step(word, scale, xs, accs, W: tl.constexpr, BLOCKS: tl.constexpr):
    """Add the products of 64 columns: ``xs`` are two halves of each of BLOCKS blocks of eight tokens."""
    if INTERPRET:
        found = ()
        for block in tl.static_range(BLOCKS):
            found = found + (plain(word, scale, xs[2 * block], xs[2 * block + 1], accs[block], 1, W),)  # type: ignore
        return found
    elif BLOCKS == 1:
        return (
            tl.inline_asm_elementwise(
                _CODE1, _OPERANDS1, [word, scale, accs[0], xs[0], xs[1]], dtype=tl.float32, is_pure=False, pack=4
            ),
        )
    elif BLOCKS == 2:
        return tl.inline_asm_elementwise(
            _CODE2, _OPERANDS2, [word, scale, accs[0], accs[1], xs[0], xs[1], xs[2], xs[3]],
            dtype=(tl.float32, tl.float32), is_pure=False, pack=4,
        )  # fmt: skip
    elif BLOCKS == 3:
        return tl.inline_asm_elementwise(
            _CODE3, _OPERANDS3, [word, scale, accs[0], accs[1], accs[2], xs[0], xs[1], xs[2], xs[3], xs[4], xs[5]],
            dtype=(tl.float32, tl.float32, tl.float32), is_pure=False, pack=4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _CODE4, _OPERANDS4,
            [word, scale, accs[0], accs[1], accs[2], accs[3],
             xs[0], xs[1], xs[2], xs[3], xs[4], xs[5], xs[6], xs[7]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=4,
        )  # fmt: skip


@triton.jit
def _codes(words, scales, step, STEPS: tl.constexpr, W: tl.constexpr):
    """Ask for the codes and scales of a step; none behind the last."""
    inside = step < STEPS
    word = tl.load(words + step * 32, mask=inside, other=0, cache_modifier=".cg")
    return word, scales_of(scales + step * 64, inside, W)


@triton.jit
def _fragment(pointers, inside, ALL: tl.constexpr, W: tl.constexpr):
    """As ``tokens_of``; ALL: every load is inside."""
    if ALL and not INTERPRET:
        return tl.inline_asm_elementwise(
            "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l,l,l,l", [pointers],
            dtype=tl.int32, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        return tokens_of(pointers, inside, W)


@triton.jit
def _places(w_ptr, s_ptr, first, LAST: tl.constexpr, LENGTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Return where codes and scales begin, of R times one tile a warp."""
    STEPS: tl.constexpr = (LENGTH + 63) // 64
    e = tl.arange(0, 128)[None, None, :]
    words = ()
    scales = ()
    for r in tl.static_range(R):
        tile = tl.minimum(first + r * W + tl.arange(0, W)[None, :, None], LAST)
        words = words + (w_ptr + (tile * 4 + e // 32) * ((LENGTH + 127) // 128 * 64) + e % 32,)  # type: ignore[assignment]
        place = (tile // 16 * 8 + tile % 8) * (STEPS * 64) + tile // 8 % 2 * 32 + e // 16 * 4 + e % 4
        scales = scales + (s_ptr + place,)  # type: ignore[assignment]
    return words, scales


@triton.jit
def _ask(words, scales, LENGTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr):
    """Ask for the first AHEAD steps."""
    held = ()
    held_scales = ()
    for step in tl.static_range(AHEAD):
        for r in tl.static_range(R):
            word, scale = _codes(words[r], scales[r], step, (LENGTH + 63) // 64, W)
            held = held + (word,)  # type: ignore[assignment]
            held_scales = held_scales + (scale,)  # type: ignore[assignment]
    return held, held_scales


@triton.jit
def _multiply(
    held, held_scales, words, scales, x_ptr, group, w_ptr, LENGTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    BLOCKS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return sums ``[W, 128]`` over LENGTH columns, BLOCKS for each of R tiles; ``group``: first of eight rows."""
    STEPS: tl.constexpr = (LENGTH + 63) // 64
    HALVES: tl.constexpr = LENGTH // 32
    ALL: tl.constexpr = STEPS % AHEAD == 0 and HALVES == 2 * STEPS
    zeros = zeros_of(w_ptr + tl.arange(0, W)[None, :, None] * 128 + tl.arange(0, 128)[None, None, :], W)
    fragments = x_ptr + group.to(tl.int64) * (STEPS * 256) + tl.arange(0, 128)[None, None, :] + zeros
    accs = ()
    for _ in tl.static_range(R * BLOCKS):
        accs = accs + (zeros.to(tl.float32, bitcast=True),)  # type: ignore[assignment]
    for start in tl.range(0, STEPS, AHEAD, num_stages=1):
        following = ()
        following_scales = ()
        for i in tl.static_range(AHEAD):
            step = start + i
            inside, more = step < STEPS, step * 2 + 1 < HALVES
            xs = ()
            for block in tl.static_range(BLOCKS):
                at = fragments + (block * STEPS + step) * 256
                xs = xs + (_fragment(at, inside, ALL, W), _fragment(at + 128, more, ALL, W))  # type: ignore[assignment]
            added = ()
            for r in tl.static_range(R):
                added = added + _step(
                    held[i * R + r], held_scales[i * R + r], xs, accs[r * BLOCKS : (r + 1) * BLOCKS], W, BLOCKS
                )
                word, scale = _codes(words[r], scales[r], step + AHEAD, STEPS, W)
                following = following + (word,)  # type: ignore[assignment]
                following_scales = following_scales + (scale,)  # type: ignore[assignment]
            accs = added
        held = following
        held_scales = following_scales
    sums = ()
    for i in tl.static_range(R * BLOCKS):
        sums = sums + (tl.reshape(accs[i], [W, 128]) * UNFOLD,)  # type: ignore[assignment]
    return sums


@triton.jit
def _count(sorted_ptr, block, num_pairs, TOKENS: tl.constexpr):
    """Return how many pairs a block has, where it matters: from 16 slots on."""
    if TOKENS <= 8:
        return 1
    else:
        return tl.sum((tl.load(sorted_ptr + block * TOKENS + tl.arange(0, TOKENS)) < num_pairs).to(tl.int32), axis=0)


@triton.jit
def _gate_up(
    held, held_scales, words, scales, x_ptr, w_ptr, bias_ptr, out_ptr, block, first, alpha, limit,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCKS groups of eight, apply the activation, store what the second product reads: empty slots, too."""
    group = block * (TOKENS // 8)
    sums = _multiply(held, held_scales, words, scales, x_ptr, group, w_ptr, HIDDEN, R, W, BLOCKS, AHEAD)
    f = tl.arange(0, 64)[None, :]
    for r in tl.static_range(R):
        tile = first + r * W + tl.arange(0, W)[:, None]
        column, bias = inner_columns(tile), inner_bias(bias_ptr, tile, INNER, HAS_BIAS)
        place = column // 32 * 256 + (f // 4 % 4 * 2 + f % 2) * 32 + place_of(column)
        for i in tl.static_range(BLOCKS):
            inner = cast(inner_of(sums[r * BLOCKS + i], bias, alpha, limit, W), out_ptr.dtype.element_ty)
            start = out_ptr + (group + i).to(tl.int64) * ((INNER + 63) // 64 * 512)
            tl.store(start + place, inner, mask=column < INNER)


@kernel(do_not_specialize=("num_pairs",))
def rows_gate_up_kernel(
    x_ptr, w_ptr, ws_ptr, bias_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr, num_pairs, alpha, limit,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a block's tokens by R·W tiles of gate and up rows of one expert, apply the activation."""
    TILES: tl.constexpr = (2 * INNER + 16 * R * W - 1) // (16 * R * W)
    LAST: tl.constexpr = (2 * INNER + 15) // 16 - 1
    block, first = tl.program_id(0) // TILES, tl.program_id(0) % TILES * (R * W)
    if block_is_empty(expert_ptr, total_ptr, block, 0, False, TOKENS):
        await_inputs(PDL)
        release_dependents(PDL)
        return
    expert = tl.load(expert_ptr + block).to(tl.int64)
    w_ptr += expert * ((2 * INNER + 63) // 64 * 16 * ((HIDDEN + 127) // 128 * 64))
    ws_ptr += expert * ((2 * INNER + 255) // 256 * 8 * ((HIDDEN + 63) // 64 * 64))
    words, scales = _places(w_ptr, ws_ptr, first, LAST, HIDDEN, R, W)
    held, held_scales = _ask(words, scales, HIDDEN, R, W, AHEAD)
    count = _count(sorted_ptr, block, num_pairs, TOKENS)
    bias_ptr += expert * 2 * INNER
    await_inputs(PDL)
    release_dependents(PDL)
    if TOKENS <= 8:
        _gate_up(
            held, held_scales, words, scales, x_ptr, w_ptr, bias_ptr, out_ptr, block, first, alpha, limit,
            HIDDEN, INNER, HAS_BIAS, TOKENS, 1, R, W, AHEAD,
        )  # fmt: skip
    elif count <= 8:
        _gate_up(
            held, held_scales, words, scales, x_ptr, w_ptr, bias_ptr, out_ptr, block, first, alpha, limit,
            HIDDEN, INNER, HAS_BIAS, TOKENS, 1, R, W, AHEAD,
        )  # fmt: skip
    elif TOKENS == 16:
        _gate_up(
            held, held_scales, words, scales, x_ptr, w_ptr, bias_ptr, out_ptr, block, first, alpha, limit,
            HIDDEN, INNER, HAS_BIAS, TOKENS, 2, R, W, AHEAD,
        )  # fmt: skip
    elif count <= 16:
        _gate_up(
            held, held_scales, words, scales, x_ptr, w_ptr, bias_ptr, out_ptr, block, first, alpha, limit,
            HIDDEN, INNER, HAS_BIAS, TOKENS, 2, R, W, AHEAD,
        )  # fmt: skip
    elif count <= 24:
        _gate_up(
            held, held_scales, words, scales, x_ptr, w_ptr, bias_ptr, out_ptr, block, first, alpha, limit,
            HIDDEN, INNER, HAS_BIAS, TOKENS, 3, R, W, AHEAD,
        )  # fmt: skip
    else:
        _gate_up(
            held, held_scales, words, scales, x_ptr, w_ptr, bias_ptr, out_ptr, block, first, alpha, limit,
            HIDDEN, INNER, HAS_BIAS, TOKENS, 4, R, W, AHEAD,
        )  # fmt: skip


@triton.jit
def _down(
    held, held_scales, words, scales, a_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, block, first,
    num_pairs, HIDDEN: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCKS groups of eight, add the bias, weigh, store rows of pairs."""
    group = block * (TOKENS // 8)
    sums = _multiply(held, held_scales, words, scales, a_ptr, group, w_ptr, INNER, R, W, BLOCKS, AHEAD)
    e = tl.arange(0, 128)[None, :]
    for i in tl.static_range(BLOCKS):
        pair = tl.load(sorted_ptr + (group + i) * 8 + e // 4 % 4 * 2 + e % 2)
        real = pair < num_pairs
        weight = tl.load(weights_ptr + pair, mask=real, other=0.0)
        for r in tl.static_range(R):
            row = (first + r * W + tl.arange(0, W)[:, None]) * 16 + e // 2 % 2 * 8 + e // 16
            bias = tl.zeros([W, 128], tl.float32)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + row, mask=row < HIDDEN, other=0.0)
            weighed = (sums[r * BLOCKS + i] + bias) * weight
            tl.store(out_ptr + pair.to(tl.int64) * HIDDEN + row, weighed, mask=real & (row < HIDDEN))


@kernel(do_not_specialize=("num_pairs",))
def rows_down_kernel(
    a_ptr, w_ptr, ws_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr, num_pairs,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a block's inner rows by R·W tiles of down rows, add the bias, weigh; fp32 rows of pairs."""
    TILES: tl.constexpr = (HIDDEN + 16 * R * W - 1) // (16 * R * W)
    LAST: tl.constexpr = (HIDDEN + 15) // 16 - 1
    block, first = tl.program_id(0) // TILES, tl.program_id(0) % TILES * (R * W)
    if block_is_empty(expert_ptr, total_ptr, block, 0, False, TOKENS):
        await_inputs(PDL)
        release_dependents(PDL)
        return
    expert = tl.load(expert_ptr + block).to(tl.int64)
    w_ptr += expert * ((HIDDEN + 63) // 64 * 16 * ((INNER + 127) // 128 * 64))
    ws_ptr += expert * ((HIDDEN + 255) // 256 * 8 * ((INNER + 63) // 64 * 64))
    words, scales = _places(w_ptr, ws_ptr, first, LAST, INNER, R, W)
    held, held_scales = _ask(words, scales, INNER, R, W, AHEAD)
    count = _count(sorted_ptr, block, num_pairs, TOKENS)
    bias_ptr += expert * HIDDEN
    await_inputs(PDL)
    release_dependents(PDL)
    if TOKENS <= 8:
        _down(
            held, held_scales, words, scales, a_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, block, first,
            num_pairs, HIDDEN, INNER, HAS_BIAS, TOKENS, 1, R, W, AHEAD,
        )  # fmt: skip
    elif count <= 8:
        _down(
            held, held_scales, words, scales, a_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, block, first,
            num_pairs, HIDDEN, INNER, HAS_BIAS, TOKENS, 1, R, W, AHEAD,
        )  # fmt: skip
    elif TOKENS == 16:
        _down(
            held, held_scales, words, scales, a_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, block, first,
            num_pairs, HIDDEN, INNER, HAS_BIAS, TOKENS, 2, R, W, AHEAD,
        )  # fmt: skip
    elif count <= 16:
        _down(
            held, held_scales, words, scales, a_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, block, first,
            num_pairs, HIDDEN, INNER, HAS_BIAS, TOKENS, 2, R, W, AHEAD,
        )  # fmt: skip
    elif count <= 24:
        _down(
            held, held_scales, words, scales, a_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, block, first,
            num_pairs, HIDDEN, INNER, HAS_BIAS, TOKENS, 3, R, W, AHEAD,
        )  # fmt: skip
    else:
        _down(
            held, held_scales, words, scales, a_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, block, first,
            num_pairs, HIDDEN, INNER, HAS_BIAS, TOKENS, 4, R, W, AHEAD,
        )  # fmt: skip


@kernel(do_not_specialize=("num_pairs",))
def gather_kernel(
    x_ptr, sorted_ptr, total_ptr, out_ptr, x_stride, width, num_pairs, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the token of a slot of the alignment as a part of its group's fragments; zeros for an empty slot."""
    slot = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    await_inputs(PDL)
    release_dependents(PDL)
    # A group of eight begins with a pair, or nobody reads it.
    if (slot >= tl.load(total_ptr)) | (tl.load(sorted_ptr + slot // 8 * 8) >= num_pairs):
        return
    pair = tl.load(sorted_ptr + slot)
    row = x_ptr + (pair // PER_TOKEN).to(tl.int64) * x_stride
    x = tl.load(row + column_at(place), mask=(place < width) & (pair < num_pairs), other=0.0)
    out = out_ptr + (slot // 8).to(tl.int64) * ((width + 63) // 64 * 512) + slot % 8 * 32
    tl.store(out + place // 32 * 256 + place % 32, x, mask=place < width)
