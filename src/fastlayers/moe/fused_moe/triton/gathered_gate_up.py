"""The first product of FP8 experts of a prompt: tokens' rows are gathered, rows in the order of experts come out.

    a[r], s[r] = codes of act(x[token of r] · gate^T, x[token of r] · up^T)    r: a row of an expert, see .permute

Packages' grouped products read rows in the order of experts: to write them, a token's nine times, takes a quarter of
what the product does. Here a token's codes are read where they are, and what the second product reads is written.

Sums of FP8 are added up twice, by the tensor cores over 128 columns and in fp32 over all, so that gate and up together
need more registers than two programs of a multiprocessor have. A program goes over its rows twice instead, once for
gate, once for up. Sums are those of :func:`~fastlayers.moe.fused_moe.triton.grouped_gemm.gate_up_kernel` bit for bit;
what was tried: ``benchmarks/notes/fused_moe_triton.md``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.fused_moe.triton.activation import activation_of
from fastlayers.moe.fused_moe.triton.grouped_gemm import program_tile
from fastlayers.moe.fused_moe.triton.permute import COLUMN_SCALES, Rows, empty_scales
from fastlayers.moe.fused_moe.weights import EPS, GROUP
from fastlayers.quant.group_quant.triton import quantize_tile
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, dependent_launch, dot, release_dependents

_GROUP = tl.constexpr(GROUP)
# Blocks of rows whose programs run one after another for the same columns, so that they share weights in L2.
BAND = 8


class Plan(NamedTuple):
    """Rows of a block, its warps, and the steps of 128 columns that are on their way or multiplied."""

    m: int
    warps: int
    stages: int


# The first is the rule. Of 64 rows two programs share a multiprocessor.
PLANS = Plan(64, 4, 4), Plan(64, 8, 4), Plan(128, 8, 4)


@triton.jit
def _half(x_rows, rows, x_scale, scale, real, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the fp32 product of gathered rows and 128 rows of a weight, both FP8 in groups of 128 columns."""
    acc = tl.zeros([BLOCK_M, _GROUP], tl.float32)
    for group in range(0, GROUPS):
        x = tl.load(x_rows + group * _GROUP, mask=real, other=0.0)
        w = tl.load(rows + group * _GROUP)
        s = tl.load(x_scale + group) * tl.load(scale + group)
        acc += dot(x, w, tl.zeros([BLOCK_M, _GROUP], tl.float32)) * s[:, None]
    return acc


@kernel(do_not_specialize=("tiles_m", "s_stride"))
def gathered_gate_up_kernel(
    x_ptr, xs_ptr, w_ptr, ws_ptr, a_ptr, s_ptr, groups_ptr, token_ptr, tiles_m, s_stride, eps,
    D: tl.constexpr, I: tl.constexpr, ALL: tl.constexpr, BLOCK_E: tl.constexpr, UE8M0: tl.constexpr,
    BLOCK_M: tl.constexpr, BAND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_M rows of one expert by 128 of its gate and of its up rows, activate, quantise as one group."""
    tile_m, group = program_tile(tiles_m, I // _GROUP, BAND)
    start = tile_m * BLOCK_M
    await_inputs(PDL)
    release_dependents(PDL)
    every = tl.arange(0, BLOCK_E)
    first = tl.load(groups_ptr + ALL + every, mask=every < ALL, other=0x7FFFFFFF)
    # Of experts that begin at one row the last one has it: those before have none.
    expert = tl.sum((first <= start).to(tl.int32), axis=0) - 1
    end = tl.load(groups_ptr + 2 * ALL + expert)
    if start >= end:
        return
    row = start + tl.arange(0, BLOCK_M)
    real = row < end
    token = tl.load(token_ptr + row, mask=real, other=0).to(tl.int64)
    depth, column = tl.arange(0, _GROUP), tl.arange(0, _GROUP)
    GROUPS: tl.constexpr = D // _GROUP
    x_rows = x_ptr + token[:, None] * D + depth[None, :]
    x_scale = xs_ptr + token * GROUPS
    gate_rows = w_ptr + (expert.to(tl.int64) * 2 * I + group * _GROUP) * D + column[None, :] * D + depth[:, None]
    gate_scale = ws_ptr + (expert * (2 * I // _GROUP) + group) * GROUPS
    gate = _half(x_rows, gate_rows, x_scale, gate_scale, real[:, None], GROUPS, BLOCK_M)
    up_scale = gate_scale + I // _GROUP * GROUPS
    up = _half(x_rows, gate_rows + I * D, x_scale, up_scale, real[:, None], GROUPS, BLOCK_M)
    codes, scale = quantize_tile(activation_of(gate, up, 0.0, 0.0, False), eps, 448.0, UE8M0, False)
    row = row.to(tl.int64)
    tl.store(a_ptr + row[:, None] * I + group * _GROUP + column[None, :], codes, mask=real[:, None])
    tl.store(s_ptr + group * s_stride + row, scale, mask=real)


def gathered_gate_up(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, rows: Rows, plan: Plan,
    ue8m0: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the activation's codes ``[rows, I]`` and scales, in columns; rows in no use are not written.

    Parameters
    ----------
    x, x_scale : Tensor ``[T, D]``, ``[T, D/128]``
        Contiguous.
    weight, weight_scale : Tensor ``[E, 2I, D]``, ``[E, 2I/128, D/128]``
    rows : Rows
        With the tokens of rows; first rows are multiples of ``plan.m``.
    """
    (experts, halves, hidden), inner = weight.shape, weight.shape[1] // 2
    assert rows.token_of is not None and rows.align % plan.m == 0
    a = torch.empty(rows.total, inner, dtype=torch.float8_e4m3fn, device=x.device)
    s, stride = empty_scales(rows, inner // GROUP, COLUMN_SCALES)
    blocks = cdiv(rows.total, plan.m)
    gathered_gate_up_kernel[(blocks * (inner // GROUP),)](
        x, x_scale, weight, weight_scale, a, s, rows.groups, rows.token_of, blocks, stride, EPS,
        D=hidden, I=inner, ALL=experts, BLOCK_E=next_power_of_2(experts + 1), UE8M0=ue8m0, BLOCK_M=plan.m, BAND=BAND,
        num_warps=plan.warps, num_stages=plan.stages, **dependent_launch(x.device),
    )  # fmt: skip
    return a, s
