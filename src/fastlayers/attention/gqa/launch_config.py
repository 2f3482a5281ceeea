"""What decides about the launches of decode in Triton: blocks, splits, and which steps of a few tokens take its kernel.

All of it follows from host bounds and the configuration, so that a captured grid serves every step.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from fastlayers.attention.gqa.config import GQAConfig
from fastlayers.integers import next_power_of_2

# Programs that a small batch is cut into: one a multiprocessor of an H200; of narrow heads, which bring half the bytes
# a block, two. Constants, so that results do not depend on the GPU.
FEW_PROGRAMS, PROGRAMS = 132, 264
# Longer requests than LONGEST are cut further, into at most MANY programs in all: one of them holds up nobody.
LONGEST, MANY = 2048, 1056
# So many parts are added up by the last program of a request to finish; more by a second kernel, a head a program.
FUSED_SPLITS = 4
# Parts that a request is cut into at most where keys alone say how many.
KEYED = 8
# So many rows, tokens × query heads of a key head, are one tile: the time of a program is then that of its keys.
FEW_ROWS = 32

# Of a configuration, in the operator's order.
NUMBERS = ("BLOCK_N", "PROGRAMS", "MIN_KEYS", "MAX_KEYS", "num_warps", "num_stages")


def decode_config(cfg: GQAConfig, requests: int) -> dict[str, int]:
    """Return what decides about a batch without a tuned table.

    BLOCK_N keys a block, PROGRAMS that a batch is cut into, of at least MIN_KEYS and if possible at most MAX_KEYS keys.
    """
    if cfg.dtype == torch.float32:
        block, stages = 16, 2
    else:
        block, stages = 64 if cfg.head_dim <= 128 else 32, 4
    if cfg.window is not None and cfg.window <= 4 * block:
        return {
            "BLOCK_N": block, "PROGRAMS": 1, "MIN_KEYS": LONGEST, "MAX_KEYS": LONGEST,
            "num_warps": 4, "num_stages": min(stages, 3),
        }  # fmt: skip
    # Where requests fill the GPU, only long ones are cut.
    least = block if requests * cfg.num_kv_heads < FEW_PROGRAMS else LONGEST
    programs = FEW_PROGRAMS if cfg.head_dim > 64 else PROGRAMS
    return {
        "BLOCK_N": block, "PROGRAMS": programs, "MIN_KEYS": least, "MAX_KEYS": LONGEST,
        "num_warps": 4, "num_stages": stages,
    }  # fmt: skip


def candidates(cfg: GQAConfig, requests: int) -> list[dict[str, int]]:
    """Return what is worth timing, the rule's own choice first."""
    own = decode_config(cfg, requests)
    if cfg.dtype == torch.float32:
        return [own]
    shapes: tuple[tuple[int, int, int], ...]
    if own["PROGRAMS"] == 1:
        shapes = ((64, 4, 2), (64, 4, 4), (64, 2, 3), (64, 1, 2), (128, 8, 2), (128, 4, 2), (32, 1, 4), (32, 1, 3))
        found = [own | {"BLOCK_N": n, "num_warps": warps, "num_stages": stages} for n, warps, stages in shapes]
    else:
        shapes = ((64, 4, 4), (64, 2, 4), (64, 4, 6), (32, 2, 4), (32, 2, 6), (32, 1, 4))
        few, tiles = own["MIN_KEYS"], requests * cfg.num_kv_heads
        # By keys alone, whatever fills the GPU: a request that is much longer than the others holds up nobody.
        found = [
            {
                "BLOCK_N": n, "PROGRAMS": KEYED * tiles, "MIN_KEYS": least, "MAX_KEYS": LONGEST,
                "num_warps": warps, "num_stages": stages,
            }
            for least in (LONGEST, LONGEST // 2)
            for n, warps, stages in shapes[:2]
        ] + [
            {
                "BLOCK_N": n, "PROGRAMS": programs, "MIN_KEYS": least, "MAX_KEYS": most,
                "num_warps": warps, "num_stages": stages,
            }
            for least, most in ((few, LONGEST), (few, 2 * LONGEST), (2 * few, LONGEST))
            for programs in ((FEW_PROGRAMS, PROGRAMS) if tiles < PROGRAMS else (own["PROGRAMS"],))
            for n, warps, stages in shapes
            if n * cfg.head_dim * (stages - 1) <= 40960
        ]  # fmt: skip
    return [own, *(one for one in found if one != own)][:40]


@lru_cache
def splits_of(tiles: int, keys: int, programs: int, min_keys: int, max_keys: int) -> tuple[int, int]:
    """Return programs for each of ``tiles`` requests × key heads of at most ``keys`` keys: at most, and usually.

    From host bounds only, so that a captured grid serves every step.
    """
    usual = max(1, min(programs // tiles, -(-keys // min_keys)))
    balanced = min(-(-keys // max_keys), MANY // tiles, max(usual, FUSED_SPLITS))
    return max(usual, balanced), usual


def one_page(page_size: int, block_n: int, window: int) -> bool:
    """Return whether blocks begin where pages do, so that one page holds each; a short window takes fewer without."""
    return page_size % block_n == 0 and not 0 < window <= 4 * block_n


@lru_cache
def blocks_of(group: int, each: int, head_dim: int, splits: int) -> dict[str, int]:
    """Return the sizes of a program's tiles: rows of queries, those added up, a head's values, parts added at once."""
    power = next_power_of_2
    rows = power(group * each)
    return {
        "BLOCK_M": max(16, rows), "BLOCK_G": rows, "BLOCK_D": max(16, power(head_dim)),
        "BLOCK_S": min(power(splits), FUSED_SPLITS),
    }  # fmt: skip


def serves(group: int, dtype: torch.dtype) -> bool:
    """Return whether these kernels fit: wide groups of fp32 heads would not fit the registers."""
    return group <= (16 if dtype == torch.float32 else 64)


def tokens_each(group: int, most: int, dtype: torch.dtype) -> int:
    """Return for how many tokens a request the kernel that takes ``most`` is made; 0: these kernels do not.

    As many as fill a tile of its height, so that few variants are compiled.
    """
    rows = max(16, next_power_of_2(group * most))
    return max(2, rows // group) if rows <= FEW_ROWS and serves(rows, dtype) else 0


def kernels_of(
    group: int, each: int, tiles: int, head_dim: int, keys: int, block_n: int, programs: int, min_keys: int,
    max_keys: int, warps: int, stages: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """Return what of a step is compiled into kernels: constants that differ between steps, and numbers.

    ``tiles``: requests × key heads. ``keys``: the most that one of them reads. The rest is the configuration's.
    """
    splits, wanted = splits_of(tiles, keys, programs, min_keys, max_keys)
    blocks = blocks_of(group, each, head_dim, splits)
    least, most = max(1, min_keys // block_n), max(1, max_keys // block_n)
    combined = combine_block(splits, blocks["BLOCK_D"]) if splits > FUSED_SPLITS else 0
    return (each, block_n, least, most, warps, stages, splits > 1, blocks["BLOCK_S"], combined), (splits, wanted)


def combine_block(splits: int, block_d: int) -> int:
    """Return how many parts the second kernel adds up at once."""
    return min(next_power_of_2(splits), 4096 // block_d)
