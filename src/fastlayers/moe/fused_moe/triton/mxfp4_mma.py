"""Products of MXFP4 weights with few tokens: a warp reads its operands as they lie in memory and multiplies itself.

Weights are in the layout of :mod:`fastlayers.moe.fused_moe.swizzle`: the 16 bytes that a thread copies are the left
operands of four m16n8k16 products, rows of an expert times 8 tokens. Nothing is exchanged between threads and nothing
transposed; decoding takes 15 instructions for 8 codes. Warps of a program take the steps of a tile in turns.

Every tensor of a product has the shape [R tiles, W warps, 32 lanes * 4], and the instructions are right only if a
thread holds the four numbers of its lane: ``tests/compile/test_swizzled_layout.py`` reads that from the compiled
kernels. Lane = 4·g + t; in a product's result the four numbers (b, n) of a lane belong to row 8·b + g of the tile and
token 2·t + n of the block. Tokens lie in memory with the columns (q, h, t, c) of each 32 in the order (t, q, h, c).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlayers.triton_lang import INTERPRET

# A code's bits times its scale's make a bf16 number that is 2^64 too small: one product, and scales up to 2^65 fit.
_FOLD = 64
MAX_SCALE = 128 + _FOLD
_UNFOLD = tl.constexpr(2.0**_FOLD)


def _product(blocks: int) -> tuple[tl.constexpr, tl.constexpr]:
    """Return the instructions of four products for ``blocks`` times 8 tokens, and their operands' constraints.

    Operands: results (4 a block), weights (4), the scales' bytes (1), sums so far (4 a block), tokens (8 a block).
    """
    outs, words = 4 * blocks, [f"${4 * blocks + i}" for i in range(4)]
    scales, sums = f"${outs + 4}", outs + 5
    tokens = sums + outs
    lines = [".reg .b32 a0, a1, a2, a3, u, v, m0, m1;", ".reg .b16 low, high;"]
    lines += [f".reg .f32 c{i};" for i in range(outs)]
    lines += [f"mov.f32 c{i}, ${sums + i};" for i in range(outs)]
    add = (126 - _FOLD) * 0x00800080
    for q, word in enumerate(words):
        if q % 2 == 0:
            # Both rows' bytes, as bf16's exponents; the multiplications below take one half of it twice.
            lines += [
                f"prmt.b32 u, {scales}, 0, {0x4140 + 0x202 * (q // 2):#x};",
                f"mad.lo.u32 u, u, 128, {add:#x};",
                "mov.b32 {low, high}, u;",
                "mov.b32 m0, {low, low};",
                "mov.b32 m1, {high, high};",
            ]
        lines += [
            f"and.b32 a0, {word}, 0x81C081C0;",
            f"shl.b32 u, {word}, 3;",
            "and.b32 a1, u, 0x81C081C0;",
            f"shl.b32 u, {word}, 6;",
            "and.b32 a2, u, 0x81C081C0;",
            f"shr.b32 u, {word}, 3;",
            "and.b32 u, u, 0x01800180;",
            f"shl.b32 v, {word}, 1;",
            "lop3.b32 u, v, 0x80008000, u, 0xEA;",
            f"shr.b32 v, {word}, 7;",
            "lop3.b32 a3, v, 0x00400040, u, 0xEA;",
            *(f"mul.bf16x2 a{i}, a{i}, m{i % 2};" for i in range(4)),
        ]
        for block in range(blocks):
            c = ", ".join(f"c{4 * block + i}" for i in range(4))
            pair = ", ".join(f"${tokens + 8 * block + 2 * q + i}" for i in range(2))
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{c}}}, {{a0, a1, a2, a3}}, {{{pair}}}, {{{c}}};"
            )
    lines += [f"mov.f32 ${i}, c{i};" for i in range(outs)]
    constraints = ["=f"] * outs + ["r"] * 5 + ["f"] * outs + ["r"] * (8 * blocks)
    text = "{\n" + "\n".join(lines) + "\n}"
    return tl.constexpr(text), tl.constexpr(",".join(constraints))


_CODE1, _OPERANDS1 = _product(1)
_CODE2, _OPERANDS2 = _product(2)


@triton.jit
def _value(code):
    """Return fp32 of codes that lie as in bf16: sign at bit 15, the rest at bits 8 to 6."""
    small = (code >> 6) & 7
    exponent, mantissa = small >> 1, (small & 1).to(tl.float32)
    size = tl.where(exponent == 0, mantissa * 0.5, (1.0 + mantissa * 0.5) * tl.exp2((exponent - 1).to(tl.float32)))
    return tl.where(((code >> 15) & 1) == 1, -size, size)


@triton.jit
def _halves(word):
    low = (word << 16).to(tl.float32, bitcast=True)
    high = (word & -65536).to(tl.float32, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _plain(word, scale, x0, x1, acc, R: tl.constexpr, W: tl.constexpr):
    """Do what the instructions do, in Triton's own words: for its interpreter."""
    fourth = ((word << 1) & 0x8000) | ((word >> 3) & 0x180) | ((word >> 7) & 0x40)
    upper = word >> 16
    above = ((upper << 1) & 0x8000) | ((upper >> 3) & 0x180) | ((upper >> 7) & 0x40)
    first = tl.join(tl.join(word, upper), tl.join(word << 6, upper << 6))  # [.., c, h]
    second = tl.join(tl.join(word << 3, upper << 3), tl.join(fourth, above))
    codes = tl.join(first, second)  # [R, W, 128, c, h, b]
    # Lanes and words are g, t, q' (halves of q), q".
    values = tl.reshape(_value(codes), [R, W, 8, 4, 2, 2, 2, 2, 2])
    bytes_ = tl.reshape(scale.to(tl.int32), [R, W, 8, 4, 2, 2])  # g, t, s, b
    power = tl.exp2((bytes_ - (127 + 64)).to(tl.float32))
    values = values * tl.reshape(power, [R, W, 8, 4, 2, 1, 1, 1, 2])
    weights = tl.reshape(tl.permute(values, (0, 1, 8, 2, 3, 4, 5, 7, 6)), [R * W, 1, 16, 64])  # b g | t q' q" h c
    tokens = tl.reshape(tl.join(_halves(x0), _halves(x1)), [R * W, 8, 4, 2, 2, 2, 2])  # n t q" h c q'
    tokens = tl.reshape(tl.permute(tokens, (0, 1, 2, 6, 3, 4, 5)), [R * W, 8, 1, 64])
    sums = tl.sum(weights * tokens, axis=3)  # [R * W, 8, 16]
    sums = tl.permute(tl.reshape(sums, [R, W, 4, 2, 2, 8]), (0, 1, 5, 2, 4, 3))  # g t b n
    return acc + tl.reshape(sums, [R, W, 128])


@triton.jit
def _step(word, scale, x0, x1, acc, R: tl.constexpr, W: tl.constexpr):
    if INTERPRET:
        return _plain(word, scale, x0, x1, acc, R, W)
    else:
        return tl.inline_asm_elementwise(
            _CODE1, _OPERANDS1, [word, scale, acc, x0, x1], dtype=tl.float32, is_pure=False, pack=4
        )


@triton.jit
def _two_steps(word, scale, x0, x1, y0, y1, acc0, acc1, R: tl.constexpr, W: tl.constexpr):
    if INTERPRET:
        return _plain(word, scale, x0, x1, acc0, R, W), _plain(word, scale, y0, y1, acc1, R, W)
    else:
        return tl.inline_asm_elementwise(
            _CODE2, _OPERANDS2, [word, scale, acc0, acc1, x0, x1, y0, y1], dtype=(tl.float32, tl.float32),
            is_pure=False, pack=4,
        )  # fmt: skip


@triton.jit
def _zeros(pointers, W: tl.constexpr):
    """Return zeros that lie as the numbers of ``pointers`` do where they are loaded: four neighbours a thread."""
    if INTERPRET:
        return tl.zeros([1, W, 128], tl.int32)
    else:
        # The assembler sees that the load is not needed; Triton does not, and keeps its layout.
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0;", "=r,r", [tl.load(pointers)], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _tokens(pointers, mask, R: tl.constexpr, W: tl.constexpr, ASYNC: tl.constexpr):
    """Return words of tokens; not ASYNC: through L1, where the programs of an expert find them."""
    if ASYNC or INTERPRET:
        words = tl.load(pointers, mask=mask, other=0)
    else:
        words = tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.b32 p, $8, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
            " @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4];}",
            "=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r", [pointers, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=4,
        )  # fmt: skip
    return tl.broadcast_to(words, [R, W, 128])


@triton.jit
def ask(w_ptr, s_ptr, tile, LENGTH: tl.constexpr, W: tl.constexpr):
    """Return all codes and scales of tiles ``[R,1,1]`` over LENGTH columns, a tuple each: all are on their way."""
    STEPS: tl.constexpr = (LENGTH + 63) // 64
    warp = tl.arange(0, W)[None, :, None]
    e = tl.arange(0, 128)[None, None, :]
    words = w_ptr + (tile * 4 + e // 32) * ((LENGTH + 127) // 128 * 64) + e % 32
    scales = s_ptr + (tile // 16 * 8 + tile % 8) * (STEPS * 64) + tile // 8 % 2 * 32 + e // 16 * 4 + e % 4
    held = ()
    held_scales = ()
    for start in tl.static_range(0, STEPS, W):
        step = start + warp
        held = held + (tl.load(words + step * 32, mask=step < STEPS, other=0),)  # type: ignore[assignment]
        held_scales = held_scales + (tl.load(scales + step * 64, mask=step < STEPS, other=0),)  # type: ignore[assignment]
    return held, held_scales


@triton.jit
def multiply_held(
    held, held_scales, x_ptr, row, w_ptr, LENGTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Do what :func:`multiply` does with what :func:`ask` returned, in the same order: one block of rows of x."""
    STEPS: tl.constexpr = (LENGTH + 63) // 64
    HALVES: tl.constexpr = LENGTH // 32
    warp = tl.arange(0, W)[None, :, None]
    e = tl.arange(0, 128)[None, None, :]
    zeros = _zeros(w_ptr + warp * 128 + e, W)
    x_rows = x_ptr + row.to(tl.int64) * (LENGTH // 2) + e % 16 + zeros
    acc = tl.broadcast_to(zeros.to(tl.float32, bitcast=True), [R, W, 128])
    for i in tl.static_range((STEPS + W - 1) // W):
        step = i * W + warp
        x0 = _tokens(x_rows + step * 32, step < STEPS, R, W, False)
        x1 = _tokens(x_rows + step * 32 + 16, step * 2 + 1 < HALVES, R, W, False)
        acc = _step(held[i], held_scales[i], x0, x1, acc, R, W)
    return tl.sum(acc, axis=1) * _UNFOLD


@triton.jit
def multiply(
    x_ptr, row0, row1, w_ptr, s_ptr, tile, LENGTH: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, ASYNC: tl.constexpr,
):  # fmt: skip
    """Return sums over LENGTH columns of tiles ``[R,1,1]`` with rows ``[1,1,128]`` of x, two blocks if WIDE.

    Their shape is ``[R, 128]``.
    """
    STEPS: tl.constexpr = (LENGTH + 63) // 64
    HALVES: tl.constexpr = LENGTH // 32
    warp = tl.arange(0, W)[None, :, None]
    e = tl.arange(0, 128)[None, None, :]
    words = w_ptr + (tile * 4 + e // 32) * ((LENGTH + 127) // 128 * 64) + e % 32
    scales = s_ptr + (tile // 16 * 8 + tile % 8) * (STEPS * 64) + tile // 8 % 2 * 32 + e // 16 * 4 + e % 4
    zeros = _zeros(w_ptr + warp * 128 + e, W)
    x_rows = x_ptr + row0.to(tl.int64) * (LENGTH // 2) + e % 16
    y_rows = x_ptr + row1.to(tl.int64) * (LENGTH // 2) + e % 16
    if not ASYNC:
        x_rows, y_rows = x_rows + zeros, y_rows + zeros
    acc0 = tl.broadcast_to(zeros.to(tl.float32, bitcast=True), [R, W, 128])
    acc1 = acc0
    for start in tl.range(0, STEPS, W, num_stages=STAGES):
        step = start + warp
        inside, more = step < STEPS, step * 2 + 1 < HALVES
        word = tl.load(words + step * 32, mask=inside, other=0)
        scale = tl.load(scales + step * 64, mask=inside, other=0)
        x0 = _tokens(x_rows + step * 32, inside, R, W, ASYNC)
        x1 = _tokens(x_rows + step * 32 + 16, more, R, W, ASYNC)
        if WIDE:
            y0 = _tokens(y_rows + step * 32, inside, R, W, ASYNC)
            y1 = _tokens(y_rows + step * 32 + 16, more, R, W, ASYNC)
            acc0, acc1 = _two_steps(word, scale, x0, x1, y0, y1, acc0, acc1, R, W)
        else:
            acc0 = _step(word, scale, x0, x1, acc0, R, W)
    return tl.sum(acc0, axis=1) * _UNFOLD, tl.sum(acc1, axis=1) * _UNFOLD
