"""Which schedule sgl_kernel's CUTLASS product of FP8-block experts takes: its binaries choose, we can only say what.

    device        K          tile M×N×K        cluster   warps
    H20           > 128      64×128×128        2×1×1     pingpong
    other sm_90   any        128×128×128       1×2×1     cooperative

Two groups of warps that take turns (pingpong) hide one's scaling behind the other's products. That pays where the
matrix units are slow, as an H20's are: an H100's generation, 78 multiprocessors. On an H100 or H200 the scaling would
lie bare, and both groups work on one tile (cooperative). Up to 2048 rows the operands are swapped, so that few rows
fill the narrow side of a tile. Source: SGLang's fp8_blockwise_moe_kernel.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastlayers.device import Device

H20_MULTIPROCESSORS = 78
# Rows of all experts together.
SWAPPED_ROWS = 2048


@dataclass(frozen=True)
class Schedule:
    """One schedule: ``tile`` (M, N, K), ``cluster``, ``kind`` ("pingpong" or "cooperative"), operands ``swapped``."""

    tile: tuple[int, int, int]
    cluster: tuple[int, int, int]
    kind: str
    swapped: bool


def schedule_for(device: Device, k: int, rows: int) -> Schedule:
    """Return what runs on an sm_90 ``device`` for inputs of ``k`` features and ``rows`` rows in all."""
    swapped = rows <= SWAPPED_ROWS
    if device.sm_count == H20_MULTIPROCESSORS and k > 128:
        return Schedule((64, 128, 128), (2, 1, 1), "pingpong", swapped)
    return Schedule((128, 128, 128), (1, 2, 1), "cooperative", swapped)


def about(cfg: Any, device: Device) -> str:
    """Return the schedule of the first product in words."""
    found = schedule_for(device, cfg.hidden_size, SWAPPED_ROWS)
    tile, cluster = ("×".join(map(str, each)) for each in (found.tile, found.cluster))
    return f"{found.kind} tiles of {tile}, clusters of {cluster}; operands swapped up to {SWAPPED_ROWS} rows"
