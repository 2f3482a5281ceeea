"""Bmm in Triton: one kernel reads x, quantises its tile in registers, multiplies, scales and writes.

The whole-call scale of ``fp8_tensor`` needs a pass over x before. fp32 layers multiply e4m3 values in bf16 (which
holds them exactly): the e4m3 unit keeps about 14 bits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.linear.bmm.layer import BLOCK_EPS, FORMATS, GROUP, BmmConfig
from fastlayers.linear.fp8_scaled.layer import EPS
from fastlayers.linear.fp8_scaled.triton import absmax_of_row
from fastlayers.linear.triton_gemm import Tile, dot, tile_for, tile_origin
from fastlayers.operators import nothing, operator
from fastlayers.quant.block_quant import E4M3_MAX
from fastlayers.quant.group_quant.triton import scale_of
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import cast, to_e4m3


@kernel(do_not_specialize=("T",))
def _absmax_kernel(x_ptr, absmax_ptr, T, K, x_stride_h, x_stride_t, BLOCK: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    absmax = absmax_of_row(x_ptr + head * x_stride_h + token * x_stride_t, K, BLOCK)
    tl.store(absmax_ptr + head * T + token, absmax)


@triton.jit
def _encode_groups(x, eps, MAX: tl.constexpr):
    """Return (e4m3 codes, fp32 scales) of fp32 rows, one scale a row; NaN for a row that is not finite."""
    size = tl.abs(x)
    absmax = tl.max(tl.where(size < float("inf"), size, float("inf")), axis=1)
    finite = absmax < float("inf")
    scale = scale_of(tl.where(finite, tl.maximum(absmax, eps), 1.0), MAX, False)
    return to_e4m3(tl.div_rn(x, scale[:, None])), tl.where(finite, scale, float("nan"))


# Nothing that depends on the number of tokens is specialised on: no compilation after the warm-up.
@kernel(do_not_specialize=("T",))
def _bmm_kernel(
    x_ptr, sx_ptr, weight_ptr, scale_ptr, y_ptr, T, N, K,
    x_stride_h, x_stride_t, w_stride_h, w_stride_n, w_stride_k, s_stride_h, s_stride_n, s_stride_k,
    y_stride_h, y_stride_t, eps,
    PER_TENSOR: tl.constexpr, PER_BLOCK: tl.constexpr, WIDE: tl.constexpr, EVEN_K: tl.constexpr, MAX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row0, column0 = tile_origin(T, N, BLOCK_M, BLOCK_N)
    head = tl.program_id(1).to(tl.int64)
    row, column, depth = row0 + tl.arange(0, BLOCK_M), column0 + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # Rows and columns beyond the edge read a valid one again; their results are never stored.
    safe_column = (column % N).to(tl.int64)
    x_rows = x_ptr + head * x_stride_h + (row % T).to(tl.int64)[:, None] * x_stride_t
    weight_rows = weight_ptr + head * w_stride_h + safe_column[None, :] * w_stride_n
    scale_rows = scale_ptr + head * s_stride_h
    if PER_BLOCK:
        scale_rows += safe_column // 128 * s_stride_n
    if PER_TENSOR:
        whole = tl.load(sx_ptr)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(0, tl.cdiv(K, BLOCK_K)):
        k = block * BLOCK_K + depth
        if EVEN_K:
            x = tl.load(x_rows + k[None, :])
            weight = tl.load(weight_rows + k[:, None] * w_stride_k)
        else:
            x = tl.load(x_rows + k[None, :], mask=k[None, :] < K, other=0.0)
            weight = tl.load(weight_rows + k[:, None] * w_stride_k, mask=k[:, None] < K, other=0.0)
        if PER_TENSOR:
            x = to_e4m3(tl.div_rn(x.to(tl.float32), whole))
        if PER_BLOCK:
            x, sx = _encode_groups(x.to(tl.float32), eps, MAX)
        if WIDE:
            x, weight = x.to(tl.bfloat16), weight.to(tl.bfloat16)
        if PER_BLOCK:
            scale = tl.load(scale_rows + block * s_stride_k)
            part = dot(x, weight, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            acc += part * (sx[:, None] * scale[None, :])
        elif PER_TENSOR:
            acc += dot(x, weight, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        else:
            acc = dot(x, weight, acc)
    if PER_TENSOR:
        acc = acc * whole * tl.load(scale_rows)
    target = y_ptr + head * y_stride_h + row.to(tl.int64)[:, None] * y_stride_t + column[None, :]
    tl.store(target, cast(acc, y_ptr.dtype.element_ty), mask=(row[:, None] < T) & (column[None, :] < N))


def _depth(format: int, dtype: torch.dtype) -> int:
    if FORMATS[format] != "none":
        return GROUP
    return 32 if dtype == torch.float32 else 64


def _tile(tokens: int, n: int, k: int, format: int, dtype: torch.dtype) -> Tile:
    """Return tile sizes; encoding a tile of x in registers costs registers, and x is wide until then."""
    name = FORMATS[format]
    largest = {"none": tokens, "fp8_tensor": tokens, "fp8_block": 256 if dtype.itemsize == 2 else 32}[name]
    tile = tile_for(min(tokens, largest), n, cdiv(k, _depth(format, dtype)), split=False)
    return tile if name == "none" else replace(tile, stages=min(tile.stages, 3))


def _scale_of_call(x: torch.Tensor) -> torch.Tensor:
    """Return fp32 ``[1]``: the scale of the whole of ``x``."""
    heads, tokens, k = x.shape
    absmax = torch.empty((heads, tokens), dtype=torch.float32, device=x.device)
    block = min(4096, next_power_of_2(k))
    _absmax_kernel[(tokens, heads)](x, absmax, tokens, k, x.stride(0), x.stride(1), BLOCK=block)
    largest = absmax.amax((0, 1)).reshape(1)
    scale = largest.clamp_min(EPS) / largest.new_full((), E4M3_MAX)
    return scale.masked_fill(~largest.isfinite(), torch.nan)


@operator("bmm", nothing, writes=("out",))
def _bmm(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None, format: int, out: torch.Tensor
) -> None:
    (heads, tokens, k), n = x.shape, weight.shape[1]
    if tokens == 0:
        return
    per_tensor, per_block = FORMATS[format] == "fp8_tensor", FORMATS[format] == "fp8_block"
    depth = _depth(format, x.dtype)
    tile = _tile(tokens, n, k, format, x.dtype)
    scale = out if weight_scale is None else weight_scale
    _bmm_kernel[(tile.grid(tokens, n)[0], heads)](
        x, _scale_of_call(x) if per_tensor else x, weight, scale, out, tokens, n, k,
        x.stride(0), x.stride(1), *weight.stride(),
        scale.stride(0), scale.stride(1) if per_block else 0, scale.stride(2) if per_block else 0,
        out.stride(0), out.stride(1), BLOCK_EPS,
        PER_TENSOR=per_tensor, PER_BLOCK=per_block, WIDE=weight_scale is not None and x.dtype == torch.float32,
        EVEN_K=k % depth == 0, MAX=E4M3_MAX, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


class TritonBmm:
    """Heads are the second dimension of the grid; K is at most a few hundred, so it is not split.

    Its operator ``writes`` into its result, so that autograd sees nothing of it: the layer refuses gradients.
    """

    writes = True

    def __init__(self, cfg: BmmConfig) -> None:
        self.format = FORMATS.index(cfg.format)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``y`` ``[H, T, N]``: ``out``, or a new contiguous tensor."""
        y = x.new_empty((x.shape[0], x.shape[1], weight.shape[1])) if out is None else out
        _bmm(x, weight, weight_scale, self.format, y)
        return y
