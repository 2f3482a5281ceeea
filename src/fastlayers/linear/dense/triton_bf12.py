"""The product of up to 32 rows with weights of 12 bits (``quant/bf12.py``), by the tensor cores' own operands.

A program has R times WARPS / SHARES tiles of 16 outputs; SHARES warps take a tile's columns in turns, 64 at a time, and
are added at the end. The first AHEAD turns' weights, and a row's outliers, are asked for before the wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlayers.quant.bf12_mma import ask, multiply, order, summed
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, release_dependents


@kernel
def bf12_kernel(
    x_ptr, ordered_ptr, beside_ptr, words_ptr, scale_ptr, columns_ptr, values_ptr, bias_ptr, y_ptr, M, N, x_stride,
    STEPS: tl.constexpr, HAS_BIAS: tl.constexpr, OUTLIERS: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr,
    SHARES: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr, ORDERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply tiles of 16 rows of the weight by the ``M`` (of at most 8 · BLOCKS) rows of x.

    ORDERED: rows of x lie in ``ordered_ptr`` as :func:`order_kernel` wrote them, and what outliers add in
    ``beside_ptr``; else there is one block.
    """
    PARTS: tl.constexpr = W // SHARES
    TILES: tl.constexpr = R * PARTS
    first, last = tl.program_id(0) * TILES, N // 16 - 1
    # Tiles beyond the edge read the last one again; their results are never stored.
    tile = first + tl.arange(0, R)[:, None, None] * PARTS + tl.arange(0, W)[None, :, None] // SHARES
    words, held = ask(words_ptr, tl.minimum(tile, last), STEPS, SHARES, W, AHEAD)
    column = first * 16 + tl.arange(0, TILES * 16)
    row, known = tl.minimum(column, N - 1), column < N
    scale = tl.load(scale_ptr + row)
    bias = tl.zeros([TILES * 16], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + row).to(tl.float32)
    e, n = tl.arange(0, 128)[None, None, :], tl.arange(0, 8)
    if not ORDERED:
        place = row[:, None] * OUTLIERS + tl.arange(0, OUTLIERS)[None, :]
        outlying, values = tl.load(columns_ptr + place), tl.load(values_ptr + place)
    await_inputs(PDL)
    release_dependents(PDL)
    x_rows = ()
    if ORDERED:
        for block in tl.static_range(BLOCKS):
            x_rows = x_rows + (ordered_ptr.to(tl.pointer_type(tl.int32)) + block * (STEPS * 256),)  # type: ignore
    else:
        token = tl.minimum(e // 16, M - 1).to(tl.int64)
        x_rows = x_rows + (x_ptr.to(tl.pointer_type(tl.int32)) + token * (x_stride // 2),)  # type: ignore
        token = tl.minimum(n, M - 1).to(tl.int64)
        gathered = tl.load(x_ptr + token[None, :, None] * x_stride + outlying[:, None, :])
    found = multiply(words, held, x_rows, words_ptr, STEPS, R, SHARES, W, BLOCKS, AHEAD, ORDERED)
    for block in tl.static_range(BLOCKS):
        token = block * 8 + n
        target = token.to(tl.int64)[None, :] * N + column[:, None]
        inside = known[:, None] & (token < M)[None, :]
        y = summed(found[block], R, SHARES, W) * scale[:, None] + bias[:, None]
        if ORDERED:
            y += tl.load(beside_ptr + target, mask=inside, other=0.0)
        else:
            y += tl.sum(gathered.to(tl.float32) * values.to(tl.float32)[:, None, :], axis=2)
        tl.store(y_ptr + target, cast(y, y_ptr.dtype.element_ty), mask=inside)


@kernel
def order_kernel(
    x_ptr, ordered_ptr, beside_ptr, columns_ptr, values_ptr, M, N, x_stride, width,
    OUTLIERS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write rows of x as :func:`bf12_kernel` reads them, or what outliers of BLOCK outputs add to the product."""
    program, place = tl.program_id(0), tl.arange(0, BLOCK)
    parts = tl.cdiv(width, BLOCK)
    if program < M * parts:
        await_inputs(PDL)
        release_dependents(PDL)
        order(x_ptr, ordered_ptr, program // parts, program % parts * BLOCK + place, x_stride, width)
    else:
        column = (program - M * parts) * BLOCK + place
        token, known = tl.arange(0, TOKENS), column < N
        sums = tl.zeros([TOKENS, BLOCK], tl.float32)
        await_inputs(PDL)
        release_dependents(PDL)
        for i in tl.static_range(OUTLIERS):
            outlying = tl.load(columns_ptr + column * OUTLIERS + i, mask=known, other=0)
            value = tl.load(values_ptr + column * OUTLIERS + i, mask=known, other=0.0).to(tl.float32)
            rows = tl.minimum(token, M - 1).to(tl.int64)[:, None] * x_stride
            some = (value != 0.0)[None, :] & (token < M)[:, None]
            sums += tl.load(x_ptr + rows + outlying[None, :], mask=some, other=0.0).to(tl.float32) * value[None, :]
        target = token.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(beside_ptr + target, sums, mask=known[None, :] & (token < M)[:, None])
