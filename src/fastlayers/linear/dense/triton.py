"""Linear in Triton: a tiled GEMM split over K when there are few rows, and a matrix-vector kernel for 1 to 4 rows.

With few rows the time is that of reading the weights. The vector kernel asks for its first weights before the
kernels in front of it have ended, keeps the next tiles in flight while it multiplies, and needs no tensor cores, so
that a program may hold as few as two output features and all SMs read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl

from fastlayers.errors import check_keys
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.linear.dense.layer import LinearConfig
from fastlayers.linear.dense.triton_vector import vector_kernel
from fastlayers.linear.split_rows import LEAVE, SplitRows, told
from fastlayers.linear.triton_gemm import TARGET_PROGRAMS, Tile, add_splits_kernel, tile_for, tile_origin
from fastlayers.operators import operator
from fastlayers.runtime.launch import Kinds, New, kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, dot, release_dependents

MAX_VECTOR_ROWS = 4


@kernel(do_not_specialize=("M",))
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, M, N, K, x_stride, weight_stride,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row0, column0 = tile_origin(M, N, BLOCK_M, BLOCK_N)
    row, column, depth = row0 + tl.arange(0, BLOCK_M), column0 + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # Rows and columns beyond the edge read a valid one again; their results are never stored.
    x_rows = x_ptr + (row % M).to(tl.int64)[:, None] * x_stride
    weight_rows = weight_ptr + (column % N).to(tl.int64)[None, :] * weight_stride
    split = tl.program_id(1)
    blocks = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    first = split * blocks
    last = tl.minimum(first + blocks, tl.cdiv(K, BLOCK_K))
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    await_inputs(PDL)
    release_dependents(PDL)
    for block in range(first, last):
        k = block * BLOCK_K + depth
        if EVEN_K:
            x = tl.load(x_rows + k[None, :])
            weight = tl.load(weight_rows + k[:, None])
        else:
            x = tl.load(x_rows + k[None, :], mask=k[None, :] < K, other=0.0)
            weight = tl.load(weight_rows + k[:, None], mask=k[:, None] < K, other=0.0)
        acc = dot(x, weight, acc)
    inside = (row[:, None] < M) & (column[None, :] < N)
    if SPLITS == 1 and HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    target = y_ptr + (split.to(tl.int64) * M + row.to(tl.int64))[:, None] * N + column[None, :]
    tl.store(target, cast(acc, y_ptr.dtype.element_ty), mask=inside)


@lru_cache(maxsize=4096)
def rule(rows: int, n: int, k: int, dtype: torch.dtype) -> dict[str, int]:
    """Return kernel parameters for ``[rows, k] · [n, k]ᵀ`` where no tuned table gives them.

    Measured on an H200, see ``benchmarks/notes/linear.md``: one row, or few outputs, take the vector kernel; a very
    large weight keeps the SMs busy with matrix tiles either way.
    """
    small = n <= 1024 and rows <= MAX_VECTOR_ROWS
    if small or (rows == 1 and n * k < 1 << 27) or (dtype == torch.float32 and rows <= MAX_VECTOR_ROWS):
        return _vector_rule(rows, n, k, dtype)
    depth, stages = (32, 0) if dtype == torch.float32 else (128, 4) if rows <= 32 else (64, 0)
    tile = tile_for(rows, n, cdiv(k, depth))
    return {
        "VECTOR": 0, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": depth, "SPLITS": tile.splits,
        "num_warps": tile.warps, "num_stages": stages or tile.stages,
    }  # fmt: skip


def _vector_rule(rows: int, n: int, k: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the vector kernel's parameters, for one row as whole decode steps were fastest on an H200."""
    if rows > 1 or n <= 1024 or dtype == torch.float32:
        outputs, depth, ahead, warps = 2, 2048 if n <= 1024 and rows == 1 else 1024, 1, 4
    elif k < 4096 or k > 8192:
        outputs, depth, ahead, warps = 4, 512, 4, 2
    else:
        outputs, depth, ahead, warps = (4, 1024, 2, 4) if n <= 3072 else (2, 1024, 4, 4)
    return {
        "VECTOR": 1, "BLOCK_N": outputs, "BLOCK_K": min(depth, next_power_of_2(k)), "num_warps": warps, "AHEAD": ahead,
    }  # fmt: skip


def candidates(cfg: LinearConfig, num_tokens: int) -> list[dict[str, int]]:
    """Return the parameters worth measuring for this many rows, :func:`rule`'s own first."""
    found = [rule(num_tokens, cfg.out_features, cfg.in_features, cfg.dtype)]
    # More rows of 16 bits take twice the time without tensor cores, but for few outputs.
    if num_tokens == 1 or (num_tokens <= MAX_VECTOR_ROWS and (cfg.out_features <= 1024 or cfg.dtype == torch.float32)):
        for n, k, warps, ahead in ((1, 2048, 8, 2), (2, 512, 2, 4), (4, 512, 2, 4), (2, 1024, 4, 1), (2, 1024, 4, 4),
                                   (2, 1024, 4, 8), (4, 1024, 4, 2), (4, 1024, 4, 4), (2, 2048, 8, 3)):  # fmt: skip
            # Registers of a thread: sums in fp32, and weights in pairs.
            fits = max(n * k * num_tokens, n * k * ahead // 2) <= 64 * 32 * warps
            if k < 2 * cfg.in_features and fits:
                found.append({"VECTOR": 1, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "AHEAD": ahead})
    if cfg.dtype != torch.float32:
        found += _matrix_candidates(cfg, num_tokens)
    return [config for index, config in enumerate(found) if config not in found[:index]]


def serves(config: Mapping[str, int], num_tokens: int) -> bool:
    """Return whether a configuration is for so many rows; others run by :func:`rule`.

    The vector kernel's rows are unrolled: of 64 its compiler takes a minute, of a prompt's it never ends.
    """
    return not config.get("VECTOR") or num_tokens <= MAX_VECTOR_ROWS


def _matrix_candidates(cfg: LinearConfig, rows: int) -> list[dict[str, int]]:
    m = max(16, min(128, next_power_of_2(rows)))
    shapes = (
        ((m, 32, 128, 4, 5), (m, 32, 256, 4, 4), (m, 64, 128, 4, 4), (m, 128, 64, 4, 4))
        if rows <= 64
        else ((64, 128, 64, 4, 4), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (64, 256, 64, 8, 4))
    )
    found = []
    for m, n, k, warps, stages in shapes:
        tiles = cdiv(rows, m) * cdiv(cfg.out_features, n)
        for splits in (1, 2, 4, 8) if rows <= 64 else (1,):
            # Programs for half of a large GPU, unless no split gives so many.
            enough = rows > 64 or tiles * splits >= TARGET_PROGRAMS // 4 or tiles * 8 < TARGET_PROGRAMS // 4
            split = tiles * splits <= 4 * TARGET_PROGRAMS and cfg.in_features >= splits * k * 2
            if (splits == 1 or split) and enough:
                found.append({
                    "VECTOR": 0, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "SPLITS": splits, "num_warps": warps,
                    "num_stages": stages,
                })  # fmt: skip
    return found


# The order in which an operator takes them: its schema knows integers, not mappings.
PARAMETERS = ("VECTOR", "BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLITS", "num_warps", "num_stages", "AHEAD")


class Launches(NamedTuple):
    """The product of one shape, and what adds its splits where it has some."""

    product: Callable[..., torch.Tensor]
    add_splits: Callable[..., torch.Tensor] | None

    def run(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``y`` ``[M, N]``, a new tensor."""
        addend = weight if bias is None else bias
        y = self.product(x, weight, addend)
        return y if self.add_splits is None else self.add_splits(y, addend)

    def leave(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> SplitRows | None:
        """Return the product with its splits not added; ``None``: it has none."""
        if self.add_splits is None:
            return None
        addend = weight if bias is None else bias
        return SplitRows(self.product(x, weight, addend), bias, dtype, self.add_splits, addend)


def adding(
    product: Callable[..., torch.Tensor], m: int, n: int, splits: int, bias: bool, y: New, device: torch.device
) -> Launches:
    """Return the launches of a product that makes fp32 ``[splits, m, n]``; of one split, ``y`` with its bias."""
    if splits == 1:
        return Launches(product, None)
    add_splits = add_splits_kernel.at(
        (m, cdiv(n, 1024)), m, n, makes={2: y},
        SPLITS=splits, HAS_BIAS=bias, ROUND_BEFORE_BIAS=False, BLOCK=1024, **dependent_launch(device),
    )  # fmt: skip
    return Launches(product, add_splits)


@lru_cache(maxsize=4096)
def _launches(
    m: int, n: int, k: int, x_stride: int, weight_stride: int, dtype: torch.dtype, bias: bool, out_dtype: torch.dtype,
    config: tuple[int, ...], device: torch.device,
) -> Launches:  # fmt: skip
    c, launch = dict(zip(PARAMETERS, config, strict=True)) if config else {}, dependent_launch(device)
    if not c or not serves(c, m):
        c = rule(m, n, k, dtype)
    numbers, y = (m, n, k, x_stride, weight_stride), New((m, n), out_dtype)
    sizes = {"HAS_BIAS": bias, "EVEN_K": k % c["BLOCK_K"] == 0, "BLOCK_N": c["BLOCK_N"], "BLOCK_K": c["BLOCK_K"]}
    if c["VECTOR"]:
        blocks = cdiv(k, c["BLOCK_K"])
        product = vector_kernel.at(
            (cdiv(n, c["BLOCK_N"]),),
            *numbers,
            makes={3: y},
            **sizes,
            BLOCKS=blocks,
            AHEAD=min(blocks, max(1, c["AHEAD"])),
            ROWS=next_power_of_2(m),
            num_warps=c["num_warps"],
            **launch,
        )
        return Launches(product, None)
    tile = Tile(c["BLOCK_M"], c["BLOCK_N"], c["num_warps"], c["num_stages"], c["SPLITS"])
    partial = New((tile.splits, m, n), torch.float32)
    product = _linear_kernel.at(
        tile.grid(m, n), *numbers, makes={3: y if tile.splits == 1 else partial},
        **sizes, SPLITS=tile.splits, BLOCK_M=tile.m, num_warps=tile.warps, num_stages=tile.stages, **launch,
    )  # fmt: skip
    return adding(product, m, n, tile.splits, bias, y, device)


def launches_of(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, config: Sequence[int]
) -> Launches:
    """Return what multiplies such rows ``x`` ``[M, K]``, of neighbouring columns, one or more."""
    strides, rest = (x.stride()[0], weight.stride()[0]), (x.dtype, bias is not None, out_dtype)
    return _launches(len(x), *weight.shape, *strides, *rest, tuple(config), x.device)


def _fake(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)


@operator("linear", _fake)
def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, config: list[int]
) -> torch.Tensor:
    if x.stride()[1] != 1:
        x = x.contiguous()
    if not len(x):
        return x.new_empty(0, len(weight), dtype=out_dtype)
    return launches_of(x, weight, bias, out_dtype, config).run(x, weight, bias)


class TritonLinear:
    """Reads ``x`` with any row stride; sums in fp32 and rounds once, after the bias."""

    candidates, serves = staticmethod(candidates), staticmethod(serves)

    def __init__(self, cfg: LinearConfig, config: Mapping[str, int] | None = None) -> None:
        self.out_dtype, given = cfg.y_dtype, dict(config or {})
        check_keys("linear", "config of the Triton backend", given, (*PARAMETERS, LEAVE), (*PARAMETERS, LEAVE))
        self.leaves_splits = told(bool(given.pop(LEAVE, 0)))
        self.config = [given.get(name, 0) for name in PARAMETERS] if given else []
        # What launches rows of kinds that came before.
        self._ready = Kinds()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``y`` ``[..., N]``, a new contiguous tensor."""
        if x.dim() == 2:
            if _linear.unwatched(x, weight, bias):
                kind = x.shape, weight.shape, x.stride(), x.dtype, x.device, weight.stride(), bias is None
                found = self._ready.get(kind)
                if found is None and len(x) and x.stride()[1] == 1:
                    found = self._ready.keep(kind, launches_of(x, weight, bias, self.out_dtype, self.config))
                if found is not None:
                    return found.run(x, weight, bias)
            y: torch.Tensor = _linear(x, weight, bias, self.out_dtype, self.config)
            return y
        y = _linear(x.reshape(-1, x.shape[-1]), weight, bias, self.out_dtype, self.config)
        return y.view(*x.shape[:-1], weight.shape[0])

    def splits(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> SplitRows | None:
        """Return ``y`` of ``x`` ``[M, K]``, its splits left to who reads it; ``None``: the call is what there is."""
        if not self.leaves_splits or x.dim() != 2 or not len(x) or x.stride()[1] != 1:
            return None
        if not _linear.unwatched(x, weight, bias):
            return None
        return launches_of(x, weight, bias, self.out_dtype, self.config).leave(x, weight, bias, self.out_dtype)
