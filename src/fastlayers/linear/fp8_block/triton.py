"""FP8BlockLinear in Triton: e4m3 tensor cores, promoted to fp32 with the scales after every block of K.

fp32 layers multiply in bf16 instead (e4m3 fits exactly): the e4m3 unit keeps about 14 bits inside a block,
enough for bf16 and fp16 outputs, not for fp32 ones. A few tokens have a kernel of their own (triton_skinny_gemm.py),
one token another (triton_vector.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch.nn import functional as F

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.linear.fp8_block.layer import FP8LinearConfig
from fastlayers.linear.fp8_block.triton_skinny_gemm import fp8_block_skinny_gemm
from fastlayers.linear.fp8_block.triton_vector import fp8_block_vector
from fastlayers.linear.scaled_product import empty_product
from fastlayers.linear.triton_gemm import MAX_SPLITS, TARGET_PROGRAMS, Tile, add_splits_kernel, tile_origin
from fastlayers.operators import operator
from fastlayers.quant.coded_rows import CodedRows
from fastlayers.quant.group_quant.layer import GroupQuantConfig
from fastlayers.quant.group_quant.triton import TritonGroupQuant
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, dot, release_dependents


# Nothing that depends on the number of tokens is specialised on: no compilation after the warm-up.
@kernel(do_not_specialize=("M", "s_stride_row", "s_stride_group"))
def _fp8_gemm_kernel(
    q_ptr, s_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, M, N, K,
    q_stride, s_stride_row, s_stride_group, weight_stride, scale_stride,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row0, column0 = tile_origin(M, N, BLOCK_M, BLOCK_N)
    row, column, depth = row0 + tl.arange(0, BLOCK_M), column0 + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # Rows and columns beyond the edge read a valid one again; their results are never stored.
    safe_row, safe_column = (row % M).to(tl.int64), (column % N).to(tl.int64)
    q_rows = q_ptr + safe_row[:, None] * q_stride
    weight_rows = weight_ptr + safe_column[None, :] * weight_stride
    s_rows = s_ptr + safe_row * s_stride_row
    # A tile that lies in one block of rows needs one weight scale, otherwise one per column.
    ONE_SCALE: tl.constexpr = BLOCK_ROWS % BLOCK_N == 0
    if ONE_SCALE:
        scale_rows = scale_ptr + (column0 // BLOCK_ROWS).to(tl.int64) * scale_stride
    else:
        scale_rows = scale_ptr + (safe_column // BLOCK_ROWS) * scale_stride
    split = tl.program_id(1)
    blocks = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    first = split * blocks
    last = tl.minimum(first + blocks, tl.cdiv(K, BLOCK_K))
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    await_inputs(PDL)
    release_dependents(PDL)
    # With the number of stages on the loop itself the scales are fetched ahead too, not only what is multiplied:
    # waiting for them at the end of each block took half of the kernel's time.
    for block in tl.range(first, last, num_stages=STAGES):
        k = block * BLOCK_K + depth
        # The activations are padded to whole blocks with codes 0, the weight is not.
        q = tl.load(q_rows + k[None, :])
        if EVEN_K:
            weight = tl.load(weight_rows + k[:, None])
        else:
            weight = tl.load(weight_rows + k[:, None], mask=k[:, None] < K, other=0.0)
        s = tl.load(s_rows + block * s_stride_group)
        scale = tl.load(scale_rows + block)
        if WIDE:
            q, weight = q.to(tl.bfloat16), weight.to(tl.bfloat16)
        inside_block = dot(q, weight, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        if ONE_SCALE:
            acc += inside_block * (s * scale)[:, None]
        else:
            acc += inside_block * (s[:, None] * scale[None, :])
    out_dtype = y_ptr.dtype.element_ty
    y = cast(acc, out_dtype)
    if SPLITS == 1 and HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
        y = cast(y.to(tl.float32) + bias[None, :], out_dtype)
    target = y_ptr + (split.to(tl.int64) * M + row.to(tl.int64))[:, None] * N + column[None, :]
    tl.store(target, y, mask=(row[:, None] < M) & (column[None, :] < N))


class _Launches(NamedTuple):
    """The product of one shape, and what adds its splits."""

    product: Callable[..., None]
    add_splits: Callable[..., None]


@lru_cache(maxsize=4096)
def _launches(
    m: int, n: int, k: int, strides: tuple[int, ...], bias: bool, wide: bool, block: tuple[int, int], cut: Tile,
    device: torch.device,
) -> _Launches:  # fmt: skip
    """Return what launches the product of one shape."""
    launch, (block_rows, block_columns) = dependent_launch(device), block
    product = _fp8_gemm_kernel.at(
        cut.grid(m, n), m, n, k, *strides,
        HAS_BIAS=bias, SPLITS=cut.splits, EVEN_K=k % block_columns == 0, WIDE=wide, BLOCK_ROWS=block_rows,
        BLOCK_M=cut.m, BLOCK_N=cut.n, BLOCK_K=block_columns, STAGES=cut.stages,
        num_warps=cut.warps, num_stages=cut.stages, **launch,
    )  # fmt: skip
    add_splits = add_splits_kernel.at(
        (m, cdiv(n, 1024)), m, n, SPLITS=cut.splits, HAS_BIAS=bias, ROUND_BEFORE_BIAS=True, BLOCK=1024, **launch
    )
    return _Launches(product, add_splits)


@operator("fp8_block_gemm", empty_product)
def fp8_block_gemm(
    q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    block_rows: int, block_columns: int, dtype: torch.dtype, tile: list[int],
) -> torch.Tensor:  # fmt: skip
    """Return ``y`` ``[M, N]`` for codes ``q`` ``[M, K padded to whole blocks]`` and their scales ``s``.

    ``tile`` is the fields of a :class:`Tile`.
    """
    m, (n, k) = q.shape[0], weight.shape
    y = q.new_empty(m, n, dtype=dtype)
    if m == 0:
        return y
    cut, strides = Tile(*tile), (q.stride(0), s.stride(0), s.stride(1), weight.stride(0), scale.stride(0))
    product, add_splits = _launches(
        m, n, k, strides, bias is not None, dtype == torch.float32, (block_rows, block_columns), cut, q.device
    )
    target = y if cut.splits == 1 else q.new_empty(cut.splits, m, n, dtype=torch.float32)
    addend = y if bias is None else bias
    product(q, s, weight, scale, addend, target)
    if cut.splits > 1:
        add_splits(target, addend, y)
    return y


def _splits(programs: int, blocks: int) -> int:
    """Return how many programs share the K of a tile: each keeps 12 blocks, or adding up costs more than it saves."""
    splits, limit = 1, min(MAX_SPLITS, blocks // 12)
    while splits * 2 <= limit and programs * splits * 2 <= TARGET_PROGRAMS:
        splits *= 2
    return splits


def tile_config(m: int, n: int, warps: int, stages: int, splits: int) -> dict[str, int]:
    """Return the parameters of the tiled kernel."""
    return {"m": m, "n": n, "warps": warps, "stages": stages, "splits": splits}


def skinny_config(m: int, n: int, parts: int, warps: int, stages: int, *, fused: bool) -> dict[str, int]:
    """Return the parameters of the kernel for a few tokens."""
    return {"m": m, "n": n, "parts": parts, "warps": warps, "stages": stages, "fused": int(fused)}


def vector_config(n: int, k: int, ahead: int) -> dict[str, int]:
    """Return the parameters of the kernel for one token: a warp has 512 of ``k`` columns, 16 of them a thread."""
    return {"n": n, "k": k, "warps": max(1, k // 512), "ahead": ahead, "fused": 1}


def _vector_rule(cfg: FP8LinearConfig) -> dict[str, int]:
    """Return the vector kernel's parameters: see benchmarks/notes/fp8_linear.md.

    What a program quantises again it shares among its rows, of which there are many unless programs are few.
    """
    n, columns = cfg.out_features, cfg.in_features
    if n >= 2048 and columns > 2304:
        return vector_config(8, 4096, 1)
    k = max(512, min(2048, next_power_of_2(columns)))
    return vector_config(16 if n >= 2048 else 4 if n >= 1024 else 2, k, min(2, cdiv(columns, k)))


def default_config(cfg: FP8LinearConfig, tokens: int) -> dict[str, int]:
    """Return kernel parameters by rule, where no table was measured: see benchmarks/notes/fp8_linear.md."""
    if tokens == 1 and _fits_vector(cfg) and cfg.in_features <= MOST_COLUMNS:
        return _vector_rule(cfg)
    n, blocks = cfg.out_features, cfg.grid[1]
    short, small_batch = blocks <= 16, tokens <= 2
    # More than two tokens share the reading of a wide tile of a weight that is short in K.
    up_to_8, up_to_16 = tokens <= 8 and (n <= 8192 or not short), tokens <= 16 and blocks > 64
    if _fits_skinny(cfg) and (small_batch or up_to_8 or up_to_16):
        m = next_power_of_2(max(1, tokens))
        if cdiv(n, 16) <= TARGET_PROGRAMS:
            return skinny_config(m, 16, 8, 8, 4, fused=small_batch)
        return skinny_config(m, 32, 4, 4, 3 if short else 4, fused=small_batch or (short and tokens <= 4))
    if tokens <= 16:
        m, width, warps, stages = 16, 64, 4, 5
    elif tokens <= 64:
        m, width, warps, stages = (64, 32, 4, 5) if n <= 8192 and blocks <= 64 else (64, 64, 4, 4)
    elif cfg.dtype == torch.float32 or (blocks > 64 and tokens > 512):
        m, width, warps, stages = 128, 128, 8, 4
    elif cdiv(tokens, 64) * cdiv(n, 128) <= TARGET_PROGRAMS:
        m, width, warps, stages = 64, 64, 4, 4
    else:
        m, width, warps, stages = 64, 128, 4, 4
    programs = cdiv(tokens, m) * cdiv(n, width)
    return tile_config(m, width, warps, stages, _splits(programs, blocks))


def _fits_skinny(cfg: FP8LinearConfig) -> bool:
    return cfg.dtype != torch.float32 and cfg.block_size[1] == 128 and cfg.block_size[0] % 32 == 0


def _fits_vector(cfg: FP8LinearConfig) -> bool:
    """Return whether one token's product is by vectors: rows of the weight are read 16 bytes at a time."""
    return _fits_skinny(cfg) and cfg.in_features % 16 == 0


def serves(config: Mapping[str, int], num_tokens: int) -> bool:
    """Return whether a configuration is for so many tokens; others run by :func:`default_config`."""
    return "ahead" not in config or num_tokens == 1


# Longer rows of a weight run by the kernel for few tokens, which quantises less often.
MOST_COLUMNS = 8192
# Rows of the weight, columns and tiles ahead of the vector kernel's programs.
VECTORS = (
    (8, 2048, 1),
    (8, 2048, 2),
    (8, 2048, 4),
    (4, 2048, 2),
    (16, 2048, 1),
    (8, 1024, 2),
    (4, 1024, 4),
    (8, 4096, 1),
)


class TritonFP8Linear:
    """One kernel for one or two tokens; else quantise and multiply, and where K is split, add the parts."""

    def __init__(self, cfg: FP8LinearConfig, config: Mapping[str, int] | None = None) -> None:
        self.cfg = cfg
        self.config = dict(config) if config else None
        # Scales with tokens next to each other: a tile reads one column of them per block of K.
        quantization = GroupQuantConfig(cfg.block_size[1], scale_fmt=cfg.scale_fmt, scale_layout="col")
        self.quantize = TritonGroupQuant(quantization)

    serves = staticmethod(serves)

    @staticmethod
    def fits(cfg: FP8LinearConfig, config: Mapping[str, int]) -> bool:
        """Return whether a configuration, maybe of another shape's table, is one for this shape."""
        return "ahead" not in config or _fits_vector(cfg)

    def _config(self, tokens: int) -> dict[str, int]:
        """Return the kernel parameters for so many tokens."""
        if self.config and serves(self.config, tokens):
            return self.config
        return default_config(self.cfg, tokens)

    @staticmethod
    def candidates(cfg: FP8LinearConfig, num_tokens: int) -> list[dict[str, int]]:
        """Return kernel parameters worth timing for this many tokens, the rule's own first."""
        found = [default_config(cfg, num_tokens)]
        blocks = cfg.grid[1]
        if num_tokens == 1 and _fits_vector(cfg):
            # No more columns than there are, and as many tiles ahead; half a tile may lie beyond the end.
            found += [
                vector_config(n, k, ahead) for n, k, ahead in VECTORS
                if k < 2 * cfg.in_features and ahead <= cdiv(cfg.in_features, k)
            ]  # fmt: skip
        if num_tokens <= 16 and _fits_skinny(cfg):
            m = next_power_of_2(max(1, num_tokens))
            for shape in ((16, 8, 8, 4), (16, 4, 4, 4), (16, 4, 4, 6), (32, 4, 4, 4), (32, 4, 4, 3)):
                found += [skinny_config(m, *shape, fused=fused) for fused in (True, False) if m <= 4 or not fused]
        if num_tokens <= 16:
            shapes = [(16, 64, 4, 5), (16, 128, 4, 4), (16, 32, 4, 6)]
        elif num_tokens <= 64:
            shapes = [(32, 64, 4, 5)] if num_tokens <= 32 else []
            shapes += [(64, 32, 4, 5), (64, 64, 4, 4), (64, 128, 4, 4), (64, 128, 4, 3)]
        else:
            shapes = [(64, 64, 4, 4), (64, 128, 4, 4), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 4)]
            shapes += [(128, 128, 8, 4), (128, 128, 8, 3)]
        for m, n, warps, stages in shapes:
            programs = cdiv(num_tokens, m) * cdiv(cfg.out_features, n)
            max_splits = min(MAX_SPLITS, blocks // 4, TARGET_PROGRAMS // programs)
            found += [
                tile_config(m, n, warps, stages, splits)
                for splits in (1, 2, 4, 8, 16)
                if splits == 1 or splits <= max_splits
            ]
        return [config for index, config in enumerate(found) if config not in found[:index]]

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale_inv: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``y`` ``[..., N]``, a new contiguous tensor of ``x``'s dtype."""
        if isinstance(x, CodedRows):
            return self.product(x.codes, x.scales, weight, weight_scale_inv, bias)
        cfg, rows = self.cfg, x.reshape(-1, self.cfg.in_features)
        c = self._config(rows.shape[0])
        operands: tuple[torch.Tensor, torch.Tensor | None] = (rows, None)
        if not c.get("fused"):
            if cfg.padded_in != cfg.in_features:
                rows = F.pad(rows, (0, cfg.padded_in - cfg.in_features))
            operands = self.quantize(rows)
        y = self._multiply(c, *operands, weight, weight_scale_inv, bias)
        return y.view(*x.shape[:-1], cfg.out_features)

    def codes_layout(self, rows: int) -> str | None:
        """Return the layout of scales with which :meth:`product` takes codes; ``None`` where the product quantises."""
        c = self._config(rows)
        return None if c.get("fused") or self.cfg.padded_in != self.cfg.in_features else "col"

    def product(
        self, q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``y`` ``[T, N]`` of codes ``[T, K]`` and their scales."""
        return self._multiply(self._config(q.shape[0]), q, s, weight, scale, bias)

    def _multiply(
        self, c: dict[str, int], x: torch.Tensor, s: torch.Tensor | None, weight: torch.Tensor, scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        cfg = self.cfg
        y: torch.Tensor
        if "ahead" in c:
            tile = [c["n"], c["k"], c["warps"], c["ahead"]]
            y = fp8_block_vector(
                x, s, weight, scale, bias, cfg.block_size[0], cfg.scale_fmt == "ue8m0", cfg.dtype, tile
            )
        elif "parts" in c:
            tile = [c["m"], c["n"], c["parts"], c["warps"], c["stages"]]
            y = fp8_block_skinny_gemm(
                x, s, weight, scale, bias, cfg.block_size[0], cfg.scale_fmt == "ue8m0", cfg.dtype, tile
            )
        else:
            tile = [c["m"], c["n"], c["warps"], c["stages"], c["splits"]]
            y = fp8_block_gemm(x, s, weight, scale, bias, *cfg.block_size, cfg.dtype, tile)
        return y
