"""Launch configurations of MLA's Triton kernels: tile sizes by rows of a program and by number format.

A tile of ``block_m`` query rows holds an fp32 accumulator of ``block_m × kv_lora_rank`` in registers and a tile of
``block_n`` cached rows in shared memory, so the latent width (512 in every released model) settles the sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from fastlayers.errors import check_keys
from fastlayers.integers import cdiv, next_power_of_2


@dataclass(frozen=True)
class LaunchConfig:
    """Tile sizes of one launch: query rows, cached rows (keys), warps, pipeline stages.

    ``ahead``: decode reads the page table one tile ahead. It hides a load and costs registers, which the largest
    tile does not have. ``per_sm``: programs that a multiprocessor holds at once.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ahead: bool = True
    per_sm: int = 2

    @property
    def split_rows(self) -> int:
        """Fewest cached rows worth a split: with many query rows its partial results cost more than it saves."""
        return SPLIT_ROWS if self.block_m <= 16 else 2 * SPLIT_ROWS


# Smallest first; the last one also serves more rows. A tile inside one page needs one entry of the page table and
# one base address, which leaves registers for larger tiles.
_DECODE_PAGED = (LaunchConfig(16, 64, 4, 2), LaunchConfig(32, 64, 8, 2), LaunchConfig(64, 64, 8, 2, per_sm=1))
# Several new tokens a request and no splits: the mask and the rounded output together would spill the largest tile.
_DECODE_PAGED_LAST = (*_DECODE_PAGED[:-1], LaunchConfig(64, 32, 8, 3, per_sm=1))
# Tiles over several pages.
_DECODE_16BIT = (
    LaunchConfig(16, 32, 4, 3), LaunchConfig(32, 32, 8, 3), LaunchConfig(64, 64, 8, 2, ahead=False, per_sm=1)
)  # fmt: skip
# Rounding the output in the kernel (no splits) takes registers, too; with tiles of 64 keys it would spill.
_DECODE_16BIT_DIRECT = (*_DECODE_16BIT[:-1], LaunchConfig(64, 32, 8, 3, per_sm=1))
# Converting e4m3 takes registers: a tile of 64 query rows would spill.
_DECODE_E4M3 = (LaunchConfig(16, 32, 8, 3), LaunchConfig(32, 32, 8, 2))
_DECODE_PAGED_E4M3 = (LaunchConfig(16, 32, 4, 3), LaunchConfig(32, 32, 8, 2))
# fp32 has no tensor-core product that keeps 24 bits: multiply-adds, small tiles.
_DECODE_FP32 = (LaunchConfig(16, 16, 8, 1),)

_PREFILL_16BIT = LaunchConfig(128, 64, 8, 3)
_PREFILL_FP32 = LaunchConfig(32, 16, 8, 1)

# What costs are counted for, and what decides the splits where there are no multiprocessors.
NOMINAL_SM_COUNT = 132
# Most splits of a request; the partial results go through memory.
MAX_SPLITS = 64
# Fewest cached rows worth a split, and what more are multiples of.
SPLIT_ROWS = 64
# From so many requests on lengths settle the splits; a request longer than so many times the mean has no more of them.
MANY_REQUESTS = 8
UNEVEN = 8
# Partial results of so many rows (of 2 KiB) at most.
PARTIAL_ROWS = 65536
# Kernels for fewer requests are the same. A warp's: what it adds up goes through no shared memory; the next larger one
# as large as a program, with which the kernel does not spill.
REQUEST_BLOCKS = (32, 128)


@dataclass(frozen=True)
class ReduceTile:
    """What a program that adds up a row's parts reads at once: so many parts, so many of their columns."""

    block: int
    columns: int
    num_warps: int


# By the usual parts: tiles of 8 or 16 KB, as many parts mean few rows. Which one adds in which order, so that nothing
# else may decide; and each is a kernel to compile.
_REDUCE = (ReduceTile(4, 512, 4), ReduceTile(16, 256, 4), ReduceTile(64, 64, 4))


def reduce_tile(usual: int, rank: int) -> ReduceTile:
    """Return the tile for rows of ``rank`` columns with ``usual`` parts each, at most :data:`MAX_SPLITS`."""
    tile = next(tile for tile in _REDUCE if usual <= tile.block)
    return replace(tile, columns=min(tile.columns, rank))


@lru_cache(maxsize=4096)
def decode_config(
    rows: int, dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, direct: bool = False, causal: bool = False
) -> LaunchConfig:  # fmt: skip
    """Return the decode configuration for requests with ``rows`` = heads × new tokens query rows.

    ``direct``: one split, so the kernel writes the output itself; ``causal``: several new tokens a request.
    ``block_m`` depends on neither.
    """
    e4m3, paged = kv_dtype == torch.float8_e4m3fn, page_size % 64 == 0
    table: tuple[LaunchConfig, ...]
    if dtype == torch.float32:
        table = _DECODE_FP32
    elif paged:
        table = _DECODE_PAGED_E4M3 if e4m3 else _DECODE_PAGED_LAST if direct and causal else _DECODE_PAGED
    elif e4m3:
        table = _DECODE_E4M3
    else:
        table = _DECODE_16BIT_DIRECT if direct else _DECODE_16BIT
    return next((config for config in table if rows <= config.block_m), table[-1])


def prefill_config(dtype: torch.dtype) -> LaunchConfig:
    """Return the prefill configuration."""
    return _PREFILL_FP32 if dtype == torch.float32 else _PREFILL_16BIT


def num_splits(programs: int, max_seq_len: int, config: LaunchConfig, sm_count: int) -> int:
    """Return into how many parts each request's cached rows are cut.

    A function of host bounds only, so it is the same at capture and at every replay. A power of two: as many programs
    as run at once, but no split shorter than ``config.split_rows``.

    Parameters
    ----------
    programs : int
        Programs without splitting.
    max_seq_len : int
    config : LaunchConfig
    sm_count : int
    """
    splits, places = 1, sm_count * config.per_sm
    while splits < MAX_SPLITS and programs * splits * 2 <= places and max_seq_len >= 2 * splits * config.split_rows:
        splits *= 2
    return splits


def uneven_splits(usual: int, requests: int, rows: int, max_seq_len: int, config: LaunchConfig) -> int:
    """Return how many splits the longest request may have where each has as many as its length is worth.

    Requests of a batch differ in length, so that the longest one alone would keep its few programs busy long after all
    others; the more requests, the fewer programs each has. A function of host bounds, as :func:`num_splits`: how long
    they are, kernels read. ``rows``: query rows of all requests; their partial results go through memory.
    """
    if requests < MANY_REQUESTS:
        return usual
    return min(MAX_SPLITS, UNEVEN * usual, max_seq_len // config.split_rows, PARTIAL_ROWS // rows)


# What a tuned table may set, in this order: tile sizes, warps, stages, and for decode the programs a multiprocessor
# that splits aim at.
KNOBS = ("block_m", "block_n", "num_warps", "num_stages", "per_sm")


def knobs(config: Mapping[str, int] | None) -> list[int]:
    """Return a tuned table's kernel parameters in the order of :data:`KNOBS`; empty: the heuristic's."""
    if not config:
        return []
    check_keys("mla", "config of the Triton backend", config, KNOBS)
    return [config[name] for name in KNOBS]


def tuned(chosen: LaunchConfig, knobs: Sequence[int], page_size: int) -> LaunchConfig:
    """Return the configuration of these knobs, or ``chosen`` if there are none."""
    if not knobs:
        return chosen
    block_m, block_n, num_warps, num_stages, per_sm = knobs
    return LaunchConfig(block_m, block_n, num_warps, num_stages, chosen.ahead or page_size % block_n == 0, per_sm)


@lru_cache(maxsize=4096)
def decode_launch(
    rows: int, requests: int, max_query_len: int, max_seq_len: int, dtype: torch.dtype, kv_dtype: torch.dtype,
    page_size: int, knobs: tuple[int, ...], sm_count: int,
) -> tuple[LaunchConfig, int, int, int, int]:  # fmt: skip
    """Return a decode launch's configuration, blocks of rows a request, splits: usual, at most, and by whose lengths.

    ``rows``: query rows of a request, heads × the most new tokens. The last: a power of two that holds all requests,
    whose lengths settle their splits (see :func:`uneven_splits`); 0: each has the usual ones (:func:`num_splits`).
    """
    config = tuned(decode_config(rows, dtype, kv_dtype, page_size), knobs, page_size)
    row_blocks = cdiv(rows, config.block_m)
    usual = num_splits(requests * row_blocks, max_seq_len, config, sm_count)
    most = uneven_splits(usual, requests, requests * rows, max_seq_len, config)
    if most >= 2 * usual:
        block = next((size for size in REQUEST_BLOCKS if requests <= size), next_power_of_2(requests))
        return config, row_blocks, usual, most, block
    if usual == 1:
        config = tuned(decode_config(rows, dtype, kv_dtype, page_size, True, max_query_len > 1), knobs, page_size)
    return config, row_blocks, usual, usual, 0


def decode_candidates(rows: int, dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int) -> list[dict[str, int]]:
    """Return the decode configurations that a tuner tries, the heuristic's own first."""
    own = decode_config(rows, dtype, kv_dtype, page_size)
    found = [own]
    if dtype != torch.float32:
        e4m3 = kv_dtype == torch.float8_e4m3fn
        shapes: tuple[tuple[int, int, int, int], ...]
        if rows > 32 and not e4m3:
            shapes = ((64, 64, 8, 2), (64, 32, 8, 3))
        elif rows > 16:
            shapes = ((32, 64, 8, 2), (32, 32, 8, 3), (32, 32, 8, 2))
        elif e4m3:
            shapes = ((16, 32, 4, 3), (16, 32, 4, 4), (16, 64, 8, 2), (16, 64, 8, 3))
        else:
            shapes = ((16, 64, 4, 2), (16, 64, 8, 2), (16, 64, 8, 3), (16, 32, 4, 3))
        for block_m, block_n, warps, stages in shapes:
            for per_sm in (1, 2, 4):
                ahead = own.ahead or page_size % block_n == 0
                found.append(LaunchConfig(block_m, block_n, warps, stages, ahead, per_sm))
    return _as_dicts(found)


def prefill_candidates(dtype: torch.dtype) -> list[dict[str, int]]:
    """Return the prefill configurations that a tuner tries, the heuristic's own first."""
    found = [prefill_config(dtype)]
    if dtype != torch.float32:
        sizes = ((128, 64, 8), (128, 128, 8), (128, 32, 8), (64, 64, 4), (64, 128, 4), (64, 32, 4))
        found += [LaunchConfig(m, n, warps, stages) for m, n, warps in sizes for stages in (2, 3)]
    return _as_dicts(found)


def _as_dicts(configs: list[LaunchConfig]) -> list[dict[str, int]]:
    dicts = [{name: int(getattr(config, name)) for name in KNOBS} for config in configs]
    return [each for index, each in enumerate(dicts) if each not in dicts[:index]]
