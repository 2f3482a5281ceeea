"""The matrix-vector product of 1 to 4 rows with weights of 12 bits (``quant/packed_bf16.py``).

A tile is BLOCK_N rows of BLOCK_G words of each of the three runs: BLOCK_G groups of eight weights. AHEAD tiles are held
in registers, the first ones from before the wait on, and so are a row's outliers. Sums are fp32, over rows of x raised
by 2^64: weights are decoded as the smallest numbers that there are, and each sum is scaled once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlayers.quant.packed_bf16 import EXPONENTS, SIGNS_AND_MANTISSAS
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, release_dependents

_BITS, _EXPONENTS = tl.constexpr(SIGNS_AND_MANTISSAS), tl.constexpr(EXPONENTS)
_RAISED = tl.constexpr(2.0**64)


@triton.jit
def turned(words, LEFT: tl.constexpr):
    """Return 32 bits turned left."""
    return (words << LEFT) | (words >> (32 - LEFT))


@triton.jit
def pair_of(bits, exponents):
    """Return two bfloat16 numbers in a word, the lower half first."""
    return (bits & _BITS) | (exponents & _EXPONENTS)


@triton.jit
def lower(pair):
    """Return the first number of a pair in fp32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def upper(pair):
    """Return the second number of a pair in fp32."""
    return (pair & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def words_at(rows, group, G, RUN: tl.constexpr, EVEN: tl.constexpr, EVICT: tl.constexpr):
    """Return a tile of the three runs."""
    place = rows + (group // RUN * (3 * RUN) + group % RUN)[None, :]
    if EVEN:
        first = tl.load(place, eviction_policy=EVICT)
        second = tl.load(place + RUN, eviction_policy=EVICT)
        codes = tl.load(place + 2 * RUN, eviction_policy=EVICT)
    else:
        here = (group < G)[None, :]
        first = tl.load(place, mask=here, other=0, eviction_policy=EVICT)
        second = tl.load(place + RUN, mask=here, other=0, eviction_policy=EVICT)
        codes = tl.load(place + 2 * RUN, mask=here, other=0, eviction_policy=EVICT)
    return first.to(tl.uint32, bitcast=True), second.to(tl.uint32, bitcast=True), codes.to(tl.uint32, bitcast=True)


@triton.jit
def raised(x_row, group, column: tl.constexpr, G, RUN: tl.constexpr, EVEN: tl.constexpr):
    """Return the inputs that belong to one of the eight columns of each group, times 2^64."""
    place = x_row + group // RUN * (8 * RUN) + group % RUN + column * RUN
    x = tl.load(place) if EVEN else tl.load(place, mask=group < G, other=0.0)
    return (x.to(tl.float32) * _RAISED)[None, :]


@triton.jit
def multiplied(acc, words, x_row, group, G, RUN: tl.constexpr, EVEN: tl.constexpr):
    """Return ``acc`` with the products of a tile and a row of x added, group by group."""
    first, second, codes = words
    pair = pair_of(first, codes)
    acc += lower(pair) * raised(x_row, group, 0, G, RUN, EVEN)
    acc += upper(pair) * raised(x_row, group, 1, G, RUN, EVEN)
    pair = pair_of(turned(first, 8), turned(codes, 4))
    acc += lower(pair) * raised(x_row, group, 2, G, RUN, EVEN)
    acc += upper(pair) * raised(x_row, group, 3, G, RUN, EVEN)
    pair = pair_of(second, turned(codes, 8))
    acc += lower(pair) * raised(x_row, group, 4, G, RUN, EVEN)
    acc += upper(pair) * raised(x_row, group, 5, G, RUN, EVEN)
    pair = pair_of(turned(second, 8), turned(codes, 12))
    acc += lower(pair) * raised(x_row, group, 6, G, RUN, EVEN)
    acc += upper(pair) * raised(x_row, group, 7, G, RUN, EVEN)
    return acc


@kernel
def packed_vector_kernel(
    x_ptr, words_ptr, scale_ptr, columns_ptr, values_ptr, bias_ptr, y_ptr, M, N, G, x_stride,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr,
    OUTLIERS: tl.constexpr, RUN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, EVICT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N rows of the weight by the ``M`` (of at most ROWS) rows of x."""
    column, group = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_G)
    known = column < N
    # Rows and columns beyond the edge read a valid one again; their results are never stored.
    row = tl.minimum(column, N - 1).to(tl.int64)
    rows = words_ptr + row[:, None] * (3 * G)
    held = ()
    for i in tl.static_range(AHEAD):
        held = held + (words_at(rows, i * BLOCK_G + group, G, RUN, EVEN, EVICT),)  # type: ignore[assignment]
    scale = tl.load(scale_ptr + row)
    place = row[:, None] * OUTLIERS + tl.arange(0, OUTLIERS)[None, :]
    outlying, values = tl.load(columns_ptr + place).to(tl.int32), tl.load(values_ptr + place).to(tl.float32)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=known, other=0.0).to(tl.float32)
    await_inputs(PDL)
    release_dependents(PDL)
    sums = ()
    for m in tl.static_range(ROWS):
        sums = sums + (tl.zeros([BLOCK_N, BLOCK_G], tl.float32),)  # type: ignore[assignment]
    for i in tl.static_range(BLOCKS):
        if i + AHEAD < BLOCKS:
            held = held + (words_at(rows, (i + AHEAD) * BLOCK_G + group, G, RUN, EVEN, EVICT),)  # type: ignore[assignment]
        added = ()
        for m in tl.static_range(ROWS):
            x_row = x_ptr + (m % M) * x_stride
            added = added + (multiplied(sums[m], held[i], x_row, i * BLOCK_G + group, G, RUN, EVEN),)
        sums = added
    for m in tl.static_range(ROWS):
        x_row = x_ptr + (m % M) * x_stride
        beside = tl.sum(tl.load(x_row + outlying).to(tl.float32) * values, axis=1)
        y = cast(tl.sum(sums[m], axis=1) * scale + beside + bias, y_ptr.dtype.element_ty)
        tl.store(y_ptr + m * N + column, y, mask=known & (m < M))
