"""The product of up to 32 rows with weights of 12 bits (``quant/packed_bf16.py``), by the tensor cores' own operands.

A program has R times WARPS / SHARES tiles of 16 outputs; SHARES warps take a tile's columns in turns, 64 at a time, and
are added at the end. The first AHEAD turns' weights, and a row's outliers, are asked for before the wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlayers.quant.packed_bf16_mma import ask, multiply
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, release_dependents


@kernel
def packed_kernel(
    x_ptr, words_ptr, scale_ptr, columns_ptr, values_ptr, bias_ptr, y_ptr, M, N, x_stride,
    STEPS: tl.constexpr, HAS_BIAS: tl.constexpr, OUTLIERS: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr,
    SHARES: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply tiles of 16 rows of the weight by the ``M`` (of at most 8 · BLOCKS) rows of x."""
    PARTS: tl.constexpr = W // SHARES
    first = tl.program_id(0) * (R * PARTS)
    last = N // 16 - 1
    warp = tl.arange(0, W)[None, :, None]
    # Tiles beyond the edge read the last one again; their results are never stored.
    tile = tl.minimum(first + tl.arange(0, R)[:, None, None] * PARTS + warp // SHARES, last)
    words, held = ask(words_ptr, tile, STEPS, SHARES, W, AHEAD)
    e = tl.arange(0, 128)[None, None, :]
    mine = first + tl.arange(0, R)[:, None, None] * PARTS + tl.arange(0, PARTS)[None, :, None]
    row = tl.minimum(mine, last) * 16 + e // 2 % 2 * 8 + e // 16
    known = mine <= last
    scale = tl.load(scale_ptr + row)
    columns = ()
    values = ()
    for i in tl.static_range(OUTLIERS):
        columns = columns + (tl.load(columns_ptr + row * OUTLIERS + i),)  # type: ignore[assignment]
        values = values + (tl.load(values_ptr + row * OUTLIERS + i).to(tl.float32),)  # type: ignore[assignment]
    bias = tl.zeros([R, PARTS, 128], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + row).to(tl.float32)
    await_inputs(PDL)
    release_dependents(PDL)
    beside = ()
    x_rows = ()
    x_words = x_ptr.to(tl.pointer_type(tl.int32))
    for block in tl.static_range(BLOCKS):
        # A lane's token as a right operand, and its two tokens of a result.
        token = tl.minimum(block * 8 + e // 16, M - 1)
        x_rows = x_rows + (x_words + token.to(tl.int64) * (x_stride // 2),)  # type: ignore[assignment]
        token = tl.minimum(block * 8 + e // 4 % 4 * 2 + e % 2, M - 1)
        x_row = x_ptr + token.to(tl.int64) * x_stride
        sums = tl.zeros([R, PARTS, 128], tl.float32)
        for i in tl.static_range(OUTLIERS):
            sums += tl.load(x_row + columns[i]).to(tl.float32) * values[i]
        beside = beside + (sums,)  # type: ignore[assignment]
    found = multiply(words, held, x_rows, words_ptr, STEPS, R, SHARES, W, BLOCKS, AHEAD)
    for block in tl.static_range(BLOCKS):
        token = block * 8 + e // 4 % 4 * 2 + e % 2
        y = cast(found[block] * scale + beside[block] + bias, y_ptr.dtype.element_ty)
        tl.store(y_ptr + token.to(tl.int64) * N + row, y, mask=known & (token < M))
