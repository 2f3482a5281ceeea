"""The matrix-vector product of 1 to 4 rows: a program asks for its weights before the kernels in front have ended.

A tile of weights is BLOCK_N rows of BLOCK_K columns; AHEAD of them are held in registers at any time, the first ones
from before the wait on. Tiles of x are single rows in the weights' own layout, if BLOCK_K is a multiple of what all
threads load at once, 256 columns of 16 bits a warp. With a third dimension for the rows of x, Triton would bring
both through shared memory for every tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, release_dependents


@triton.jit
def _tile(rows, k, K, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(rows + k[None, :])
    else:
        return tl.load(rows + k[None, :], mask=k[None, :] < K, other=0.0)


@kernel
def vector_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, M, N, K, x_stride, weight_stride,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N rows of the weight by the ``M`` (of at most ROWS) rows of x, BLOCKS tiles of columns each."""
    column, depth = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    known = column < N
    # Rows and columns beyond the edge read a valid one again; their results are never stored.
    weight_rows = weight_ptr + tl.minimum(column, N - 1).to(tl.int64)[:, None] * weight_stride
    held = ()
    for i in tl.static_range(AHEAD):
        held = held + (_tile(weight_rows, i * BLOCK_K + depth, K, EVEN_K),)  # type: ignore[assignment]
    bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=known, other=0.0).to(tl.float32)
    await_inputs(PDL)
    release_dependents(PDL)
    sums = ()
    for row in tl.static_range(ROWS):
        sums = sums + (tl.zeros([BLOCK_N, BLOCK_K], tl.float32),)  # type: ignore[assignment]
    for i in tl.static_range(BLOCKS):
        if i + AHEAD < BLOCKS:
            held = held + (_tile(weight_rows, (i + AHEAD) * BLOCK_K + depth, K, EVEN_K),)  # type: ignore[assignment]
        weight = held[i].to(tl.float32)  # type: ignore[var-annotated]
        added = ()
        for row in tl.static_range(ROWS):
            x = _tile(x_ptr + (row % M) * x_stride, i * BLOCK_K + depth, K, EVEN_K)
            added = added + (sums[row] + x.to(tl.float32) * weight,)
        sums = added
    for row in tl.static_range(ROWS):
        y = cast(tl.sum(sums[row], axis=1) + bias, y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * N + column, y, mask=known & (row < M))
