"""FP8ScaledLinear in Triton: one kernel quantises the rows, the next multiplies e4m3 and scales the sums.

fp32 layers multiply in bf16 instead (e4m3 fits exactly): the e4m3 unit keeps about 14 bits inside a block of K,
enough for bf16 and fp16 outputs, not for fp32 ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.linear.triton_gemm import dot, tile_for, tile_origin
from fastlayers.operators import operator
from fastlayers.quant.fp8_linear.blocks import E4M3, E4M3_MAX
from fastlayers.quant.fp8_scaled_linear.layer import EPS, FP8ScaledLinearConfig
from fastlayers.quant.group_quant.triton import scale_of
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import cast, to_e4m3

BLOCK_K = 128


@triton.jit
def absmax_of_row(row_ptr, K, BLOCK: tl.constexpr):
    """Return the largest magnitude of ``K`` numbers; infinity if one of them is NaN or infinite."""
    column = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        size = tl.abs(tl.load(row_ptr + start + column, mask=start + column < K, other=0.0).to(tl.float32))
        # NaN counts as infinity; a maximum may drop it.
        largest = tl.maximum(largest, tl.where(size < float("inf"), size, float("inf")))
    return tl.max(largest, axis=0)


@triton.jit
def _row_absmax_kernel(x_ptr, absmax_ptr, K, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(absmax_ptr + row, absmax_of_row(x_ptr + row * x_stride, K, BLOCK))


@triton.jit
def _encode_kernel(
    x_ptr, scale_ptr, q_ptr, s_ptr, K, x_stride, eps, MAX: tl.constexpr, DYNAMIC: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x_row, q_row = x_ptr + row * x_stride, q_ptr + row * K
    if DYNAMIC:
        absmax = absmax_of_row(x_row, K, BLOCK)
        finite = absmax < float("inf")
        scale = scale_of(tl.where(finite, tl.maximum(absmax, eps), 1.0), MAX, False)
        tl.store(s_ptr + row, tl.where(finite, scale, float("nan")))
    else:
        scale = tl.load(scale_ptr)
        tl.store(s_ptr + row, scale)
    # The second reading of the row comes from the cache.
    for start in range(0, K, BLOCK):
        x = tl.load(x_row + start + column, mask=start + column < K, other=0.0).to(tl.float32)
        tl.store(q_row + start + column, to_e4m3(tl.div_rn(x, scale)), mask=start + column < K)


# Nothing that depends on the number of tokens is specialised on: no compilation after the warm-up.
@triton.jit(do_not_specialize=["M"])
def _scaled_gemm_kernel(
    q_ptr, s_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, M, N, K, q_stride, weight_stride,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr,
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
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
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
        acc += dot(q, weight, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
    inside = (row[:, None] < M) & (column[None, :] < N)
    target = y_ptr + (split.to(tl.int64) * M + row.to(tl.int64))[:, None] * N + column[None, :]
    if SPLITS > 1:
        tl.store(target, acc, mask=inside)
    else:
        s = tl.load(s_ptr + row, mask=row < M, other=0.0)
        scale = tl.load(scale_ptr + column, mask=column < N, other=0.0)
        y = acc * s[:, None] * scale[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
        tl.store(target, cast(y, y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _add_scaled_splits_kernel(
    partial_ptr, s_ptr, scale_ptr, bias_ptr, y_ptr, M, N,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial_ptr + (split * M.to(tl.int64) + row) * N + column, mask=inside, other=0.0)
    y = total * tl.load(s_ptr + row) * tl.load(scale_ptr + column, mask=inside, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + column, cast(y, y_ptr.dtype.element_ty), mask=inside)


def _row_block(k: int) -> int:
    return min(4096, triton.next_power_of_2(k))


def _quant_fake(x: torch.Tensor, kind: str, input_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty((x.shape[0],), dtype=torch.float32)


@operator("quant_e4m3(Tensor x, str kind, Tensor? input_scale) -> (Tensor, Tensor)", _quant_fake)
def quant_e4m3(x: torch.Tensor, kind: str, input_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes ``[T, K]`` and fp32 scales ``[T]`` for ``x`` ``[T, K]``, rows of any stride."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows, k = x.shape
    q = torch.empty((rows, k), dtype=E4M3, device=x.device)
    s = torch.empty((rows,), dtype=torch.float32, device=x.device)
    if rows == 0:
        return q, s
    block = _row_block(k)
    if kind == "tensor":
        absmax = torch.empty((rows,), dtype=torch.float32, device=x.device)
        _row_absmax_kernel[(rows,)](x, absmax, k, x.stride(0), BLOCK=block, num_warps=8)
        largest = absmax.amax(0, keepdim=True)
        scale = largest.clamp_min(EPS) / largest.new_full((), E4M3_MAX)
        input_scale = scale.masked_fill(~largest.isfinite(), torch.nan)
    _encode_kernel[(rows,)](
        x, s if input_scale is None else input_scale, q, s, k, x.stride(0), EPS,
        MAX=E4M3_MAX, DYNAMIC=input_scale is None, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return q, s


def _gemm_fake(
    q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    return q.new_empty((q.shape[0], weight.shape[0]), dtype=dtype)


@operator(
    "fp8_scaled_gemm(Tensor q, Tensor s, Tensor weight, Tensor scale, Tensor? bias, ScalarType dtype) -> Tensor",
    _gemm_fake,
)
def fp8_scaled_gemm(
    q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return ``y`` ``[M, N]`` for codes ``q`` ``[M, K]`` with scales ``s`` ``[M]``."""
    m, (n, k) = q.shape[0], weight.shape
    y = torch.empty((m, n), dtype=dtype, device=q.device)
    if m == 0:
        return y
    tile = tile_for(m, n, triton.cdiv(k, BLOCK_K))
    target = y if tile.splits == 1 else torch.empty((tile.splits, m, n), dtype=torch.float32, device=q.device)
    _scaled_gemm_kernel[tile.grid(m, n)](
        q, s, weight, scale, y if bias is None else bias, target, m, n, k, q.stride(0), weight.stride(0),
        HAS_BIAS=bias is not None, SPLITS=tile.splits, EVEN_K=k % BLOCK_K == 0, WIDE=dtype == torch.float32,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=BLOCK_K, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if tile.splits > 1:
        _add_scaled_splits_kernel[(m, triton.cdiv(n, 1024))](
            target, s, scale, y if bias is None else bias, y, m, n,
            SPLITS=tile.splits, HAS_BIAS=bias is not None, BLOCK=1024,
        )  # fmt: skip
    return y


class TritonFP8ScaledLinear:
    """Two kernels (a scale for the whole call: three); with few rows K is split, and one more adds the parts."""

    def __init__(self, cfg: FP8ScaledLinearConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``y`` ``[..., N]``, a new contiguous tensor of ``x``'s dtype."""
        q, s = quant_e4m3(x.reshape(-1, self.cfg.in_features), self.cfg.activation_scale, input_scale)
        y: torch.Tensor = fp8_scaled_gemm(q, s, weight, weight_scale, bias, x.dtype)
        return y.view(*x.shape[:-1], weight.shape[0])


def _build(m: int, n: int, k: int, dtype: str = "bf16") -> KernelBuild:
    tile = tile_for(m, n, triton.cdiv(k, BLOCK_K))
    return KernelBuild(
        f"fp8_scaled_gemm_{m}x{n}x{k}_{dtype}",
        _scaled_gemm_kernel,
        {
            "q_ptr": "*fp8e4nv", "s_ptr": "*fp32", "weight_ptr": "*fp8e4nv", "scale_ptr": "*fp32",
            "bias_ptr": f"*{dtype}", "y_ptr": f"*{dtype}" if tile.splits == 1 else "*fp32",
            "M": "i32", "N": "i32", "K": "i32", "q_stride": "i32", "weight_stride": "i32",
        },
        {
            "HAS_BIAS": True, "SPLITS": tile.splits, "EVEN_K": k % BLOCK_K == 0, "WIDE": dtype == "fp32",
            "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": BLOCK_K,
        },
        tile.warps, tile.stages, ("N", "K", "q_stride", "weight_stride"),
    )  # fmt: skip


COMPILE = [
    _build(1, 6144, 4096),
    _build(32, 24576, 4096),
    _build(128, 4096, 12288),
    _build(4096, 4096, 12288),
    _build(4096, 6144, 4096, "fp32"),
    KernelBuild(
        "add_scaled_splits_16",
        _add_scaled_splits_kernel,
        {
            "partial_ptr": "*fp32", "s_ptr": "*fp32", "scale_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16",
            "M": "i32", "N": "i32",
        },
        {"SPLITS": 16, "HAS_BIAS": True, "BLOCK": 1024},
        aligned=("N",),
    ),
    KernelBuild(
        "row_absmax_12288",
        _row_absmax_kernel,
        {"x_ptr": "*bf16", "absmax_ptr": "*fp32", "K": "i32", "x_stride": "i32"},
        {"BLOCK": _row_block(12288)},
        num_warps=8,
        aligned=("K", "x_stride"),
    ),
    *(
        KernelBuild(
            f"encode_e4m3_{k}_{'dynamic' if dynamic else 'static'}",
            _encode_kernel,
            {
                "x_ptr": "*bf16", "scale_ptr": "*fp32", "q_ptr": "*fp8e4nv", "s_ptr": "*fp32",
                "K": "i32", "x_stride": "i32", "eps": "fp32",
            },
            {"MAX": E4M3_MAX, "DYNAMIC": dynamic, "BLOCK": _row_block(k)},
            num_warps=8,
            aligned=("K", "x_stride"),
        )
        for k, dynamic in ((4096, True), (12288, True), (12288, False))
    ),
]  # fmt: skip
