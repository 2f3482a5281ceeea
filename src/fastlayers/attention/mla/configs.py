"""Launch configurations of MLA's Triton kernels: tile sizes by rows of a program and by number format.

A tile of ``block_m`` query rows holds an fp32 accumulator of ``block_m × kv_lora_rank`` in registers and a tile of
``block_n`` cached rows in shared memory, so the latent width (512 in every released model) settles the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LaunchConfig:
    """Tile sizes of one launch: query rows, cached rows (keys), warps, pipeline stages.

    ``ahead``: decode reads the page table one tile ahead. It hides a load and costs registers, which the largest
    tile does not have.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ahead: bool = True


# Smallest first; the last one also serves more rows.
_DECODE_16BIT = (LaunchConfig(16, 32, 4, 3), LaunchConfig(32, 32, 8, 3), LaunchConfig(64, 64, 8, 2, ahead=False))
# Rounding the output in the kernel (no splits) takes registers, too; with tiles of 64 keys it would spill.
_DECODE_16BIT_DIRECT = (*_DECODE_16BIT[:-1], LaunchConfig(64, 32, 8, 3))
# Converting e4m3 takes registers: a tile of 64 query rows would spill.
_DECODE_E4M3 = (LaunchConfig(16, 32, 8, 3), LaunchConfig(32, 32, 8, 2))
# fp32 has no tensor-core product that keeps 24 bits: multiply-adds, small tiles.
_DECODE_FP32 = (LaunchConfig(16, 16, 8, 1),)

_PREFILL_16BIT = LaunchConfig(128, 64, 8, 3)
_PREFILL_FP32 = LaunchConfig(32, 16, 8, 1)

# What costs are counted for, and what decides the splits where there are no multiprocessors.
NOMINAL_SM_COUNT = 132
# Fewest cached rows worth a split of their own, and most splits (the partial results go through memory).
MIN_ROWS_OF_SPLIT = 128
MAX_SPLITS = 64
# Splits that the reduction loads at once.
REDUCE_BLOCK = 8


def decode_config(rows: int, dtype: torch.dtype, kv_dtype: torch.dtype, direct: bool = False) -> LaunchConfig:
    """Return the decode configuration for requests with ``rows`` = heads × new tokens query rows.

    ``direct``: one split, so the kernel writes the output itself. ``block_m`` does not depend on it.
    """
    table: tuple[LaunchConfig, ...]
    if dtype == torch.float32:
        table = _DECODE_FP32
    elif kv_dtype == torch.float8_e4m3fn:
        table = _DECODE_E4M3
    else:
        table = _DECODE_16BIT_DIRECT if direct else _DECODE_16BIT
    return next((config for config in table if rows <= config.block_m), table[-1])


def prefill_config(dtype: torch.dtype) -> LaunchConfig:
    """Return the prefill configuration."""
    return _PREFILL_FP32 if dtype == torch.float32 else _PREFILL_16BIT


def num_splits(programs: int, max_seq_len: int, sm_count: int) -> int:
    """Return into how many parts each request's cached rows are cut.

    A function of host bounds only, so it is the same at capture and at every replay. A power of two: enough
    programs for two on each multiprocessor, but no split shorter than :data:`MIN_ROWS_OF_SPLIT`.

    Parameters
    ----------
    programs : int
        Programs without splitting.
    max_seq_len : int
    sm_count : int
    """
    splits = 1
    while (
        splits < MAX_SPLITS and programs * splits * 2 <= 2 * sm_count and max_seq_len >= 2 * splits * MIN_ROWS_OF_SPLIT
    ):
        splits *= 2
    return splits
