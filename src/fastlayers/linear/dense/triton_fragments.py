"""The product of 1 to 16 rows on the tensor cores, its weights in registers from before the wait on.

Transposed, ``yᵀ = weight · xᵀ``, a matrix instruction takes 16 outputs, 8 rows of x and 16 columns: a thread's share of
32 columns of either operand is four columns here and four there. Which four does not matter, as long as it is the same
ones in both, so every thread reads 8 neighbours, 16 bytes, and they are its share as they are: nothing goes through
shared memory, nobody waits for another warp before the end. The warps of a program share K, every one its own columns
of each tile (two or four times 32, which are read one after another: with 64 bytes a row the memory is slower), and add
up at the end in fixed order.

What a row costs is its share of x; a row's bits do not depend on the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dot, release_dependents

# Outputs, rows of x and columns that one warp multiplies at a time.
OUTPUTS, ROWS, COLUMNS = tl.constexpr(16), tl.constexpr(8), tl.constexpr(32)


@triton.jit
def _eight_rows(rows, k, K, known, WHOLE: tl.constexpr, ALL: tl.constexpr):
    """Return a tile [8, warps, 32] of ``rows``, those that are ``known`` or ALL; not WHOLE: columns end at K."""
    if WHOLE:
        if ALL:
            return tl.load(rows + k)
        else:
            return tl.load(rows + k, mask=known, other=0.0)
    else:
        return tl.load(rows + k, mask=known & (k < K), other=0.0)


@triton.jit
def _share(tile, HEIGHT: tl.constexpr, WARPS: tl.constexpr):
    """Return [warps, HEIGHT, 32] with columns in the order in which threads have them: 4 of each, then 4 more."""
    return tile.reshape(WARPS, HEIGHT, 4, 2, 4).permute(0, 1, 3, 2, 4).reshape(WARPS, HEIGHT, COLUMNS)


@kernel(do_not_specialize=("M",))
def fragment_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, M, N, K, x_stride, weight_stride,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr, GROUPS: tl.constexpr,
    HALVES: tl.constexpr, SPAN: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply GROUPS · 16 outputs by the ``M`` (of at most HALVES · 8) rows of x, in BLOCKS tiles.

    A warp's part of a tile is SPAN · 32 columns; AHEAD tiles are on their way at any time.
    """
    # Rows first, then warps: so a warp's threads are 8 rows of 4, as the instruction wants them.
    eight, warp = tl.arange(0, ROWS)[:, None, None], tl.arange(0, WARPS)[None, :, None]
    WIDTH: tl.constexpr = WARPS * SPAN * COLUMNS
    depth = warp * (SPAN * COLUMNS) + tl.arange(0, COLUMNS)[None, None, :]
    first = tl.program_id(0) * (GROUPS * OUTPUTS)
    rows = ()
    for part in tl.static_range(2 * GROUPS):
        # Outputs beyond the edge read the last one again; their results are never stored.
        output = tl.minimum(first + part * ROWS + eight, N - 1).to(tl.int64)
        rows = rows + (weight_ptr + output * weight_stride,)  # type: ignore[assignment]
    held = ()
    for i in tl.static_range(AHEAD):
        for part in tl.static_range(2 * GROUPS):
            for piece in tl.static_range(SPAN):
                k = i * WIDTH + piece * COLUMNS + depth
                tile = _eight_rows(rows[part], k, K, eight < ROWS, EVEN_K or i < BLOCKS - 1, True)
                held = held + (tile,)  # type: ignore[assignment]
    biases = ()
    for group in tl.static_range(GROUPS):
        column = first + group * OUTPUTS + tl.arange(0, OUTPUTS)
        bias = tl.zeros([OUTPUTS], tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
        biases = biases + (bias,)  # type: ignore[assignment]
    await_inputs(PDL)
    release_dependents(PDL)
    # Tiles in turns to two sums: an instruction need not wait for the one in front.
    sums = ()
    for i in tl.static_range(2 * GROUPS * HALVES):
        sums = sums + (tl.zeros([WARPS, OUTPUTS, ROWS], tl.float32),)  # type: ignore[assignment]
    for i in tl.static_range(BLOCKS):
        if i + AHEAD < BLOCKS:
            for part in tl.static_range(2 * GROUPS):
                for piece in tl.static_range(SPAN):
                    k = (i + AHEAD) * WIDTH + piece * COLUMNS + depth
                    tile = _eight_rows(rows[part], k, K, eight < ROWS, EVEN_K or i + AHEAD < BLOCKS - 1, True)
                    held = held + (tile,)  # type: ignore[assignment]
        for piece in tl.static_range(SPAN):
            columns = ()
            for half in tl.static_range(HALVES):
                row, k = half * ROWS + eight, i * WIDTH + piece * COLUMNS + depth
                x = _eight_rows(x_ptr + row * x_stride, k, K, row < M, EVEN_K or i < BLOCKS - 1, False)
                columns = columns + (_share(x.permute(1, 0, 2), ROWS, WARPS).permute(0, 2, 1),)  # type: ignore[assignment]
            added = ()
            for group in tl.static_range(GROUPS):
                low = held[2 * (i * GROUPS + group) * SPAN + piece]  # type: ignore[var-annotated]
                high = held[(2 * (i * GROUPS + group) + 1) * SPAN + piece]  # type: ignore[var-annotated]
                weight = tl.join(low, high).permute(1, 3, 0, 2).reshape(WARPS, OUTPUTS, COLUMNS)
                weight = _share(weight, OUTPUTS, WARPS)
                for half in tl.static_range(HALVES):
                    added = added + (dot(weight, columns[half], sums[group * HALVES + half]),)  # type: ignore[assignment]
            for rest in tl.static_range(GROUPS * HALVES):
                added = (sums[2 * GROUPS * HALVES - 1 - rest],) + added  # type: ignore[assignment]
            sums = added
    for group in tl.static_range(GROUPS):
        column = first + group * OUTPUTS + tl.arange(0, OUTPUTS)
        for half in tl.static_range(HALVES):
            row = half * ROWS + tl.arange(0, ROWS)
            both = sums[group * HALVES + half] + sums[(GROUPS + group) * HALVES + half]  # type: ignore[var-annotated]
            y = tl.sum(both, axis=0) + biases[group][:, None]
            tl.store(
                y_ptr + row[None, :].to(tl.int64) * N + column[:, None], cast(y, y_ptr.dtype.element_ty),
                mask=(column < N)[:, None] & (row < M)[None, :],
            )  # fmt: skip
