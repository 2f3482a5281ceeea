"""Tile sizes of the grouped GEMMs, by how many pairs an expert gets on average."""

from __future__ import annotations

from dataclasses import dataclass

# More tokens run in several rounds, so that the fp32 partial sums [T*k, D] stay below about 1 GiB.
MAX_TOKENS = 4096


@dataclass(frozen=True)
class Tile:
    """Tile of one grouped GEMM; ``m`` is shared by both, because the alignment is."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def tiles(pairs: int, experts: int, quant: str, wide: bool) -> tuple[Tile, Tile]:
    """Return the tiles of the first and second GEMM.

    Parameters
    ----------
    pairs, experts : int
        Token-expert pairs of a call, and experts.
    quant : str
        Format of the weights.
    wide : bool
        fp32 activations: no matrix units.

    Notes
    -----
    Depends on shapes only, so that a captured grid stays right. The first GEMM holds two accumulators (gate and
    up). With few pairs narrow tiles spread the reading of weights over the multiprocessors.
    """
    average = -(-pairs // experts)
    if wide and quant == "none":
        m = 16 if average <= 16 else 32
        return Tile(m, 32, 32, 4, 2), Tile(m, 64, 32, 4, 2)
    k = 64 if quant == "none" else 128
    if average <= 16:
        few = pairs <= 4 * 16
        return Tile(16, 32 if few else 64, k, 4, 4), Tile(16, 64, k, 4, 4)
    if average <= 64:
        m = 32 if average <= 32 else 64
        return Tile(m, 64, k, 4, 4), Tile(m, 128, k, 4, 4)
    if quant == "none":
        return Tile(128, 128, k, 8, 3), Tile(128, 128, k, 8, 4)
    return Tile(64, 128, k, 8, 3), Tile(64, 128, k, 4, 4)


def mxfp4_tiles(pairs: int, experts: int, hidden: int, inner: int, wide: bool) -> tuple[Tile, Tile]:
    """Return the tiles of both GEMMs over packed MXFP4 weights.

    Parameters
    ----------
    pairs, experts : int
        Token-expert pairs of a call, and experts.
    hidden, inner : int
        Multiples of 32. ``k`` divides both, so that no tile ends inside a row.
    wide : bool
        fp32 activations: no matrix units.

    Notes
    -----
    Here ``n`` is the GEMM's M, the side that is decoded: 64 rows are the least that Hopper's matrix units take.
    """
    depths = [128 if width % 128 == 0 else 64 if width % 64 == 0 else 32 for width in (hidden, inner)]
    average = -(-pairs // experts)
    if wide:
        return Tile(16, 32, 32, 4, 2), Tile(16, 64, 32, 4, 2)
    m = 16 if average <= 16 else 32 if average <= 32 else 64 if average <= 64 else 128
    warps = 4 if m <= 64 else 8
    return Tile(m, 64, depths[0], warps, 4), Tile(m, 64 if m <= 32 else 128, depths[1], warps, 4)
