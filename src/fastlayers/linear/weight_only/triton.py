"""WeightOnlyLinear in Triton: codes are decoded in registers on their way into the product.

A tiled product split over K when there are few rows, a kernel that decodes the weights for a dense product when there
are many, and a matrix-vector kernel for 1 to 4 rows that keeps its next tiles of codes in flight (and asks for the
first ones before the kernels in front have ended), as for dense weights.
A tile lies in one group of input features, so that it takes one scale a column. Nibbles come as two halves that meet
two runs of x (quant/packed_codes.py): no shuffle between registers. Codes less their zero points are multiplied,
exactly, and a group's sums are scaled in fp32, as experts' are (moe/fused_moe/triton/packed_gemm.py).
Of nibbles in groups a tile takes x in whole lines, and several runs of groups shorter than 128 (triton_groups.py),
while there are few rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from fastlayers.errors import check_keys
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.linear.triton_gemm import TARGET_PROGRAMS, Tile, add_splits_kernel, tile_origin
from fastlayers.linear.weight_only.layer import ZERO, WeightOnlyLinearConfig
from fastlayers.linear.weight_only.triton_codes import decode, halves_of, load_columns, load_tile, scales_of
from fastlayers.linear.weight_only.triton_groups import short_groups_kernel
from fastlayers.operators import operator
from fastlayers.quant.packed_codes import run_of
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, dot, release_dependents

MAX_VECTOR_ROWS = 4
# Rows above which weights are decoded first, where groups have scales: 25 million take some 20 µs, as long as the
# dense product of 64 rows, and decoding them anew for each tile of rows takes longer.
MOST_ROWS = 64
# Codes of a tile that takes whole runs, unless a configuration says other.
DEPTH = 128
PARAMETERS = (
    "VECTOR", "BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLITS", "num_warps", "num_stages", "AHEAD", "BYTES", "WHOLE", "CACHED",
)  # fmt: skip


@triton.jit
def _rounded(
    code, scale_ptr, zero_ptr, index_ptr, k, column, N, K, scale, zero, dtype: tl.constexpr, ZERO: tl.constexpr,
    HAS_ZERO: tl.constexpr, E4M3: tl.constexpr, INDEXED: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Return weights of codes, by the scales given, or where each input feature ``k`` has a group by that one's."""
    if INDEXED:
        group = load_tile(index_ptr + k, k, K, EVEN_K)[None, :]
        own, middle = scales_of(scale_ptr, zero_ptr, group, column, N, ZERO, HAS_ZERO)
        return decode(code, own, middle, dtype, True, E4M3)
    else:
        return decode(code, scale, zero, dtype, True, E4M3)


@kernel
def _decode_kernel(
    weight_ptr, scale_ptr, zero_ptr, index_ptr, whole_ptr, N, K, weight_stride,
    ZERO: tl.constexpr, HAS_ZERO: tl.constexpr, NIBBLES: tl.constexpr, E4M3: tl.constexpr, GROUP: tl.constexpr,
    INDEXED: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write rounded weights ``[N, K]`` from codes whose groups have scales."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    known = (row % N)[:, None]
    CODES: tl.constexpr = BLOCK_K // 2 if NIBBLES else BLOCK_K
    code = tl.arange(0, CODES)
    k = block * BLOCK_K + ((code // 16) * 32 + code % 16 if NIBBLES else code)
    from_row = weight_ptr + known.to(tl.int64) * weight_stride + block * CODES + code[None, :]
    packed = load_tile(from_row, k[None, :], K, EVEN_K)
    scale, zero = scales_of(scale_ptr, zero_ptr, known * 0 + block * BLOCK_K // GROUP, known, N, ZERO, HAS_ZERO)
    dtype: tl.constexpr = whole_ptr.dtype.element_ty
    inside = (row < N)[:, None] & (k < K)[None, :]
    place = whole_ptr + row[:, None].to(tl.int64) * K + k[None, :]
    await_inputs(PDL)  # what is written may be what a kernel in front still reads
    release_dependents(PDL)
    low = _rounded(packed & 15 if NIBBLES else packed, scale_ptr, zero_ptr, index_ptr, k, known, N, K, scale, zero,
                   dtype, ZERO, HAS_ZERO, E4M3, INDEXED, EVEN_K)  # fmt: skip
    tl.store(place, low, mask=inside)
    if NIBBLES:
        high = _rounded(packed >> 4, scale_ptr, zero_ptr, index_ptr, k + 16, known, N, K, scale, zero, dtype, ZERO,
                        HAS_ZERO, E4M3, INDEXED, EVEN_K)  # fmt: skip
        tl.store(place + 16, high, mask=inside)


@kernel(do_not_specialize=("M",))
def _weight_only_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, index_ptr, bias_ptr, y_ptr, M, N, K, x_stride, weight_stride,
    ZERO: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, NIBBLES: tl.constexpr, E4M3: tl.constexpr,
    GROUP: tl.constexpr, INDEXED: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row0, column0 = tile_origin(M, N, BLOCK_M, BLOCK_N)
    row, column = row0 + tl.arange(0, BLOCK_M), column0 + tl.arange(0, BLOCK_N)
    CODES: tl.constexpr = BLOCK_K // 2 if NIBBLES else BLOCK_K
    code = tl.arange(0, CODES)
    # Input features of a tile's codes: of low halves, or of whole bytes. High halves are 16 further.
    low = (code // 16) * 32 + code % 16 if NIBBLES else code
    # Rows and columns beyond the edge read a valid one again, or nothing; their results are never stored.
    known, real = (column % N)[:, None], (row < M)[None, :]
    x_columns = x_ptr + (row % M).to(tl.int64)[None, :] * x_stride
    weight_rows = weight_ptr + known.to(tl.int64) * weight_stride + code[None, :]
    split = tl.program_id(1)
    blocks = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    first = split * blocks
    last = tl.minimum(first + blocks, tl.cdiv(K, BLOCK_K))
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # Of large tiles and of short groups, second sums take longer than rounding weights.
    SUMS: tl.constexpr = GROUP == 0 or (not INDEXED and BLOCK_K >= 64 and BLOCK_M <= 64)
    # Weights are the left factor: it may come from registers, in which they are decoded.
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # They are too few to be copied asynchronously: read one step ahead.
    start = tl.maximum(tl.minimum(first, last - 1), 0) * BLOCK_K // GROUP if GROUP > 0 else 0
    scale, zero = scales_of(scale_ptr, zero_ptr, known * 0 + start, known, N, ZERO, HAS_ZERO)
    await_inputs(PDL)
    release_dependents(PDL)
    for block in range(first, last):
        k = block * BLOCK_K + low
        x = load_columns(x_columns + k[:, None], k[:, None], K, real, EVEN_K, BLOCK_M <= 16)
        packed = load_tile(weight_rows + block * CODES, k[None, :], K, EVEN_K)
        if GROUP > 0 and not INDEXED:
            following = tl.minimum(block + 1, last - 1) * BLOCK_K // GROUP
            ahead, zero_ahead = scales_of(scale_ptr, zero_ptr, known * 0 + following, known, N, ZERO, HAS_ZERO)
        else:
            ahead, zero_ahead = scale, zero
        if SUMS:  # codes less their zero points are multiplied, exactly, and a group's sums are scaled
            part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) if GROUP > 0 else acc
            if NIBBLES:
                less, more = halves_of(packed, zero, dtype)
                part = dot(less, x, part)
                x = load_columns(x_columns + (k + 16)[:, None], k[:, None], K, real, EVEN_K, BLOCK_M <= 16)
                part = dot(more, x, part)
            else:
                part = dot(decode(packed, 1.0, zero, dtype, False, E4M3), x, part)
            acc = acc + part * scale if GROUP > 0 else part
        else:  # weights are multiplied, rounded
            low_weights = _rounded(packed & 15 if NIBBLES else packed, scale_ptr, zero_ptr, index_ptr, k, known, N, K,
                                   scale, zero, dtype, ZERO, HAS_ZERO, E4M3, INDEXED, EVEN_K)  # fmt: skip
            acc = dot(low_weights, x, acc)
            if NIBBLES:
                x = load_columns(x_columns + (k + 16)[:, None], k[:, None], K, real, EVEN_K, BLOCK_M <= 16)
                high_weights = _rounded(packed >> 4, scale_ptr, zero_ptr, index_ptr, k + 16, known, N, K, scale, zero,
                                        dtype, ZERO, HAS_ZERO, E4M3, INDEXED, EVEN_K)  # fmt: skip
                acc = dot(high_weights, x, acc)
        scale, zero = ahead, zero_ahead
    if GROUP == 0:
        acc *= scale
    if SPLITS == 1 and HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[:, None]
    target = y_ptr + (split.to(tl.int64) * M + row.to(tl.int64))[None, :] * N + column[:, None]
    tl.store(target, cast(acc, y_ptr.dtype.element_ty), mask=(row[None, :] < M) & (column[:, None] < N))


@triton.jit
def _held(
    weight_rows, scale_ptr, zero_ptr, low, group, column, tile, N, K,
    ZERO: tl.constexpr, HAS_ZERO: tl.constexpr, GROUPED: tl.constexpr, EVEN_K: tl.constexpr,
    CODES: tl.constexpr, FEATURES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return a tile of codes ``[BLOCK_N, GROUPS, BYTES]`` with scales and zero points ``[BLOCK_N, GROUPS, 1]``."""
    packed = load_tile(weight_rows + tile * CODES, tile * FEATURES + low, K, EVEN_K)
    at = tl.minimum(tile * (FEATURES // GROUP) + group, K // GROUP - 1) if GROUPED else group * 0
    scale, zero = scales_of(scale_ptr, zero_ptr, at, column, N, ZERO, HAS_ZERO)
    return packed, scale, zero


@kernel
def _weight_only_vector_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, M, N, K, x_stride, weight_stride,
    ZERO: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, NIBBLES: tl.constexpr, E4M3: tl.constexpr,
    GROUPED: tl.constexpr, EVEN_K: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N rows of the weight by ``M`` (at most ROWS) rows of x: BLOCKS tiles of GROUPS runs of BYTES."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = tl.minimum(column, N - 1)[:, None, None]
    group, byte = tl.arange(0, GROUPS)[None, :, None], tl.arange(0, BYTES)[None, None, :]
    GROUP: tl.constexpr = 2 * BYTES if NIBBLES else BYTES
    CODES: tl.constexpr = GROUPS * BYTES
    FEATURES: tl.constexpr = GROUPS * GROUP
    low = group * GROUP + ((byte // 16) * 32 + byte % 16 if NIBBLES else byte)
    weight_rows = weight_ptr + known.to(tl.int64) * weight_stride + group * BYTES + byte
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    held = ()
    for i in tl.static_range(AHEAD):
        tile = _held(weight_rows, scale_ptr, zero_ptr, low, group, known, i, N, K,
                     ZERO, HAS_ZERO, GROUPED, EVEN_K, CODES, FEATURES, GROUP)  # fmt: skip
        held = held + (tile,)  # type: ignore[assignment]
    await_inputs(PDL)
    release_dependents(PDL)
    sums = ()
    for row in tl.static_range(ROWS):
        sums = sums + (tl.zeros([BLOCK_N, GROUPS, BYTES], tl.float32),)  # type: ignore[assignment]
    for i in tl.static_range(BLOCKS):
        if i + AHEAD < BLOCKS:
            tile = _held(weight_rows, scale_ptr, zero_ptr, low, group, known, i + AHEAD, N, K,
                         ZERO, HAS_ZERO, GROUPED, EVEN_K, CODES, FEATURES, GROUP)  # fmt: skip
            held = held + (tile,)  # type: ignore[assignment]
        packed, scale, zero = held[i]  # type: ignore[misc]
        k = i * FEATURES + low
        if NIBBLES:
            weight, other = halves_of(packed, zero, dtype)
        else:
            weight = decode(packed, 1.0, zero, dtype, False, E4M3)
            other = weight
        added = ()
        for row in tl.static_range(ROWS):
            # For each row of the weight, else it comes in another layout and crosses shared memory.
            x_row = x_ptr + (row % M) * x_stride + k + known * 0
            part = load_tile(x_row, k, K, EVEN_K).to(tl.float32) * weight.to(tl.float32)
            if NIBBLES:
                part += load_tile(x_row + 16, k, K, EVEN_K).to(tl.float32) * other.to(tl.float32)
            added = added + (sums[row] + part * scale if GROUPED else sums[row] + part,)
        sums = added
    bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    for row in tl.static_range(ROWS):
        y = tl.sum(tl.sum(sums[row], axis=2), axis=1)
        if not GROUPED:
            y *= tl.load(scale_ptr + tl.minimum(column, N - 1))
        tl.store(y_ptr + row * N + column, cast(y + bias, y_ptr.dtype.element_ty), mask=(column < N) & (row < M))


def _fits_vectors(rows: int, group: int, indexed: bool) -> bool:
    """Return whether the vector kernel is for this: few rows, groups of a power of two (or none) that lie in order."""
    return rows <= MAX_VECTOR_ROWS and not indexed and group & (group - 1) == 0


def _fits_whole(group: int, dtype: torch.dtype) -> bool:
    """Return whether weights may be decoded first: they are rounded where groups have scales."""
    return group > 0 and dtype != torch.float32


def _in_runs(dtype: torch.dtype, format: str, group: int, indexed: bool) -> bool:
    """Return whether tiles may take whole runs: nibbles whose groups lie in order."""
    return format == "w4a16" and group > 0 and not indexed and dtype != torch.float32


@lru_cache(maxsize=4096)
def rule(rows: int, n: int, k: int, dtype: torch.dtype, format: str, group: int, indexed: bool) -> dict[str, int]:
    """Return kernel parameters by rule."""
    if rows > MOST_ROWS and _fits_whole(group, dtype):
        return {"WHOLE": 1}
    # Of nibbles two rows are quicker as a product of tiles.
    if _fits_vectors(rows, group, indexed) and (rows == 1 or format != "w4a16"):
        most, codes = (512, k // 2) if format == "w4a16" else (1024, k)
        outputs = 4 if rows == 1 and n > 1024 else 2
        return {
            "VECTOR": 1, "BLOCK_N": outputs, "num_warps": 4, "AHEAD": 2, "BYTES": min(most, next_power_of_2(codes)),
        }  # fmt: skip
    m, width, warps, stages = (16, 64, 4, 4) if rows <= 16 else (32, 64, 4, 4) if rows <= 32 else (64, 64, 4, 4)
    if rows > 256 and dtype != torch.float32:
        m, width, warps, stages = 128, 128, 8, 3
    programs, splits = cdiv(rows, m) * cdiv(n, width), 1
    while programs * splits * 2 <= TARGET_PROGRAMS and k >= splits * 2 * 512:
        splits *= 2
    runs = m <= MOST_ROWS and _in_runs(dtype, format, group, indexed)
    # Of short groups 16 rows pass through the first-level cache as it is: their runs are of 64 bytes.
    return _matrix(m, width, splits, warps, stages, DEPTH if runs else 0, runs and m == 16 and group >= DEPTH)


def _matrix(
    m: int, n: int, splits: int, warps: int, stages: int, depth: int = 0, cached: bool = False
) -> dict[str, int]:
    """Return parameters of tiles; ``depth``: of how many codes, where that is not given by the group."""
    sizes = {"VECTOR": 0, "BLOCK_M": m, "BLOCK_N": n} | ({"BLOCK_K": depth} if depth else {})
    return sizes | {"SPLITS": splits, "num_warps": warps, "num_stages": stages} | ({"CACHED": 1} if cached else {})


def _shapes(cfg: WeightOnlyLinearConfig, m: int) -> list[tuple[int, int, int, int, bool]]:
    """Return columns, warps, stages and codes of tiles of ``m`` rows, and whether x passes through the first cache."""
    if m > MOST_ROWS:
        return [(64, 4, 4, 0, False), (128, 8, 3, 0, False)]
    halves = [(64, 4, 4, 0, False), (128, 4, 4, 0, False)]
    if not _in_runs(cfg.dtype, cfg.format, cfg.group_size, cfg.act_order):
        return [(32, 4, 4, 0, False), *halves]
    runs = [(64, 4, 4, DEPTH, False), (128, 8, 4, DEPTH, False)]
    if cfg.group_size < DEPTH:  # the last takes a run a tile, which other formats' tiles do
        return [*runs, (64, 4, 4 if m <= 32 else 3, 2 * DEPTH, False), (64, 4, 4, 32, False)]
    return [*halves, *runs, *((n, warps, stages, depth, True) for n, warps, stages, depth, _ in runs)]


def candidates(cfg: WeightOnlyLinearConfig, num_tokens: int) -> list[dict[str, int]]:
    """Return the parameters worth measuring for this many rows, :func:`rule`'s own first."""
    shape = cfg.out_features, cfg.in_features
    found = [rule(num_tokens, *shape, cfg.dtype, cfg.format, cfg.group_size, cfg.act_order)]
    if _fits_vectors(num_tokens, cfg.group_size, cfg.act_order):
        codes = cfg.in_features // (2 if cfg.format == "w4a16" else 1)
        for n, many, warps, ahead in ((2, 512, 4, 2), (4, 512, 4, 1), (8, 256, 4, 2), (2, 1024, 4, 2), (4, 1024, 8, 2)):
            if many < 2 * codes and n * many * num_tokens <= 64 * 32 * warps:
                found.append({"VECTOR": 1, "BLOCK_N": n, "num_warps": warps, "AHEAD": ahead, "BYTES": many})
    if num_tokens >= 32 and _fits_whole(cfg.group_size, cfg.dtype):
        found.append({"WHOLE": 1})
    m = max(16, min(128, next_power_of_2(num_tokens)))
    shapes = _shapes(cfg, m)
    for n, warps, stages, depth, cached in shapes:
        programs = cdiv(num_tokens, m) * cdiv(cfg.out_features, n)
        for splits in (1, 2, 4, 8):
            config = _matrix(m, n, splits, warps, stages, depth, cached)
            if splits > 1 and (programs * splits > 2 * TARGET_PROGRAMS or cfg.in_features < splits * 512):
                continue
            # Of many shapes, those with too few programs would crowd others out of a quick run.
            if len(shapes) <= 4 or suits(cfg, config):
                found.append(config)
    return [config for index, config in enumerate(found) if config not in found[:index]]


def serves(config: Mapping[str, int], num_tokens: int) -> bool:
    """Return whether a configuration is for so many rows, which the vector kernel unrolls; others run by the rule."""
    return not config.get("VECTOR") or num_tokens <= MAX_VECTOR_ROWS


def suits(cfg: WeightOnlyLinearConfig, config: Mapping[str, int]) -> bool:
    """Return whether another shape's parameters give programs for half of a large GPU here, or K cannot be split more.

    Not asked of tiles of more rows: how many there are is not known.
    """
    if config.get("VECTOR") or config.get("WHOLE") or config.get("BLOCK_M", 0) > MOST_ROWS:
        return True
    splits = max(1, config.get("SPLITS", 1))
    programs = cdiv(cfg.out_features, config["BLOCK_N"]) * splits
    return 2 * programs >= TARGET_PROGRAMS or cfg.in_features < splits * 2 * 512


def _fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@operator("weight_only_linear", _fake)
def _weight_only(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, index: torch.Tensor | None,
    bias: torch.Tensor | None, format: str, group: int, config: list[int],
) -> torch.Tensor:  # fmt: skip
    if x.stride(-1) != 1:
        x = x.contiguous()
    (m, k), n = x.shape, weight.shape[0]
    y = x.new_empty(m, n)
    if m == 0:
        return y
    c: Mapping[str, int] = dict(zip(PARAMETERS, config, strict=True)) if config else {}
    if not c or not serves(c, m):
        c = rule(m, n, k, x.dtype, format, group, index is not None)
    nibbles, launch, grouped = format == "w4a16", dependent_launch(x.device), group > 0
    codes = weight.view(torch.uint8) if format == "fp8_w8a16" else weight
    addend, zeros, run = y if bias is None else bias, scale if zero is None else zero, run_of(group, x.dtype)
    alike = {"ZERO": ZERO[format], "HAS_ZERO": zero is not None, "NIBBLES": nibbles, "E4M3": format == "fp8_w8a16"}
    same = alike | {"HAS_BIAS": bias is not None}
    if c.get("WHOLE"):
        whole = x.new_empty(n, k)
        _decode_kernel[(cdiv(n, 64), cdiv(k, run))](
            codes, scale, zeros, x if index is None else index, whole, n, k, codes.stride(0), **alike, GROUP=group,
            INDEXED=index is not None, EVEN_K=k % run == 0, BLOCK_N=64, BLOCK_K=run, num_warps=4, **launch,
        )  # fmt: skip
        return F.linear(x, whole, bias)
    if c.get("VECTOR"):
        # A tile of BYTES codes is whole groups, or lies in one.
        per_byte = 2 if nibbles else 1
        run_bytes = min(c["BYTES"], group // per_byte) if grouped else c["BYTES"]
        groups = c["BYTES"] // run_bytes
        blocks = cdiv(k, groups * run_bytes * per_byte)
        _weight_only_vector_kernel[(cdiv(n, c["BLOCK_N"]),)](
            x, codes, scale, zeros, addend, y, m, n, k, x.stride(0), codes.stride(0), **same, GROUPED=grouped,
            EVEN_K=k % (groups * run_bytes * per_byte) == 0, BLOCKS=blocks, AHEAD=min(blocks, max(1, c["AHEAD"])),
            ROWS=next_power_of_2(m), BLOCK_N=c["BLOCK_N"], GROUPS=groups, BYTES=run_bytes, num_warps=c["num_warps"],
            **launch,
        )  # fmt: skip
        return y
    tile = Tile(c["BLOCK_M"], c["BLOCK_N"], c["num_warps"], c["num_stages"], c["SPLITS"])
    target = y if tile.splits == 1 else x.new_empty(tile.splits, m, n, dtype=torch.float32)
    sizes = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "num_warps": tile.warps, "num_stages": tile.stages, **launch}
    runs = tile.m <= MOST_ROWS and _in_runs(x.dtype, format, group, index is not None)
    # Ladders of groups of 128 that say no depth are of tiles that take x in halves.
    depth = (c.get("BLOCK_K") or (DEPTH if group < DEPTH else 0)) if runs else 0
    levels = (depth // run).bit_length() - 1
    if levels > 0 or depth == DEPTH:
        # With fewer warps 128 columns spill: a ladder lent by groups of 128 has such tiles.
        sizes["num_warps"] = max(tile.warps, tile.n // 16)
        short_groups_kernel[tile.grid(m, n)](
            x, codes, scale, zeros, addend, target, m, n, k, x.stride(0), codes.stride(0), ZERO=ZERO[format],
            HAS_ZERO=zero is not None, HAS_BIAS=bias is not None, GROUP=group, RUN=run,
            LEVELS=levels, CACHED=bool(c.get("CACHED")), SPLITS=tile.splits, EVEN_K=k % (run << levels) == 0, **sizes,
        )  # fmt: skip
    else:
        _weight_only_kernel[tile.grid(m, n)](
            x, codes, scale, zeros, x if index is None else index, addend, target, m, n, k, x.stride(0),
            codes.stride(0), **same, GROUP=group, INDEXED=index is not None, SPLITS=tile.splits, EVEN_K=k % run == 0,
            BLOCK_K=run, **sizes,
        )  # fmt: skip
    if tile.splits > 1:
        add_splits_kernel[(m, cdiv(n, 1024))](
            target, addend, y, m, n, SPLITS=tile.splits, HAS_BIAS=bias is not None, ROUND_BEFORE_BIAS=False, BLOCK=1024,
            **launch,
        )  # fmt: skip
    return y


class TritonWeightOnlyLinear:
    """One kernel; where K is split, a second adds the parts."""

    candidates, serves, suits = staticmethod(candidates), staticmethod(serves), staticmethod(suits)

    def __init__(self, cfg: WeightOnlyLinearConfig, config: Mapping[str, int] | None = None) -> None:
        self.cfg = cfg
        # An operator's schema knows integers, not mappings.
        check_keys("weight_only_linear", "config of the Triton backend", config or {}, PARAMETERS, PARAMETERS)
        self.config = [config.get(name, 0) for name in PARAMETERS] if config else []

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_zero: torch.Tensor | None,
        group_index: torch.Tensor | None, bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``y`` ``[..., N]``, a new contiguous tensor of ``x``'s dtype."""
        cfg, rows = self.cfg, x.reshape(-1, self.cfg.in_features)
        y: torch.Tensor = _weight_only(
            rows, weight, weight_scale, weight_zero, group_index, bias, cfg.format, cfg.group_size,
            self.config,
        )  # fmt: skip
        return y.view(*x.shape[:-1], cfg.out_features)
