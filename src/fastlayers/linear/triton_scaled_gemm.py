"""The Triton GEMM of layers with one scale per token and one per output channel, on e4m3 or int8 codes.

    y[M, N] = round( (q[M, K] · weight[N, K]ᵀ) · s[M] · scale[N] + bias[N] )

int8 codes are summed in int32. e4m3 codes are promoted to fp32 after every block of K, because the e4m3 unit keeps
about 14 bits inside one: enough for bf16 and fp16 outputs. fp32 outputs are multiplied in bf16, where e4m3 fits
exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton.language as tl

from fastlayers.errors import check_keys
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.linear.quantised import QuantisedLinearConfig
from fastlayers.linear.scaled_product import ScaledProduct, empty_product
from fastlayers.linear.triton_gemm import MAX_SPLITS, TARGET_PROGRAMS, Tile, tile_for, tile_origin
from fastlayers.operators import operator
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import cast, dot

BLOCK_K = 128
# Names of a tile's fields, in their order: an operator's schema knows integers, not mappings.
PARAMETERS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "SPLITS")


# Nothing that depends on the number of tokens is specialised on: no compilation after the warm-up.
@kernel(do_not_specialize=("M",))
def _scaled_gemm_kernel(
    q_ptr, s_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, M, N, K, q_stride, weight_stride,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, SUM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row0, column0 = tile_origin(M, N, BLOCK_M, BLOCK_N)
    row, column, depth = row0 + tl.arange(0, BLOCK_M), column0 + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # Rows and columns beyond the edge read a valid one again; their results are never stored.
    q_rows = q_ptr + (row % M).to(tl.int64)[:, None] * q_stride
    weight_rows = weight_ptr + (column % N).to(tl.int64)[None, :] * weight_stride
    split = tl.program_id(1)
    blocks = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    first = split * blocks
    last = tl.minimum(first + blocks, tl.cdiv(K, BLOCK_K))
    acc = tl.zeros([BLOCK_M, BLOCK_N], SUM)
    for block in range(first, last):
        k = block * BLOCK_K + depth
        if EVEN_K:
            q = tl.load(q_rows + k[None, :])
            weight = tl.load(weight_rows + k[:, None])
        else:
            q = tl.load(q_rows + k[None, :], mask=k[None, :] < K, other=0.0)
            weight = tl.load(weight_rows + k[:, None], mask=k[:, None] < K, other=0.0)
        if WIDE:
            q, weight = q.to(tl.bfloat16), weight.to(tl.bfloat16)
        if SUM == tl.int32:
            acc = dot(q, weight, acc)
        else:
            acc += dot(q, weight, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
    inside = (row[:, None] < M) & (column[None, :] < N)
    target = y_ptr + (split.to(tl.int64) * M + row.to(tl.int64))[:, None] * N + column[None, :]
    if SPLITS > 1:
        tl.store(target, acc, mask=inside)
    else:
        s = tl.load(s_ptr + row, mask=row < M, other=0.0)
        scale = tl.load(scale_ptr + column, mask=column < N, other=0.0)
        y = acc.to(tl.float32) * s[:, None] * scale[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
        tl.store(target, cast(y, y_ptr.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=("M",))
def _add_scaled_splits_kernel(
    partial_ptr, s_ptr, scale_ptr, bias_ptr, y_ptr, M, N,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    total = tl.zeros([BLOCK], partial_ptr.dtype.element_ty)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial_ptr + (split * M.to(tl.int64) + row) * N + column, mask=inside, other=0.0)
    y = total.to(tl.float32) * tl.load(s_ptr + row) * tl.load(scale_ptr + column, mask=inside, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + column, cast(y, y_ptr.dtype.element_ty), mask=inside)


@operator("scaled_gemm", empty_product)
def scaled_gemm(
    q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype, config: list[int],
) -> torch.Tensor:  # fmt: skip
    """Return ``y`` ``[M, N]`` for int8 or e4m3 codes ``q`` ``[M, K]`` with scales ``s`` ``[M]``.

    With few rows K is split, and a second kernel adds the parts. ``config``: values of :data:`PARAMETERS`; empty: by
    rule.
    """
    m, (n, k) = q.shape[0], weight.shape
    y = empty_product(q, weight, dtype)
    if m == 0:
        return y
    tile, integers = Tile(*config) if config else tile_for(m, n, cdiv(k, BLOCK_K)), q.dtype == torch.int8
    target = y
    if tile.splits > 1:
        target = q.new_empty(tile.splits, m, n, dtype=torch.int32 if integers else torch.float32)
    _scaled_gemm_kernel[tile.grid(m, n)](
        q, s, weight, scale, y if bias is None else bias, target, m, n, k, q.stride(0), weight.stride(0),
        HAS_BIAS=bias is not None, SPLITS=tile.splits, EVEN_K=k % BLOCK_K == 0,
        WIDE=dtype == torch.float32 and not integers, SUM=tl.int32 if integers else tl.float32,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=BLOCK_K, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if tile.splits > 1:
        _add_scaled_splits_kernel[(m, cdiv(n, 1024))](
            target, s, scale, y if bias is None else bias, y, m, n,
            SPLITS=tile.splits, HAS_BIAS=bias is not None, BLOCK=1024,
        )  # fmt: skip
    return y


def candidates(cfg: QuantisedLinearConfig, num_tokens: int) -> list[dict[str, int]]:
    """Return the parameters worth measuring for this many rows, the rule's own first."""
    n, blocks = cfg.out_features, cdiv(cfg.in_features, BLOCK_K)
    found = [tile_for(num_tokens, n, blocks)]
    if num_tokens <= 64:
        m = max(16, next_power_of_2(num_tokens))
        shapes = [(m, 32, 4, 5), (m, 64, 4, 5), (m, 64, 4, 3), (m, 128, 4, 4)]
    else:
        shapes = [(64, 64, 4, 4), (64, 128, 4, 4), (64, 256, 8, 3), (128, 128, 8, 4), (128, 128, 8, 3)]
        shapes.append((128, 256, 8, 3))
    for shape in shapes:
        most = min(MAX_SPLITS, blocks // 4, 2 * TARGET_PROGRAMS // Tile(*shape, 1).grid(num_tokens, n)[0])
        found += [Tile(*shape, splits) for splits in (1, 2, 4, 8, 16) if splits == 1 or splits <= most]
    unique = dict.fromkeys((t.m, t.n, t.warps, t.stages, t.splits) for t in found)
    return [dict(zip(PARAMETERS, each, strict=True)) for each in unique]


class TiledProduct(ScaledProduct):
    """Whose product is :func:`scaled_gemm`, in tiles by rule or as a table says."""

    candidates = staticmethod(candidates)

    def __init__(self, cfg: QuantisedLinearConfig, config: Mapping[str, int] | None = None) -> None:
        super().__init__(cfg)
        if config:
            check_keys(cfg.layer, "config of the Triton backend", config, PARAMETERS)
        self.config = [config[name] for name in PARAMETERS] if config else []

    def multiply(
        self, q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """Return the product of codes."""
        y: torch.Tensor = scaled_gemm(q, s, weight, scale, bias, dtype, self.config)
        return y
