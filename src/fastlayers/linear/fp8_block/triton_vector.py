"""FP8BlockLinear in Triton for one token: a matrix-vector product that asks for its weights before it waits.

    x'[k] = code[k] · (s_x[group of k] · weight_scale_inv[block row, group of k])
    y[n]  = Σ x'[k] · weight[n, k]                                                      (fp32)

A tile of weights is BLOCK_N rows, all of one block of scales, times BLOCK_K columns; AHEAD of them are held in
registers at any time, the first ones from before the wait on. CUDA cores multiply, in fp32: a program quantises the
whole row again, and shares that among its BLOCK_N rows. BLOCK_K is 512 columns a warp, 16 bytes of each row a thread; x
comes in halves of 16 values so that a thread has the columns of its weights, and nothing goes through shared memory but
the last sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv
from fastlayers.operators import operator
from fastlayers.quant.group_quant.triton import requantized
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents

GROUP = 128
EPS = 1e-10
# Columns that a thread reads of a row at a time: it adds their products before it keeps the sum.
FOLD = tl.constexpr(16)


@triton.jit
def _tile(rows, k, K, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(rows + k[None, :])
    else:
        return tl.load(rows + k[None, :], mask=k[None, :] < K, other=0.0)


@triton.jit
def _scales(row, group, stride, K, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(row + group * stride)
    else:
        return tl.load(row + group * stride, mask=group * 128 < K, other=0.0)


@triton.jit
def _values(x_ptr, first, K, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return BLOCK_K values of the row from ``first`` on; a thread has FOLD that follow each other."""
    HALF: tl.constexpr = FOLD // 2
    k = first + tl.arange(0, BLOCK_K // FOLD)[:, None] * FOLD + tl.arange(0, HALF)[None, :]
    if EVEN_K:
        low, high = tl.load(x_ptr + k), tl.load(x_ptr + k + HALF)
    else:
        low, high = tl.load(x_ptr + k, mask=k < K, other=0.0), tl.load(x_ptr + k + HALF, mask=k + HALF < K, other=0.0)
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [BLOCK_K])


@triton.jit
def _decoded(codes, scale):
    """Return e4m3 ``codes`` ``[K]`` times the scales of their groups ``[K // 128]``, in fp32."""
    groups = tl.reshape(codes.to(tl.float32), [codes.shape[0] // 128, 128])
    return tl.reshape(groups * scale[:, None], [codes.shape[0]])


# Codes of one row have their scales any stride apart.
@kernel(do_not_specialize=("s_stride",))
def fp8_vector_kernel(
    x_ptr, s_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, N, K, s_stride, weight_stride, scale_stride, eps,
    CODED: tl.constexpr, UE8M0: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, BLOCKS: tl.constexpr,
    AHEAD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N rows of the weight by the row x, BLOCKS tiles of columns; ``CODED``: x is codes, with scales."""
    GROUPS: tl.constexpr = BLOCK_K // 128
    column0 = tl.program_id(0) * BLOCK_N
    column, depth, group = column0 + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, GROUPS)
    known = column < N
    # Rows beyond the edge read the last one again; their results are never stored.
    weight_rows = weight_ptr + tl.minimum(column, N - 1).to(tl.int64)[:, None] * weight_stride
    scale_row = scale_ptr + (column0 // BLOCK_ROWS).to(tl.int64) * scale_stride
    held = ()
    scales = ()
    for i in tl.static_range(AHEAD):
        held = held + (_tile(weight_rows, i * BLOCK_K + depth, K, EVEN_K),)  # type: ignore[assignment]
    for i in tl.static_range(BLOCKS):
        scales = scales + (_scales(scale_row, i * GROUPS + group, 1, K, EVEN_K),)  # type: ignore[assignment]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=known, other=0.0).to(tl.float32)
    await_inputs(PDL)
    release_dependents(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K // FOLD], tl.float32)
    for i in tl.static_range(BLOCKS):
        if i + AHEAD < BLOCKS:
            held = held + (_tile(weight_rows, (i + AHEAD) * BLOCK_K + depth, K, EVEN_K),)  # type: ignore[assignment]
        if CODED:
            codes = _tile(x_ptr, i * BLOCK_K + depth, K, EVEN_K)
            s = _scales(s_ptr, i * GROUPS + group, s_stride, K, EVEN_K)
            x = _decoded(tl.reshape(codes, [BLOCK_K]), s * scales[i])
        else:
            x = _values(x_ptr, i * BLOCK_K, K, EVEN_K, BLOCK_K).to(tl.float32)
            x = requantized(x, scales[i], eps, 448.0, UE8M0, True)
        product = x[None, :] * held[i].to(tl.float32)
        acc += tl.sum(tl.reshape(product, [BLOCK_N, BLOCK_K // FOLD, FOLD]), axis=2)
    out_dtype = y_ptr.dtype.element_ty
    y = cast(tl.sum(acc, axis=1), out_dtype)
    if HAS_BIAS:
        y = cast(y.to(tl.float32) + bias, out_dtype)
    tl.store(y_ptr + column, y, mask=known)


@lru_cache(maxsize=4096)
def _launch(
    n: int, k: int, s_stride: int, weight_stride: int, scale_stride: int, coded: bool, ue8m0: bool, bias: bool,
    block_rows: int, tile: tuple[int, ...], device: torch.device,
) -> Callable[..., None]:  # fmt: skip
    """Return what launches the product of one shape."""
    block_n, block_k, warps, ahead = tile
    blocks = cdiv(k, block_k)
    return fp8_vector_kernel.at(
        (cdiv(n, block_n),), n, k, s_stride, weight_stride, scale_stride, EPS,
        CODED=coded, UE8M0=ue8m0, HAS_BIAS=bias, EVEN_K=k % block_k == 0, BLOCKS=blocks, AHEAD=min(blocks, ahead),
        BLOCK_ROWS=block_rows, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, **dependent_launch(device),
    )  # fmt: skip


def _empty(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(1, weight.shape[0], dtype=dtype)


@operator("fp8_block_vector", _empty)
def fp8_block_vector(
    x: torch.Tensor, s: torch.Tensor | None, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    block_rows: int, ue8m0: bool, dtype: torch.dtype, tile: list[int],
) -> torch.Tensor:  # fmt: skip
    """Return ``y`` ``[1, N]`` for codes ``x`` and their scales ``s``, or, without ``s``, for ``x`` of 16 bits as it is.

    ``tile`` is (rows of the weight, columns, warps, tiles ahead) of a program; ``block_rows`` is a multiple of the
    first.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    n, k = weight.shape
    y = _empty(x, weight, dtype)
    launch = _launch(
        n, k, 0 if s is None else s.stride(1), weight.stride(0), scale.stride(0), s is not None, ue8m0,
        bias is not None, block_rows, tuple(tile), x.device,
    )  # fmt: skip
    launch(x, scale if s is None else s, weight, scale, y if bias is None else bias, y)
    return y
