"""Between the two grouped GEMMs: the activation, inside a kernel of ours or of the rows of another package's GEMM.

activate   a[row] = act(h[row, gate], h[row, up]), maybe quantised: a program a pair, or a block of rows of a prompt
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.triton.permute import WIDTH, Rows, empty_scales, scale_offset
from fastlayers.moe.fused_moe.weights import EPS, GROUP
from fastlayers.quant.group_quant.triton import quantize_tile
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import cast


@triton.jit
def activation_of(gate, up, alpha, limit, OAI: tl.constexpr):
    """Return ``silu(gate) * up``, or GPT-OSS's clamped variant."""
    if OAI:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        return gate * tl.sigmoid(gate * alpha) * up
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit
def activated(
    halves, bias_ptr, expert, first, I, alpha, limit, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, OAI: tl.constexpr
):  # fmt: skip
    """Return columns of a pair's inner row from ``first`` on, and what they hold.

    ``halves``: fp32 sums of BLOCK_N gate rows, then of as many up rows.
    """
    gate, up = tl.split(tl.trans(tl.reshape(halves, [2, BLOCK_N])))
    column = first + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        bias = bias_ptr + expert * 2 * I + column
        gate += tl.load(bias).to(tl.float32)
        up += tl.load(bias + I).to(tl.float32)
    return column, activation_of(gate, up, alpha, limit, OAI)


@triton.jit
def _inner_of(
    h, bias, column, inner, inside, alpha, limit, HAS_BIAS: tl.constexpr, OAI: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Return the activation of some columns; ``h``, ``bias``: where their rows begin, and their experts' biases."""
    gate_column = column * 2 if INTERLEAVED else column
    up_column = gate_column + 1 if INTERLEAVED else gate_column + inner
    gate = tl.load(h + gate_column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h + up_column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        gate += tl.load(bias + gate_column, mask=column < inner, other=0.0).to(tl.float32)
        up += tl.load(bias + up_column, mask=column < inner, other=0.0).to(tl.float32)
    return activation_of(gate, up, alpha, limit, OAI)


@kernel
def activate_kernel(
    h_ptr, row_ptr, ids_ptr, bias_ptr, a_ptr, s_ptr, inner, groups, s_stride, alpha, limit, eps,
    QUANT: tl.constexpr, UE8M0: tl.constexpr, LAYOUT: tl.constexpr, OAI: tl.constexpr, HAS_BIAS: tl.constexpr,
    INTERLEAVED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Apply the activation to GROUPS groups of a pair's row, and maybe quantise."""
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + pair).to(tl.int64)
    if row < 0:
        return
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = column < inner
    bias = bias_ptr
    if HAS_BIAS:
        bias += tl.load(ids_ptr + pair).to(tl.int64) * 2 * inner
    result = _inner_of(
        h_ptr + row * 2 * inner, bias, column, inner, inside, alpha, limit, HAS_BIAS, OAI, INTERLEAVED
    )  # fmt: skip
    if QUANT:
        codes, scale = quantize_tile(result, eps, 448.0, UE8M0, False)
        tl.store(a_ptr + row * inner + column, codes, mask=inside)
        tl.store(s_ptr + scale_offset(row, group, groups, s_stride, LAYOUT), scale, mask=group < groups)
    else:
        tl.store(a_ptr + row * inner + column, cast(result, a_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _expert_and_end(groups_ptr, start, ALL: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr):
    """Return the expert of the row ``start``, and where the rows end that are in use from there on.

    Of the ROWS from ``start`` on; behind that end none of them is in use, see :func:`takes_blocks`.
    """
    expert = tl.arange(0, BLOCK_E)
    first = tl.load(groups_ptr + ALL + expert, mask=expert < ALL, other=0x7FFFFFFF)
    end = tl.load(groups_ptr + 2 * ALL + expert, mask=expert < ALL, other=0)
    return tl.max(tl.where(first <= start, expert, 0), axis=0), tl.max(tl.where(first < start + ROWS, end, 0), axis=0)


@kernel
def activate_blocks_kernel(
    h_ptr, groups_ptr, bias_ptr, a_ptr, s_ptr, inner, groups, s_stride, alpha, limit, eps,
    QUANT: tl.constexpr, UE8M0: tl.constexpr, LAYOUT: tl.constexpr, OAI: tl.constexpr, HAS_BIAS: tl.constexpr,
    INTERLEAVED: tl.constexpr, ALL: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Apply the activation to one group of ROWS neighbouring rows, and maybe quantise.

    No row waits for its place to be read, and scales in columns are written side by side.
    """
    start, group = tl.program_id(0) * ROWS, tl.program_id(1)
    expert, end = _expert_and_end(groups_ptr, start, ALL, BLOCK_E, ROWS)
    if start >= end:
        return
    row = start + tl.arange(0, ROWS)
    used, wide = row < end, row.to(tl.int64)
    column = (group * WIDTH + tl.arange(0, WIDTH))[None, :]
    inside = used[:, None] & (column < inner)
    result = _inner_of(
        h_ptr + wide[:, None] * 2 * inner, bias_ptr + expert.to(tl.int64) * 2 * inner, column, inner, inside, alpha,
        limit, HAS_BIAS, OAI, INTERLEAVED,
    )  # fmt: skip
    if QUANT:
        codes, scale = quantize_tile(result, eps, 448.0, UE8M0, False)
        tl.store(a_ptr + wide[:, None] * inner + column, codes, mask=inside)
        tl.store(s_ptr + scale_offset(wide, group, groups, s_stride, LAYOUT), scale, mask=used)
    else:
        tl.store(a_ptr + wide[:, None] * inner + column, cast(result, a_ptr.dtype.element_ty), mask=inside)


# Rows of a block and its warps: the fastest on an H200, of FP8. With fewer pairs, in all or an expert, blocks lose.
ROWS, WARPS, MANY_PAIRS, EACH = 32, 4, 8192, 64


def takes_blocks(rows: Rows, has_bias: bool, quantised: bool) -> bool:
    """Return whether blocks of neighbouring rows are activated, rather than pairs.

    Rows in use must be the first ones of a block: an expert's, where it begins with a block, or all rows, where none
    lies between experts and nothing but a bias tells them apart. In 16 bits blocks win at one shape, lose at another.
    """
    fits = rows.align % ROWS == 0 or (rows.align == 1 and not has_bias)
    pairs, experts = rows.row_of.shape[0], rows.groups.shape[1]
    return quantised and fits and not rows.masked and pairs >= max(MANY_PAIRS, EACH * experts)


def activate(
    h: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None, rows: Rows, cfg: FusedMoEConfig, layout: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the activation of the first product ``[rows, 2I]`` and its scales, as :func:`scatter` does."""
    if takes_blocks(rows, bias is not None, cfg.quant == "fp8_block"):
        return by_blocks(h, bias, rows, cfg, layout)
    return by_pairs(h, ids, bias, rows, cfg, layout)


def by_pairs(
    h: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None, rows: Rows, cfg: FusedMoEConfig, layout: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do :func:`activate` with a program a pair."""
    a, s, groups, stride, constants = _outputs(h, rows, cfg, layout)
    each = min(8, next_power_of_2(groups))
    activate_kernel[(rows.row_of.shape[0], cdiv(groups, each))](
        h, rows.row_of, ids, h if bias is None else bias, a, s, h.shape[1] // 2, groups, stride, cfg.alpha, cfg.limit,
        EPS, **constants, HAS_BIAS=bias is not None, GROUPS=each, num_warps=max(1, each // 2),
    )  # fmt: skip
    return a, s


def by_blocks(
    h: torch.Tensor, bias: torch.Tensor | None, rows: Rows, cfg: FusedMoEConfig, layout: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do :func:`activate` with a program a group of ROWS rows."""
    (a, s, groups, stride, constants), experts = _outputs(h, rows, cfg, layout), rows.groups.shape[1]
    activate_blocks_kernel[(cdiv(rows.total, ROWS), groups)](
        h, rows.groups, h if bias is None else bias, a, s, h.shape[1] // 2, groups, stride, cfg.alpha, cfg.limit, EPS,
        **constants, HAS_BIAS=bias is not None, ALL=experts, BLOCK_E=next_power_of_2(experts), ROWS=ROWS,
        num_warps=WARPS,
    )  # fmt: skip
    return a, s


def _outputs(
    h: torch.Tensor, rows: Rows, cfg: FusedMoEConfig, layout: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, dict[str, bool | int]]:
    """Return empty outputs, groups of a row, the stride between their scales, and constants of both kernels."""
    inner, fp8 = h.shape[1] // 2, cfg.quant == "fp8_block"
    groups = cdiv(inner, GROUP)
    a = h.new_empty(rows.total, inner, dtype=torch.float8_e4m3fn if fp8 else h.dtype)
    s, stride = empty_scales(rows, groups, layout) if fp8 else (a, 0)
    constants = {
        "QUANT": fp8, "UE8M0": cfg.scale_fmt == "ue8m0", "LAYOUT": 2 * layout if rows.masked else layout,
        "OAI": cfg.activation == "swiglu_oai", "INTERLEAVED": cfg.interleaved,
    }  # fmt: skip
    return a, s, groups, stride, constants
