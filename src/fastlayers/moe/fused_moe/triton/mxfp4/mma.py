"""Products of MXFP4 weights with few tokens: a warp reads its operands as they lie in memory and multiplies itself.

Weights are in the layout of :mod:`fastlayers.moe.fused_moe.swizzle`: the 16 bytes that a thread copies are the left
operands of four m16n8k16 products, rows of an expert times 8 tokens. Nothing is exchanged between threads and nothing
transposed; decoding takes 15 instructions for 8 codes. How warps share it: ``mxfp4/hopper.py``, ``mxfp4/rows.py``;
for ``mxfp4/wgmma.py`` the same instructions decode.

Every tensor of a product has the shape [R tiles, W warps, 32 lanes * 4], and the instructions are right only if a
thread holds the four numbers of its lane: ``tests/compile/test_swizzled_layout.py`` reads that from the compiled
kernels. Lane = 4·g + t; in a product's result the four numbers (b, n) of a lane belong to row 8·b + g of the tile and
token 2·t + n of the block. Tokens lie in memory with the columns (q, h, t, c) of each 32 in the order (t, q, h, c).
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from fastlayers.moe.fused_moe.triton.activation import activation_of
from fastlayers.triton_lang import INTERPRET

# A code's bits times its scale's make a bf16 number that is 2^64 too small: one product, and scales up to 2^65 fit.
_FOLD = 64
MAX_SCALE = 128 + _FOLD
UNFOLD = tl.constexpr(2.0**_FOLD)


def _decode(q: int, word: str, bytes_: str, a: Sequence[str]) -> list[str]:
    """Return the instructions that make the left operand ``a`` of the q-th of four products, of a word of codes.

    ``bytes_``: of the scales, four in a word. Written besides: u, v, low, high; m0, m1 for the next one.
    """
    lines = []
    if q % 2 == 0:
        # Both rows' bytes, as bf16's exponents; the multiplications below take one half of it twice.
        lines += [
            f"prmt.b32 u, {bytes_}, 0, {0x4140 + 0x202 * (q // 2):#x};",
            f"mad.lo.u32 u, u, 128, {(126 - _FOLD) * 0x00800080:#x};",
            "mov.b32 {low, high}, u;",
            "mov.b32 m0, {low, low};",
            "mov.b32 m1, {high, high};",
        ]
    return [
        *lines,
        f"and.b32 {a[0]}, {word}, 0x81C081C0;",
        f"shl.b32 u, {word}, 3;",
        f"and.b32 {a[1]}, u, 0x81C081C0;",
        f"shl.b32 u, {word}, 6;",
        f"and.b32 {a[2]}, u, 0x81C081C0;",
        # The fourth: bits 11 and 10 go 3 down and bit 13 goes 7 down, both as the upper half of one product: a
        # multiplication is not for the pipe of half the rate that all the rest keeps busy, as shifts down are.
        f"and.b32 u, {word}, 0x2C002C00;",
        "mul.hi.u32 u, u, 0x22000000;",
        f"shl.b32 v, {word}, 1;",
        "and.b32 v, v, 0x80008000;",
        f"lop3.b32 {a[3]}, u, 0x01C001C0, v, 0xEA;",
        *(f"mul.bf16x2 {each}, {each}, m{i % 2};" for i, each in enumerate(a)),
    ]


def product_of(blocks: int, scales: int) -> tuple[tl.constexpr, tl.constexpr]:
    """Return the instructions of four products for ``blocks`` times 8 tokens, and their operands' constraints.

    Operands: results (4 a block), weights (4), the scales' four bytes (``scales`` words, of which the first has them),
    sums so far (4 a block), tokens (8 a block).
    """
    outs, words = 4 * blocks, [f"${4 * blocks + i}" for i in range(4)]
    bytes_, sums = f"${outs + 4}", outs + 4 + scales
    tokens = sums + outs
    lines = [".reg .b32 a0, a1, a2, a3, u, v, m0, m1;", ".reg .b16 low, high;"]
    lines += [f".reg .f32 c{i};" for i in range(outs)]
    lines += [f"mov.f32 c{i}, ${sums + i};" for i in range(outs)]
    for q, word in enumerate(words):
        lines += _decode(q, word, bytes_, ("a0", "a1", "a2", "a3"))
        for block in range(blocks):
            c = ", ".join(f"c{4 * block + i}" for i in range(4))
            pair = ", ".join(f"${tokens + 8 * block + 2 * q + i}" for i in range(2))
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{c}}}, {{a0, a1, a2, a3}}, {{{pair}}}, {{{c}}};"
            )
    lines += [f"mov.f32 ${i}, c{i};" for i in range(outs)]
    constraints = ["=f"] * outs + ["r"] * (4 + scales) + ["f"] * outs + ["r"] * (8 * blocks)
    text = "{\n" + "\n".join(lines) + "\n}"
    return tl.constexpr(text), tl.constexpr(",".join(constraints))


def left_operand() -> tuple[tl.constexpr, tl.constexpr]:
    """Return the instructions that decode a lane's four words for ``wgmma``, and their operands' constraints.

    Results 4·(q % 2) + 2·h + b, two values (c) each of q // 2 = 0 and 1: so a register is one of the operand's. Then
    the words, and the scales' four bytes in the first of four.
    """
    lines = [".reg .b32 u, v, m0, m1;", ".reg .b16 low, high;"]
    for q in range(4):
        lines += _decode(q, f"${16 + q}", "$20", [f"${2 * (4 * (q % 2) + i) + q // 2}" for i in range(4)])
    text = "{\n" + "\n".join(lines) + "\n}"
    return tl.constexpr(text), tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 8))


_CODE1, _OPERANDS1 = product_of(1, 1)
CODES, OPERANDS = zip(*(product_of(blocks, 4) for blocks in (1, 2, 3, 4)), strict=True)
_CODE1W, _OPERANDS1W = CODES[0], OPERANDS[0]


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
def plain(word, scale, x0, x1, acc, R: tl.constexpr, W: tl.constexpr):
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
        return plain(word, scale, x0, x1, acc, R, W)
    else:
        return tl.inline_asm_elementwise(
            _CODE1, _OPERANDS1, [word, scale, acc, x0, x1], dtype=tl.float32, is_pure=False, pack=4
        )


@triton.jit
def zeros_of(pointers, W: tl.constexpr):
    """Return zeros that lie as the numbers of ``pointers`` do where they are loaded: four neighbours a thread."""
    if INTERPRET:
        return tl.zeros([1, W, 128], tl.int32)
    else:
        # The assembler sees that the load is not needed; Triton does not, and keeps its layout.
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0;", "=r,r", [tl.load(pointers)], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def tokens_of(pointers, inside, W: tl.constexpr):
    """Return words of tokens ``[1, W, 128]``, four a thread, through L1; zeros where not inside."""
    if INTERPRET:
        return tl.load(pointers, mask=inside, other=0)
    else:
        return tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.b32 p, $8, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
            " @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4];}",
            "=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r", [pointers, tl.broadcast_to(inside, [1, W, 128]).to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=4,
        )  # fmt: skip


@triton.jit
def scales_of(pointers, inside, W: tl.constexpr):
    """Return a thread's four scales ``[1, W, 128]`` in the first of its four words; none where not inside.

    As bytes they would be taken apart and put together again, which costs as much as decoding a word of codes.
    """
    if INTERPRET:
        return tl.load(pointers, mask=inside, other=0)
    else:
        return tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.b32 p, $8, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
            " @p ld.global.b32 $0, [$4];}",
            "=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r", [pointers, tl.broadcast_to(inside, [1, W, 128]).to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=4,
        )  # fmt: skip


@triton.jit
def _step_by_words(word, scale, x0, x1, acc, R: tl.constexpr, W: tl.constexpr):
    """As ``_step``, the scales as :func:`scales_of` returns them."""
    if INTERPRET:
        return plain(word, scale, x0, x1, acc, R, W)
    else:
        return tl.inline_asm_elementwise(
            _CODE1W, _OPERANDS1W, [word, scale, acc, x0, x1], dtype=tl.float32, is_pure=False, pack=4
        )


@triton.jit
def _ask_step(words, scales, step, STEPS: tl.constexpr, W: tl.constexpr):
    return tl.load(words + step * 32, mask=step < STEPS, other=0), scales_of(scales + step * 64, step < STEPS, W)


@triton.jit
def ask(w_ptr, s_ptr, tile, LENGTH: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr):
    """Return where codes and scales of tiles ``[R,1,1]`` lie, and of a warp's first AHEAD steps a tuple each."""
    STEPS: tl.constexpr = (LENGTH + 63) // 64
    warp = tl.arange(0, W)[None, :, None]
    e = tl.arange(0, 128)[None, None, :]
    words = w_ptr + (tile * 4 + e // 32) * ((LENGTH + 127) // 128 * 64) + e % 32
    scales = s_ptr + (tile // 16 * 8 + tile % 8) * (STEPS * 64) + tile // 8 % 2 * 32 + e // 16 * 4 + e % 4
    held = ()
    held_scales = ()
    for i in tl.static_range(AHEAD):
        word, scale = _ask_step(words, scales, i * W + warp, STEPS, W)
        held = held + (word,)  # type: ignore[assignment]
        held_scales = held_scales + (scale,)  # type: ignore[assignment]
    return words, scales, held, held_scales


@triton.jit
def multiply_held(
    words, scales, held, held_scales, x_ptr, row, w_ptr, LENGTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Do what :func:`multiply` does with what :func:`ask` returned, in the same order: one block of rows of x."""
    STEPS: tl.constexpr = (LENGTH + 63) // 64
    HALVES: tl.constexpr = LENGTH // 32
    TURNS: tl.constexpr = (STEPS + W - 1) // W
    warp = tl.arange(0, W)[None, :, None]
    e = tl.arange(0, 128)[None, None, :]
    zeros = zeros_of(w_ptr + warp * 128 + e, W)
    x_rows = x_ptr + row.to(tl.int64) * (LENGTH // 2) + e % 16 + zeros
    acc = tl.broadcast_to(zeros.to(tl.float32, bitcast=True), [R, W, 128])
    for i in tl.static_range(TURNS):
        step = i * W + warp
        if i + AHEAD < TURNS:
            word, scale = _ask_step(words, scales, step + AHEAD * W, STEPS, W)
            held = held + (word,)
            held_scales = held_scales + (scale,)
        x0 = tl.broadcast_to(tokens_of(x_rows + step * 32, step < STEPS, W), [R, W, 128])
        x1 = tl.broadcast_to(tokens_of(x_rows + step * 32 + 16, step * 2 + 1 < HALVES, W), [R, W, 128])
        acc = _step_by_words(held[i], held_scales[i], x0, x1, acc, R, W)
    return tl.sum(acc, axis=1) * UNFOLD


@triton.jit
def multiply(
    x_ptr, row, w_ptr, s_ptr, tile, LENGTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr
):
    """Return sums ``[R, 128]`` over LENGTH columns of tiles ``[R,1,1]`` with rows ``[1,1,128]`` of x."""
    STEPS: tl.constexpr = (LENGTH + 63) // 64
    HALVES: tl.constexpr = LENGTH // 32
    warp = tl.arange(0, W)[None, :, None]
    e = tl.arange(0, 128)[None, None, :]
    words = w_ptr + (tile * 4 + e // 32) * ((LENGTH + 127) // 128 * 64) + e % 32
    scales = s_ptr + (tile // 16 * 8 + tile % 8) * (STEPS * 64) + tile // 8 % 2 * 32 + e // 16 * 4 + e % 4
    zeros = zeros_of(w_ptr + warp * 128 + e, W)
    x_rows = x_ptr + row.to(tl.int64) * (LENGTH // 2) + e % 16 + zeros
    acc = tl.broadcast_to(zeros.to(tl.float32, bitcast=True), [R, W, 128])
    for start in tl.range(0, STEPS, W, num_stages=STAGES):
        step = start + warp
        inside = step < STEPS
        word = tl.load(words + step * 32, mask=inside, other=0)
        scale = tl.load(scales + step * 64, mask=inside, other=0)
        x0 = tl.broadcast_to(tokens_of(x_rows + step * 32, inside, W), [R, W, 128])
        x1 = tl.broadcast_to(tokens_of(x_rows + step * 32 + 16, step * 2 + 1 < HALVES, W), [R, W, 128])
        acc = _step(word, scale, x0, x1, acc, R, W)
    return tl.sum(acc, axis=1) * UNFOLD


@triton.jit
def inner_columns(tile):
    """Return the inner columns of tiles ``[R, 1]`` of gate and up rows, ``[R, 64]``: (g // 2, t, b, n)."""
    f = tl.arange(0, 64)[None, :]
    return tile * 8 + f // 2 % 2 * 4 + f // 16


@triton.jit
def inner_bias(bias_ptr, tile, INNER: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return the biases of gate and up rows of tiles ``[R, 1]``."""
    column = inner_columns(tile)
    if HAS_BIAS:
        gate = tl.load(bias_ptr + column * 2, mask=column < INNER, other=0.0)
        return gate, tl.load(bias_ptr + column * 2 + 1, mask=column < INNER, other=0.0)
    else:
        return 0.0, 0.0


@triton.jit
def inner_of(both, bias, alpha, limit, R: tl.constexpr):
    """Apply bias and activation to ``both`` ``[R, 128]``, gate and up rows in turns."""
    turned = tl.permute(tl.reshape(both, [R, 4, 2, 16]), (0, 1, 3, 2))
    gate, up = tl.split(turned)
    gate, up = tl.reshape(gate, [R, 64]) + bias[0], tl.reshape(up, [R, 64]) + bias[1]
    return activation_of(gate, up, alpha, limit, True)


@triton.jit
def place_of(column):
    """Return where a column of a block of 32, (q, h, t, c), lies: (t, q, h, c)."""
    return column % 8 // 2 * 8 + column // 8 % 4 * 2 + column % 2


@triton.jit
def column_at(place):
    """Return which column lies at a place of all."""
    return place // 32 * 32 + place // 2 % 4 * 8 + place // 8 % 4 * 2 + place % 2
