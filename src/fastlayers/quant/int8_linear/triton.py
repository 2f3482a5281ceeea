"""Int8Linear in Triton: one kernel quantises the rows, the next multiplies int8 and scales int32 sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.linear.triton_gemm import tile_for, tile_origin
from fastlayers.operators import operator
from fastlayers.quant.group_quant.triton import round_to_int8, scale_of
from fastlayers.quant.int8_linear.layer import EPS, LARGEST, Int8LinearConfig
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import cast, dot

BLOCK_K = 128


@triton.jit
def _token_quant_kernel(
    x_ptr, q_ptr, s_ptr, K, x_stride, eps, MAX: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x_row, q_row = x_ptr + row * x_stride, q_ptr + row * K
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        size = tl.abs(tl.load(x_row + start + column, mask=start + column < K, other=0.0).to(tl.float32))
        # NaN counts as infinity; a maximum may drop it.
        largest = tl.maximum(largest, tl.where(size < float("inf"), size, float("inf")))
    absmax = tl.max(largest, axis=0)
    finite = absmax < float("inf")
    scale = scale_of(tl.where(finite, tl.maximum(absmax, eps), 1.0), MAX, False)
    # The second reading of the row comes from the cache.
    for start in range(0, K, BLOCK):
        x = tl.load(x_row + start + column, mask=start + column < K, other=0.0).to(tl.float32)
        ratio = tl.minimum(tl.maximum(tl.div_rn(x, scale), -MAX), MAX)
        tl.store(q_row + start + column, round_to_int8(tl.where(finite, ratio, 0.0)), mask=start + column < K)
    tl.store(s_ptr + row, tl.where(finite, scale, float("nan")))


@triton.jit(do_not_specialize=["M"])
def _int8_gemm_kernel(
    q_ptr, s_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, M, N, K, q_stride, weight_stride,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr,
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
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for block in range(first, last):
        k = block * BLOCK_K + depth
        if EVEN_K:
            q = tl.load(q_rows + k[None, :])
            weight = tl.load(weight_rows + k[:, None])
        else:
            q = tl.load(q_rows + k[None, :], mask=k[None, :] < K, other=0)
            weight = tl.load(weight_rows + k[:, None], mask=k[:, None] < K, other=0)
        acc = dot(q, weight, acc)
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


@triton.jit(do_not_specialize=["M"])
def _add_int32_splits_kernel(
    partial_ptr, s_ptr, scale_ptr, bias_ptr, y_ptr, M, N,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    total = tl.zeros([BLOCK], tl.int32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial_ptr + (split * M.to(tl.int64) + row) * N + column, mask=inside, other=0)
    y = total.to(tl.float32) * tl.load(s_ptr + row) * tl.load(scale_ptr + column, mask=inside, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + column, cast(y, y_ptr.dtype.element_ty), mask=inside)


def _row_block(k: int) -> int:
    return min(4096, triton.next_power_of_2(k))


def _quant_fake(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((x.shape[0],), dtype=torch.float32)


@operator("token_quant_int8(Tensor x, float eps) -> (Tensor, Tensor)", _quant_fake)
def token_quant_int8(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes ``[T, K]`` and fp32 scales ``[T]`` for ``x`` ``[T, K]``, rows of any stride."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows, k = x.shape
    q = torch.empty((rows, k), dtype=torch.int8, device=x.device)
    s = torch.empty((rows,), dtype=torch.float32, device=x.device)
    if rows:
        _token_quant_kernel[(rows,)](
            x, q, s, k, x.stride(0), eps, MAX=LARGEST, BLOCK=_row_block(k), num_warps=8
        )  # fmt: skip
    return q, s


def _gemm_fake(
    q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    return q.new_empty((q.shape[0], weight.shape[0]), dtype=dtype)


@operator(
    "int8_gemm(Tensor q, Tensor s, Tensor weight, Tensor scale, Tensor? bias, ScalarType dtype) -> Tensor",
    _gemm_fake,
)
def int8_gemm(
    q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return ``y`` ``[M, N]`` for codes ``q`` ``[M, K]`` with scales ``s`` ``[M]``."""
    m, (n, k) = q.shape[0], weight.shape
    y = torch.empty((m, n), dtype=dtype, device=q.device)
    if m == 0:
        return y
    tile = tile_for(m, n, triton.cdiv(k, BLOCK_K))
    target = y if tile.splits == 1 else torch.empty((tile.splits, m, n), dtype=torch.int32, device=q.device)
    _int8_gemm_kernel[tile.grid(m, n)](
        q, s, weight, scale, y if bias is None else bias, target, m, n, k, q.stride(0), weight.stride(0),
        HAS_BIAS=bias is not None, SPLITS=tile.splits, EVEN_K=k % BLOCK_K == 0,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=BLOCK_K, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if tile.splits > 1:
        _add_int32_splits_kernel[(m, triton.cdiv(n, 1024))](
            target, s, scale, y if bias is None else bias, y, m, n,
            SPLITS=tile.splits, HAS_BIAS=bias is not None, BLOCK=1024,
        )  # fmt: skip
    return y


class TritonInt8Linear:
    """Two kernels; with few rows K is split, and a third adds the int32 parts."""

    def __init__(self, cfg: Int8LinearConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``y`` ``[..., N]``, a new contiguous tensor of ``x``'s dtype."""
        q, s = token_quant_int8(x.reshape(-1, x.shape[-1]), EPS)
        y: torch.Tensor = int8_gemm(q, s, weight, weight_scale, bias, x.dtype)
        return y.view(*x.shape[:-1], weight.shape[0])


def _build(m: int, n: int, k: int) -> KernelBuild:
    tile = tile_for(m, n, triton.cdiv(k, BLOCK_K))
    return KernelBuild(
        f"int8_gemm_{m}x{n}x{k}",
        _int8_gemm_kernel,
        {
            "q_ptr": "*i8", "s_ptr": "*fp32", "weight_ptr": "*i8", "scale_ptr": "*fp32", "bias_ptr": "*bf16",
            "y_ptr": "*bf16" if tile.splits == 1 else "*i32",
            "M": "i32", "N": "i32", "K": "i32", "q_stride": "i32", "weight_stride": "i32",
        },
        {
            "HAS_BIAS": True, "SPLITS": tile.splits, "EVEN_K": k % BLOCK_K == 0,
            "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": BLOCK_K,
        },
        tile.warps, tile.stages, ("N", "K", "q_stride", "weight_stride"),
    )  # fmt: skip


COMPILE = [
    _build(1, 6144, 4096),
    _build(32, 24576, 4096),
    _build(64, 36864, 7168),
    _build(128, 2048, 3072),
    _build(4096, 4096, 12288),
    KernelBuild(
        "add_int32_splits_16",
        _add_int32_splits_kernel,
        {
            "partial_ptr": "*i32", "s_ptr": "*fp32", "scale_ptr": "*fp32",
            "bias_ptr": "*bf16", "y_ptr": "*bf16",
            "M": "i32", "N": "i32",
        },
        {"SPLITS": 16, "HAS_BIAS": True, "BLOCK": 1024},
        aligned=("N",),
    ),
    *(
        KernelBuild(
            f"token_quant_int8_{k}",
            _token_quant_kernel,
            {
                "x_ptr": "*bf16", "q_ptr": "*i8", "s_ptr": "*fp32",
                "K": "i32", "x_stride": "i32", "eps": "fp32",
            },
            {"MAX": LARGEST, "BLOCK": _row_block(k)},
            num_warps=8,
            aligned=("K", "x_stride"),
        )
        for k in (4096, 7168, 18432, 36864)
    ),
]  # fmt: skip
