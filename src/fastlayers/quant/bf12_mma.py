"""Products of bfloat16 weights of 12 bits with few tokens: a warp reads its operands as they lie, and multiplies.

Weights are those of :mod:`fastlayers.quant.bf12`: the three times 16 bytes that a thread copies are the left
operands of four m16n8k16 products, 16 rows times 64 columns of weights times 8 tokens. Nothing is exchanged between
threads; decoding takes 13 instructions for 8 weights. The right operand is 32 bytes of a row of x, as they lie.

Every tensor of a product has the shape [R tiles, W warps, 32 lanes * 4], and the instructions are right only if a
thread holds the four numbers of its lane: ``tests/compile/test_bf12_layout.py`` reads that from the compiled
kernels. Lane = 4·g + t; in a product's result the four numbers (b, n) of a lane belong to row 8·b + g of the tile and
token 2·t + n of the block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlayers.quant.bf12 import EXPONENTS, RAISED, SIGNS_AND_MANTISSAS
from fastlayers.triton_lang import INTERPRET


def _decode() -> tuple[tl.constexpr, tl.constexpr]:
    """Return the instructions that make the left operands of four products of a lane's words, and their constraints.

    Results: four registers of an operand, of each of four products. Operands: words of row g, of row g + 8, of codes.
    """
    lines = [".reg .b32 u, v;"]
    for q in range(4):
        for i in range(4):
            b, h = i % 2, i // 2
            signs, codes = f"${16 + 4 * b + q}", f"${24 + 2 * b + q // 2}"
            left = 4 * (2 * (q % 2) + h)
            if left:
                lines.append(f"shf.l.wrap.b32 u, {codes}, {codes}, {left};")
            lines.append(f"and.b32 u, {'u' if left else codes}, {EXPONENTS:#x};")
            if h:
                lines.append(f"shf.l.wrap.b32 v, {signs}, {signs}, 8;")
            lines.append(f"lop3.b32 ${4 * i + q}, {'v' if h else signs}, {SIGNS_AND_MANTISSAS:#x}, u, 0xEA;")
    return tl.constexpr("{\n" + "\n".join(lines) + "\n}"), tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 12))


def _products() -> tuple[tl.constexpr, tl.constexpr]:
    """Return the instructions of four products with eight tokens, and their constraints.

    Results: four sums. Operands: four registers of each product's left operand, sums so far, two times 16 bytes of x.
    """
    lines = [".reg .f32 c0, c1, c2, c3;"] + [f"mov.f32 c{i}, ${20 + i};" for i in range(4)]
    c = "{c0, c1, c2, c3}"
    for q in range(4):
        a = ", ".join(f"${4 + 4 * i + q}" for i in range(4))
        b = f"${24 + 2 * q}, ${25 + 2 * q}"
        lines.append(f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {c}, {{{a}}}, {{{b}}}, {c};")
    lines += [f"mov.f32 ${i}, c{i};" for i in range(4)]
    constraints = ["=f"] * 4 + ["r"] * 16 + ["f"] * 4 + ["r"] * 8
    return tl.constexpr("{\n" + "\n".join(lines) + "\n}"), tl.constexpr(",".join(constraints))


_DECODE, _DECODE_OPERANDS = _decode()
_PRODUCTS, _PRODUCT_OPERANDS = _products()
_SIGNS, _EXPONENTS = tl.constexpr(SIGNS_AND_MANTISSAS - (1 << 32)), tl.constexpr(EXPONENTS)
_RAISED = tl.constexpr(2.0**RAISED)
# Both halves of a word times 2^64.
_RAISE = tl.constexpr(
    f"{{.reg .b32 m; mov.b32 m, {((127 + RAISED) << 7) * 0x00010001:#x}; mul.rn.bf16x2 $0, $1, m;}}"
)


@triton.jit
def _turned(words, LEFT: tl.constexpr):
    return (words << LEFT) | ((words >> (32 - LEFT)) & ((1 << LEFT) - 1))


@triton.jit
def _left(signs, codes):
    return (signs & _SIGNS) | (codes & _EXPONENTS)


@triton.jit
def decoded(first, second, codes, SHAPE: tl.constexpr):
    """Return four registers of left operands, of four products each, of words ``[…, 128]``."""
    if INTERPRET:
        # Codes of row g, and of row g + 8, where the products' words are: two each.
        halves = tl.reshape(codes, [SHAPE[0], SHAPE[1], 32, 2, 2])
        rows = tl.split(tl.permute(halves, (0, 1, 2, 4, 3)))
        found = ()
        for i in tl.static_range(4):
            mine = rows[i % 2]
            word = tl.reshape(tl.join(mine, _turned(mine, 8)), [SHAPE[0], SHAPE[1], 128])
            signs = first if i % 2 == 0 else second
            if i // 2 == 0:
                found = found + (_left(signs, word),)
            else:
                found = found + (_left(_turned(signs, 8), _turned(word, 4)),)
        return found
    else:
        return tl.inline_asm_elementwise(
            _DECODE, _DECODE_OPERANDS, [first, second, codes],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def _numbers(word):
    low = (word << 16).to(tl.float32, bitcast=True)
    high = (word & -65536).to(tl.float32, bitcast=True)
    return tl.join(low, high)


@triton.jit
def multiplied(a, x0, x1, acc, SHAPE: tl.constexpr):
    """Return ``acc`` with the products of decoded weights and eight tokens' raised words added."""
    if INTERPRET:
        R: tl.constexpr = SHAPE[0]
        W: tl.constexpr = SHAPE[1]
        # [R, W, (g t q), h, b, c] to rows (b g) and columns (q // 2, t, q % 2, h, c).
        pairs = tl.join(tl.join(a[0], a[2]), tl.join(a[1], a[3]))  # [R, W, 128, h, b]
        weights = tl.reshape(_numbers(pairs), [R * W, 8, 4, 2, 2, 2, 2, 2])  # g t q/2 q%2 h b c
        weights = tl.reshape(tl.permute(weights, (0, 6, 1, 3, 2, 4, 5, 7)), [R * W, 1, 16, 64])
        tokens = tl.join(_numbers(x0), _numbers(x1))  # [R, W, (n t q%2 h), c, q/2]
        tokens = tl.reshape(tokens, [R * W, 8, 4, 4, 2, 2])  # n t (q%2 h) c q/2
        tokens = tl.reshape(tl.permute(tokens, (0, 1, 5, 2, 3, 4)), [R * W, 8, 1, 64])
        sums = tl.sum(weights * tokens, axis=3)  # [R * W, 8, 16]
        sums = tl.permute(tl.reshape(sums, [R, W, 4, 2, 2, 8]), (0, 1, 5, 2, 4, 3))  # g t b n
        return acc + tl.reshape(sums, [R, W, 128])
    else:
        return tl.inline_asm_elementwise(
            _PRODUCTS, _PRODUCT_OPERANDS, [a[0], a[1], a[2], a[3], acc, x0, x1],
            dtype=tl.float32, is_pure=False, pack=4,
        )  # fmt: skip


@triton.jit
def zeros_of(pointers, SHAPE: tl.constexpr):
    """Return zeros that lie as the numbers of ``pointers`` do where they are loaded: four neighbours a thread."""
    if INTERPRET:
        return tl.zeros([1, SHAPE[1], 128], tl.int32)
    else:
        # The assembler sees that the load is not needed; Triton does not, and keeps its layout.
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0;", "=r,r", [tl.load(pointers)], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _words_of(pointers, inside, ORDERED: tl.constexpr, SHAPE: tl.constexpr):
    """Return words of tokens ``[1, W, 128]``, four a thread, through L1; zeros where not inside.

    They are raised by 2^64, unless ORDERED: then they have been.
    """
    if INTERPRET:
        word = tl.load(pointers, mask=inside, other=0)
        if ORDERED:
            return word
        both = _numbers(word) * _RAISED
        low, high = tl.split(both.to(tl.bfloat16).to(tl.float32).to(tl.int32, bitcast=True))
        return ((low >> 16) & 0xFFFF) | (high & -65536)
    else:
        words = tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.b32 p, $8, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
            " @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4];}",
            "=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r", [pointers, tl.broadcast_to(inside, [1, SHAPE[1], 128]).to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=4,
        )  # fmt: skip
        if ORDERED:
            return words
        else:
            return tl.inline_asm_elementwise(_RAISE, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _ask_step(words, step, STEPS: tl.constexpr):
    inside, place = step < STEPS, words + step * 384
    first = tl.load(place, mask=inside, other=0, eviction_policy="evict_first")
    second = tl.load(place + 128, mask=inside, other=0, eviction_policy="evict_first")
    return first, second, tl.load(place + 256, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def ask(w_ptr, tile, STEPS: tl.constexpr, SHARES: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr):
    """Return where words of tiles ``[R, W, 1]`` lie, and the first AHEAD turns' words.

    A warp's steps are each SHARES-th one; ``W`` warps are SHARES of each group of rows.
    """
    share = tl.arange(0, W)[None, :, None] % SHARES
    words = w_ptr + tile.to(tl.int64) * (STEPS * 384) + tl.arange(0, 128)[None, None, :]
    held = ()
    for i in tl.static_range(AHEAD):
        held = held + (_ask_step(words, i * SHARES + share, STEPS),)  # type: ignore[assignment]
    return words, held


@triton.jit
def _turn(
    held, x_rows, step, accs, STEPS: tl.constexpr, BLOCKS: tl.constexpr, ORDERED: tl.constexpr, SHAPE: tl.constexpr
):
    """Return the sums with a step's products added."""
    # Words of x from a step to the next, and from its first 32 columns to its last.
    STRIDE: tl.constexpr = 256 if ORDERED else 32
    a = decoded(held[0], held[1], held[2], SHAPE)
    added = ()
    for block in tl.static_range(BLOCKS):
        at = x_rows[block] + step * STRIDE
        x0 = _words_of(at, step < STEPS, ORDERED, SHAPE)
        x1 = _words_of(at + STRIDE // 2, step < STEPS, ORDERED, SHAPE)
        x0, x1 = tl.broadcast_to(x0, [SHAPE[0], SHAPE[1], 128]), tl.broadcast_to(x1, [SHAPE[0], SHAPE[1], 128])
        added = added + (multiplied(a, x0, x1, accs[block], SHAPE),)  # type: ignore[assignment]
    return added


@triton.jit
def multiply(
    words, held, x_rows, w_ptr, STEPS: tl.constexpr, R: tl.constexpr, SHARES: tl.constexpr, W: tl.constexpr,
    BLOCKS: tl.constexpr, AHEAD: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Return sums ``[R, W, 128]`` over each warp's columns, of each of BLOCKS blocks of eight tokens.

    ``x_rows``: BLOCKS pointers ``[1, W, 128]`` to words of lanes' tokens: rows of x, or what :func:`order` wrote.
    """
    SHAPE: tl.constexpr = (R, W)
    TURNS: tl.constexpr = (STEPS + SHARES - 1) // SHARES
    share = tl.arange(0, W)[None, :, None] % SHARES
    e = tl.arange(0, 128)[None, None, :]
    zeros = zeros_of(w_ptr + tl.arange(0, W)[None, :, None] * 128 + e, SHAPE)
    places = ()
    accs = ()
    for block in tl.static_range(BLOCKS):
        places = places + (x_rows[block] + ((e if ORDERED else e % 16) + zeros),)  # type: ignore[assignment]
        accs = accs + (tl.broadcast_to(zeros.to(tl.float32, bitcast=True), [R, W, 128]),)  # type: ignore[assignment]
    if TURNS <= 8:
        for i in tl.static_range(TURNS):
            if i + AHEAD < TURNS:
                held = held + (_ask_step(words, (i + AHEAD) * SHARES + share, STEPS),)
            accs = _turn(held[i], places, i * SHARES + share, accs, STEPS, BLOCKS, ORDERED, SHAPE)
    else:
        for start in tl.range(0, TURNS, AHEAD, num_stages=1):
            following = ()
            for i in tl.static_range(AHEAD):
                step = (start + i) * SHARES + share
                following = following + (_ask_step(words, step + AHEAD * SHARES, STEPS),)  # type: ignore[assignment]
                accs = _turn(held[i], places, step, accs, STEPS, BLOCKS, ORDERED, SHAPE)
            held = following
    return accs


@triton.jit
def summed(sums, R: tl.constexpr, SHARES: tl.constexpr, W: tl.constexpr):
    """Return sums ``[R * W / SHARES * 16, 8]`` of rows and tokens over the warps that share tiles."""
    TILES: tl.constexpr = R * (W // SHARES)
    if SHARES > 1:
        sums = tl.sum(tl.reshape(sums, [TILES, SHARES, 128]), axis=1)
    lanes = tl.reshape(sums, [TILES, 8, 4, 2, 2])  # g t b n
    return tl.reshape(tl.permute(lanes, (0, 3, 1, 2, 4)), [TILES * 16, 8])


@triton.jit
def order(x_ptr, out_ptr, row, place, x_stride, width):
    """Write a row of x, raised, as lanes read it: of blocks of eight rows, 32 columns of each row after the other."""
    row, inside = row.to(tl.int64), place < width
    x = tl.load(x_ptr + row * x_stride + place, mask=inside, other=0.0).to(tl.float32) * _RAISED
    target = out_ptr + row // 8 * (width * 8) + place // 32 * 256 + row % 8 * 32 + place % 32
    tl.store(target, x.to(tl.bfloat16), mask=inside)
