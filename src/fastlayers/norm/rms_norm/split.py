"""RMSNorm of rows of which a sum over splits is due, in Triton: one launch adds splits, bias and residual, and norms.

The bits are those of the launch that adds the splits and of the norm behind it: the sum is rounded to the model's
dtype in between, before the residual is added.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl

from fastlayers.integers import next_power_of_2
from fastlayers.linear.split_rows import SplitRows
from fastlayers.norm.rms_norm.layer import ROUNDINGS, RMSNormConfig
from fastlayers.norm.rms_norm.row import normalised
from fastlayers.norm.rms_norm.triton import TritonRMSNorm, _rms_norm
from fastlayers.runtime.launch import New, kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents


@kernel(do_not_specialize=("M",))
def _split_norm_kernel(
    splits_ptr, bias_ptr, residual_ptr, weight_ptr, y_ptr, summed_ptr, M, residual_stride, hidden_size, eps,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden_size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    # Before the wait: the product that follows asks for its weights while the kernel in front of this one still runs.
    release_dependents(PDL)
    await_inputs(PDL)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(splits_ptr + (split * M.to(tl.int64) + row) * hidden_size + column, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    x = cast(total, residual.dtype)
    x = cast(x.to(tl.float32) + residual.to(tl.float32), x.dtype)
    tl.store(summed_ptr + row * hidden_size + column, x, mask=inside)
    y = normalised(x, weight, hidden_size, eps, ROUNDING)
    tl.store(y_ptr + row * hidden_size + column, cast(y, y_ptr.dtype.element_ty), mask=inside)


@lru_cache(maxsize=4096)
def _launch(
    splits: int, rows: int, hidden_size: int, residual_stride: int, bias: bool, eps: float, rounding: int,
    dtype: torch.dtype, device: torch.device,
) -> Callable[..., Any]:  # fmt: skip
    """Return what launches rows of one shape: ``y`` and the sum."""
    block, new = next_power_of_2(hidden_size), New((rows, hidden_size), dtype)
    return _split_norm_kernel.at(
        (rows,), rows, residual_stride, hidden_size, eps, makes={4: new, 5: new},
        SPLITS=splits, HAS_BIAS=bias, ROUNDING=rounding, BLOCK=block,
        num_warps=min(16, max(1, block // 512)), **dependent_launch(device),
    )  # fmt: skip


def split_norm(
    cfg: RMSNormConfig, impl: Any, rows: SplitRows, weight: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return ``(y, new_residual)``, both new contiguous tensors; ``None`` where they are not this kernel's to compute.

    Parameters
    ----------
    cfg : RMSNormConfig
    impl
        What computes the norm of so many rows: whose bits these are, if it is :class:`TritonRMSNorm`.
    rows : SplitRows ``[T, D]``
        Of the dtype of ``residual``.
    weight : Tensor ``[D]``
    residual : Tensor ``[T, D]``
        Rows may be strided; the last dimension is contiguous.
    """
    count, hidden_size = rows.shape
    fits = type(impl) is TritonRMSNorm and rows.dtype == residual.dtype and residual.dim() == 2 and count > 0
    if not fits or not _rms_norm.unwatched(rows.splits, weight, residual):
        return None
    launch = _launch(
        len(rows.splits), count, hidden_size, residual.stride()[0], rows.bias is not None, cfg.eps,
        ROUNDINGS.index(cfg.rounding), rows.dtype, rows.splits.device,
    )  # fmt: skip
    y, summed = launch(rows.splits, weight if rows.bias is None else rows.bias, residual, weight)
    return y, summed
