"""Rows of experts in Triton: what stands around a grouped GEMM of another package.

    scatter    xq[row_of[p]] = x[t], copied or quantised once a token and written for each of its pairs p
    activate   a[row] = act(h[row, gate], h[row, up]), maybe quantised
    combine    y[t] = factor * sum over j of w[t,j] * (o[row_of[t,j]] + b2)     fp32, in the order of j

:mod:`fastlayers.moe.fused_moe.triton.permute` gives ``row_of``. Rows that no pair has are neither written nor read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.fused_moe.layer import FusedMoEConfig
from fastlayers.moe.fused_moe.triton.permute import Rows
from fastlayers.moe.fused_moe.weights import EPS, GROUP
from fastlayers.quant.group_quant.triton import quantize_tile
from fastlayers.runtime.launch import kernel
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import cast

# How scales lie in memory: a row's are neighbours, or (column) a group's.
ROW_SCALES, COLUMN_SCALES = 0, 1
_GROUP = tl.constexpr(GROUP)


@triton.jit
def _scale_offset(row, group, groups, stride, LAYOUT: tl.constexpr):
    # 0: rows of scales; 1: columns of ``stride`` rows; 2: the same within each expert's ``stride`` rows
    if LAYOUT == 0:
        return row * groups + group
    elif LAYOUT == 1:
        return group * stride + row
    else:
        return (row // stride) * stride * groups + group * stride + row % stride


@kernel
def scatter_kernel(
    x_ptr, row_ptr, q_ptr, s_ptr, x_stride, width, groups, s_stride, eps,
    PAIRS: tl.constexpr, QUANT: tl.constexpr, UE8M0: tl.constexpr, LAYOUT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Copy or quantise GROUPS groups of a token, and write them to the rows of all its pairs."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = column < width
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0)
    if QUANT:
        codes, scale = quantize_tile(x.to(tl.float32), eps, 448.0, UE8M0, False)
    for j in tl.static_range(PAIRS):
        row = tl.load(row_ptr + token * PAIRS + j).to(tl.int64)
        if row >= 0:
            if QUANT:
                tl.store(q_ptr + row * width + column, codes, mask=inside)
                tl.store(s_ptr + _scale_offset(row, group, groups, s_stride, LAYOUT), scale, mask=group < groups)
            else:
                tl.store(q_ptr + row * width + column, x, mask=inside)


@kernel
def activate_kernel(
    h_ptr, row_ptr, ids_ptr, bias_ptr, a_ptr, s_ptr, inner, groups, s_stride, alpha, limit, eps,
    PAIRS: tl.constexpr, QUANT: tl.constexpr, UE8M0: tl.constexpr, LAYOUT: tl.constexpr, OAI: tl.constexpr,
    HAS_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Apply the activation to GROUPS groups of a pair's row, and maybe quantise."""
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + pair).to(tl.int64)
    if row < 0:
        return
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = column < inner
    gate_column = column * 2 if INTERLEAVED else column
    up_column = gate_column + 1 if INTERLEAVED else gate_column + inner
    gate = tl.load(h_ptr + row * 2 * inner + gate_column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + row * 2 * inner + up_column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = bias_ptr + tl.load(ids_ptr + pair).to(tl.int64) * 2 * inner
        gate += tl.load(bias + gate_column, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + up_column, mask=inside, other=0.0).to(tl.float32)
    if OAI:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        gate = gate * tl.sigmoid(gate * alpha)
    else:
        gate = gate * tl.sigmoid(gate)
    result = gate * up
    if QUANT:
        codes, scale = quantize_tile(result, eps, 448.0, UE8M0, False)
        tl.store(a_ptr + row * inner + column, codes, mask=inside)
        tl.store(s_ptr + _scale_offset(row, group, groups, s_stride, LAYOUT), scale, mask=group < groups)
    else:
        tl.store(a_ptr + row * inner + column, cast(result, a_ptr.dtype.element_ty), mask=inside)


@kernel
def combine_kernel(
    o_ptr, row_ptr, weights_ptr, ids_ptr, bias_ptr, y_ptr, hidden, factor,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weigh and add a token's rows in order, apply the factor once, round once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(row_ptr + token * (TOP_K + SHARED) + j).to(tl.int64)
        valid = inside & (row >= 0)
        out = tl.load(o_ptr + row * hidden + column, mask=valid, other=0.0).to(tl.float32)
        if HAS_BIAS:
            expert = tl.load(ids_ptr + token * TOP_K + j).to(tl.int64)
            out += tl.load(bias_ptr + expert * hidden + column, mask=valid, other=0.0).to(tl.float32)
        weight = tl.load(weights_ptr + token * TOP_K + j)
        total += tl.where(valid, out * weight, 0.0)
    total = total * factor
    for j in tl.static_range(SHARED):
        row = tl.load(row_ptr + token * (TOP_K + SHARED) + TOP_K + j).to(tl.int64)
        total += tl.load(o_ptr + row * hidden + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    tl.store(y_ptr + token * hidden + column, cast(total, y_ptr.dtype.element_ty), mask=inside)


def _scales(rows: Rows, groups: int, layout: int) -> tuple[torch.Tensor, int]:
    """Return an empty buffer of scales and the stride between its groups."""
    where = rows.groups.device
    if layout == ROW_SCALES:
        return torch.empty(rows.total, groups, dtype=torch.float32, device=where), groups
    shape = (rows.groups.shape[1], groups, rows.capacity) if rows.masked else (groups, rows.capacity)
    return torch.empty(shape, dtype=torch.float32, device=where).mT, rows.capacity


def scatter(x: torch.Tensor, rows: Rows, quant: str, ue8m0: bool, layout: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs' inputs ``[rows, D]`` and their scales (of no use if not quantised).

    Scales are rows ``[rows, D/128]``, or columns: of the same shape with the rows' stride 1, masked
    ``[E, capacity, D/128]``.
    """
    (tokens, width), fp8 = x.shape, quant == "fp8_block"
    groups = cdiv(width, GROUP)
    q = torch.empty(rows.total, width, dtype=torch.float8_e4m3fn if fp8 else x.dtype, device=x.device)
    s, stride = _scales(rows, groups, layout) if fp8 else (q, 0)
    each = min(8, next_power_of_2(groups))
    scatter_kernel[(tokens, cdiv(groups, each))](
        x, rows.row_of, q, s, x.stride(0), width, groups, stride, EPS,
        PAIRS=rows.row_of.shape[0] // tokens, QUANT=fp8, UE8M0=ue8m0, LAYOUT=2 * layout if rows.masked else layout,
        GROUPS=each, num_warps=max(1, each // 2),
    )  # fmt: skip
    return q, s


def activate(
    h: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None, rows: Rows, cfg: FusedMoEConfig, layout: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the activation of the first product ``[rows, 2I]`` and its scales, as :func:`scatter` does."""
    inner, fp8 = h.shape[1] // 2, cfg.quant == "fp8_block"
    groups = cdiv(inner, GROUP)
    a = torch.empty(rows.total, inner, dtype=torch.float8_e4m3fn if fp8 else h.dtype, device=h.device)
    s, stride = _scales(rows, groups, layout) if fp8 else (a, 0)
    each = min(8, next_power_of_2(groups))
    activate_kernel[(rows.row_of.shape[0], cdiv(groups, each))](
        h, rows.row_of, ids, h if bias is None else bias, a, s, inner, groups, stride, cfg.alpha, cfg.limit, EPS,
        PAIRS=cfg.pairs_per_token, QUANT=fp8, UE8M0=cfg.scale_fmt == "ue8m0",
        LAYOUT=2 * layout if rows.masked else layout, OAI=cfg.activation == "swiglu_oai", HAS_BIAS=bias is not None,
        INTERLEAVED=cfg.interleaved, GROUPS=each, num_warps=max(1, each // 2),
    )  # fmt: skip
    return a, s


def combine(
    o: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None, rows: Rows,
    shared: int, factor: float, y: torch.Tensor,
) -> None:  # fmt: skip
    """Write the weighted sums of the second product's rows ``[rows, D]`` to ``y`` ``[T, D]``."""
    tokens, hidden = y.shape
    block = min(1024, next_power_of_2(hidden))
    combine_kernel[(tokens, cdiv(hidden, block))](
        o, rows.row_of, weights, ids, o if bias is None else bias, y, hidden, factor,
        TOP_K=ids.shape[1], SHARED=shared, HAS_BIAS=bias is not None, BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip


def _builds_of(fp8: bool) -> list[KernelBuild]:
    code = "fp8e4nv" if fp8 else "bf16"
    name = "fp8" if fp8 else "bf16"
    static = {"QUANT": fp8, "UE8M0": False, "GROUPS": 8}
    return [
        KernelBuild(
            f"moe_rows_scatter_{name}_{layout}",
            scatter_kernel,
            {
                "x_ptr": "*bf16", "row_ptr": "*i32", "q_ptr": f"*{code}", "s_ptr": "*fp32" if fp8 else "*bf16",
                "x_stride": "i32", "width": "i32", "groups": "i32", "s_stride": "i32", "eps": "fp32",
            },
            {**static, "PAIRS": 8, "LAYOUT": layout}, 4, aligned=("x_stride", "width"),
        )
        for layout in ((0, 1, 2) if fp8 else (0,))
    ] + [
        KernelBuild(
            f"moe_rows_activate_{name}",
            activate_kernel,
            {
                "h_ptr": "*bf16", "row_ptr": "*i32", "ids_ptr": "*i32", "bias_ptr": "*bf16", "a_ptr": f"*{code}",
                "s_ptr": "*fp32" if fp8 else "*bf16", "inner": "i32", "groups": "i32", "s_stride": "i32",
                "alpha": "fp32", "limit": "fp32", "eps": "fp32",
            },
            {
                **static, "PAIRS": 8, "LAYOUT": 1 if fp8 else 0, "OAI": not fp8, "HAS_BIAS": not fp8,
                "INTERLEAVED": not fp8,
            },
            4, aligned=("inner",),
        )
    ]  # fmt: skip


COMPILE = [
    *_builds_of(True),
    *_builds_of(False),
    KernelBuild(
        "moe_rows_combine",
        combine_kernel,
        {
            "o_ptr": "*bf16", "row_ptr": "*i32", "weights_ptr": "*fp32", "ids_ptr": "*i32", "bias_ptr": "*bf16",
            "y_ptr": "*bf16", "hidden": "i32", "factor": "fp32",
        },
        {"TOP_K": 8, "SHARED": 1, "HAS_BIAS": True, "BLOCK": 1024}, 4, aligned=("hidden",),
    ),
]  # fmt: skip
