"""FP8BlockLinear in Triton for a few tokens: one kernel streams the weight, and may quantise x on the way.

    PARTS = blocks of K at a time;  acc[part, n, m] += (weight[n, k of part] · x[m, k of part]) · scales

Few tokens leave a matrix product that is a walk through the weight. A program owns 16 or 32 rows of it and the
whole K; its warps take one block of K each (the batch dimension of one product) and are added at the end, in a
fixed order. So K is split inside a program: no partial sums in memory, no second kernel. With one or two tokens
quantising x again in every program costs less than a kernel of its own; ``FUSED`` does that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton.language as tl

from fastlayers.integers import cdiv
from fastlayers.operators import operator
from fastlayers.quant.group_quant.triton import quantize_tile
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, dot, release_dependents

GROUP = 128
EPS = 1e-10


# Nothing that depends on the number of tokens is specialised on: no compilation after the warm-up.
@kernel(do_not_specialize=("M", "s_stride_row", "s_stride_group"))
def _skinny_kernel(
    x_ptr, s_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, M, N, K,
    x_stride, s_stride_row, s_stride_group, weight_stride, scale_stride, eps,
    FUSED: tl.constexpr, UE8M0: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = 128
    column0 = tl.program_id(0) * BLOCK_N
    row, column = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), column0 + tl.arange(0, BLOCK_N)
    part, depth = tl.arange(0, PARTS), tl.arange(0, GROUP)
    # Columns beyond the edge read a valid one again; their results are never stored.
    weight_rows = weight_ptr + ((column % N).to(tl.int64) * weight_stride)[None, :, None]
    weight_rows += part[:, None, None] * GROUP + depth[None, None, :]
    x_rows = x_ptr + (row.to(tl.int64) * x_stride)[None, None, :] + part[:, None, None] * GROUP + depth[None, :, None]
    s_rows = s_ptr + (row.to(tl.int64) * s_stride_row)[None, :] + part[:, None] * s_stride_group
    scale_row = scale_ptr + (column0 // BLOCK_ROWS).to(tl.int64) * scale_stride + part
    blocks = tl.cdiv(K, GROUP)
    acc = tl.zeros([PARTS, BLOCK_N, BLOCK_M], tl.float32)
    await_inputs(PDL)
    release_dependents(PDL)
    for first in tl.range(0, blocks, PARTS, num_stages=STAGES):
        here = first + part < blocks
        k_here = here[:, None, None]
        if not EVEN_K:
            k_here = ((first + part)[:, None, None] * GROUP + depth[None, :, None]) < K
        x = tl.load(x_rows + first * GROUP, mask=k_here & (row < M)[None, None, :], other=0.0)
        if not EVEN_K:
            k_here = ((first + part)[:, None, None] * GROUP + depth[None, None, :]) < K
        weight = tl.load(weight_rows + first * GROUP, mask=k_here, other=0.0)
        scale = tl.load(scale_row + first, mask=here, other=0.0)[:, None]
        if FUSED:
            tokens = tl.permute(x.to(tl.float32), (0, 2, 1)).reshape(PARTS * BLOCK_M, GROUP)
            codes, s = quantize_tile(tokens, eps, 448.0, UE8M0, False)
            x = tl.permute(codes.reshape(PARTS, BLOCK_M, GROUP), (0, 2, 1))
            s = s.reshape(PARTS, BLOCK_M)
        else:
            s = tl.load(s_rows + first * s_stride_group, mask=here[:, None] & (row < M)[None, :], other=0.0)
        acc += dot(weight, x) * (s * scale)[:, None, :]
    out_dtype = y_ptr.dtype.element_ty
    y = cast(tl.sum(acc, axis=0), out_dtype)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
        y = cast(y.to(tl.float32) + bias[:, None], out_dtype)
    inside = (row < M)[None, :] & (column < N)[:, None]
    tl.store(y_ptr + row.to(tl.int64)[None, :] * N + column[:, None], y, mask=inside)


@lru_cache(maxsize=4096)
def _launch(
    m: int, n: int, k: int, strides: tuple[int, ...], fused: bool, ue8m0: bool, bias: bool, block_rows: int,
    tile: tuple[int, ...], device: torch.device,
) -> Callable[..., None]:  # fmt: skip
    """Return what launches the product of one shape."""
    block_m, block_n, parts, warps, stages = tile
    return _skinny_kernel.at(
        (cdiv(n, block_n), cdiv(m, block_m)), m, n, k, *strides, EPS,
        FUSED=fused, UE8M0=ue8m0, HAS_BIAS=bias, EVEN_K=k % GROUP == 0,
        BLOCK_ROWS=block_rows, BLOCK_M=block_m, BLOCK_N=block_n, PARTS=parts, STAGES=stages,
        num_warps=warps, num_stages=stages, **dependent_launch(device),
    )  # fmt: skip


def _empty(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


@operator("fp8_block_skinny_gemm", _empty)
def fp8_block_skinny_gemm(
    x: torch.Tensor, s: torch.Tensor | None, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    block_rows: int, ue8m0: bool, dtype: torch.dtype, tile: list[int],
) -> torch.Tensor:  # fmt: skip
    """Return ``y`` ``[M, N]`` for codes ``x`` and their scales ``s``, or, without ``s``, for ``x`` as it is.

    ``tile`` is (tokens, rows of the weight, blocks of K, warps, stages) of a program; ``block_rows`` is a
    multiple of its second.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    (m, _), (n, k) = x.shape, weight.shape
    y = x.new_empty(m, n, dtype=dtype)
    if m == 0:
        return y
    s_strides = (0, 0) if s is None else s.stride()
    launch = _launch(
        m, n, k, (x.stride(0), *s_strides, weight.stride(0), scale.stride(0)), s is None, ue8m0, bias is not None,
        block_rows, tuple(tile), x.device,
    )  # fmt: skip
    launch(x, scale if s is None else s, weight, scale, y if bias is None else bias, y)
    return y
