"""The experts' grouped GEMMs over packed MXFP4 weights in Triton: codes are decoded in registers, no copy is made.

A byte holds two neighbours along K: the even one low, the odd one high. So the activations lie with all even columns
first and all odd ones behind them ([R, 2, K/2]), and each tile of bytes feeds two dots: nothing has to be interleaved
in registers, and all loads are contiguous. The first kernel writes its result in that order already.

Weights are the left operand (rows of an expert are the GEMM's M, pairs its N), which Hopper reads from registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.align.triton import align
from fastlayers.moe.fused_moe.launch_config import LaunchConfig
from fastlayers.moe.fused_moe.triton.activation import activation_of
from fastlayers.moe.fused_moe.triton.grouped_gemm import (
    block_is_empty,
    block_of_pairs,
    prefetch_rows,
    program_tile,
)
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.quant.mxfp4.codes import GROUP
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import INTERPRET, await_inputs, cast, dependent_launch, dot, release_dependents

_GROUP = tl.constexpr(GROUP)


@triton.jit
def decode_scales(byte, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Return fp32 ``2^14 · 2^(byte - 127)`` for each of the 16 bytes of a block: ``[ROWS, 16 * GROUPS]``."""
    # 0 would be subnormal as bits. (From 241 on the result is infinite; such weights overflow anyway.)
    power = (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 16384.0
    power = tl.where(byte == 0, 9.62964972193618e-35, power)  # 2^-113
    return tl.reshape(tl.broadcast_to(power[:, :, None], [ROWS, GROUPS, 16]), [ROWS, 16 * GROUPS])


@triton.jit
def decode_codes(code, power, dtype: tl.constexpr):
    """Return the values of e2m1 codes in the low nibbles of int16 ``code``, times ``power``, in ``dtype``.

    The two exponent bits and the mantissa bit, put where fp16 has its own, make a number that is too small by 2^14;
    code 1 becomes fp16's subnormal 2^-15, exactly half of code 2. ``power`` has the 2^14.
    """
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * power
    return value.to(dtype)  # exact in bf16: 2 bits of mantissa


@triton.jit
def decode_pairs(bytes_, scale, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Return bf16 values of the low and the high nibbles of ``bytes_``, times ``2^(scale - 127)``.

    In bf16's place for exponent and mantissa the three bits make a number that is too small by 2^126, also where it
    is subnormal there. Two numbers share a register; each costs about three instructions.
    """
    power = tl.where(scale == 0, 0x40, scale.to(tl.int16) << 7).to(tl.int16)
    power = tl.reshape(tl.broadcast_to(power[:, :, None], [ROWS, GROUPS, 16]), [ROWS, 16 * GROUPS])
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 p, q, s, t;
        prmt.b32 p, $4, 0, 0x1404;
        prmt.b32 q, $4, 0, 0x3424;
        shl.b32 s, p, 4;
        shr.b32 t, p, 2;
        and.b32 t, t, 0x01C001C0;
        lop3.b32 $0, s, 0x80008000, t, 0xEA;
        shl.b32 s, q, 4;
        shr.b32 t, q, 2;
        and.b32 t, t, 0x01C001C0;
        lop3.b32 $1, s, 0x80008000, t, 0xEA;
        shr.b32 t, p, 6;
        and.b32 t, t, 0x01C001C0;
        lop3.b32 $2, p, 0x80008000, t, 0xEA;
        shr.b32 t, q, 6;
        and.b32 t, t, 0x01C001C0;
        lop3.b32 $3, q, 0x80008000, t, 0xEA;
        mov.b32 s, 0x7E807E80;
        mul.bf16x2 $0, $0, s;
        mul.bf16x2 $1, $1, s;
        mul.bf16x2 $2, $2, s;
        mul.bf16x2 $3, $3, s;
        mul.bf16x2 $0, $0, $5;
        mul.bf16x2 $1, $1, $6;
        mul.bf16x2 $2, $2, $5;
        mul.bf16x2 $3, $3, $6;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r", [bytes_, power], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _dots(bytes_, scale, even, odd, acc, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    dtype: tl.constexpr = even.dtype
    if dtype == tl.bfloat16 and not INTERPRET:
        low, high = decode_pairs(bytes_, scale, ROWS, GROUPS)
    else:
        power, code = decode_scales(scale, ROWS, GROUPS), bytes_.to(tl.int16)
        low, high = decode_codes(code, power, dtype), decode_codes(code >> 4, power, dtype)
    return dot(high, odd, dot(low, even, acc))


@kernel
def split_kernel(x_ptr, out_ptr, x_stride, HALF, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Write a row's even columns, then its odd ones."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HALF
    await_inputs(PDL)
    release_dependents(PDL)
    for odd in tl.static_range(2):
        x = tl.load(x_ptr + row * x_stride + column * 2 + odd, mask=inside)
        tl.store(out_ptr + (row * 2 + odd) * HALF + column, x, mask=inside)


@triton.jit
def _product(
    codes, scales, even_rows, odd_rows, real, first, last,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Return ``[ROWS, BLOCK_M]``: weight rows times tokens over the groups of 32 columns from first to last."""
    HALF: tl.constexpr = BLOCK_K // 2
    GROUPS: tl.constexpr = BLOCK_K // _GROUP
    half, group = tl.arange(0, HALF), tl.arange(0, GROUPS)[None, :]
    acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
    # Scales are too narrow to be copied asynchronously: they are read one step ahead.
    scale = tl.load(scales + first + group, mask=first + group < last, other=0)
    for start in range(first, last, GROUPS):
        place = start * 16 + half
        following = start + GROUPS + group
        if EVEN_K:
            even = tl.load(even_rows + place[:, None], mask=real[None, :], other=0.0)
            odd = tl.load(odd_rows + place[:, None], mask=real[None, :], other=0.0)
            bytes_ = tl.load(codes + place[None, :])
        else:
            inside = place < last * 16
            even = tl.load(even_rows + place[:, None], mask=inside[:, None] & real[None, :], other=0.0)
            odd = tl.load(odd_rows + place[:, None], mask=inside[:, None] & real[None, :], other=0.0)
            bytes_ = tl.load(codes + place[None, :], mask=inside[None, :], other=0)
        ahead = tl.load(scales + following, mask=following < last, other=0)
        acc = _dots(bytes_, scale, even, odd, acc, ROWS, GROUPS)
        scale = ahead
    return acc


@kernel(do_not_specialize=("num_pairs", "tiles_m"))
def mxfp4_gate_up_kernel(
    x_ptr, w_ptr, ws_ptr, bias_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr,
    num_pairs, tiles_m, num_experts, groups, I, alpha, limit,
    PER_TOKEN: tl.constexpr, OAI: tl.constexpr, HAS_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr,
    DIRECT: tl.constexpr, LINES: tl.constexpr, BAND: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gather token rows, multiply by gate and up rows of one expert in turns, apply the activation."""
    tile_m, tile_n = program_tile(tiles_m, tl.cdiv(I, BLOCK_N), BAND)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if not DIRECT:
        await_inputs(PDL)
    empty = block_is_empty(expert_ptr, total_ptr, tile_m, num_experts, DIRECT, BLOCK_M)
    expert, pair = block_of_pairs(sorted_ptr, expert_ptr, tile_m, num_pairs, DIRECT, BLOCK_M)
    expert = expert.to(tl.int64)
    real = pair < num_pairs
    token = tl.where(real, pair // PER_TOKEN, 0).to(tl.int64)
    # Row 2p is the gate and row 2p + 1 the up of place p. Even columns of the tile come first: where they are
    # stored, they are neighbours.
    row = tl.arange(0, 2 * BLOCK_N)
    place, is_up = row // 2, row % 2
    column = tile_n * BLOCK_N + place % (BLOCK_N // 2) * 2 + place // (BLOCK_N // 2)
    valid = column < I
    inside = tl.where(valid, column, 0)
    w_row = expert * 2 * I + (inside * 2 + is_up if INTERLEAVED else inside + is_up * I)
    if DIRECT:
        if PDL:
            # The ids were there before the kernel in front began: it only split x.
            prefetch_rows(w_ptr + w_row * (groups * 16), valid & (not empty), groups * 16, LINES)
        await_inputs(PDL)
    release_dependents(PDL)
    if empty:
        return
    even_rows = x_ptr + token[None, :] * (groups * 32)
    both = _product(
        w_ptr + w_row[:, None] * (groups * 16), ws_ptr + w_row[:, None] * groups, even_rows,
        even_rows + groups * 16, real, 0, groups, 2 * BLOCK_N, BLOCK_M, BLOCK_K, EVEN_K,
    )  # fmt: skip
    if HAS_BIAS:
        both += tl.load(bias_ptr + w_row).to(tl.float32)[:, None]
    gate, up = tl.split(tl.permute(tl.reshape(both, [BLOCK_N, 2, BLOCK_M]), (0, 2, 1)))
    inner = activation_of(gate, up, alpha, limit, OAI)
    place = tl.arange(0, BLOCK_N)
    odd_half = place // (BLOCK_N // 2)
    half = tile_n * (BLOCK_N // 2) + place % (BLOCK_N // 2)
    out = out_ptr + pair[:, None].to(tl.int64) * I + (odd_half * (I // 2) + half)[None, :]
    tl.store(out, cast(tl.trans(inner), dtype), mask=real[:, None] & (half * 2 + odd_half < I)[None, :])


@kernel(do_not_specialize=("num_pairs", "tiles_m"))
def mxfp4_down_kernel(
    a_ptr, w_ptr, ws_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr,
    num_pairs, tiles_m, num_experts, D, groups,
    HAS_BIAS: tl.constexpr, DIRECT: tl.constexpr, LINES: tl.constexpr, BAND: tl.constexpr, EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
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
    row = expert * D + tl.where(column < D, column, 0)
    each = tl.cdiv(groups, SPLITS)
    first, last = split * each, tl.minimum((split + 1) * each, groups)
    if PDL and BLOCK_M <= 16:
        # While the first GEMM ends, these rows travel to L2.
        wanted = (column < D) & (not empty)
        prefetch_rows(w_ptr + row * (groups * 16) + first * 16, wanted, (last - first) * 16, LINES)
    await_inputs(PDL)
    release_dependents(PDL)
    if empty:
        return
    # A padding row reads pair 0, which may be dropped and never written: nothing of it is stored.
    even_rows = a_ptr + place[None, :] * (groups * 32)
    acc = _product(
        w_ptr + row[:, None] * (groups * 16), ws_ptr + row[:, None] * groups, even_rows, even_rows + groups * 16,
        place >= 0, first, last, BLOCK_N, BLOCK_M, BLOCK_K, EVEN_K,
    )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + row).to(tl.float32)
        acc += tl.where(split == 0, bias, 0.0)[:, None]
    weight = tl.load(weights_ptr + place)
    out = out_ptr + (place * SPLITS + split)[:, None] * D + column[None, :]
    tl.store(out, tl.trans(acc * weight[None, :]), mask=real[:, None] & (column < D)[None, :])


def mxfp4_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: MoEWeights, plan: LaunchConfig, oai: bool,
    alpha: float, limit: float, interleaved: bool,
) -> torch.Tensor:  # fmt: skip
    """Return the weighted rows of all pairs, fp32 ``[T*k, splits, D]``; those of dropped pairs are not written."""
    assert packed.w13_scale is not None and packed.w2_scale is not None
    (experts, hidden), inner, pairs = packed.w2.shape[:2], packed.w2.shape[2] * GROUP, ids.numel()
    first, second, direct = plan.first, plan.second, plan.by_pair
    height = max(16, first.m)
    sorted_ids, expert_ids, total, blocks = ids, ids, ids, pairs
    if not direct:
        sorted_ids, expert_ids, total = align(ids, experts, height)
        blocks = expert_ids.shape[0]
    split = x.new_empty(*x.shape)
    width = min(1024, next_power_of_2(hidden // 2))
    split_kernel[(x.shape[0], cdiv(hidden // 2, width))](
        x, split, x.stride(0), hidden // 2, BLOCK=width, **dependent_launch(x.device)
    )  # fmt: skip
    inner_rows = x.new_empty(pairs, inner)
    mxfp4_gate_up_kernel[(blocks * cdiv(inner, first.n),)](
        split, packed.w13, packed.w13_scale, weights if packed.w13_bias is None else packed.w13_bias, inner_rows,
        sorted_ids, expert_ids, total, pairs, blocks, experts, hidden // GROUP, inner, alpha, limit,
        PER_TOKEN=ids.shape[1], OAI=oai, HAS_BIAS=packed.w13_bias is not None, INTERLEAVED=interleaved,
        DIRECT=direct, LINES=_lines(hidden), BAND=plan.band, EVEN_K=hidden % first.k == 0, BLOCK_M=height,
        BLOCK_N=first.n, BLOCK_K=first.k, num_warps=first.warps, num_stages=first.stages, **dependent_launch(x.device),
    )  # fmt: skip
    splits = plan.splits
    partial = x.new_empty(pairs, splits, hidden, dtype=torch.float32)
    mxfp4_down_kernel[(blocks * cdiv(hidden, second.n), splits)](
        inner_rows, packed.w2, packed.w2_scale, weights if packed.w2_bias is None else packed.w2_bias, weights,
        partial, sorted_ids, expert_ids, total, pairs, blocks, experts, hidden, inner // GROUP,
        HAS_BIAS=packed.w2_bias is not None, DIRECT=direct, LINES=_lines(inner), BAND=plan.band,
        EVEN_K=_even(inner, second.k, splits), SPLITS=splits, BLOCK_M=height, BLOCK_N=second.n, BLOCK_K=second.k,
        num_warps=second.warps, num_stages=second.stages, **dependent_launch(x.device),
    )  # fmt: skip
    return partial


def _even(columns: int, step: int, splits: int) -> bool:
    """Whether no split ends inside a step."""
    return columns % (step * splits) == 0


def _lines(columns: int) -> int:
    """Return how many lines of 128 bytes hold a row of codes: a power of two."""
    return next_power_of_2(cdiv(columns, 256))
