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

from fastlayers.linear.triton_gemm import dot
from fastlayers.moe.align.triton import moe_align
from fastlayers.moe.fused_moe.configs import Tile, mxfp4_tiles
from fastlayers.moe.fused_moe.layer import FusedMoEConfig
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.quant.mxfp4.codes import GROUP
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import cast

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
def _dots(bytes_, power, even, odd, acc, dtype: tl.constexpr):
    code = bytes_.to(tl.int16)
    acc = dot(decode_codes(code, power, dtype), even, acc)
    return dot(decode_codes(code >> 4, power, dtype), odd, acc)


@triton.jit(do_not_specialize=["num_pairs", "tiles_m"])
def mxfp4_gate_up_kernel(
    x_ptr, w_ptr, ws_ptr, bias_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr,
    num_pairs, tiles_m, D, I, alpha, limit,
    PER_TOKEN: tl.constexpr, OAI: tl.constexpr, HAS_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gather token rows, multiply by gate and up rows of one expert, apply the activation."""
    tile_m, tile_n = program_tile(tiles_m, tl.cdiv(I, BLOCK_N))
    if tile_m * BLOCK_M >= tl.load(total_ptr):
        return
    HALF: tl.constexpr = BLOCK_K // 2
    GROUPS: tl.constexpr = BLOCK_K // _GROUP
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    expert = tl.load(expert_ptr + tile_m).to(tl.int64)
    pair = tl.load(sorted_ptr + tile_m * BLOCK_M + tl.arange(0, BLOCK_M))
    real = pair < num_pairs
    token = tl.where(real, pair // PER_TOKEN, 0).to(tl.int64)
    # Even columns of the tile first: where they are stored, they are neighbours.
    place = tl.arange(0, BLOCK_N)
    inside, odd_half = place % (BLOCK_N // 2), place // (BLOCK_N // 2)
    column = tile_n * BLOCK_N + inside * 2 + odd_half
    valid = column < I
    row = tl.where(valid, column, 0)
    gate_row = (expert * 2 * I + (row * 2 if INTERLEAVED else row))[:, None]
    up_row = gate_row + (1 if INTERLEAVED else I)
    half, group = tl.arange(0, HALF), tl.arange(0, GROUPS)[None, :]
    even_rows = x_ptr + token[None, :] * D + half[:, None]
    gate_codes, up_codes = w_ptr + gate_row * (D // 2) + half[None, :], w_ptr + up_row * (D // 2) + half[None, :]
    gate_scales, up_scales = ws_ptr + gate_row * (D // _GROUP) + group, ws_ptr + up_row * (D // _GROUP) + group
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(0, D // BLOCK_K):
        even = tl.load(even_rows + block * HALF, mask=real[None, :], other=0.0)
        odd = tl.load(even_rows + D // 2 + block * HALF, mask=real[None, :], other=0.0)
        power = decode_scales(tl.load(gate_scales + block * GROUPS), BLOCK_N, GROUPS)
        gate = _dots(tl.load(gate_codes + block * HALF), power, even, odd, gate, dtype)
        power = decode_scales(tl.load(up_scales + block * GROUPS), BLOCK_N, GROUPS)
        up = _dots(tl.load(up_codes + block * HALF), power, even, odd, up, dtype)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + gate_row).to(tl.float32)
        up += tl.load(bias_ptr + up_row).to(tl.float32)
    if OAI:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        gate = gate * tl.sigmoid(gate * alpha)
    else:
        gate = gate * tl.sigmoid(gate)
    to = (odd_half * (I // 2) + tile_n * (BLOCK_N // 2) + inside)[None, :]
    out = out_ptr + pair[:, None].to(tl.int64) * I + to
    tl.store(out, cast(tl.trans(gate * up), dtype), mask=real[:, None] & valid[None, :])


@triton.jit(do_not_specialize=["num_pairs", "tiles_m"])
def mxfp4_down_kernel(
    a_ptr, w_ptr, ws_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr,
    num_pairs, tiles_m, D, I, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply the pairs' inner rows by the down projection, add the bias, weigh; fp32 rows of pairs."""
    tile_m, tile_n = program_tile(tiles_m, tl.cdiv(D, BLOCK_N))
    if tile_m * BLOCK_M >= tl.load(total_ptr):
        return
    HALF: tl.constexpr = BLOCK_K // 2
    GROUPS: tl.constexpr = BLOCK_K // _GROUP
    expert = tl.load(expert_ptr + tile_m).to(tl.int64)
    pair = tl.load(sorted_ptr + tile_m * BLOCK_M + tl.arange(0, BLOCK_M))
    real = pair < num_pairs
    place = tl.where(real, pair, 0).to(tl.int64)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (expert * D + tl.where(column < D, column, 0))[:, None]
    half, group = tl.arange(0, HALF), tl.arange(0, GROUPS)[None, :]
    # A padding row reads pair 0, which may be dropped and never written: nothing of it is stored.
    even_rows = a_ptr + place[None, :] * I + half[:, None]
    codes, scales = w_ptr + row * (I // 2) + half[None, :], ws_ptr + row * (I // _GROUP) + group
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(0, I // BLOCK_K):
        even = tl.load(even_rows + block * HALF)
        odd = tl.load(even_rows + I // 2 + block * HALF)
        power = decode_scales(tl.load(scales + block * GROUPS), BLOCK_N, GROUPS)
        acc = _dots(tl.load(codes + block * HALF), power, even, odd, acc, a_ptr.dtype.element_ty)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row).to(tl.float32)
    weight = tl.load(weights_ptr + place)
    out = out_ptr + place[:, None] * D + column[None, :]
    tl.store(out, tl.trans(acc * weight[None, :]), mask=real[:, None] & (column < D)[None, :])


@triton.jit
def program_tile(tiles_m, tiles_n):
    """Return (block of pairs, block of rows): bands of blocks, so that programs that run together share L2."""
    BAND: tl.constexpr = 8
    index = tl.program_id(0)
    band = index // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    inside = index % (BAND * tiles_n)
    return band * BAND + inside % height, inside // height


def mxfp4_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: MoEWeights, oai: bool, alpha: float,
    limit: float, interleaved: bool,
) -> torch.Tensor:  # fmt: skip
    """Return the weighted rows of all pairs, fp32 ``[T*k, D]``; those of dropped pairs are not written."""
    assert packed.w13_scale is not None and packed.w2_scale is not None
    (experts, hidden), inner, pairs = packed.w2.shape[:2], packed.w2.shape[2] * GROUP, ids.numel()
    first, second = mxfp4_tiles(pairs, experts, hidden, inner, x.dtype == torch.float32)
    sorted_ids, expert_ids, total = moe_align(ids, experts, first.m)
    blocks = expert_ids.shape[0]
    split = x.unflatten(1, (-1, 2)).mT.contiguous()
    inner_rows = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    mxfp4_gate_up_kernel[(blocks * triton.cdiv(inner, first.n),)](
        split, packed.w13, packed.w13_scale, weights if packed.w13_bias is None else packed.w13_bias, inner_rows,
        sorted_ids, expert_ids, total, pairs, blocks, hidden, inner, alpha, limit,
        PER_TOKEN=ids.shape[1], OAI=oai, HAS_BIAS=packed.w13_bias is not None, INTERLEAVED=interleaved,
        BLOCK_M=first.m, BLOCK_N=first.n, BLOCK_K=first.k, num_warps=first.warps, num_stages=first.stages,
    )  # fmt: skip
    partial = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    mxfp4_down_kernel[(blocks * triton.cdiv(hidden, second.n),)](
        inner_rows, packed.w2, packed.w2_scale, weights if packed.w2_bias is None else packed.w2_bias, weights,
        partial, sorted_ids, expert_ids, total, pairs, blocks, hidden, inner, HAS_BIAS=packed.w2_bias is not None,
        BLOCK_M=second.m, BLOCK_N=second.n, BLOCK_K=second.k, num_warps=second.warps, num_stages=second.stages,
    )  # fmt: skip
    return partial


def _builds(name: str, cfg: FusedMoEConfig, tokens: int, code: str) -> list[KernelBuild]:
    wide = code == "fp32"
    tiles = mxfp4_tiles(tokens * cfg.top_k, cfg.num_experts, cfg.hidden_size, cfg.intermediate_size, wide)
    blocks = {"sorted_ptr": "*i32", "expert_ptr": "*i32", "total_ptr": "*i32"}
    blocks |= {"num_pairs": "i32", "tiles_m": "i32", "D": "i32", "I": "i32"}
    codes = {"w_ptr": "*u8", "ws_ptr": "*u8", "bias_ptr": f"*{code}"}
    more = {"PER_TOKEN": cfg.top_k, "OAI": True, "INTERLEAVED": True}

    def build(which: str, kernel: object, signature: dict[str, str], tile: Tile, own: dict[str, int]) -> KernelBuild:
        sizes = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "HAS_BIAS": cfg.bias}
        return KernelBuild(
            f"moe_mxfp4_{which}_{name}_{code}_{tokens}", kernel, signature | codes | blocks, sizes | own,
            tile.warps, tile.stages, ("D", "I"),
        )  # fmt: skip

    first = {"x_ptr": f"*{code}", "out_ptr": f"*{code}", "alpha": "fp32", "limit": "fp32"}
    second = {"a_ptr": f"*{code}", "weights_ptr": "*fp32", "out_ptr": "*fp32"}
    return [
        build("gate_up", mxfp4_gate_up_kernel, first, tiles[0], more),
        build("down", mxfp4_down_kernel, second, tiles[1], {}),
    ]


_GPT_OSS = FusedMoEConfig(2880, 2880, 32, 4, quant="mxfp4", activation="swiglu_oai", bias=True, interleaved=True)
_TP2 = FusedMoEConfig(2880, 1440, 128, 4, quant="mxfp4", activation="swiglu_oai", bias=True, interleaved=True)
COMPILE = [
    build
    for name, cfg, tokens, code in (
        *(("20b", _GPT_OSS, tokens, "bf16") for tokens in (1, 64, 256, 1024, 4096)),
        ("120b_tp2", _TP2, 64, "bf16"),
        ("120b_tp2", _TP2, 4096, "bf16"),
        ("20b", _GPT_OSS, 64, "fp16"),
        ("20b", _GPT_OSS, 64, "fp32"),
        ("20b", _GPT_OSS, 1024, "fp32"),
    )
    for build in _builds(name, cfg, tokens, code)
]
