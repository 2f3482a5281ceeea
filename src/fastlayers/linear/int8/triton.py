"""Int8Linear in Triton: one kernel quantises the rows, the next multiplies int8 and scales int32 sums."""

from __future__ import annotations

import torch
import triton.language as tl

from fastlayers.linear.fp8_scaled.triton import absmax_of_row, row_block
from fastlayers.linear.int8.layer import EPS, LARGEST
from fastlayers.linear.scaled_product import ScaledProduct
from fastlayers.linear.triton_scaled_gemm import TiledProduct
from fastlayers.operators import operator
from fastlayers.quant.group_quant.triton import round_to_int8, scale_of
from fastlayers.runtime.launch import kernel


@kernel
def _token_quant_kernel(
    x_ptr, q_ptr, s_ptr, K, x_stride, eps, MAX: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x_row, q_row = x_ptr + row * x_stride, q_ptr + row * K
    absmax = absmax_of_row(x_row, K, BLOCK)
    finite = absmax < float("inf")
    scale = scale_of(tl.where(finite, tl.maximum(absmax, eps), 1.0), MAX, False)
    # The second reading of the row comes from the cache.
    for start in range(0, K, BLOCK):
        x = tl.load(x_row + start + column, mask=start + column < K, other=0.0).to(tl.float32)
        ratio = tl.minimum(tl.maximum(tl.div_rn(x, scale), -MAX), MAX)
        tl.store(q_row + start + column, round_to_int8(tl.where(finite, ratio, 0.0)), mask=start + column < K)
    tl.store(s_ptr + row, tl.where(finite, scale, float("nan")))


def _quant_fake(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(*x.shape, dtype=torch.int8), x.new_empty(x.shape[0], dtype=torch.float32)


@operator("token_quant_int8", _quant_fake)
def token_quant_int8(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes ``[T, K]`` and fp32 scales ``[T]`` for ``x`` ``[T, K]``, rows of any stride."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows, k = x.shape
    q = x.new_empty(rows, k, dtype=torch.int8)
    s = x.new_empty(rows, dtype=torch.float32)
    if rows:
        _token_quant_kernel[(rows,)](
            x, q, s, k, x.stride(0), eps, MAX=LARGEST, BLOCK=row_block(k), num_warps=8
        )  # fmt: skip
    return q, s


class Int8Codes(ScaledProduct):
    """A scale for each token, found at each call."""

    def codes(self, rows: torch.Tensor, *scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int8 codes and their scales."""
        found: tuple[torch.Tensor, torch.Tensor] = token_quant_int8(rows, EPS)
        return found


class TritonInt8Linear(TiledProduct, Int8Codes):
    """Two kernels; with few rows K is split, and a third adds the int32 parts."""
