"""Linear in Triton: a tiled GEMM with masked edges, split over K when there are few rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.linear.dense.layer import LinearConfig
from fastlayers.linear.triton_gemm import add_splits_kernel, tile_for, tile_origin
from fastlayers.operators import operator
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import cast, dot


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, M, N, K, x_stride, weight_stride,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr,
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


def _depth(dtype: torch.dtype) -> int:
    return 32 if dtype == torch.float32 else 64


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


@operator("linear(Tensor x, Tensor weight, Tensor? bias, ScalarType out_dtype) -> Tensor", _fake)
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    (m, k), n, block_k = x.shape, weight.shape[0], _depth(x.dtype)
    y = x.new_empty((m, n), dtype=out_dtype)
    if m == 0:
        return y
    tile = tile_for(m, n, triton.cdiv(k, block_k))
    target = y if tile.splits == 1 else x.new_empty((tile.splits, m, n), dtype=torch.float32)
    _linear_kernel[tile.grid(m, n)](
        x, weight, y if bias is None else bias, target, m, n, k, x.stride(0), weight.stride(0),
        HAS_BIAS=bias is not None, SPLITS=tile.splits, EVEN_K=k % block_k == 0,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=block_k, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if tile.splits > 1:
        add_splits_kernel[(m, triton.cdiv(n, 1024))](
            target, y if bias is None else bias, y, m, n,
            SPLITS=tile.splits, HAS_BIAS=bias is not None, ROUND_BEFORE_BIAS=False, BLOCK=1024,
        )  # fmt: skip
    return y


class TritonLinear:
    """Reads ``x`` with any row stride; sums in fp32 and rounds once, after the bias."""

    def __init__(self, cfg: LinearConfig) -> None:
        self.out_dtype = cfg.y_dtype

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``y`` ``[..., N]``, a new contiguous tensor."""
        y: torch.Tensor = _linear(x.reshape(-1, x.shape[-1]), weight, bias, self.out_dtype)
        return y.view(*x.shape[:-1], weight.shape[0])


def _build(m: int, n: int, k: int, dtype: str) -> KernelBuild:
    block_k = 32 if dtype == "fp32" else 64
    tile = tile_for(m, n, triton.cdiv(k, block_k))
    return KernelBuild(
        f"linear_{m}x{n}x{k}_{dtype}",
        _linear_kernel,
        {
            "x_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}", "bias_ptr": f"*{dtype}",
            "y_ptr": f"*{dtype}" if tile.splits == 1 else "*fp32",
            "M": "i32", "N": "i32", "K": "i32", "x_stride": "i64", "weight_stride": "i64",
        },
        {
            "HAS_BIAS": True, "SPLITS": tile.splits, "EVEN_K": k % block_k == 0,
            "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": block_k,
        },
        tile.warps, tile.stages, ("N", "K", "x_stride", "weight_stride"),
    )  # fmt: skip


COMPILE = [
    _build(m, n, k, dtype)
    for m, n, k, dtype in (
        (1, 2112, 7168, "bf16"), (32, 6144, 4096, "bf16"), (64, 5120, 2880, "bf16"),
        (128, 24576, 1536, "fp16"),
        (4096, 24576, 1536, "bf16"), (4096, 2112, 7168, "fp32"), (1, 256, 7168, "fp32"),
    )
]  # fmt: skip
