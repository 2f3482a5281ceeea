"""MXFP4 experts of many tokens by ``wgmma``, codes and tokens on their way through rings in shared memory (Gluon).

A warp's 16 bytes a lane of the swizzled weights are, decoded, just the registers that ``wgmma`` takes as its left
operand: nothing is exchanged between lanes. Tokens lie row by row in the order of the alignment's slots; both kinds of
bytes are copied asynchronously, STAGES - 1 steps of 64 columns ahead, and need no registers on their way.

    program = (block of TOKENS slots of one expert, R * W tiles of 16 rows);  W warps, every four one ``wgmma``

In front of the wait stands what reads weights alone, and the alignment, which ended before the kernel in front began.
Where the first product gathers its rows itself, the alignment is in front of it: then all is read behind the wait.
Sums are those of :mod:`fastlayers.moe.fused_moe.triton.mxfp4.rows` to the last bit; that is what runs in Triton's
interpreter, which knows no Gluon.
"""

# Inside a Gluon kernel tuples grow in unrolled loops.
# mypy: disable-error-code="assignment, has-type, var-annotated"

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from fastlayers.moe.fused_moe.triton.activation import activation_of
from fastlayers.moe.fused_moe.triton.mxfp4.blocks import blocks_of
from fastlayers.moe.fused_moe.triton.mxfp4.mma import UNFOLD, left_operand
from fastlayers.moe.fused_moe.triton.mxfp4.plans import DIRECT, REGISTERS, HopperLaunchConfig
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, dependent_launch, release_dependents

DECODE, OPERANDS = left_operand()


@gluon.constexpr_function
def lanes_of(warps):
    """Return how words ``[4·W, 2, 16]``, (w f), o, (t q), lie in lanes: as in memory, and as in the left operand."""
    return gl.BlockedLayout([1, 1, 4], [4, 2, 4], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def tokens_by(warps):
    """Return how rows of 64 columns are copied: 16 bytes a lane, whole lines."""
    return gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def rows_by(warps):
    """Return how sums ``[16·W, TOKENS]`` are stored: eight rows a lane."""
    return gl.BlockedLayout([8, 1], [2 * warps, 16 // warps], [1, warps], [0, 1])


@gluon.constexpr_function
def halves_by(warps):
    """Return how the inner columns of :func:`rows_by` lie: half as many rows."""
    return gl.BlockedLayout([4, 1], [2 * warps, 16 // warps], [1, warps], [0, 1])


@gluon.jit
def _decoded(word, scale, W: gl.constexpr, LAYOUT: gl.constexpr):
    """Return bf16 ``[16·W, 64]`` as left operand of words ``[4·W, 2, 16]``: (w f), o, (t q)."""
    found = gl.inline_asm_elementwise(
        DECODE, OPERANDS, [word, scale],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=4,
    )  # fmt: skip
    # Joined: the last dimensions are b, h and q % 2; of a word's four values the last two are q // 2 and c.
    first = gl.join(gl.join(found[0], found[1]), gl.join(found[2], found[3]))  # b' = second join: [.., b, h]
    second = gl.join(gl.join(found[4], found[5]), gl.join(found[6], found[7]))
    both = gl.reshape(gl.join(first, second), [W, 4, 2, 4, 2, 2, 2, 2, 2])  # w f o t s c b h p
    rows = gl.permute(both, (0, 6, 1, 2, 4, 8, 7, 3, 5))  # w b f o | s p h t c
    return gl.convert_layout(gl.reshape(rows, [16 * W, 64]), LAYOUT, assert_trivial=True)


@gluon.jit
def _places(w_ptr, s_ptr, first, LAST: gl.constexpr, LENGTH: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """Return where codes and scales begin, of R times one tile a warp."""
    lanes: gl.constexpr = lanes_of(W)
    row = gl.arange(0, W * 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, lanes)))[:, None, None]
    odd = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, lanes)))[None, :, None]
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, lanes)))[None, None, :]
    words = ()
    scales = ()
    for r in gl.static_range(R):
        tile = gl.minimum(first + r * W + row // 4, LAST)
        words = words + (w_ptr + (tile * 4 + row % 4) * ((LENGTH + 127) // 128 * 64) + odd * 16 + word,)
        place = (tile // 16 * 8 + tile % 8) * (LENGTH // 64 * 16) + tile // 8 % 2 * 8
        scales = scales + (s_ptr + place + row % 4 * 2 + odd,)
    return words, scales


@gluon.jit
def _ask(words, scales, word_ring, scale_ring, here: gl.constexpr, step, inside, R: gl.constexpr):
    """Ask for the codes and scales of a step, if it is inside."""
    for r in gl.static_range(R):
        async_copy.async_copy_global_to_shared(word_ring[here * R + r], words[r] + step * 32, mask=inside)
        async_copy.async_copy_global_to_shared(scale_ring[here * R + r], scales[r] + step * 16, mask=inside)


@gluon.jit
def _turn(
    words, scales, tokens, word_ring, scale_ring, x_ring, accs, real, step, here: gl.constexpr, then: gl.constexpr,
    STEPS: gl.constexpr, R: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add the products of a step; ask for the one that is STAGES - 1 ahead, into the buffers of the step before."""
    lanes: gl.constexpr = lanes_of(W)
    left: gl.constexpr = gl.DotOperandLayout(0, accs[0].type.layout, 2)
    async_copy.wait_group(STAGES - 2)
    ahead = step + (STAGES - 1)
    inside = ahead < STEPS
    _ask(words, scales, word_ring, scale_ring, then, ahead, inside, R)
    async_copy.async_copy_global_to_shared(x_ring[then], tokens + ahead * 64, mask=real & inside)
    async_copy.commit_group()
    held = None
    added = ()
    for r in gl.static_range(R):
        word = word_ring[here * R + r].load(lanes)
        scale = scale_ring[here * R + r].load(lanes)
        a = _decoded(word, scale, W, left)
        acc = hopper.warpgroup_mma(a, x_ring[here].permute((1, 0)), accs[r], is_async=True)
        if r > 0:
            # While this product runs the one before ends: its codes' registers are the next one's.
            acc = hopper.warpgroup_mma_wait(1, deps=[acc, held])[0]
        held = a
        added = added + (acc,)
    found = ()
    for r in gl.static_range(R):
        found = found + (hopper.warpgroup_mma_wait(0, deps=[added[r], held])[0],)
    return found


@gluon.jit
def _product(
    x_ptr, w_ptr, s_ptr, row, real, first, LAST: gl.constexpr, LENGTH: gl.constexpr, TOKENS: gl.constexpr,
    R: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Return sums ``[16·W, TOKENS]``, R of them, over LENGTH columns.

    ``row``: which rows of x; ``real``: which of them are read, the others' sums are anything. Buffers of a ring are
    memory of their own each: where they are parts of one, every copy waits for all warps.
    """
    STEPS: gl.constexpr = LENGTH // 64
    gl.static_assert(LENGTH % (64 * STAGES) == 0, "whole turns of the ring")
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, TOKENS, 16])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    word_ring = ()
    scale_ring = ()
    x_ring = ()
    for _ in gl.static_range(STAGES * R):
        word_ring = word_ring + (gl.allocate_shared_memory(gl.int32, [W * 4, 2, 16], flat),)
        scale_ring = scale_ring + (gl.allocate_shared_memory(gl.int32, [W * 4, 2, 1], flat),)
    for _ in gl.static_range(STAGES):
        x_ring = x_ring + (gl.allocate_shared_memory(gl.bfloat16, [TOKENS, 64], gl.NVMMASharedLayout(128, 16, 2)),)
    words, scales = _places(w_ptr, s_ptr, first, LAST, LENGTH, R, W)
    tokens = x_ptr + row * LENGTH + gl.arange(0, 64, layout=gl.SliceLayout(0, tokens_by(W)))[None, :]
    for turn in gl.static_range(STAGES - 1):
        _ask(words, scales, word_ring, scale_ring, turn, turn, None, R)
        async_copy.commit_group()
    await_inputs(PDL)
    release_dependents(PDL)
    for turn in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(x_ring[turn], tokens + turn * 64, mask=real)
        async_copy.commit_group()
    accs = ()
    for _ in gl.static_range(R):
        accs = accs + (gl.zeros([16 * W, TOKENS], gl.float32, mma),)
    for start in range(0, STEPS, STAGES):
        for here in gl.static_range(STAGES):
            accs = _turn(
                words, scales, tokens, word_ring, scale_ring, x_ring, accs, real, start + here, here,
                (here + STAGES - 1) % STAGES, STEPS, R, W, STAGES,
            )  # fmt: skip
    async_copy.wait_group(0)
    return accs


@gluon.jit
def _store_inner(
    sums, bias_ptr, out_ptr, sorted_ptr, slot, tile, num_pairs, alpha, limit, INNER: gl.constexpr,
    HAS_BIAS: gl.constexpr, W: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Apply bias and activation to W tiles of gate and up rows, in turns, and store them as rows of slots."""
    half: gl.constexpr = halves_by(W)
    at = slot + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, half))[None, :]
    there = gl.load(sorted_ptr + at) < num_pairs
    column = tile * 8 + gl.arange(0, 8 * W, layout=gl.SliceLayout(1, half))[:, None]
    both = gl.convert_layout(sums, rows_by(W)) * UNFOLD
    gate, up = gl.split(gl.permute(gl.reshape(both, [8 * W, 2, TOKENS]), (0, 2, 1)))
    gate, up = gl.convert_layout(gate, half, assert_trivial=True), gl.convert_layout(up, half, assert_trivial=True)
    if HAS_BIAS:
        gate += gl.load(bias_ptr + column * 2, mask=column < INNER, other=0.0)
        up += gl.load(bias_ptr + column * 2 + 1, mask=column < INNER, other=0.0)
    inner = activation_of(gate, up, alpha, limit, True)
    gl.store(out_ptr + at * INNER + column, inner.to(gl.bfloat16), mask=there & (column < INNER))


@gluon.jit
def _store_pairs(
    sums, bias_ptr, weights_ptr, out_ptr, sorted_ptr, slot, tile, num_pairs, HIDDEN: gl.constexpr,
    HAS_BIAS: gl.constexpr, W: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Add the bias to W tiles of down rows, weigh, store rows of pairs."""
    rows: gl.constexpr = rows_by(W)
    pair = gl.load(sorted_ptr + slot + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, rows)))[None, :]
    weight = gl.load(weights_ptr + pair, mask=pair < num_pairs, other=0.0)
    row = tile * 16 + gl.arange(0, 16 * W, layout=gl.SliceLayout(1, rows))[:, None]
    unfolded = gl.convert_layout(sums, rows) * UNFOLD
    if HAS_BIAS:
        unfolded += gl.load(bias_ptr + row, mask=row < HIDDEN, other=0.0)
    gl.store(out_ptr + pair.to(gl.int64) * HIDDEN + row, unfolded * weight, mask=(pair < num_pairs) & (row < HIDDEN))


@kernel(do_not_specialize=("num_pairs",), jit=gluon.jit)
def wgmma_gate_up_kernel(
    x_ptr, w_ptr, ws_ptr, bias_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr, num_pairs, alpha, limit,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, HAS_BIAS: gl.constexpr, TOKENS: gl.constexpr, R: gl.constexpr,
    W: gl.constexpr, STAGES: gl.constexpr, PER_TOKEN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply a block's tokens by R·W tiles of gate and up rows of one expert, apply the activation.

    PER_TOKEN 0: x has a row for each slot, written by the kernel in front, in front of which the alignment ended.
    Else the alignment is the kernel in front, and rows are gathered here.
    """
    TILES: gl.constexpr = (2 * INNER + 16 * R * W - 1) // (16 * R * W)
    LAST: gl.constexpr = (2 * INNER + 15) // 16 - 1
    block, first = gl.program_id(0) // TILES, gl.program_id(0) % TILES * (R * W)
    if PER_TOKEN:
        await_inputs(PDL)
        release_dependents(PDL)
    if block * TOKENS >= gl.load(total_ptr):
        if not PER_TOKEN:
            await_inputs(PDL)
            release_dependents(PDL)
        return
    expert = gl.load(expert_ptr + block).to(gl.int64)
    w_ptr += expert * ((2 * INNER + 63) // 64 * 16 * ((HIDDEN + 127) // 128 * 64))
    ws_ptr += expert * ((2 * INNER + 255) // 256 * 2 * HIDDEN)
    slot = block * TOKENS
    token = slot + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, tokens_by(W)))
    pair = gl.load(sorted_ptr + token)
    row = pair // PER_TOKEN if PER_TOKEN else token
    sums = _product(
        x_ptr, w_ptr, ws_ptr, row[:, None], (pair < num_pairs)[:, None], first, LAST, HIDDEN, TOKENS, R, W, STAGES,
        PDL and not PER_TOKEN,
    )  # fmt: skip
    for r in gl.static_range(R):
        _store_inner(
            sums[r], bias_ptr + expert * 2 * INNER, out_ptr, sorted_ptr, slot, first + r * W, num_pairs, alpha, limit,
            INNER, HAS_BIAS, W, TOKENS,
        )  # fmt: skip


@kernel(do_not_specialize=("num_pairs",), jit=gluon.jit)
def wgmma_down_kernel(
    a_ptr, w_ptr, ws_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr, num_pairs,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, HAS_BIAS: gl.constexpr, TOKENS: gl.constexpr, R: gl.constexpr,
    W: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply a block's inner rows by R·W tiles of down rows, add the bias, weigh; fp32 rows of pairs."""
    TILES: gl.constexpr = (HIDDEN + 16 * R * W - 1) // (16 * R * W)
    LAST: gl.constexpr = (HIDDEN + 15) // 16 - 1
    block, first = gl.program_id(0) // TILES, gl.program_id(0) % TILES * (R * W)
    if block * TOKENS >= gl.load(total_ptr):
        await_inputs(PDL)
        release_dependents(PDL)
        return
    expert = gl.load(expert_ptr + block).to(gl.int64)
    w_ptr += expert * ((HIDDEN + 63) // 64 * 16 * ((INNER + 127) // 128 * 64))
    ws_ptr += expert * ((HIDDEN + 255) // 256 * 2 * INNER)
    slot = block * TOKENS
    token = slot + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, tokens_by(W)))
    real = gl.load(sorted_ptr + token) < num_pairs
    sums = _product(
        a_ptr, w_ptr, ws_ptr, token[:, None], real[:, None], first, LAST, INNER, TOKENS, R, W, STAGES, PDL
    )  # fmt: skip
    for r in gl.static_range(R):
        _store_pairs(
            sums[r], bias_ptr + expert * HIDDEN, weights_ptr, out_ptr, sorted_ptr, slot, first + r * W, num_pairs,
            HIDDEN, HAS_BIAS, W, TOKENS,
        )  # fmt: skip


@kernel(do_not_specialize=("num_pairs",))
def slots_kernel(
    x_ptr, sorted_ptr, total_ptr, out_ptr, x_stride, width, num_pairs, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the token of a slot of the alignment as a row; nothing for an empty slot, which nobody reads."""
    slot = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    await_inputs(PDL)
    release_dependents(PDL)
    if slot >= tl.load(total_ptr):
        return
    pair = tl.load(sorted_ptr + slot)
    if pair >= num_pairs:
        return
    x = tl.load(x_ptr + (pair // PER_TOKEN).to(tl.int64) * x_stride + column, mask=column < width)
    tl.store(out_ptr + slot.to(tl.int64) * width + column, x, mask=column < width)


def launches(
    tokens: int, per_token: int, experts: int, hidden: int, inner: int, x_stride: int, alpha: float, limit: float,
    bias13: bool, bias2: bool, dtype: torch.dtype, plan: HopperLaunchConfig, device: torch.device,
) -> tuple[Any, ...]:  # fmt: skip
    """Return bytes, where the pairs' rows lie, the launches, and the first product as it gathers its rows itself.

    The latter is ``None`` where the plan says so, and where the tokens' rows do not lie one after another.
    """
    pairs = tokens * per_token
    of = blocks_of(
        slots_kernel, tokens, per_token, experts, hidden, inner, (hidden, inner), x_stride, dtype, plan, device
    )  # fmt: skip
    sizes = {"HIDDEN": hidden, "INNER": inner, "TOKENS": plan.tokens} | dependent_launch(device)
    first: dict[str, Any] = sizes | _of(plan.r1, plan.w1, plan.s1) | {"HAS_BIAS": bias13}
    second: dict[str, Any] = sizes | _of(plan.r2, plan.w2, plan.s2) | {"HAS_BIAS": bias2}
    into, out = ((4, of.rows), *of.first), ((0, of.rows), (5, of.partial), *of.second)
    gate_up = partial(wgmma_gate_up_kernel.at, of.grids[0], pairs, alpha, limit, **first)
    direct: Callable[..., None] | None = None
    if plan.wgmma == DIRECT and x_stride == hidden:
        direct = gate_up(parts=into, PER_TOKEN=per_token)
    return (
        of.size, of.partial, of.align, of.order, gate_up(parts=((0, of.ordered), *into), PER_TOKEN=0),
        wgmma_down_kernel.at(of.grids[1], pairs, parts=out, **second), direct,
    )  # fmt: skip


def _of(tiles: int, warps: int, stages: int) -> dict[str, int]:
    """Return a product's constants and launch options."""
    found = {"R": tiles, "W": warps, "STAGES": stages, "num_warps": warps}
    return found | ({"maxnreg": REGISTERS[warps]} if warps in REGISTERS else {})
