"""RMSNorm in Triton: one program a row, the row in registers, residual add fused."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl

from fastlayers.integers import next_power_of_2
from fastlayers.norm.rms_norm.coded import coded_norm
from fastlayers.norm.rms_norm.layer import ROUNDINGS, RMSNormConfig, empty_outputs
from fastlayers.operators import operator
from fastlayers.quant.coded_rows import CodedRows
from fastlayers.runtime.launch import Kinds, New, kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents


@kernel
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, summed_ptr, x_stride, residual_stride, hidden_size, eps,
    ROUNDING: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden_size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    # Before the wait: the product that follows asks for its weights while the kernel in front of this one still runs.
    release_dependents(PDL)
    await_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        # The sum is rounded to the model's dtype before it is normalised, as the unfused pair does.
        x = cast(x.to(tl.float32) + residual.to(tl.float32), x.dtype)
        tl.store(summed_ptr + row * hidden_size + column, x, mask=inside)
    wide = x.to(tl.float32)
    normalised = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden_size + eps)
    if ROUNDING == 0:
        y = weight.to(tl.float32) * cast(normalised, x.dtype).to(tl.float32)
    elif ROUNDING == 1:
        y = weight.to(tl.float32) * normalised
    else:
        y = (1.0 + weight.to(tl.float32)) * normalised
    tl.store(y_ptr + row * hidden_size + column, cast(y, y_ptr.dtype.element_ty), mask=inside)


@lru_cache(maxsize=4096)
def _launch(
    rows: int, hidden_size: int, x_stride: int, residual_stride: int | None, eps: float, rounding: int,
    dtype: torch.dtype, device: torch.device,
) -> Callable[..., Any]:  # fmt: skip
    """Return what launches rows of one shape: ``y``, and with a residual the sum."""
    block, y = next_power_of_2(hidden_size), New((rows, hidden_size), dtype)
    stride = x_stride if residual_stride is None else residual_stride
    return _rms_norm_kernel.at(
        (rows,), x_stride, stride, hidden_size, eps, makes={3: y} if residual_stride is None else {3: y, 4: y},
        ROUNDING=rounding, HAS_RESIDUAL=residual_stride is not None, BLOCK=block,
        num_warps=min(16, max(1, block // 512)), **dependent_launch(device),
    )  # fmt: skip


@operator("rms_norm", empty_outputs)
def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float, rounding: int
) -> list[torch.Tensor]:
    shape = x.shape
    rows = x if len(shape) == 2 else x.reshape(-1, shape[-1])
    count, hidden_size = rows.shape
    if not count:
        return empty_outputs(x, weight, residual, eps, rounding)
    if residual is None:
        launch = _launch(count, hidden_size, rows.stride()[0], None, eps, rounding, x.dtype, x.device)
        y = launch(rows, rows, weight, rows)
        return [y if rows is x else y.view(shape)]
    other = residual if rows is x else residual.reshape(-1, hidden_size)
    launch = _launch(count, hidden_size, rows.stride()[0], other.stride()[0], eps, rounding, x.dtype, x.device)
    y, summed = launch(rows, other, weight)
    return [y, summed] if rows is x else [y.view(shape), summed.view(shape)]


class TritonRMSNorm:
    """One pass over the row: reads x (and residual), writes y (and the sum)."""

    def __init__(self, cfg: RMSNormConfig) -> None:
        self.eps, self.rounding = cfg.eps, ROUNDINGS.index(cfg.rounding)
        # What launches sums of rows of kinds that came before.
        self._ready = Kinds()

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(y, new_residual)``, both new contiguous tensors of ``x``'s dtype."""
        if residual is not None and _rms_norm.unwatched(x, weight, residual):
            shape = x.shape
            kind = shape, x.stride(), residual.stride(), x.dtype, x.device
            launch = self._ready.get(kind)
            if launch is None and len(shape) == 2 and shape[0]:
                strides = x.stride()[0], residual.stride()[0]
                launch = self._ready.keep(kind, _launch(*shape, *strides, self.eps, self.rounding, x.dtype, x.device))
            if launch is not None:
                y: torch.Tensor
                y, summed = launch(x, residual, weight)
                return y, summed
        found = _rms_norm(x, weight, residual, self.eps, self.rounding)
        return found[0], None if residual is None else found[1]

    def coded(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, layout: str
    ) -> tuple[CodedRows, torch.Tensor | None]:
        """Return what a call returns, ``y`` ``[T, D]`` as codes and scales in that layout, as GroupQuant makes them."""
        codes, scales, *summed = coded_norm(x, weight, residual, self.eps, self.rounding, layout)
        return CodedRows(codes, scales), summed[0] if summed else None
