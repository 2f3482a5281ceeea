"""FP8BlockLinear in Triton: e4m3 matrix units, promoted to fp32 with the scales after every block of K.

fp32 layers multiply in bf16 instead (e4m3 fits exactly): the e4m3 unit keeps about 14 bits inside a block,
enough for bf16 and fp16 outputs, not for fp32 ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from fastlayers.linear.triton_gemm import add_splits_kernel, tile_for, tile_origin
from fastlayers.operators import operator
from fastlayers.quant.fp8_linear.layer import FP8LinearConfig
from fastlayers.quant.group_quant.layer import GroupQuantConfig
from fastlayers.quant.group_quant.triton import TritonGroupQuant
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import cast, dot


# Nothing that depends on the number of tokens is specialised on: no compilation after the warm-up.
@triton.jit(do_not_specialize=["M", "s_stride_row", "s_stride_group"])
def _fp8_gemm_kernel(
    q_ptr, s_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, M, N, K,
    q_stride, s_stride_row, s_stride_group, weight_stride, scale_stride,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
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
    for block in range(first, last):
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


def _fake(
    q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    block_rows: int, block_columns: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    return q.new_empty((q.shape[0], weight.shape[0]), dtype=dtype)


@operator(
    "fp8_block_gemm(Tensor q, Tensor s, Tensor weight, Tensor scale, Tensor? bias, int block_rows, "
    "int block_columns, ScalarType dtype) -> Tensor",
    _fake,
)
def fp8_block_gemm(
    q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    block_rows: int, block_columns: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return ``y`` ``[M, N]`` for codes ``q`` ``[M, K padded to whole blocks]`` and their scales ``s``."""
    m, (n, k) = q.shape[0], weight.shape
    y = torch.empty((m, n), dtype=dtype, device=q.device)
    if m == 0:
        return y
    tile = tile_for(m, n, triton.cdiv(k, block_columns))
    target = y if tile.splits == 1 else torch.empty((tile.splits, m, n), dtype=torch.float32, device=q.device)
    _fp8_gemm_kernel[tile.grid(m, n)](
        q, s, weight, scale, y if bias is None else bias, target, m, n, k,
        q.stride(0), s.stride(0), s.stride(1), weight.stride(0), scale.stride(0),
        HAS_BIAS=bias is not None, SPLITS=tile.splits, EVEN_K=k % block_columns == 0,
        WIDE=dtype == torch.float32, BLOCK_ROWS=block_rows,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=block_columns,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if tile.splits > 1:
        add_splits_kernel[(m, triton.cdiv(n, 1024))](
            target, y if bias is None else bias, y, m, n,
            SPLITS=tile.splits, HAS_BIAS=bias is not None, ROUND_BEFORE_BIAS=True, BLOCK=1024,
        )  # fmt: skip
    return y


class TritonFP8Linear:
    """Quantises x, then one GEMM; with few rows K is split and a third kernel adds the parts."""

    def __init__(self, cfg: FP8LinearConfig) -> None:
        self.cfg = cfg
        # Scales with tokens next to each other: a tile reads one column of them per block of K.
        quantization = GroupQuantConfig(cfg.block_size[1], scale_fmt=cfg.scale_fmt, scale_layout="col")
        self.quantize = TritonGroupQuant(quantization)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale_inv: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``y`` ``[..., N]``, a new contiguous tensor of ``x``'s dtype."""
        rows = x.reshape(-1, self.cfg.in_features)
        if self.cfg.padded_in != self.cfg.in_features:
            rows = F.pad(rows, (0, self.cfg.padded_in - self.cfg.in_features))
        q, s = self.quantize(rows)
        y: torch.Tensor = fp8_block_gemm(q, s, weight, weight_scale_inv, bias, *self.cfg.block_size, self.cfg.dtype)
        return y.view(*x.shape[:-1], self.cfg.out_features)


def _build(m: int, n: int, k: int, dtype: str = "bf16") -> KernelBuild:
    tile = tile_for(m, n, triton.cdiv(k, 128))
    return KernelBuild(
        f"fp8_gemm_{m}x{n}x{k}_{dtype}",
        _fp8_gemm_kernel,
        {
            "q_ptr": "*fp8e4nv", "s_ptr": "*fp32", "weight_ptr": "*fp8e4nv", "scale_ptr": "*fp32",
            "bias_ptr": f"*{dtype}", "y_ptr": f"*{dtype}" if tile.splits == 1 else "*fp32",
            "M": "i32", "N": "i32", "K": "i32",
            "q_stride": "i32", "s_stride_row": "i32", "s_stride_group": "i32",
            "weight_stride": "i32", "scale_stride": "i32",
        },
        {
            "HAS_BIAS": False, "SPLITS": tile.splits, "EVEN_K": k % 128 == 0, "WIDE": dtype == "fp32",
            "BLOCK_ROWS": 128, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": 128,
        },
        tile.warps, tile.stages, ("N", "K", "q_stride", "weight_stride"),
    )  # fmt: skip


COMPILE = [
    _build(1, 2112, 7168),
    _build(1, 24576, 1536),
    _build(32, 7168, 16384),
    _build(64, 36864, 7168),
    _build(128, 4096, 4096),
    _build(4096, 7168, 18432),
    _build(4096, 2112, 7168, "fp32"),
    _build(16, 576, 7168, "fp32"),
]
