"""What the Triton GEMMs of all linears share: the order of tiles, the tile sizes, the split over K.

    M = rows of x, N = output features, K = input features;  y[M,N] = x[M,K] · weight[N,K]ᵀ

With few rows there are fewer output tiles than SMs. Then ``splits`` programs share K: each
writes its fp32 partial tile, and a second kernel adds them in a fixed order: no atomics, the same bits each
run. Tile sizes and splits depend on shapes only, so a captured grid stays right.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from fastlayers.integers import cdiv
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dot, release_dependents

# Two programs for each SM of an H100 or H200. A constant, so that bits do not depend on the GPU.
TARGET_PROGRAMS = 264
MAX_SPLITS = 16


__all__ = ["MAX_SPLITS", "TARGET_PROGRAMS", "Tile", "add_splits_kernel", "dot", "tile_for", "tile_origin"]


@dataclass(frozen=True)
class Tile:
    """Tile sizes of one launch; ``splits`` programs share the K of one output tile."""

    m: int
    n: int
    warps: int
    stages: int
    splits: int

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Return (output tiles, splits)."""
        return cdiv(rows, self.m) * cdiv(columns, self.n), self.splits


def tile_for(rows: int, columns: int, depth_blocks: int, *, split: bool = True) -> Tile:
    """Return tile sizes for ``[rows, K] · [columns, K]ᵀ`` where K is ``depth_blocks`` blocks."""
    if rows <= 16:
        m, n, warps, stages = 16, 64, 4, 5
    elif rows <= 32:
        m, n, warps, stages = 32, 64, 4, 5
    elif rows <= 64:
        m, n, warps, stages = 64, 64, 4, 4
    elif rows <= 256:
        m, n, warps, stages = 64, 128, 4, 4
    else:
        m, n, warps, stages = 128, 128, 8, 4
    tiles, splits = cdiv(rows, m) * cdiv(columns, n), 1
    limit = min(MAX_SPLITS, depth_blocks // 4) if split else 1
    while splits * 2 <= limit and tiles * splits * 2 <= TARGET_PROGRAMS:
        splits *= 2
    return Tile(m, n, warps, stages, splits)


@triton.jit
def tile_origin(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (first row, first column) of this program's tile: bands of 8 tile rows keep weights in L2."""
    GROUP: tl.constexpr = 8
    index = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    band = index // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    inside = index % (GROUP * tiles_n)
    return (band * GROUP + inside % height) * BLOCK_M, (inside // height) * BLOCK_N


@kernel(do_not_specialize=("M",))
def add_splits_kernel(
    partial_ptr, bias_ptr, y_ptr, M, N,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, ROUND_BEFORE_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    await_inputs(PDL)
    release_dependents(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial_ptr + (split * M.to(tl.int64) + row) * N + column, mask=inside, other=0.0)
    if HAS_BIAS:
        if ROUND_BEFORE_BIAS:
            total = cast(total, y_ptr.dtype.element_ty).to(tl.float32)
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + column, cast(total, y_ptr.dtype.element_ty), mask=inside)
