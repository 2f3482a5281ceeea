"""Tiles of bf12 weights in Triton: three runs of words, eight weights a place, for matrix-vector products.

A tile is rows × BLOCK_G groups of eight columns. Weights are decoded as the smallest numbers that there are, and
multiplied by inputs raised by 2^64: each sum is scaled once. Inputs from 2^64 on become infinite, and an infinite one
gives NaN where it meets a zero or the place of an outlier.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlayers.quant.bf12 import EXPONENTS, RAISED, SIGNS_AND_MANTISSAS

_BITS, _EXPONENTS = tl.constexpr(SIGNS_AND_MANTISSAS), tl.constexpr(EXPONENTS)
_RAISED = tl.constexpr(2.0**RAISED)


@triton.jit
def _turned(words, LEFT: tl.constexpr):
    return (words << LEFT) | (words >> (32 - LEFT))


@triton.jit
def _pair(signs, codes):
    """Return two bfloat16 numbers in a word, the lower half first."""
    return (signs & _BITS) | (codes & _EXPONENTS)


@triton.jit
def _lower(pair):
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _upper(pair):
    return (pair & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def row_words(words_ptr, row, G):
    """Return where the words of rows of G groups begin."""
    return words_ptr + row.to(tl.int64)[:, None] * (3 * G)


@triton.jit
def words_at(rows, group, here, RUN: tl.constexpr, MASKED: tl.constexpr):
    """Return a tile of the three runs, which L2 gives up first; ``here``: what there is of it, if it is MASKED."""
    place = rows + (group // RUN * (3 * RUN) + group % RUN)[None, :]
    if MASKED:
        first = tl.load(place, mask=here, other=0, eviction_policy="evict_first")
        second = tl.load(place + RUN, mask=here, other=0, eviction_policy="evict_first")
        codes = tl.load(place + 2 * RUN, mask=here, other=0, eviction_policy="evict_first")
    else:
        first = tl.load(place, eviction_policy="evict_first")
        second = tl.load(place + RUN, eviction_policy="evict_first")
        codes = tl.load(place + 2 * RUN, eviction_policy="evict_first")
    return first.to(tl.uint32, bitcast=True), second.to(tl.uint32, bitcast=True), codes.to(tl.uint32, bitcast=True)


@triton.jit
def _raised(x_rows, group, here, column: tl.constexpr, RUN: tl.constexpr, MASKED: tl.constexpr):
    place = x_rows + (group // RUN * (8 * RUN) + group % RUN + column * RUN)[None, :]
    x = tl.load(place, mask=here, other=0.0) if MASKED else tl.load(place)
    return x.to(tl.float32) * _RAISED


@triton.jit
def add_products(acc, words, x_rows, group, here, RUN: tl.constexpr, MASKED: tl.constexpr):
    """Return ``acc`` with the products of a tile and a row of x added, group by group."""
    first, second, codes = words
    pair = _pair(first, codes)
    acc += _lower(pair) * _raised(x_rows, group, here, 0, RUN, MASKED)
    acc += _upper(pair) * _raised(x_rows, group, here, 1, RUN, MASKED)
    pair = _pair(_turned(first, 8), _turned(codes, 4))
    acc += _lower(pair) * _raised(x_rows, group, here, 2, RUN, MASKED)
    acc += _upper(pair) * _raised(x_rows, group, here, 3, RUN, MASKED)
    pair = _pair(second, _turned(codes, 8))
    acc += _lower(pair) * _raised(x_rows, group, here, 4, RUN, MASKED)
    acc += _upper(pair) * _raised(x_rows, group, here, 5, RUN, MASKED)
    pair = _pair(_turned(second, 8), _turned(codes, 12))
    acc += _lower(pair) * _raised(x_rows, group, here, 6, RUN, MASKED)
    acc += _upper(pair) * _raised(x_rows, group, here, 7, RUN, MASKED)
    return acc


@triton.jit
def outliers_of(columns_ptr, values_ptr, row, OUTLIERS: tl.constexpr):
    """Return columns and values ``[rows, OUTLIERS]`` of rows' outliers."""
    place = row.to(tl.int64)[:, None] * OUTLIERS + tl.arange(0, OUTLIERS)[None, :]
    return tl.load(columns_ptr + place), tl.load(values_ptr + place).to(tl.float32)


@triton.jit
def outlying_sum(x, values):
    """Return what outliers ``[rows, OUTLIERS]`` add; a place without one adds nothing, whatever x is there."""
    return tl.sum(tl.where(values != 0.0, x.to(tl.float32) * values, 0.0), axis=1)
