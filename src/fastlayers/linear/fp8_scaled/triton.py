"""FP8ScaledLinear in Triton: one kernel quantises the rows, the next multiplies e4m3 and scales the sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.integers import next_power_of_2
from fastlayers.linear.fp8_scaled.layer import EPS
from fastlayers.linear.scaled_product import ScaledProduct
from fastlayers.linear.triton_scaled_gemm import TiledProduct
from fastlayers.operators import operator
from fastlayers.quant.block_quant import E4M3, E4M3_MAX
from fastlayers.quant.group_quant.triton import scale_of
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import to_e4m3


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


@kernel
def _row_absmax_kernel(x_ptr, absmax_ptr, K, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(absmax_ptr + row, absmax_of_row(x_ptr + row * x_stride, K, BLOCK))


@kernel
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


def row_block(k: int) -> int:
    """Return how many numbers of a row of ``k`` a program holds at a time."""
    return min(4096, next_power_of_2(k))


def _quant_fake(x: torch.Tensor, kind: str, input_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(*x.shape, dtype=E4M3), x.new_empty(x.shape[0], dtype=torch.float32)


@operator("quant_e4m3", _quant_fake)
def quant_e4m3(x: torch.Tensor, kind: str, input_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes ``[T, K]`` and fp32 scales ``[T]`` for ``x`` ``[T, K]``, rows of any stride."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows, k = x.shape
    q = x.new_empty(rows, k, dtype=E4M3)
    s = x.new_empty(rows, dtype=torch.float32)
    if rows == 0:
        return q, s
    block = row_block(k)
    if kind == "tensor":
        absmax = x.new_empty(rows, dtype=torch.float32)
        _row_absmax_kernel[(rows,)](x, absmax, k, x.stride(0), BLOCK=block, num_warps=8)
        largest = absmax.amax(0, keepdim=True)
        scale = largest.clamp_min(EPS) / largest.new_full((), E4M3_MAX)
        input_scale = scale.masked_fill(~largest.isfinite(), torch.nan)
    _encode_kernel[(rows,)](
        x, s if input_scale is None else input_scale, q, s, k, x.stride(0), EPS,
        MAX=E4M3_MAX, DYNAMIC=input_scale is None, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return q, s


class ScaledE4M3Codes(ScaledProduct):
    """A scale for each token, for the whole call, or the stored one; every row of codes comes with its own."""

    def codes(self, rows: torch.Tensor, *scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return e4m3 codes and their scales."""
        found: tuple[torch.Tensor, torch.Tensor] = quant_e4m3(rows, self.cfg.activation_scale, *scales)
        return found


class TritonFP8ScaledLinear(TiledProduct, ScaledE4M3Codes):
    """Two kernels (a scale for the whole call: three); with few rows K is split, and one more adds the parts."""
