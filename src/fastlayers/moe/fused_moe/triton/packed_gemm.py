"""The experts' grouped GEMMs over weights alone of 4 or 8 bits in Triton: codes are decoded in registers, no copy.

Codes are read as linears read them (:mod:`fastlayers.linear.weight_only.triton_codes`): a tile lies in one group of
input features, so that it takes one scale a row; nibbles come as two halves that meet two runs of x. Codes less their
zero points are multiplied, exactly, and a group's sums are scaled in fp32: decoding a code takes an instruction or two.
Weights are the left operand (rows of an expert are the GEMM's M, pairs its N), which Hopper reads from registers, in
which they are decoded. Gate and up rows lie in turns in a tile: one product, and the activation behind it.

    gate_up   a[pair] = act(x[token of pair] @ w13[expert of pair]^T)          in the dtype of x
    down      partial[pair, split] = weight of pair · (a[pair] @ w2[expert]^T over a part of the columns)        fp32

Few tokens need no alignment: each pair is a block of its own, most of whose columns are empty.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.linear.weight_only.layer import ZERO
from fastlayers.linear.weight_only.triton_codes import decode, halves_of, load_columns, load_tile, scales_of
from fastlayers.moe.align.triton import align
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.launch_config import LaunchConfig
from fastlayers.moe.fused_moe.triton.activation import activation_of
from fastlayers.moe.fused_moe.triton.grouped_gemm import (
    block_is_empty,
    block_of_pairs,
    prefetch_rows,
    program_tile,
)
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.quant.packed_codes import run_of
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, dot, release_dependents


@triton.jit
def _product(
    weight_rows, x_columns, scale_ptr, zero_ptr, first_group, row, real, first, last, N, K,
    dtype: tl.constexpr, ZERO: tl.constexpr, HAS_ZERO: tl.constexpr, NIBBLES: tl.constexpr, E4M3: tl.constexpr,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return fp32 ``[ROWS, BLOCK_M]``: weight rows times pairs over the blocks of BLOCK_K columns from first to last.

    ``row`` ``[ROWS]``: of the ``N`` that a group's scales are of, an expert's begin with ``first_group``. ``real``
    ``[1, BLOCK_M]``: slots with a pair.
    """
    CODES: tl.constexpr = BLOCK_K // 2 if NIBBLES else BLOCK_K
    code = tl.arange(0, CODES)
    # Input features of a tile's codes: of low halves, or of whole bytes. High halves are 16 further.
    low = (code // 16) * 32 + code % 16 if NIBBLES else code
    acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
    group = first_group + row * 0
    # A split may have no blocks: then those of the last, as the next group's lie outside of the expert.
    start = tl.maximum(tl.minimum(first, last - 1), 0) * BLOCK_K // GROUP if GROUP > 0 else 0
    # They are too few to be copied asynchronously: read one step ahead.
    scale, zero = scales_of(scale_ptr, zero_ptr, group + start, row, N, ZERO, HAS_ZERO)
    for block in range(first, last):
        k = block * BLOCK_K + low
        x = load_columns(x_columns + k[:, None], k[:, None], K, real, EVEN_K)
        packed = load_tile(weight_rows + (block * CODES + code)[None, :], k[None, :], K, EVEN_K)
        if GROUP > 0:
            following = tl.minimum(block + 1, last - 1) * BLOCK_K // GROUP
            ahead, zero_ahead = scales_of(scale_ptr, zero_ptr, group + following, row, N, ZERO, HAS_ZERO)
            part = tl.zeros([ROWS, BLOCK_M], tl.float32)
        else:
            ahead, zero_ahead, part = scale, zero, acc
        if NIBBLES:
            less, more = halves_of(packed, zero[:, None], dtype)
            part = dot(less, x, part)
            x = load_columns(x_columns + (k + 16)[:, None], k[:, None], K, real, EVEN_K)
            part = dot(more, x, part)
        else:
            part = dot(decode(packed, 1.0, zero[:, None], dtype, False, E4M3), x, part)
        acc = acc + part * scale[:, None] if GROUP > 0 else part
        scale, zero = ahead, zero_ahead
    return acc if GROUP > 0 else acc * scale[:, None]


@kernel(do_not_specialize=("num_pairs", "tiles_m"))
def packed_gate_up_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr,
    num_pairs, tiles_m, num_experts, D, I, x_stride, w_stride, groups, alpha, limit,
    PER_TOKEN: tl.constexpr, OAI: tl.constexpr, HAS_BIAS: tl.constexpr, DIRECT: tl.constexpr, ZERO: tl.constexpr,
    HAS_ZERO: tl.constexpr, NIBBLES: tl.constexpr, E4M3: tl.constexpr, GROUP: tl.constexpr, BAND: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gather token rows, multiply by gate and up rows of one expert in turns, apply the activation."""
    tile_m, tile_n = program_tile(tiles_m, tl.cdiv(I, BLOCK_N), BAND)
    await_inputs(PDL)
    release_dependents(PDL)
    if block_is_empty(expert_ptr, total_ptr, tile_m, num_experts, DIRECT, BLOCK_M):
        return
    expert, pair = block_of_pairs(sorted_ptr, expert_ptr, tile_m, num_pairs, DIRECT, BLOCK_M)
    expert = expert.to(tl.int64)
    real = pair < num_pairs
    token = tl.where(real, pair // PER_TOKEN, 0).to(tl.int64)
    # Row 2p is the gate and row 2p + 1 the up of place p.
    index = tl.arange(0, 2 * BLOCK_N)
    column = tile_n * BLOCK_N + index // 2
    row = tl.where(column < I, column, 0) + index % 2 * I
    both = _product(
        w_ptr + (expert * 2 * I + row[:, None]) * w_stride, x_ptr + token[None, :] * x_stride, scale_ptr, zero_ptr,
        expert * groups, row, real[None, :], 0, tl.cdiv(D, BLOCK_K), 2 * I, D, x_ptr.dtype.element_ty, ZERO,
        HAS_ZERO, NIBBLES, E4M3, GROUP, EVEN_K, 2 * BLOCK_N, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        both += tl.load(bias_ptr + expert * 2 * I + row).to(tl.float32)[:, None]
    gate, up = tl.split(tl.permute(tl.reshape(both, [BLOCK_N, 2, BLOCK_M]), (0, 2, 1)))
    inner = activation_of(gate, up, alpha, limit, OAI)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    out = out_ptr + pair[:, None].to(tl.int64) * I + column[None, :]
    tl.store(out, cast(tl.trans(inner), out_ptr.dtype.element_ty), mask=real[:, None] & (column < I)[None, :])


@kernel(do_not_specialize=("num_pairs", "tiles_m"))
def packed_down_kernel(
    a_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr,
    num_pairs, tiles_m, num_experts, D, I, w_stride, groups,
    HAS_BIAS: tl.constexpr, DIRECT: tl.constexpr, ZERO: tl.constexpr, HAS_ZERO: tl.constexpr, NIBBLES: tl.constexpr,
    E4M3: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr, BAND: tl.constexpr, SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply the pairs' inner rows by the down projection, add the bias, weigh; fp32 rows of pairs and splits."""
    tile_m, tile_n = program_tile(tiles_m, tl.cdiv(D, BLOCK_N), BAND)
    split = tl.program_id(1)
    # Blocks and ids were there before the kernel in front began.
    empty = block_is_empty(expert_ptr, total_ptr, tile_m, num_experts, DIRECT, BLOCK_M)
    expert, pair = block_of_pairs(sorted_ptr, expert_ptr, tile_m, num_pairs, DIRECT, BLOCK_M)
    expert = expert.to(tl.int64)
    real = pair < num_pairs
    place = tl.where(real, pair, 0).to(tl.int64)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.where(column < D, column, 0)
    w_rows = w_ptr + (expert * D + row) * w_stride
    blocks = tl.cdiv(I, BLOCK_K)
    each = tl.cdiv(blocks, SPLITS)
    first, last = split * each, tl.minimum((split + 1) * each, blocks)
    if PDL and BLOCK_M <= 16:
        # While the first GEMM ends, these rows travel to L2.
        BYTES: tl.constexpr = BLOCK_K // 2 if NIBBLES else BLOCK_K
        wanted = (column < D) & (not empty)
        prefetch_rows(w_rows + first * BYTES, wanted, (last - first) * BYTES, LINES)
    await_inputs(PDL)
    release_dependents(PDL)
    if empty:
        return
    acc = _product(
        w_rows[:, None], a_ptr + place[None, :] * I, scale_ptr, zero_ptr, expert * groups, row,
        real[None, :], first, last, D, I, a_ptr.dtype.element_ty, ZERO, HAS_ZERO, NIBBLES, E4M3, GROUP, EVEN_K,
        BLOCK_N, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * D + row).to(tl.float32)
        acc += tl.where(split == 0, bias, 0.0)[:, None]
    weight = tl.load(weights_ptr + place)
    out = out_ptr + (place * SPLITS + split)[:, None] * D + column[None, :]
    tl.store(out, tl.trans(acc * weight[None, :]), mask=real[:, None] & (column < D)[None, :])


def packed_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: MoEWeights, plan: LaunchConfig,
    cfg: FusedMoEConfig,
) -> torch.Tensor:  # fmt: skip
    """Return the weighted rows of all pairs, fp32 ``[T*k, splits, D]``; those of dropped pairs are not written."""
    assert packed.w13_scale is not None and packed.w2_scale is not None
    if x.stride(-1) != 1:
        x = x.contiguous()
    experts, hidden, inner, pairs = packed.w2.shape[0], cfg.hidden_size, cfg.intermediate_size, ids.numel()
    first, second, direct, launch = plan.first, plan.second, plan.by_pair, dependent_launch(x.device)
    height = max(16, first.m)
    sorted_ids, expert_ids, total, blocks = ids, ids, ids, pairs
    if not direct:
        sorted_ids, expert_ids, total = align(ids, experts, height)
        blocks = expert_ids.shape[0]
    e4m3, run = cfg.quant == "fp8_w8a16", run_of(cfg.group_size, x.dtype)
    # A tile ends with its group at the latest.
    depths = min(run, first.k), min(run, second.k)
    w13, w2 = (w.view(torch.uint8) if e4m3 else w for w in (packed.w13, packed.w2))
    z13, z2 = (
        s if z is None else z for z, s in ((packed.w13_zero, packed.w13_scale), (packed.w2_zero, packed.w2_scale))
    )
    shared = {
        "DIRECT": direct, "ZERO": ZERO[cfg.quant], "HAS_ZERO": cfg.zero_point, "NIBBLES": cfg.quant == "w4a16",
        "E4M3": e4m3, "GROUP": cfg.group_size, "BAND": plan.band, "BLOCK_M": height,
    } | launch  # fmt: skip
    rows = x.new_empty(pairs, inner)
    packed_gate_up_kernel[(blocks * cdiv(inner, first.n),)](
        x, w13, packed.w13_scale, z13, weights if packed.w13_bias is None else packed.w13_bias, rows, sorted_ids,
        expert_ids, total, pairs, blocks, experts, hidden, inner, x.stride(0), w13.stride(1),
        packed.w13_scale.shape[1], cfg.alpha, cfg.limit, PER_TOKEN=ids.shape[1], OAI=cfg.activation == "swiglu_oai",
        HAS_BIAS=packed.w13_bias is not None, EVEN_K=hidden % depths[0] == 0, BLOCK_N=first.n, BLOCK_K=depths[0],
        num_warps=first.warps, num_stages=first.stages, **shared,
    )  # fmt: skip
    partial = x.new_empty(pairs, plan.splits, hidden, dtype=torch.float32)
    packed_down_kernel[(blocks * cdiv(hidden, second.n), plan.splits)](
        rows, w2, packed.w2_scale, z2, weights if packed.w2_bias is None else packed.w2_bias, weights, partial,
        sorted_ids, expert_ids, total, pairs, blocks, experts, hidden, inner, w2.stride(1), packed.w2_scale.shape[1],
        HAS_BIAS=packed.w2_bias is not None, LINES=next_power_of_2(cdiv(w2.stride(1), 128)), SPLITS=plan.splits,
        EVEN_K=inner % depths[1] == 0, BLOCK_N=second.n, BLOCK_K=depths[1], num_warps=second.warps,
        num_stages=second.stages, **shared,
    )  # fmt: skip
    return partial
