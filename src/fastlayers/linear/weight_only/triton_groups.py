"""Few rows times weights of 4 bits in groups: a tile of codes is one run or several, each of which lies in one group.

A tile of one short group is read by too few bytes a row, and every tile costs two barriers. Here a tile's codes come in
one copy and are taken apart in registers. Each run's two halves meet its input features in their own order, in one
product; its sums are scaled in fp32 and added, run after run: weights are not rounded.
Groups of 128 are a run each: x comes in whole lines, not in pieces of 32 bytes for each half.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlayers.linear.triton_gemm import tile_origin
from fastlayers.linear.weight_only.triton_codes import halves_of, load_columns, load_tile, scales_of
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dot, release_dependents


@triton.jit
def taken_apart(packed, ROWS: tl.constexpr, BYTES: tl.constexpr, LEVELS: tl.constexpr):
    """Return the ``2 ** LEVELS`` runs of a tile ``[ROWS, BYTES]``, in order; Triton cuts in two only."""
    pieces = (packed,)
    for level in tl.static_range(LEVELS):
        halves = ()
        for i in tl.static_range(2**level):
            both = tl.reshape(pieces[i], [ROWS, 2, (BYTES >> level) // 2])
            first, second = tl.split(tl.permute(both, (0, 2, 1)))
            halves = halves + (first, second)  # type: ignore[assignment]
        pieces = halves  # type: ignore[assignment]
    return pieces


@triton.jit
def in_order(low, high, ROWS: tl.constexpr, RUN: tl.constexpr):
    """Return a run's codes ``[ROWS, RUN]`` in the order of input features."""
    units = tl.join(tl.reshape(low, [ROWS, RUN // 32, 16]), tl.reshape(high, [ROWS, RUN // 32, 16]))
    return tl.reshape(tl.permute(units, (0, 1, 3, 2)), [ROWS, RUN])


@triton.jit
def scales_of_runs(
    scale_ptr, zero_ptr, tile, column, N, K, ZERO: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Return scales and zero points ``[ROWS, 1]`` of each run of a tile; behind K the last group's."""
    scales, zeros = (), ()
    for i in tl.static_range(RUNS):
        group = tl.minimum((tile * RUNS + i) * RUN // GROUP, K // GROUP - 1)
        scale, zero = scales_of(scale_ptr, zero_ptr, column * 0 + group, column, N, ZERO, HAS_ZERO)
        scales, zeros = scales + (scale,), zeros + (zero,)  # type: ignore[assignment]
    return scales, zeros


@kernel(do_not_specialize=("M",))
def short_groups_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, M, N, K, x_stride, weight_stride,
    ZERO: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    LEVELS: tl.constexpr, CACHED: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Multiply as the kernel of tiles does; a tile is ``2 ** LEVELS`` runs of RUN codes.

    CACHED: x passes through the first-level cache, which programs of a multiprocessor share.
    """
    row0, column0 = tile_origin(M, N, BLOCK_M, BLOCK_N)
    row, column = row0 + tl.arange(0, BLOCK_M), column0 + tl.arange(0, BLOCK_N)
    RUNS: tl.constexpr = 1 << LEVELS
    DEPTH: tl.constexpr = RUN * RUNS
    CODES: tl.constexpr = DEPTH // 2
    code, feature = tl.arange(0, CODES), tl.arange(0, RUN)
    low = (code // 16) * 32 + code % 16
    # Rows and columns beyond the edge read a valid one again, or nothing; their results are never stored.
    known, real = (column % N)[:, None], (row < M)[None, :]
    x_columns = x_ptr + (row % M).to(tl.int64)[None, :] * x_stride
    weight_rows = weight_ptr + known.to(tl.int64) * weight_stride + code[None, :]
    split = tl.program_id(1)
    tiles = tl.cdiv(tl.cdiv(K, DEPTH), SPLITS)
    first = split * tiles
    last = tl.minimum(first + tiles, tl.cdiv(K, DEPTH))
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # Weights are the left factor: it may come from registers, in which they are decoded.
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # They are too few to be copied asynchronously: read one step ahead.
    scales, zeros = scales_of_runs(scale_ptr, zero_ptr, first, known, N, K, ZERO, HAS_ZERO, GROUP, RUN, RUNS)
    await_inputs(PDL)
    release_dependents(PDL)
    for tile in range(first, last):
        packed = load_tile(weight_rows + tile * CODES, (tile * DEPTH + low)[None, :], K, EVEN_K)
        ahead, zeros_ahead = scales_of_runs(
            scale_ptr, zero_ptr, tile + 1, known, N, K, ZERO, HAS_ZERO, GROUP, RUN, RUNS
        )
        runs = taken_apart(packed, BLOCK_N, CODES, LEVELS)
        for i in tl.static_range(RUNS):
            k = (tile * DEPTH + i * RUN + feature)[:, None]
            # Copies of 16 bytes go past that cache, those of 8 do not.
            place = tl.max_contiguous(k, (4, 1)) if CACHED else k
            x = load_columns(x_columns + place, k, K, real, EVEN_K, BLOCK_M <= 16)
            less, more = halves_of(runs[i], zeros[i], dtype)
            acc += dot(in_order(less, more, BLOCK_N, RUN), x) * scales[i]
        scales, zeros = ahead, zeros_ahead
    if SPLITS == 1 and HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[:, None]
    target = y_ptr + (split.to(tl.int64) * M + row.to(tl.int64))[None, :] * N + column[:, None]
    tl.store(target, cast(acc, y_ptr.dtype.element_ty), mask=(row[None, :] < M) & (column[:, None] < N))
