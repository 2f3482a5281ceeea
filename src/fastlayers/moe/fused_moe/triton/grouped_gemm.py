"""Triton kernels of the experts; :mod:`fastlayers.moe.fused_moe.triton.backend` launches them.

A pair is one (token, expert): its number p = token * PER_TOKEN + j. ``sorted_ptr`` lists pairs in blocks of one
expert (:mod:`fastlayers.moe.align.layer`). Formats: QUANT 0 none, 1 fp8_block, 2 int8
(mxfp4 has kernels of its own in :mod:`fastlayers.moe.fused_moe.triton.mxfp4.gemm`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlayers.linear.triton_gemm import dot
from fastlayers.moe.fused_moe.triton.activation import activation_of
from fastlayers.quant.group_quant.triton import quantize_tile
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, release_dependents

GROUP = tl.constexpr(128)


@triton.jit
def prefetch_rows(rows, mask, length, LINES: tl.constexpr):
    """Ask for ``length`` bytes from each of the pointers ``[N]`` to be brought to L2; LINES of 128 bytes hold them."""
    line = tl.arange(0, LINES)[None, :] * 128
    start = rows.to(tl.int64)[:, None] + line
    wanted = (mask[:, None] & (line < length)).to(tl.int32)
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0;}",
        "=r,l,r", [start, wanted], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def block_of_pairs(sorted_ptr, expert_ptr, tile_m, num_pairs, DIRECT: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return (expert, pairs) of a block. DIRECT: ``expert_ptr`` are the ids, each pair is a block of its own."""
    expert = tl.load(expert_ptr + tile_m)
    slot = tl.arange(0, BLOCK_M)
    if DIRECT:
        pair = tl.where(slot == 0, tile_m, num_pairs)
    else:
        pair = tl.load(sorted_ptr + tile_m * BLOCK_M + slot)
    return expert, pair


@triton.jit
def block_is_empty(expert_ptr, total_ptr, tile_m, num_experts, DIRECT: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return whether a block has no pairs: it lies behind the end, or its only pair was dropped."""
    if DIRECT:
        expert = tl.load(expert_ptr + tile_m)
        return (expert < 0) | (expert >= num_experts)
    else:
        return tile_m * BLOCK_M >= tl.load(total_ptr)


@kernel(do_not_specialize=("tokens",))
def append_shared_kernel(
    weights_ptr, ids_ptr, out_weights_ptr, out_ids_ptr, tokens, shared_weight,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Append SHARED experts to every token that has a valid pair; mark dropped pairs with -1."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    j = tl.arange(0, BLOCK_K)[None, :]
    routed = (token < tokens) & (j < TOP_K)
    await_inputs(PDL)
    release_dependents(PDL)
    ids = tl.load(ids_ptr + token * TOP_K + j, mask=routed, other=-1)
    ids = tl.where((ids >= 0) & (ids < EXPERTS), ids, -1)
    weights = tl.load(weights_ptr + token * TOP_K + j, mask=routed, other=0.0)
    used = tl.max(ids, axis=1)[:, None] >= 0
    ids = tl.where(j < TOP_K, ids, tl.where(used, EXPERTS + j - TOP_K, -1))
    weights = tl.where(j < TOP_K, weights, shared_weight)
    out = token * (TOP_K + SHARED) + j
    inside = (token < tokens) & (j < TOP_K + SHARED)
    tl.store(out_ids_ptr + out, ids, mask=inside)
    tl.store(out_weights_ptr + out, weights, mask=inside)


@kernel(do_not_specialize=("count",))
def quantize_rows_kernel(
    x_ptr, ids_ptr, q_ptr, s_ptr, count, groups, x_stride, q_stride, width, num_experts, eps,
    SKIP: tl.constexpr, MAX: tl.constexpr, UE8M0: tl.constexpr, INT8: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantise PARTS of ``count`` groups (fp8: 128 columns; int8: a row). With SKIP, not rows of dropped pairs."""
    part = tl.program_id(0).to(tl.int64) * PARTS + tl.arange(0, PARTS)
    wanted = part < count
    row, group = part // groups, part % groups
    await_inputs(PDL)
    release_dependents(PDL)
    if SKIP:
        expert = tl.load(ids_ptr + row, mask=wanted, other=-1)
        wanted = (expert >= 0) & (expert < num_experts)
    column = (group * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    inside = wanted[:, None] & (column < width)
    x = tl.load(x_ptr + row[:, None] * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    codes, scale = quantize_tile(x, eps, MAX, UE8M0, INT8)
    tl.store(q_ptr + row[:, None] * q_stride + column, codes, mask=wanted[:, None] & (column < q_stride))
    tl.store(s_ptr + part, scale, mask=wanted)


@triton.jit
def program_tile(tiles_m, tiles_n, BAND: tl.constexpr):
    """Return (block of pairs, block of rows): bands of blocks, so that programs that run together share L2."""
    index = tl.program_id(0)
    band = index // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    inside = index % (BAND * tiles_n)
    return band * BAND + inside % height, inside // height


@triton.jit
def _load_weights(rows, k, limit, EVEN_K: tl.constexpr):
    # Rows beyond the edge read a valid one again, only K can end inside a tile.
    if EVEN_K:
        return tl.load(rows)
    else:
        return tl.load(rows, mask=k < limit, other=0.0)


@triton.jit
def _load_pairs(rows, k, limit, real, EVEN_K: tl.constexpr):
    # Slots without a pair read nothing: they would all ask for the same line of L2.
    if EVEN_K:
        return tl.load(rows, mask=real, other=0.0)
    else:
        return tl.load(rows, mask=real & (k < limit), other=0.0)


@triton.jit
def product_of(x, w, acc, SWAP: tl.constexpr):
    """Return ``acc + x · w``, with SWAP transposed: weights are the left operand, of which Hopper's units take 64 rows.

    With few pairs in a block the other order runs on the units before Hopper's, where e4m3 is widened to fp16 first.
    """
    if SWAP:
        return dot(tl.trans(w), tl.trans(x), acc)
    else:
        return dot(x, w, acc)


@triton.jit
def along_pairs(s, SWAP: tl.constexpr):
    """Return scales of pairs as a product is laid out."""
    return s[None, :] if SWAP else s[:, None]


@kernel(do_not_specialize=("num_pairs", "tiles_m"))
def gate_up_kernel(
    x_ptr, xs_ptr, w_ptr, ws_ptr, bias_ptr, out_ptr, out_scale_ptr, sorted_ptr, expert_ptr, total_ptr,
    num_pairs, tiles_m, D, I, x_stride, out_stride, alpha, limit, eps,
    PER_TOKEN: tl.constexpr, QUANT: tl.constexpr, QUANT_OUT: tl.constexpr, UE8M0: tl.constexpr, WIDE: tl.constexpr,
    OAI: tl.constexpr, HAS_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gather token rows, multiply by gate and up rows of one expert, apply the activation, maybe quantise."""
    tile_m, tile_n = program_tile(tiles_m, tl.cdiv(I, BLOCK_N), BAND)
    await_inputs(PDL)
    release_dependents(PDL)
    if tile_m * BLOCK_M >= tl.load(total_ptr):
        return
    expert = tl.load(expert_ptr + tile_m).to(tl.int64)
    pair = tl.load(sorted_ptr + tile_m * BLOCK_M + tl.arange(0, BLOCK_M))
    real = pair < num_pairs
    token = tl.where(real, pair // PER_TOKEN, 0).to(tl.int64)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + token[:, None] * x_stride + depth[None, :]
    gate_row = (column % I) * 2 if INTERLEAVED else column % I
    up_row = gate_row + 1 if INTERLEAVED else gate_row + I
    gate_rows = w_ptr + expert * 2 * I * D + gate_row[None, :] * D + depth[:, None]
    up_rows = w_ptr + expert * 2 * I * D + up_row[None, :] * D + depth[:, None]
    ACC: tl.constexpr = tl.int32 if QUANT == 2 else tl.float32
    SWAP: tl.constexpr = QUANT == 1 and BLOCK_M < 64 and BLOCK_N >= 64
    SHAPE: tl.constexpr = [BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N]
    gate = tl.zeros(SHAPE, ACC)
    up = tl.zeros(SHAPE, ACC)
    blocks = tl.cdiv(D, BLOCK_K)
    if QUANT == 1:
        scale_rows = tl.cdiv(I, GROUP)
        gate_scale = ws_ptr + (expert * 2 * scale_rows + tile_n * BLOCK_N // GROUP) * blocks
        up_scale = gate_scale + scale_rows * blocks
    for block in range(0, blocks):
        k = block * BLOCK_K + depth
        x = _load_pairs(x_rows + block * BLOCK_K, k[None, :], D, real[:, None], EVEN_K)
        g = _load_weights(gate_rows + block * BLOCK_K, k[:, None], D, EVEN_K)
        u = _load_weights(up_rows + block * BLOCK_K, k[:, None], D, EVEN_K)
        if QUANT == 1:
            if WIDE:
                x, g, u = x.to(tl.bfloat16), g.to(tl.bfloat16), u.to(tl.bfloat16)
            s = tl.load(xs_ptr + token * blocks + block)
            zero = tl.zeros(SHAPE, tl.float32)
            gate += product_of(x, g, zero, SWAP) * along_pairs(s * tl.load(gate_scale + block), SWAP)
            up += product_of(x, u, zero, SWAP) * along_pairs(s * tl.load(up_scale + block), SWAP)
        else:
            gate, up = product_of(x, g, gate, SWAP), product_of(x, u, up, SWAP)
    if SWAP:
        gate, up = tl.trans(gate), tl.trans(up)
    if QUANT == 2:
        s = tl.load(xs_ptr + token)[:, None]
        gate_scale = tl.load(ws_ptr + expert * 2 * I + gate_row)
        up_scale = tl.load(ws_ptr + expert * 2 * I + up_row)
        gate = gate.to(tl.float32) * s * gate_scale[None, :]
        up = up.to(tl.float32) * s * up_scale[None, :]
    if HAS_BIAS:
        gate += tl.load(bias_ptr + expert * 2 * I + gate_row).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + expert * 2 * I + up_row).to(tl.float32)[None, :]
    inner = tl.where((column < I)[None, :], activation_of(gate, up, alpha, limit, OAI), 0.0)
    out = out_ptr + pair[:, None].to(tl.int64) * out_stride + column[None, :]
    if QUANT_OUT:  # BLOCK_N is one group
        codes, scale = quantize_tile(inner, eps, 448.0, UE8M0, False)
        tl.store(out, codes, mask=real[:, None] & (column < out_stride)[None, :])
        tl.store(out_scale_ptr + pair.to(tl.int64) * tl.cdiv(I, GROUP) + tile_n, scale, mask=real)
    else:
        tl.store(out, cast(inner, out_ptr.dtype.element_ty), mask=real[:, None] & (column < I)[None, :])


@kernel(do_not_specialize=("num_pairs", "tiles_m"))
def down_kernel(
    a_ptr, as_ptr, w_ptr, ws_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr,
    num_pairs, tiles_m, D, I, a_stride,
    QUANT: tl.constexpr, WIDE: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply the pairs' inner rows by the down projection, add the bias, weigh; fp32 rows of pairs."""
    tile_m, tile_n = program_tile(tiles_m, tl.cdiv(D, BLOCK_N), BAND)
    await_inputs(PDL)
    release_dependents(PDL)
    if tile_m * BLOCK_M >= tl.load(total_ptr):
        return
    expert = tl.load(expert_ptr + tile_m).to(tl.int64)
    pair = tl.load(sorted_ptr + tile_m * BLOCK_M + tl.arange(0, BLOCK_M))
    real = pair < num_pairs
    row = tl.where(real, pair, 0).to(tl.int64)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # A slot without a pair takes pair 0's scale, which may be dropped and never written: it is masked below.
    a_rows = a_ptr + row[:, None] * a_stride + depth[None, :]
    w_rows = w_ptr + expert * D * I + (column % D)[None, :] * I + depth[:, None]
    ACC: tl.constexpr = tl.int32 if QUANT == 2 else tl.float32
    SWAP: tl.constexpr = QUANT == 1 and BLOCK_M < 64 and BLOCK_N >= 64
    SHAPE: tl.constexpr = [BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N]
    acc = tl.zeros(SHAPE, ACC)
    blocks = tl.cdiv(I, BLOCK_K)
    if QUANT == 1:
        w_scale = ws_ptr + (expert * tl.cdiv(D, GROUP) + tile_n * BLOCK_N // GROUP) * blocks
    for block in range(0, blocks):
        k = block * BLOCK_K + depth
        a = _load_pairs(a_rows + block * BLOCK_K, k[None, :], I, real[:, None], EVEN_K)
        w = _load_weights(w_rows + block * BLOCK_K, k[:, None], I, EVEN_K)
        if QUANT == 1:
            if WIDE:
                a, w = a.to(tl.bfloat16), w.to(tl.bfloat16)
            s = tl.load(as_ptr + row * blocks + block)
            product = product_of(a, w, tl.zeros(SHAPE, tl.float32), SWAP)
            acc += product * along_pairs(s * tl.load(w_scale + block), SWAP)
        else:
            acc = product_of(a, w, acc, SWAP)
    if SWAP:
        acc = tl.trans(acc)
    if QUANT == 2:
        s = tl.load(as_ptr + row)[:, None]
        acc = acc.to(tl.float32) * s * tl.load(ws_ptr + expert * D + column % D)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * D + column % D).to(tl.float32)[None, :]
    weight = tl.load(weights_ptr + row)
    out = out_ptr + row[:, None] * D + column[None, :]
    tl.store(out, acc * weight[:, None], mask=real[:, None] & (column < D)[None, :])
