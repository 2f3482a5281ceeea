"""A trial: the shipped products by ``mma.sync``, codes and tokens on their way through rings in shared memory (Gluon).

The instructions, the layout of the weights and the fragments of tokens are those of
:mod:`fastlayers.moe.fused_moe.triton.mxfp4_rows`. There a warp holds what it asked for in registers, two steps ahead,
and finds its tokens in L1; here copies run STAGES - 1 steps ahead and take no registers, and a program copies each
token once for all its warps.
"""

# Inside a Gluon kernel tuples grow in unrolled loops.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, has-type, var-annotated"

from __future__ import annotations

import sys
from pathlib import Path

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from fastlayers.moe.fused_moe.triton.mxfp4_mma import CODES, OPERANDS

sys.path.insert(0, str(Path(__file__).parents[1]))
from trials.mxfp4_wgmma import ask, store_inner, store_pairs, wait

_CODE1, _CODE2, _CODE3, _CODE4 = CODES
_OPERANDS1, _OPERANDS2, _OPERANDS3, _OPERANDS4 = OPERANDS


@gluon.constexpr_function
def lanes4(warps):
    """Return how words ``[W, 4, 2, 16]``, w, f, o, (t q), lie in lanes: as in memory, and as in the left operand."""
    return gl.BlockedLayout([1, 1, 1, 4], [1, 4, 2, 4], [warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.jit
def _places(w_ptr, s_ptr, first, LAST: gl.constexpr, LENGTH: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """Return where a lane's codes and scales begin, of R times one tile a warp, and its place in a fragment."""
    by: gl.constexpr = lanes4(W)
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, by))))[:, None, None, None]
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, by))))[None, :, None, None]
    odd = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, by))))[None, None, :, None]
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, by))))[None, None, None, :]
    words = ()
    scales = ()
    for r in gl.static_range(R):
        tile = gl.minimum(first + r * W + warp, LAST)
        words = words + (w_ptr + (tile * 4 + four) * ((LENGTH + 127) // 128 * 64) + odd * 16 + word,)
        place = (tile // 16 * 8 + tile % 8) * ((LENGTH + 63) // 64 * 16) + tile // 8 % 2 * 8
        scales = scales + (s_ptr + place + four * 2 + odd,)
    return words, scales, four * 32 + odd * 16 + word


@gluon.jit
def _step(word, scale, xs, accs, BLOCKS: gl.constexpr):
    """Add the products of 64 columns: ``xs`` are two halves of each of BLOCKS blocks of eight tokens."""
    if BLOCKS == 1:
        return (
            gl.inline_asm_elementwise(
                _CODE1, _OPERANDS1, [word, scale, accs[0], xs[0], xs[1]], dtype=gl.float32, is_pure=True, pack=4
            ),
        )
    elif BLOCKS == 2:
        return gl.inline_asm_elementwise(
            _CODE2, _OPERANDS2, [word, scale, accs[0], accs[1], xs[0], xs[1], xs[2], xs[3]],
            dtype=(gl.float32, gl.float32), is_pure=True, pack=4,
        )  # fmt: skip
    elif BLOCKS == 3:
        return gl.inline_asm_elementwise(
            _CODE3, _OPERANDS3, [word, scale, accs[0], accs[1], accs[2], xs[0], xs[1], xs[2], xs[3], xs[4], xs[5]],
            dtype=(gl.float32, gl.float32, gl.float32), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            _CODE4, _OPERANDS4,
            [word, scale, accs[0], accs[1], accs[2], accs[3],
             xs[0], xs[1], xs[2], xs[3], xs[4], xs[5], xs[6], xs[7]],
            dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=4,
        )  # fmt: skip


@gluon.jit
def _turn(
    words, scales, tokens, word_ring, scale_ring, x_ring, accs, real, step, here: gl.constexpr, then: gl.constexpr,
    STEPS: gl.constexpr, BLOCKS: gl.constexpr, R: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add a step's products; ask for what is STAGES - 1 steps ahead, into the buffers of the step before."""
    by: gl.constexpr = lanes4(W)
    async_copy.wait_group(STAGES - 2)
    # Of each lane's own codes it needs to wait for no other; of the tokens for all: the compiler's barrier is here.
    ahead = step + STAGES - 1
    inside = ahead < STEPS
    ask(words, scales, word_ring, scale_ring, then, ahead, inside, R, 1)
    async_copy.async_copy_global_to_shared(x_ring[then], tokens + ahead * 256, mask=real & inside)
    async_copy.commit_group()
    xs = ()
    for i in gl.static_range(2 * BLOCKS):
        xs = xs + (x_ring[here].slice(i, 1, 0).load(by),)
    found = ()
    for r in gl.static_range(R):
        word, scale = word_ring[here * R + r].load(by), scale_ring[here * R + r].load(by)
        found = found + _step(word, scale, xs, accs[r * BLOCKS : (r + 1) * BLOCKS], BLOCKS)
    return found


@gluon.jit
def _multiply(
    x_ptr, words, scales, place, word_ring, scale_ring, x_ring, group, LENGTH: gl.constexpr, TOKENS: gl.constexpr,
    BLOCKS: gl.constexpr, R: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return sums ``[16·W, 8]``, BLOCKS for each of R tiles a warp; codes of the first steps are on their way."""
    STEPS: gl.constexpr = (LENGTH + 63) // 64
    by: gl.constexpr = lanes4(W)
    half = gl.arange(0, TOKENS // 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, by))))
    half = half[:, None, None, None]
    tokens = x_ptr + (group + half // 2) * (STEPS * 256) + half % 2 * 128 + place
    real = half < 2 * BLOCKS
    for step in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(x_ring[step], tokens + step * 256, mask=real)
        async_copy.commit_group()
    accs = ()
    for _ in gl.static_range(R * BLOCKS):
        accs = accs + (gl.zeros([W, 4, 2, 16], gl.float32, by),)
    for start in range(0, STEPS, STAGES):
        for here in gl.static_range(STAGES):
            accs = _turn(
                words, scales, tokens, word_ring, scale_ring, x_ring, accs, real, start + here, here,
                (here + STAGES - 1) % STAGES, STEPS, BLOCKS, R, W, STAGES,
            )  # fmt: skip
    async_copy.wait_group(0)
    sums = ()
    for i in gl.static_range(R * BLOCKS):
        # w f o t b n: row 16·w + 8·b + 2·f + o, token 2·t + n.
        turned = gl.permute(gl.reshape(accs[i], [W, 4, 2, 4, 2, 2]), (0, 4, 1, 2, 3, 5))
        sums = sums + (gl.reshape(turned, [16 * W, 8]),)
    return sums


@gluon.jit
def _rings(TOKENS: gl.constexpr, R: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr):
    """Return the buffers of codes, scales and tokens."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    word_ring = ()
    scale_ring = ()
    x_ring = ()
    for _ in gl.static_range(STAGES * R):
        word_ring = word_ring + (gl.allocate_shared_memory(gl.int32, [W, 4, 2, 16], flat),)
        scale_ring = scale_ring + (gl.allocate_shared_memory(gl.int32, [W, 4, 2, 1], flat),)
    for _ in gl.static_range(STAGES):
        x_ring = x_ring + (gl.allocate_shared_memory(gl.int32, [TOKENS // 4, 4, 2, 16], flat),)
    return word_ring, scale_ring, x_ring


@gluon.jit
def _gate_up(
    x_ptr, words, scales, place, word_ring, scale_ring, x_ring, bias_ptr, out_ptr, sorted_ptr, block, first, num_pairs,
    alpha, limit, HIDDEN: gl.constexpr, INNER: gl.constexpr, TOKENS: gl.constexpr, BLOCKS: gl.constexpr,
    R: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    group = block * (TOKENS // 8)
    sums = _multiply(
        x_ptr, words, scales, place, word_ring, scale_ring, x_ring, group, HIDDEN, TOKENS, BLOCKS, R, W, STAGES
    )  # fmt: skip
    for r in gl.static_range(R):
        for i in gl.static_range(BLOCKS):
            store_inner(
                sums[r * BLOCKS + i], bias_ptr, out_ptr, sorted_ptr, (group + i) * 8, first + r * W, num_pairs, alpha,
                limit, INNER, W, 8, True,
            )  # fmt: skip


@gluon.jit
def ring_gate_up_kernel(
    x_ptr, w_ptr, ws_ptr, bias_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr, num_pairs, alpha, limit,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, TOKENS: gl.constexpr, R: gl.constexpr, W: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply a block's tokens by R·W tiles of gate and up rows of one expert, apply the activation."""
    TILES: gl.constexpr = (2 * INNER + 16 * R * W - 1) // (16 * R * W)
    LAST: gl.constexpr = (2 * INNER + 15) // 16 - 1
    block, first = gl.program_id(0) // TILES, gl.program_id(0) % TILES * (R * W)
    if block * TOKENS >= gl.load(total_ptr):
        wait(PDL)
        return
    expert = gl.load(expert_ptr + block).to(gl.int64)
    w_ptr += expert * ((2 * INNER + 63) // 64 * 16 * ((HIDDEN + 127) // 128 * 64))
    ws_ptr += expert * ((2 * INNER + 255) // 256 * 2 * ((HIDDEN + 63) // 64 * 64))
    bias_ptr += expert * 2 * INNER
    words, scales, place = _places(w_ptr, ws_ptr, first, LAST, HIDDEN, R, W)
    word_ring, scale_ring, x_ring = _rings(TOKENS, R, W, STAGES)
    for step in gl.static_range(STAGES - 1):
        ask(words, scales, word_ring, scale_ring, step, step, None, R, 1)
        async_copy.commit_group()
    # Pairs lie together: the group of eight behind the first half has any where its first slot has one.
    more = False
    if TOKENS > 8:
        more = gl.load(sorted_ptr + block * TOKENS + TOKENS // 2) < num_pairs
    wait(PDL)
    if TOKENS == 8:
        _gate_up(
            x_ptr, words, scales, place, word_ring, scale_ring, x_ring, bias_ptr, out_ptr, sorted_ptr, block, first,
            num_pairs, alpha, limit, HIDDEN, INNER, TOKENS, 1, R, W, STAGES,
        )  # fmt: skip
    elif more:
        if TOKENS == 32 and gl.load(sorted_ptr + block * TOKENS + 24) >= num_pairs:
            _gate_up(
                x_ptr, words, scales, place, word_ring, scale_ring, x_ring, bias_ptr, out_ptr, sorted_ptr, block,
                first, num_pairs, alpha, limit, HIDDEN, INNER, TOKENS, TOKENS // 8 - 1, R, W, STAGES,
            )  # fmt: skip
        else:
            _gate_up(
                x_ptr, words, scales, place, word_ring, scale_ring, x_ring, bias_ptr, out_ptr, sorted_ptr, block,
                first, num_pairs, alpha, limit, HIDDEN, INNER, TOKENS, TOKENS // 8, R, W, STAGES,
            )  # fmt: skip
    else:
        _gate_up(
            x_ptr, words, scales, place, word_ring, scale_ring, x_ring, bias_ptr, out_ptr, sorted_ptr, block, first,
            num_pairs, alpha, limit, HIDDEN, INNER, TOKENS, TOKENS // 16, R, W, STAGES,
        )  # fmt: skip


@gluon.jit
def _down(
    a_ptr, words, scales, place, word_ring, scale_ring, x_ring, bias_ptr, weights_ptr, out_ptr, sorted_ptr, block,
    first, num_pairs, HIDDEN: gl.constexpr, INNER: gl.constexpr, TOKENS: gl.constexpr, BLOCKS: gl.constexpr,
    R: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    group = block * (TOKENS // 8)
    sums = _multiply(
        a_ptr, words, scales, place, word_ring, scale_ring, x_ring, group, INNER, TOKENS, BLOCKS, R, W, STAGES
    )  # fmt: skip
    for r in gl.static_range(R):
        for i in gl.static_range(BLOCKS):
            store_pairs(
                sums[r * BLOCKS + i], bias_ptr, weights_ptr, out_ptr, sorted_ptr, (group + i) * 8, first + r * W,
                num_pairs, HIDDEN, W, 8,
            )  # fmt: skip


@gluon.jit
def ring_down_kernel(
    a_ptr, w_ptr, ws_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr, num_pairs,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, TOKENS: gl.constexpr, R: gl.constexpr, W: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply a block's inner rows by R·W tiles of down rows, add the bias, weigh; fp32 rows of pairs."""
    TILES: gl.constexpr = (HIDDEN + 16 * R * W - 1) // (16 * R * W)
    LAST: gl.constexpr = (HIDDEN + 15) // 16 - 1
    block, first = gl.program_id(0) // TILES, gl.program_id(0) % TILES * (R * W)
    if block * TOKENS >= gl.load(total_ptr):
        wait(PDL)
        return
    expert = gl.load(expert_ptr + block).to(gl.int64)
    w_ptr += expert * ((HIDDEN + 63) // 64 * 16 * ((INNER + 127) // 128 * 64))
    ws_ptr += expert * ((HIDDEN + 255) // 256 * 2 * ((INNER + 63) // 64 * 64))
    bias_ptr += expert * HIDDEN
    words, scales, place = _places(w_ptr, ws_ptr, first, LAST, INNER, R, W)
    word_ring, scale_ring, x_ring = _rings(TOKENS, R, W, STAGES)
    for step in gl.static_range(STAGES - 1):
        ask(words, scales, word_ring, scale_ring, step, step, None, R, 1)
        async_copy.commit_group()
    more = False
    if TOKENS > 8:
        more = gl.load(sorted_ptr + block * TOKENS + TOKENS // 2) < num_pairs
    wait(PDL)
    if TOKENS == 8:
        _down(
            a_ptr, words, scales, place, word_ring, scale_ring, x_ring, bias_ptr, weights_ptr, out_ptr, sorted_ptr,
            block, first, num_pairs, HIDDEN, INNER, TOKENS, 1, R, W, STAGES,
        )  # fmt: skip
    elif more:
        if TOKENS == 32 and gl.load(sorted_ptr + block * TOKENS + 24) >= num_pairs:
            _down(
                a_ptr, words, scales, place, word_ring, scale_ring, x_ring, bias_ptr, weights_ptr, out_ptr, sorted_ptr,
                block, first, num_pairs, HIDDEN, INNER, TOKENS, TOKENS // 8 - 1, R, W, STAGES,
            )  # fmt: skip
        else:
            _down(
                a_ptr, words, scales, place, word_ring, scale_ring, x_ring, bias_ptr, weights_ptr, out_ptr, sorted_ptr,
                block, first, num_pairs, HIDDEN, INNER, TOKENS, TOKENS // 8, R, W, STAGES,
            )  # fmt: skip
    else:
        _down(
            a_ptr, words, scales, place, word_ring, scale_ring, x_ring, bias_ptr, weights_ptr, out_ptr, sorted_ptr,
            block, first, num_pairs, HIDDEN, INNER, TOKENS, TOKENS // 16, R, W, STAGES,
        )  # fmt: skip
