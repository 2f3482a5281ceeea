"""How the Triton experts run: which kernels, and tile sizes, by how many pairs an expert gets on average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from fastlayers.errors import check_keys
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.weights import GROUP
from fastlayers.quant.packed_codes import run_of
from fastlayers.quant.weight_only_config import WEIGHT_ONLY

# More tokens run in several chunks, so that the fp32 partial sums [T*k, D] stay below about 1 GiB.
MAX_TOKENS = 4096
# Up to here each pair is computed by itself: experts that two tokens share are rare, and L2 holds them.
MAX_PAIR_TOKENS = 4
# Beyond, a table asks for too much: every pair reads its expert from L2.
PAIR_LIMIT, MXFP4_PAIR_LIMIT = 16, 64


@dataclass(frozen=True)
class Tile:
    """Tile of one grouped GEMM; ``m`` is shared by both, because the alignment is. ``m`` 1: one pair.

    ``m`` 0: matrix-vector products, of ``n`` rows of weights and ``stages`` tiles of ``k`` columns in flight.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class LaunchConfig:
    """Both GEMMs' tiles, and ``band``: how many blocks of pairs share the reading of weights.

    ``splits`` programs share the columns of an output of the second GEMM (packed weights, and ``first.m`` 1),
    ``splits1`` of the first (``first.m`` 1, weights not packed). A program of the second goes over ``strip`` tiles of
    outputs (above 1 where :func:`takes_strips`).
    """

    first: Tile
    second: Tile
    band: int = 8
    splits: int = 1
    splits1: int = 1
    strip: int = 1

    @property
    def by_pair(self) -> bool:
        """Whether no alignment is needed."""
        return self.first.m <= 1

    def config(self) -> dict[str, int]:
        """Return the plan as a table holds it."""
        return dict(zip(_NAMES, self.numbers(), strict=True))

    def numbers(self) -> list[int]:
        """Return the plan as an operator takes it; spelt out, because torch.compile traces it."""
        a, b = self.first, self.second
        tiles = [a.n, a.k, a.warps, a.stages, b.n, b.k, b.warps, b.stages]
        return [a.m, self.band, self.splits, self.splits1, self.strip, *tiles]

    @classmethod
    def of(cls, config: Mapping[str, int]) -> LaunchConfig:
        """Return the plan of a table's row."""
        check_keys("fused_moe", "config of the Triton backend", config, _NAMES, _ONES)
        tiles = [Tile(config["m"], *(config[f"{name}{i}"] for name in _TILE)) for i in (1, 2)]
        return cls(tiles[0], tiles[1], config["band"], *(config.get(name, 1) for name in _ONES))


# What LaunchConfig.numbers() lists.
_TILE = ("n", "k", "warps", "stages")
_ONES = ("splits", "splits1", "strip")  # 1 where a table does not say
_NAMES = ("m", "band", *_ONES, *(f"{name}{number}" for number in (1, 2) for name in _TILE))


@lru_cache(maxsize=4096)
def plan_of(numbers: tuple[int, ...]) -> LaunchConfig:
    """Return the plan of :meth:`LaunchConfig.numbers`; the same one for the same numbers."""
    return LaunchConfig.of(dict(zip(_NAMES, numbers, strict=True)))


@lru_cache(maxsize=4096)
def plan_for(tokens: int, cfg: FusedMoEConfig, wide: bool) -> LaunchConfig:
    """Return how ``tokens`` tokens run without a table; ``wide``: fp32 activations, no tensor cores.

    Depends on shapes only, so that a captured grid stays right.
    """
    small_batch = tokens <= MAX_PAIR_TOKENS
    pairs = min(tokens, MAX_TOKENS) * cfg.pairs_per_token
    if cfg.quant == "mxfp4":
        return _mxfp4_plan(pairs, small_batch, cfg, wide)
    if cfg.quant in WEIGHT_ONLY:
        return _packed_plan(pairs, small_batch, cfg, wide)
    if small_batch and not (wide and cfg.quant == "none"):
        # Of FP8 weights tables take them where they were measured: with few columns the pairs' kernels are as fast.
        if tokens == 1 and not wide and cfg.quant == "none" and takes_vectors(cfg):
            return VECTORS
        return _pair_plan(pairs, cfg)
    average = -(-pairs // cfg.all_experts)
    if wide and cfg.quant == "none":
        m = 16 if average <= 16 else 32
        return LaunchConfig(Tile(m, 32, 32, 4, 2), Tile(m, 64, 32, 4, 2))
    k = 64 if cfg.quant == "none" else 128
    strips = not wide and cfg.intermediate_size == 2 * GROUP and takes_strips(cfg, _STRIP * 64)
    if average <= 16:
        # Whole lines of 128 columns: with 64 the weights arrive at 0.87 of the speed.
        plan = LaunchConfig(Tile(16, 128, 128, 4, 3), Tile(16, 128, 128, 4, 3), band=1)
        return replace(plan, second=Tile(16, 64, 128, 4, 3), strip=_STRIP) if strips else plan
    if average <= 64:
        m = 32 if average <= 32 else 64
        return LaunchConfig(Tile(m, 64, k, 4, 4), Tile(m, 128, k, 4, 4))
    if cfg.quant == "none":
        return LaunchConfig(Tile(128, 128, k, 8, 3), Tile(128, 128, k, 8, 4))
    plan = LaunchConfig(Tile(64, 128, k, 8, 3), Tile(64, 128, k, 4, 4))
    return replace(plan, second=Tile(64, 64, k, 8, 3), strip=_STRIP) if strips else plan


# Measured on an H200, see benchmarks/notes/decode_phases.md.
VECTORS = LaunchConfig(Tile(0, 2, 1024, 4, 2), Tile(0, 2, 256, 4, 1))


# FP8: rows of each half, columns, warps and tiles ahead; outputs, warps and tiles ahead. See
# benchmarks/notes/fused_moe_triton.md.
_FP8_FIRST = (4, 2048, 4, 1), (8, 2048, 4, 1), (4, 1024, 4, 1), (2, 2048, 4, 1), (8, 1024, 4, 1)
_FP8_SECOND = (16, 4, 18), (8, 4, 9), (16, 4, 9), (32, 4, 18)


def takes_vectors(cfg: FusedMoEConfig) -> bool:
    """Return whether matrix-vector products serve.

    16-bit weights: no shared experts, and sums that fit registers. FP8 in blocks: whole groups of columns, so that
    neither rows of weights nor their scales end inside a program. Nibbles: groups of a power of two.
    """
    if cfg.quant == "w4a16":
        whole = cfg.group_size > 0 and cfg.group_size & (cfg.group_size - 1) == 0
        return whole and cfg.dtype != torch.float32 and cfg.pairs_per_token <= 16
    if cfg.quant == "fp8_block":
        whole = cfg.hidden_size % GROUP == 0 and cfg.intermediate_size % GROUP == 0
        return whole and cfg.dtype != torch.float32 and cfg.pairs_per_token <= 16
    return cfg.quant == "none" and cfg.num_shared == 0 and cfg.dtype != torch.float32 and cfg.top_k <= 16


# Tiles of a strip, of which few are as good as many, and the groups of columns whose codes fit beside weights.
_STRIP, _STRIP_GROUPS = 8, 6


def takes_strips(cfg: FusedMoEConfig, width: int) -> bool:
    """Return whether the second product can go over strips of ``width`` outputs: FP8 in blocks, nothing left over."""
    groups, rest = divmod(cfg.intermediate_size, GROUP)
    whole = rest == 0 and groups <= _STRIP_GROUPS and cfg.hidden_size % width == 0 and cfg.hidden_size % GROUP == 0
    return cfg.quant == "fp8_block" and whole and not cfg.bias and cfg.dtype != torch.float32


def _pair_plan(pairs: int, cfg: FusedMoEConfig) -> LaunchConfig:
    """64 rows a program; if that makes few, the first product's columns in parts of at least 8 steps."""
    if cfg.quant == "none":
        return LaunchConfig(Tile(1, 64, 64, 4, 6), Tile(1, 64, 64, 4, 6))
    programs, steps, splits = pairs * -(-2 * cfg.intermediate_size // 64), -(-cfg.hidden_size // 128), 1
    while programs < 512 and programs * splits < 1024 and 16 * splits <= steps:
        splits *= 2
    tile = Tile(1, 64, 128, 4, 6 if programs >= 1024 else 4)
    return LaunchConfig(tile, tile, splits1=splits)


def _mxfp4_plan(pairs: int, small_batch: bool, cfg: FusedMoEConfig, wide: bool) -> LaunchConfig:
    """``n`` is the GEMM's M here, the side that is decoded: 64 rows are the least that Hopper's tensor cores take."""
    average = -(-pairs // cfg.all_experts)
    if wide:
        m = 1 if small_batch else 16
        return LaunchConfig(Tile(m, 16, 32, 4, 2), Tile(m, 64, 32, 4, 2))
    depth = _mxfp4_depth(cfg)
    m = 1 if small_batch else 16 if average <= 16 else 32 if average <= 32 else 64 if average <= 64 else 128
    if m <= 32:
        return LaunchConfig(Tile(m, 32, depth, 4, 3), Tile(m, 64, depth, 4, 3), splits=2 if small_batch else 1)
    return LaunchConfig(Tile(m, 64, min(depth, 128), 8, 3), Tile(m, 128, min(depth, 128), 8, 3))


def _mxfp4_depth(cfg: FusedMoEConfig) -> int:
    """Return 256, or less for rows of fewer columns."""
    return min(256, 1 << (min(cfg.hidden_size, cfg.intermediate_size) - 1).bit_length())


def _packed_plan(pairs: int, small_batch: bool, cfg: FusedMoEConfig, wide: bool) -> LaunchConfig:
    """As :func:`_mxfp4_plan`; a tile takes what lies in one group of inputs, at most 128. Not measured yet."""
    average = cdiv(pairs, cfg.all_experts)
    if wide:
        m = 1 if small_batch else 16
        return LaunchConfig(Tile(m, 16, 32, 4, 2), Tile(m, 32, 32, 4, 2))
    depth, m = _packed_depth(cfg), 1 if small_batch else 16
    while not small_batch and m < min(average, 128):
        m *= 2
    if m <= 32:
        # Two products of few pairs: programs on each multiprocessor, if the columns of the second are shared.
        splits = 2 if pairs * cdiv(cfg.hidden_size, 64) < 512 and cfg.intermediate_size >= 4 * depth else 1
        return LaunchConfig(Tile(m, 32, depth, 4, 4), Tile(m, 64, depth, 4, 4), splits=splits if small_batch else 1)
    return LaunchConfig(Tile(m, 64, depth, 8, 3), Tile(m, _packed_rows(m), depth, 8, 3))


def _packed_rows(pairs: int) -> int:
    """Return the most rows of the second product: a group's sums lie beside those of all groups in registers."""
    return 128 if pairs <= 64 else 64


def _packed_depth(cfg: FusedMoEConfig) -> int:
    """Return how many input features a step takes."""
    return min(run_of(cfg.group_size, torch.bfloat16), next_power_of_2(min(cfg.hidden_size, cfg.intermediate_size)))


def candidates(cfg: FusedMoEConfig, num_tokens: int) -> list[dict[str, int]]:
    """Return what the tuner tries for ``num_tokens`` tokens, the heuristic's plan first; at most 40.

    Both GEMMs vary together along what matters most, then one at a time about the heuristic's plan.
    """
    pairs = min(num_tokens, MAX_TOKENS) * cfg.pairs_per_token
    plans = [plan_for(num_tokens, cfg, False)]
    if cfg.quant == "mxfp4":
        plans += _mxfp4_plans(cfg, num_tokens, pairs)
    elif cfg.quant in WEIGHT_ONLY:
        plans += _packed_plans(cfg, num_tokens, pairs)
    else:
        small_batch = num_tokens <= MAX_PAIR_TOKENS
        if small_batch and takes_vectors(cfg):
            plans += _fp8_vector_plans(cfg) if cfg.quant == "fp8_block" else _vector_plans(cfg)
        if num_tokens <= PAIR_LIMIT:
            plans += _pair_plans(cfg, pairs)[: None if small_batch else 4 if num_tokens <= 8 else 2]
        if not small_batch or pairs > cfg.all_experts:
            plans += _block_plans(cfg, pairs)
    unique = list(dict.fromkeys(plans))
    return [plan.config() for plan in unique[:40]]


def _pair_plans(cfg: FusedMoEConfig, pairs: int) -> list[LaunchConfig]:
    base = _pair_plan(pairs, cfg)
    shapes = [(64, 128, 4, 10 - base.first.stages), (128, 128, 8, 4), (64, 128, 2, 5), (32, 128, 2, 5)]
    if cfg.quant == "none":
        shapes = [(64, 128, 4, 4), (32, 128, 2, 5), (32, 64, 2, 8), (128, 64, 4, 4)]
    tiles = [Tile(1, *shape) for shape in shapes]
    plans = [base, *(replace(base, first=tile, second=tile) for tile in tiles), replace(base, first=tiles[0])]
    if cfg.quant != "none":
        plans += [replace(base, splits1=parts) for parts in (2 * base.splits1, max(1, base.splits1 // 2))]
        plans += [replace(base, first=tiles[0], second=tiles[0], splits1=2 * base.splits1)]
    return [*plans, replace(base, splits=2)]


def _vector_plans(cfg: FusedMoEConfig) -> list[LaunchConfig]:
    """Few rows a program; its tiles must leave a thread some registers."""
    span = next_power_of_2(cfg.top_k)
    firsts = [Tile(0, *shape) for shape in ((2, 1024, 4, 2), (1, 1024, 4, 2), (2, 512, 2, 4), (1, 2048, 8, 1))]
    shapes = (2, 256, 4, 1), (2, 256, 4, 3), (1, 256, 2, 3), (4, 256, 8, 3), (1, 256, 4, 3)
    seconds = [Tile(0, *shape) for shape in shapes]
    seconds = [tile for tile in seconds if tile.n * span * tile.k <= 2048 * tile.warps]
    plans = [LaunchConfig(tile, seconds[0]) for tile in firsts]
    return plans + [LaunchConfig(firsts[0], tile) for tile in seconds[1:]]


def _fp8_vector_plans(cfg: FusedMoEConfig) -> list[LaunchConfig]:
    """Rows enough that quantising is not most of the work; the second product's tiles ahead: those of its programs.

    A tile of the second product has ``512 * warps / k`` rows, at most as many as a program has outputs.
    """
    firsts = [Tile(0, *shape) for shape in _FP8_FIRST]
    # The largest power of two that divides a row.
    depth = min(512, cfg.intermediate_size & -cfg.intermediate_size)
    seconds = []
    for outputs, warps, ahead in _FP8_SECOND:
        rows = 512 * warps // depth
        tiles = outputs * cfg.pairs_per_token // rows * (cfg.intermediate_size // depth)
        if rows <= outputs:
            seconds.append(Tile(0, outputs, depth, warps, min(ahead, tiles)))
    plans = [LaunchConfig(tile, seconds[0]) for tile in firsts] + [LaunchConfig(firsts[0], s) for s in seconds[1:]]
    return list(dict.fromkeys(plans))


# 16-bit weights: pairs of a block, band, then columns, depth, warps and stages of both products.
_PLAIN = (
    (32, 1, (128, 128, 4, 2), (256, 128, 4, 2)), (32, 16, (128, 128, 4, 2), (256, 128, 4, 2)),
    (32, 1, (128, 128, 4, 2), (128, 128, 4, 2)), (32, 1, (128, 128, 8, 2), (256, 128, 8, 2)),
    (64, 1, (64, 64, 4, 3), (128, 64, 4, 3)), (64, 16, (64, 64, 4, 3), (128, 64, 4, 3)),
    (64, 1, (64, 64, 4, 4), (128, 64, 4, 4)), (64, 1, (64, 64, 4, 3), (64, 64, 4, 4)),
    (64, 1, (64, 64, 4, 3), (256, 64, 8, 3)), (64, 1, (128, 64, 8, 3), (128, 64, 4, 3)),
    (64, 1, (64, 128, 4, 2), (128, 128, 4, 2)),
    (128, 16, (128, 64, 8, 4), (256, 64, 8, 4)), (128, 1, (128, 64, 8, 4), (256, 64, 8, 4)),
    (128, 1, (128, 64, 8, 4), (128, 64, 8, 4)), (128, 1, (64, 64, 4, 3), (128, 64, 4, 3)),
)  # fmt: skip


def _block_plans(cfg: FusedMoEConfig, pairs: int) -> list[LaunchConfig]:
    plain = cfg.quant == "none"
    heights = _heights(pairs / cfg.all_experts, plain)
    plans = [LaunchConfig(Tile(m, *a), Tile(m, *b), band) for m, band, a, b in _PLAIN if plain and m in heights]
    for m in heights:
        for k in (64, 128) if plain else (128,):
            if m == 16:
                shapes = [(128, 128, 4, 3), (64, 128, 4, 3), (64, 64, 4, 4), (32, 64, 4, 4), (32, 128, 4, 5)]
            elif m <= 64:
                shapes = [(64, 64, 4, 4), (64, 128, 4, 3), (128, 128, 4, 3), (128, 128, 8, 3)]
            else:
                shapes = [(64, 128, 8, 4), (128, 128, 8, 3), (128, 256, 8, 3)]
            for n1, n2, warps, stages in shapes:
                n2 = min(n2, 128) if cfg.quant == "fp8_block" else n2
                # Products of fewer than 64 rows of 16 bits are not asynchronous: one buffer less than stages.
                max_stages = 220_000 // (k * (m + 2 * n1) * (2 if plain else 1)) + (plain and m < 64)
                stages = min(stages, max_stages)
                band = 1 if m <= 32 else 8
                plans.append(LaunchConfig(Tile(m, n1, k, warps, stages), Tile(m, n2, k, warps, stages), band))
        if m != 128 and takes_strips(cfg, _STRIP * 64):
            plans += [_over_strips(m, cfg, *shape) for shape in ((64, 4), (64, 8), (128, 8))]
    if not plain and heights[0] == 16:
        firsts = [Tile(16, *shape) for shape in ((64, 128, 4, 5), (128, 128, 8, 3), (128, 128, 4, 4))]
        plans += [LaunchConfig(tile, Tile(16, 128, 128, 4, 3), 1) for tile in firsts]
    return plans


def _over_strips(m: int, cfg: FusedMoEConfig, columns: int, warps: int) -> LaunchConfig:
    """Return a plan whose second product goes over strips; ``columns``: of a tile of the first."""
    first = Tile(m, columns, 128, warps, 5 if m == 16 and columns == 64 else 3)
    stages = 3 if cfg.intermediate_size <= 2 * GROUP else 2
    return LaunchConfig(first, Tile(m, 64, 128, warps, stages), 1 if m <= 32 else 8, strip=_STRIP)


def _heights(average: float, plain: bool) -> list[int]:
    """Return the pairs a block may have; weights of 16 bits are read for half empty ones rather than twice."""
    if plain:
        return [m for m in (16, 32, 64, 128) if m / 4 <= max(4.0, average) and (m >= 64 or average < 2 * m)]
    return [m for m in (16, 32, 64, 128) if m / 8 <= max(2.0, average) and (m >= 128 or average <= 6 * m)]


def _mxfp4_plans(cfg: FusedMoEConfig, num_tokens: int, pairs: int) -> list[LaunchConfig]:
    heights, depth = _heights(pairs / cfg.all_experts, False), _mxfp4_depth(cfg)
    if num_tokens <= MXFP4_PAIR_LIMIT:
        heights = [1, *heights]
    plans = []
    for m in heights:
        if m <= 32:
            shapes = [(32, 64, d, 4, s) for d, s in ((256, 3), (256, 4), (128, 4), (128, 6))]
            shapes += [(64, 64, 256, 4, 3), (64, 128, 128, 4, 4), (64, 128, 256, 8, 3)]
        else:
            shapes = [(64, 128, 128, 8, 3), (64, 128, 128, 4, 3), (32, 64, 128, 4, 4), (64, 128, 64, 8, 4)]
        for n1, n2, k, warps, stages in shapes:
            k = min(k, depth)
            for splits in (1, 2, 3) if m <= 16 and n2 == 64 else (1,):
                plans.append(LaunchConfig(Tile(m, n1, k, warps, stages), Tile(m, n2, k, warps, stages), splits=splits))
    return plans


def _packed_plans(cfg: FusedMoEConfig, num_tokens: int, pairs: int) -> list[LaunchConfig]:
    """Rows of weights of both products, depth, warps, stages; few pairs also one by one, with shared columns."""
    heights, depth = _heights(pairs / cfg.all_experts, False), _packed_depth(cfg)
    if num_tokens <= PAIR_LIMIT:
        heights = [1, *heights]
    plans = _packed_vector_plans(cfg) if num_tokens <= MAX_PAIR_TOKENS and takes_vectors(cfg) else []
    for m in heights:
        if m <= 32:
            shapes = [(32, 64, depth, 4, 4), (32, 64, depth, 4, 6), (64, 64, depth, 4, 3), (64, 128, depth, 8, 3)]
            shapes += [(16, 32, depth, 4, 6), (32, 64, max(32, depth // 2), 4, 6)]
        else:
            # Four warps have no registers for the larger tiles.
            shapes = [(64, 128, depth, 8, 3), (32, 64, depth, 4, 4), (32, 64, depth, 8, 4)]
            shapes += [(64, 128, max(32, depth // 2), 8, 4)]
        for n1, n2, k, warps, stages in shapes:
            # Each split has blocks.
            for splits in (1, 2) if m <= 16 and n2 == 64 and cfg.intermediate_size > k else (1,):
                for band in (8,) if m <= 32 else (1, 8):
                    tiles = Tile(m, n1, k, warps, stages), Tile(m, min(n2, _packed_rows(m)), k, warps, stages)
                    plans.append(LaunchConfig(*tiles, band, splits=splits))
    return plans


# Nibbles: rows of each half, columns, warps and tiles in flight; outputs, warps for the depth's own, tiles in flight.
_PACKED_FIRST = (4, 2048, 2, 1), (8, 2048, 2, 1), (2, 2048, 2, 1), (4, 1024, 1, 2)
_PACKED_SECOND = (2, 256, 6), (4, 256, 12), (4, 256, 4), (1, 256, 3)


def _packed_vector_plans(cfg: FusedMoEConfig) -> list[LaunchConfig]:
    """A thread has 16 bytes of a tile: of a row of the first product, of the second's an output's of all pairs."""
    span = next_power_of_2(cfg.pairs_per_token)
    firsts = [Tile(0, *shape) for shape in _PACKED_FIRST]
    seconds = [Tile(0, n, k, max(1, span * k // 1024), ahead) for n, k, ahead in _PACKED_SECOND]
    return [LaunchConfig(tile, seconds[0]) for tile in firsts] + [LaunchConfig(firsts[0], s) for s in seconds[1:]]
