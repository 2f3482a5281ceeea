"""The experts of a few tokens in Triton: no alignment, no matrix units, three launches at most.

With few tokens an expert serves one of them, so every (token, expert) pair multiplies its own weight rows as a
matrix-vector product on the ordinary cores, which keep up with memory. The first kernel takes one pair and a few
columns; the second takes one token, and adds its experts in a fixed order: no partial sums leave the registers.
Where two tokens share an expert, its weights come from L2 the second time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.moe.fused_moe.configs import Plan, Tile, plan_for
from fastlayers.moe.fused_moe.kernels import activation_of, prefetch_rows
from fastlayers.moe.fused_moe.layer import FusedMoEConfig
from fastlayers.moe.fused_moe.weights import FORMATS, MoEWeights
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents

_GROUP = tl.constexpr(128)


@triton.jit
def _tile(rows, k, limit, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(rows).to(tl.float32)
    else:
        return tl.load(rows, mask=k < limit, other=0.0).to(tl.float32)


@triton.jit
def pair_gate_up_kernel(
    x_ptr, xs_ptr, w_ptr, ws_ptr, bias_ptr, ids_ptr, out_ptr,
    num_experts, D, I, x_stride, alpha, limit,
    PER_TOKEN: tl.constexpr, QUANT: tl.constexpr, OAI: tl.constexpr, HAS_BIAS: tl.constexpr,
    INTERLEAVED: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one pair's token by BLOCK_N gate and up rows of its expert; apply the activation."""
    pair = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    await_inputs(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    # Only now: what comes next may read the ids without waiting, they were there before this kernel.
    release_dependents(PDL)
    if (expert < 0) | (expert >= num_experts):
        return
    token = pair // PER_TOKEN
    depth = tl.arange(0, BLOCK_K)
    gate_row = (column % I) * 2 if INTERLEAVED else column % I
    up_row = gate_row + 1 if INTERLEAVED else gate_row + I
    base = w_ptr + expert * 2 * I * D
    gate_rows, up_rows = base + gate_row[:, None] * D + depth[None, :], base + up_row[:, None] * D + depth[None, :]
    gate_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    groups, scale_rows = tl.cdiv(D, _GROUP), tl.cdiv(I, _GROUP)
    # All rows of a program lie in one block of scales.
    gate_scale = ws_ptr + (expert * 2 * scale_rows + tl.program_id(0) * BLOCK_N // _GROUP) * groups
    for start in tl.range(0, D, BLOCK_K, loop_unroll_factor=UNROLL):
        k = start + depth
        g = _tile(gate_rows + start, k[None, :], D, EVEN_K)
        u = _tile(up_rows + start, k[None, :], D, EVEN_K)
        x = _tile(x_ptr + token * x_stride + k, k, D, EVEN_K)
        if QUANT == 1:
            group = k // _GROUP
            x = x * tl.load(xs_ptr + token * groups + group, mask=k < D, other=0.0)
            gate_sum += g * (x * tl.load(gate_scale + group, mask=k < D, other=0.0))[None, :]
            up_sum += u * (x * tl.load(gate_scale + scale_rows * groups + group, mask=k < D, other=0.0))[None, :]
        else:
            gate_sum += g * x[None, :]
            up_sum += u * x[None, :]
    gate, up = tl.sum(gate_sum, axis=1), tl.sum(up_sum, axis=1)
    if QUANT == 2:
        s = tl.load(xs_ptr + token)
        gate = gate * s * tl.load(ws_ptr + expert * 2 * I + gate_row)
        up = up * s * tl.load(ws_ptr + expert * 2 * I + up_row)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + expert * 2 * I + gate_row).to(tl.float32)
        up += tl.load(bias_ptr + expert * 2 * I + up_row).to(tl.float32)
    inner = activation_of(gate, up, alpha, limit, OAI)
    tl.store(out_ptr + pair * I + column, cast(inner, out_ptr.dtype.element_ty), mask=column < I)


@triton.jit
def pair_down_kernel(
    a_ptr, as_ptr, w_ptr, ws_ptr, bias_ptr, weights_ptr, ids_ptr, y_ptr,
    num_experts, D, I, factor,
    PER_TOKEN: tl.constexpr, QUANT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, LINES: tl.constexpr,
    UNROLL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one token's inner rows by BLOCK_N down rows of each of its experts, weigh, add, round once."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = column % D
    depth = tl.arange(0, BLOCK_K)
    groups, scale_rows = tl.cdiv(I, _GROUP), tl.cdiv(D, _GROUP)
    BYTES: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    if PDL:
        # While the first GEMM ends, these rows travel to L2. The ids were there before it began.
        for j in tl.static_range(PER_TOKEN):
            expert = tl.load(ids_ptr + token * PER_TOKEN + j).to(tl.int64)
            here = (expert >= 0) & (expert < num_experts)
            rows = w_ptr + (tl.where(here, expert, 0) * D + row) * I
            prefetch_rows(rows, here & (column < D), I * BYTES, LINES)
    await_inputs(PDL)
    release_dependents(PDL)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    extra = tl.zeros([BLOCK_N], tl.float32)
    # Experts in turns without a branch or a loop, so that loads of several are on their way at once.
    for j in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + j
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        weight = tl.load(weights_ptr + pair)
        # A dropped pair reads nothing.
        here = (expert >= 0) & (expert < num_experts)
        expert = tl.where(here, expert, 0)
        end = tl.where(here, I, 0)
        w_rows = w_ptr + (expert * D + row[:, None]) * I
        if QUANT == 2:
            s = tl.load(ws_ptr + expert * D + row) * tl.load(as_ptr + pair, mask=here, other=0.0)
        for step in tl.range(0, STEPS, loop_unroll_factor=UNROLL):
            k = step * BLOCK_K + depth
            w = tl.load(w_rows + k[None, :], mask=k[None, :] < end, other=0.0).to(tl.float32)
            a = tl.load(a_ptr + pair * I + k, mask=k < end, other=0.0).to(tl.float32) * weight
            if QUANT == 1:
                group = k // _GROUP
                block = (expert * scale_rows + tl.program_id(0) * BLOCK_N // _GROUP) * groups + group
                a = a * tl.load(as_ptr + pair * groups + group, mask=k < end, other=0.0)
                a = a * tl.load(ws_ptr + block, mask=k < end, other=0.0)
            if QUANT == 2:
                w = w * s[:, None]
            total += w * a[None, :]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * D + row).to(tl.float32)
            extra += tl.where(here, bias * weight, 0.0)
    y = (tl.sum(total, axis=1) + extra) * factor
    tl.store(y_ptr + token * D + column, cast(y, y_ptr.dtype.element_ty), mask=column < D)


def pair_gate_up(
    x: torch.Tensor, scale: torch.Tensor, packed: MoEWeights, ids: torch.Tensor, tile: Tile, quant: str,
    activation: str, alpha: float, limit: float, interleaved: bool, out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return the inner rows ``[T*k, I]``; those of dropped pairs are not written."""
    (experts, rows, hidden), inner = packed.w13.shape, packed.w13.shape[1] // 2
    out = torch.empty(ids.numel(), inner, dtype=out_dtype, device=x.device)
    pair_gate_up_kernel[(triton.cdiv(inner, tile.n), ids.numel())](
        x, scale, packed.w13, scale if packed.w13_scale is None else packed.w13_scale,
        scale if packed.w13_bias is None else packed.w13_bias, ids, out, experts, hidden, inner, x.stride(0),
        alpha, limit, PER_TOKEN=ids.shape[1], QUANT=FORMATS.index(quant), OAI=activation == "swiglu_oai",
        HAS_BIAS=packed.w13_bias is not None, INTERLEAVED=interleaved, EVEN_K=hidden % tile.k == 0,
        BLOCK_N=tile.n, BLOCK_K=tile.k, UNROLL=tile.stages, num_warps=tile.warps,
        **dependent_launch(x),
    )  # fmt: skip
    return out


def pair_down(
    a: torch.Tensor, scale: torch.Tensor, packed: MoEWeights, weights: torch.Tensor, ids: torch.Tensor,
    y: torch.Tensor, tile: Tile, quant: str, factor: float,
) -> None:  # fmt: skip
    """Write each token's weighted sum to ``y``."""
    experts, hidden, inner = packed.w2.shape
    lines = triton.cdiv(inner * packed.w2.element_size(), 128)
    pair_down_kernel[(triton.cdiv(hidden, tile.n), ids.shape[0])](
        a, scale, packed.w2, scale if packed.w2_scale is None else packed.w2_scale,
        scale if packed.w2_bias is None else packed.w2_bias, weights, ids, y, experts, hidden, inner, factor,
        PER_TOKEN=ids.shape[1], QUANT=FORMATS.index(quant), HAS_BIAS=packed.w2_bias is not None,
        BLOCK_N=tile.n, BLOCK_K=tile.k, STEPS=triton.cdiv(inner, tile.k), LINES=triton.next_power_of_2(lines),
        UNROLL=tile.stages, num_warps=tile.warps, **dependent_launch(a),
    )  # fmt: skip


def _builds(name: str, cfg: FusedMoEConfig, plan: Plan) -> list[KernelBuild]:
    first, second = plan.first, plan.second
    code = {"none": "bf16", "fp8_block": "fp8e4nv", "int8": "i8"}[cfg.quant]
    inner = "bf16" if cfg.quant == "none" else "fp32"
    shared = {"PER_TOKEN": cfg.pairs_per_token, "QUANT": FORMATS.index(cfg.quant), "HAS_BIAS": cfg.bias, "PDL": True}
    lines = triton.cdiv(cfg.intermediate_size * (2 if cfg.quant == "none" else 1), 128)
    return [
        KernelBuild(
            f"moe_pair_gate_up_{name}", pair_gate_up_kernel,
            {
                "x_ptr": f"*{code}", "xs_ptr": "*fp32", "w_ptr": f"*{code}", "ws_ptr": "*fp32", "bias_ptr": "*bf16",
                "ids_ptr": "*i32", "out_ptr": f"*{inner}", "num_experts": "i32", "D": "i32", "I": "i32",
                "x_stride": "i32", "alpha": "fp32", "limit": "fp32",
            },
            shared | {
                "OAI": cfg.activation != "silu", "INTERLEAVED": cfg.interleaved,
                "EVEN_K": cfg.hidden_size % first.k == 0, "BLOCK_N": first.n, "BLOCK_K": first.k,
                "UNROLL": first.stages,
            },
            first.warps, 1, ("D", "I", "x_stride"),
        ),
        KernelBuild(
            f"moe_pair_down_{name}", pair_down_kernel,
            {
                "a_ptr": f"*{code}", "as_ptr": "*fp32", "w_ptr": f"*{code}", "ws_ptr": "*fp32", "bias_ptr": "*bf16",
                "weights_ptr": "*fp32", "ids_ptr": "*i32", "y_ptr": "*bf16", "num_experts": "i32", "D": "i32",
                "I": "i32", "factor": "fp32",
            },
            shared | {
                "BLOCK_N": second.n, "BLOCK_K": second.k, "STEPS": triton.cdiv(cfg.intermediate_size, second.k),
                "LINES": triton.next_power_of_2(lines), "UNROLL": second.stages,
            },
            second.warps, 1, ("D", "I"),
        ),
    ]  # fmt: skip


_SHAPES = {
    "qwen3_30b": FusedMoEConfig(2048, 768, 128, 8),
    "v3": FusedMoEConfig(7168, 2048, 256, 8, num_shared=1, quant="fp8_block"),
    "v3_tp8_int8": FusedMoEConfig(7168, 256, 256, 8, num_shared=1, quant="int8"),
    "gpt_oss": FusedMoEConfig(2880, 2880, 32, 4, activation="swiglu_oai", bias=True, interleaved=True),
}
COMPILE = [build for name, cfg in _SHAPES.items() for build in _builds(name, cfg, plan_for(1, cfg, False))]
