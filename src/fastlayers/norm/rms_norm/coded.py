"""RMSNorm that writes codes and scales, in Triton: a row is quantised where it is normed, and never written as rows.

The bits are those of the norm and of the quantisation behind it: ``y`` is rounded to the model's dtype in between. At
many rows that saves a launch and two trips of ``y`` through memory; the sum, if any, is written as before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton.language as tl

from fastlayers.integers import next_power_of_2
from fastlayers.norm.rms_norm.row import normalised, quantised_row
from fastlayers.operators import operator
from fastlayers.quant.coded_rows import empty_codes
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents


@kernel(do_not_specialize=("s_stride_row", "s_stride_group"))
def _coded_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, q_ptr, s_ptr, summed_ptr, x_stride, residual_stride, s_stride_row, s_stride_group,
    hidden_size, eps, ROUNDING: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden_size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    release_dependents(PDL)
    await_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        x = cast(x.to(tl.float32) + residual.to(tl.float32), x.dtype)
        tl.store(summed_ptr + row * hidden_size + column, x, mask=inside)
    y = cast(normalised(x, weight, hidden_size, eps, ROUNDING), x.dtype)
    codes, scale = quantised_row(y, BLOCK)
    group = tl.arange(0, BLOCK // 128)
    place = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(q_ptr + row * hidden_size + place, codes, mask=place < hidden_size)
    tl.store(s_ptr + row * s_stride_row + group.to(tl.int64) * s_stride_group, scale, mask=group * 128 < hidden_size)


@lru_cache(maxsize=4096)
def _launch(
    rows: int, hidden_size: int, strides: tuple[int, ...], with_residual: bool, eps: float, rounding: int,
    device: torch.device,
) -> Callable[..., None]:  # fmt: skip
    """Return what launches rows of one shape."""
    block = max(128, next_power_of_2(hidden_size))
    return _coded_norm_kernel.at(
        (rows,), *strides, hidden_size, eps,
        ROUNDING=rounding, HAS_RESIDUAL=with_residual, BLOCK=block,
        num_warps=min(16, max(1, block // 512)), **dependent_launch(device),
    )  # fmt: skip


def _fake(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float, rounding: int, layout: str
) -> list[torch.Tensor]:
    return [*empty_codes(x, layout), *([] if residual is None else [x.new_empty(x.shape)])]


@operator("rms_norm_codes", _fake)
def coded_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float, rounding: int, layout: str
) -> list[torch.Tensor]:
    """Return ``[codes, scales]`` of ``norm(x + residual)`` ``[T, D]``, and with a residual the sum behind them."""
    (rows, hidden_size), (codes, scales) = x.shape, empty_codes(x, layout)
    other, summed = (x, codes) if residual is None else (residual, x.new_empty(x.shape))
    if rows:
        strides = x.stride()[0], other.stride()[0], *scales.stride()
        launch = _launch(rows, hidden_size, strides, residual is not None, eps, rounding, x.device)
        launch(x, other, weight, codes, scales, summed)
    return [codes, scales] if residual is None else [codes, scales, summed]
