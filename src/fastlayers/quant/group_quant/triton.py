"""Group quantisation in Triton: a program takes a few (token, group) pairs, each group in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.operators import operator
from fastlayers.quant.group_quant.layer import LARGEST, SCALE_LAYOUTS, GroupQuantConfig, empty_scales
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import to_e4m3


@triton.jit
def scale_of(absmax, MAX: tl.constexpr, UE8M0: tl.constexpr):
    """Return fp32 ``absmax / MAX``, correctly rounded; for ue8m0 the next power of two that is not below."""
    scale = tl.div_rn(absmax, MAX)
    if UE8M0:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def round_to_int8(x):
    """Return fp32 ``x`` (within ±127) as int8, rounded to even: 1.5 · 2^23 leaves no fraction bits."""
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def quantize_tile(x, eps, MAX: tl.constexpr, UE8M0: tl.constexpr, INT8: tl.constexpr):
    """Return (codes, scales) of an fp32 tile whose rows are groups; a group that is not finite: 0 and NaN."""
    finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), axis=1) != 0
    x = tl.where(finite[:, None], x, 0.0)
    scale = scale_of(tl.maximum(tl.max(tl.abs(x), axis=1), eps), MAX, UE8M0)
    ratio = tl.div_rn(x, scale[:, None])
    if INT8:
        codes = round_to_int8(tl.minimum(tl.maximum(ratio, -MAX), MAX))
    else:
        codes = to_e4m3(ratio)
    return codes, tl.where(finite, scale, float("nan"))


@triton.jit(do_not_specialize=["pairs", "s_stride_row", "s_stride_group"])
def _group_quant_kernel(
    x_ptr, q_ptr, s_ptr, pairs, groups, x_stride, s_stride_row, s_stride_group, eps,
    MAX: tl.constexpr, UE8M0: tl.constexpr, INT8: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    row, group = pair // groups, pair % groups
    column = tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + (row * x_stride + group * GROUP)[:, None] + column, mask=inside[:, None], other=0.0)
    codes, scale = quantize_tile(x.to(tl.float32), eps, MAX, UE8M0, INT8)
    tl.store(q_ptr + pair[:, None] * GROUP + column, codes, mask=inside[:, None])
    tl.store(s_ptr + row * s_stride_row + group * s_stride_group, scale, mask=inside)


def _fake(
    x: torch.Tensor, group: int, dtype: torch.dtype, ue8m0: bool, layout: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, features = x.shape
    return x.new_empty(x.shape, dtype=dtype), empty_scales(x, rows, features // group, SCALE_LAYOUTS[layout])


_ARGUMENTS = "Tensor x, int group, ScalarType dtype, bool ue8m0, int layout, float eps"


@operator(f"group_quant({_ARGUMENTS}) -> (Tensor, Tensor)", _fake)
def _group_quant(
    x: torch.Tensor, group: int, dtype: torch.dtype, ue8m0: bool, layout: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.stride(-1) != 1:
        x = x.contiguous()
    (rows, features), groups = x.shape, x.shape[1] // group
    q = torch.empty((rows, features), dtype=dtype, device=x.device)
    s = empty_scales(x, rows, groups, SCALE_LAYOUTS[layout])
    if pairs := rows * groups:
        # Few pairs: small programs, so that a decode step spreads over the multiprocessors.
        block = (4 if pairs <= 2048 else 32) * (128 // group)
        _group_quant_kernel[(triton.cdiv(pairs, block),)](
            x, q, s, pairs, groups, x.stride(0), s.stride(0), s.stride(1), eps,
            MAX=LARGEST[dtype], UE8M0=ue8m0, INT8=dtype == torch.int8, GROUP=group, BLOCK=block,
            num_warps=1 if pairs <= 2048 else 4,
        )  # fmt: skip
    return q, s


class TritonGroupQuant:
    """Memory bound: reads x once, writes codes and scales once, in the layout asked for."""

    def __init__(self, cfg: GroupQuantConfig) -> None:
        self.group, self.dtype, self.eps = cfg.group, cfg.dtype, cfg.eps
        self.ue8m0, self.layout = cfg.scale_fmt == "ue8m0", SCALE_LAYOUTS.index(cfg.scale_layout)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(q, s)`` for ``x`` ``[T, K]``, rows of any stride."""
        q, s = _group_quant(x, self.group, self.dtype, self.ue8m0, self.layout, self.eps)
        return q, s


COMPILE = [
    KernelBuild(
        f"group_quant_{group}_{dtype}_{out}_{block}_{ue8m0}",
        _group_quant_kernel,
        {
            "x_ptr": f"*{dtype}", "q_ptr": f"*{out}", "s_ptr": "*fp32", "pairs": "i32", "groups": "i32",
            "x_stride": "i64", "s_stride_row": "i64", "s_stride_group": "i64", "eps": "fp32",
        },
        {
            "MAX": 127.0 if out == "i8" else 448.0, "UE8M0": ue8m0, "INT8": out == "i8",
            "GROUP": group, "BLOCK": block,
        },
        num_warps=warps, num_stages=3, aligned=("x_stride",),
    )
    for group, dtype, out, ue8m0, block, warps in (
        (128, "bf16", "fp8e4nv", False, 4, 1), (128, "bf16", "fp8e4nv", True, 32, 4),
        (128, "fp32", "fp8e4nv", False, 32, 4), (64, "bf16", "i8", False, 64, 4),
    )
]  # fmt: skip
