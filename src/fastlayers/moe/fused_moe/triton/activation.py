"""Between the two grouped GEMMs: the activation, inside a kernel of ours or of the rows of another package's GEMM.

activate   a[row] = act(h[row, gate], h[row, up]), maybe quantised
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
    column = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
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
        tl.store(s_ptr + scale_offset(row, group, groups, s_stride, LAYOUT), scale, mask=group < groups)
    else:
        tl.store(a_ptr + row * inner + column, cast(result, a_ptr.dtype.element_ty), mask=inside)


def activate(
    h: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None, rows: Rows, cfg: FusedMoEConfig, layout: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the activation of the first product ``[rows, 2I]`` and its scales, as :func:`scatter` does."""
    inner, fp8 = h.shape[1] // 2, cfg.quant == "fp8_block"
    groups = cdiv(inner, GROUP)
    a = h.new_empty(rows.total, inner, dtype=torch.float8_e4m3fn if fp8 else h.dtype)
    s, stride = empty_scales(rows, groups, layout) if fp8 else (a, 0)
    each = min(8, next_power_of_2(groups))
    activate_kernel[(rows.row_of.shape[0], cdiv(groups, each))](
        h, rows.row_of, ids, h if bias is None else bias, a, s, inner, groups, stride, cfg.alpha, cfg.limit, EPS,
        PAIRS=cfg.pairs_per_token, QUANT=fp8, UE8M0=cfg.scale_fmt == "ue8m0",
        LAYOUT=2 * layout if rows.masked else layout, OAI=cfg.activation == "swiglu_oai", HAS_BIAS=bias is not None,
        INTERLEAVED=cfg.interleaved, GROUPS=each, num_warps=max(1, each // 2),
    )  # fmt: skip
    return a, s
