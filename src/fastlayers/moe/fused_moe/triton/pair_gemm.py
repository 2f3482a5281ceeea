"""The experts of a few tokens on the tensor cores: every (token, expert) pair a block of its own, no alignment.

Weight rows are the left operand, which Hopper's tensor cores read from shared memory where asynchronous copies put
them: no instruction is spent on a weight. The pair is one of eight columns on the right. Both products are one kernel:

    product   out[pair, split] = x[row of pair] @ w[expert of pair]^T over a part of the columns     fp32
    activate  a[pair] = act(sum of the splits), quantised where the format says so

and a sum adds a token's pairs in order. Without quantisation and without splits the first product applies the
activation itself: gate and up rows of a tile lie in turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.fused_moe.launch_config import LaunchConfig, Tile
from fastlayers.moe.fused_moe.triton.activation import activation_of
from fastlayers.moe.fused_moe.triton.reduce import pair_sum
from fastlayers.moe.fused_moe.weights import EPS, FORMATS, GROUP, MoEWeights
from fastlayers.quant.group_quant.triton import quantize_tile
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, dot, release_dependents

_GROUP = tl.constexpr(GROUP)
# Columns of the right operand: the fewest that the tensor cores take. All hold the pair.
_COLUMNS = tl.constexpr(8)


@triton.jit
def _load(rows, k, limit, EVEN_K: tl.constexpr):
    # Rows beyond the edge read a valid one again, only K can end inside a tile.
    if EVEN_K:
        return tl.load(rows)
    else:
        return tl.load(rows, mask=k < limit, other=0.0)


@triton.jit
def expert_of(ids_ptr, pair, num_routed, TOP_K: tl.constexpr, SHARED: tl.constexpr, SPAN: tl.constexpr):
    """Return the expert of a pair, -1 if it is dropped. The last SHARED pairs of a token follow its routed ones."""
    if SHARED == 0:
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        return tl.where((expert >= 0) & (expert < num_routed), expert, -1)
    else:
        token, j, slot = pair // (TOP_K + SHARED), pair % (TOP_K + SHARED), tl.arange(0, SPAN)
        ids = tl.load(ids_ptr + token * TOP_K + slot, mask=slot < TOP_K, other=-1).to(tl.int64)
        ids = tl.where((ids >= 0) & (ids < num_routed), ids, -1)
        own = tl.max(tl.where(slot == j, ids, -1), axis=0)
        # A token without any expert here takes the shared ones neither.
        shared = tl.where(tl.max(ids, axis=0) >= 0, num_routed + j - TOP_K, -1)
        return tl.where(j < TOP_K, own, shared)


@kernel
def pair_product_kernel(
    x_ptr, xs_ptr, w_ptr, ws_ptr, bias_ptr, weights_ptr, ids_ptr, out_ptr,
    num_routed, N, K, x_stride, alpha, limit, shared_weight,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, SPAN: tl.constexpr, QUANT: tl.constexpr, WIDE: tl.constexpr,
    HALVES: tl.constexpr, PAIRED: tl.constexpr, INTERLEAVED: tl.constexpr, OAI: tl.constexpr, WEIGH: tl.constexpr,
    HAS_BIAS: tl.constexpr, IDS_READY: tl.constexpr, EVEN_K: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N rows of a pair's expert by its input row over the columns of one split.

    HALVES of ``N`` rows each have scale rows of their own. PAIRED: gate and up rows in turns, and the activation.
    """
    pair, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    tile, index = tl.program_id(0), tl.arange(0, BLOCK_N)
    if PAIRED:
        half = index % 2
        column = tile * (BLOCK_N // 2) + index // 2
    else:
        tiles = tl.cdiv(N, BLOCK_N)
        half = tile // tiles
        column = tile % tiles * BLOCK_N + index
    valid = column < N
    inside = tl.where(valid, column, 0)
    row = inside * 2 + half if INTERLEAVED and PAIRED else inside + half * N
    blocks = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(blocks, SPLITS)
    first, last = split * each, tl.minimum((split + 1) * each, blocks)
    if not IDS_READY:
        await_inputs(PDL)
    expert = expert_of(ids_ptr, pair, num_routed, TOP_K, SHARED, SPAN)
    here = expert >= 0
    rows = w_ptr + (tl.where(here, expert, 0) * HALVES * N + row) * K
    if IDS_READY:
        # They were there before the kernel in front began.
        await_inputs(PDL)
    release_dependents(PDL)
    if not here:
        return
    if WEIGH:
        j = pair % (TOP_K + SHARED)
        weight = tl.load(weights_ptr + pair // (TOP_K + SHARED) * TOP_K + j, mask=j < TOP_K, other=shared_weight)
    same = tl.arange(0, _COLUMNS) * 0
    depth = tl.arange(0, BLOCK_K)
    # The second product (WEIGH) has a row of its own for each pair.
    x_index = pair if WEIGH else pair // (TOP_K + SHARED)
    x_row = x_ptr + x_index * x_stride
    ACC: tl.constexpr = tl.int32 if QUANT == 2 else tl.float32
    acc = tl.zeros([BLOCK_N, _COLUMNS], ACC)
    if QUANT == 1:
        scale_rows = tl.cdiv(N, _GROUP)
        # All rows of a program lie in one block of scales, or in one of either half.
        block_row = tile * (BLOCK_N // 2) // _GROUP if PAIRED else half * scale_rows + tile % tiles * BLOCK_N // _GROUP
        w_scale = ws_ptr + (expert * HALVES * scale_rows + block_row) * blocks
        x_scale = xs_ptr + x_index * blocks
    for block in range(first, last):
        k = block * BLOCK_K + depth
        w = _load(rows[:, None] + k[None, :], k[None, :], K, EVEN_K)
        x = _load(x_row + k[:, None] + same[None, :], k[:, None], K, EVEN_K)
        if QUANT == 1:
            if WIDE:
                w, x = w.to(tl.bfloat16), x.to(tl.bfloat16)
            s = tl.load(x_scale + block)
            product = dot(w, x, tl.zeros([BLOCK_N, _COLUMNS], tl.float32))
            if PAIRED:
                gate_scale, up_scale = tl.load(w_scale + block), tl.load(w_scale + scale_rows * blocks + block)
                acc += product * tl.where(half == 0, s * gate_scale, s * up_scale)[:, None]
            else:
                acc += product * (s * tl.load(w_scale + block))
        else:
            acc = dot(w, x, acc)
    # Eight equal columns: their sum is exact.
    result = tl.sum(acc.to(tl.float32), axis=1) * (1.0 / _COLUMNS)
    if QUANT == 2:
        result = result * tl.load(xs_ptr + x_index) * tl.load(ws_ptr + expert * HALVES * N + row)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * HALVES * N + row).to(tl.float32)
        result += tl.where(split == 0, bias, 0.0)
    if PAIRED:
        gate, up = tl.split(tl.reshape(result, [BLOCK_N // 2, 2]))
        inner = activation_of(gate, up, alpha, limit, OAI)
        column = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        tl.store(out_ptr + pair * N + column, cast(inner, out_ptr.dtype.element_ty), mask=column < N)
    else:
        if WEIGH:
            result = result * weight
        tl.store(out_ptr + (pair * SPLITS + split) * HALVES * N + row, result, mask=valid)


@kernel
def pair_activate_kernel(
    h_ptr, ids_ptr, a_ptr, s_ptr, num_routed, I, alpha, limit, eps,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, SPAN: tl.constexpr,
    QUANT: tl.constexpr, MAX: tl.constexpr, UE8M0: tl.constexpr, OAI: tl.constexpr, INTERLEAVED: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the splits of BLOCK columns of a pair in order, apply the activation, maybe quantise them as one group."""
    pair, group = tl.program_id(1).to(tl.int64), tl.program_id(0)
    # The ids were there before the kernel in front began.
    expert = expert_of(ids_ptr, pair, num_routed, TOP_K, SHARED, SPAN)
    await_inputs(PDL)
    release_dependents(PDL)
    if expert < 0:
        return
    column = group * BLOCK + tl.arange(0, BLOCK)
    inside = column < I
    gate_column = column * 2 if INTERLEAVED else column
    up_column = gate_column + 1 if INTERLEAVED else gate_column + I
    gate = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        row = h_ptr + (pair * SPLITS + split) * 2 * I
        gate += tl.load(row + gate_column, mask=inside, other=0.0)
        up += tl.load(row + up_column, mask=inside, other=0.0)
    inner = activation_of(gate, up, alpha, limit, OAI)
    if QUANT == 0:
        tl.store(a_ptr + pair * I + column, cast(inner, a_ptr.dtype.element_ty), mask=inside)
    else:
        codes, scale = quantize_tile(inner[None, :], eps, MAX, UE8M0, QUANT == 2)
        tl.store(a_ptr + pair * I + column[None, :], codes, mask=inside[None, :])
        tl.store(s_ptr + pair * tl.num_programs(0) + group + tl.arange(0, 1), scale)


@dataclass(frozen=True)
class _Route:
    """What every kernel knows of the pairs: a token's ``ids`` ``[T, k]``, then its shared experts."""

    ids: torch.Tensor
    weights: torch.Tensor
    routed: int
    shared: int

    @property
    def pairs(self) -> int:
        return self.ids.shape[0] * (self.ids.shape[1] + self.shared)

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]


@lru_cache(maxsize=1024)
def _bound_product(
    top_k: int, shared: int, quant: str, wide: bool, halves: int, paired: bool, interleaved: bool, oai: bool,
    weigh: bool, bias: bool, ids_ready: bool, even_k: bool, splits: int, tile: Tile, device: torch.device,
) -> Callable[..., None]:  # fmt: skip
    return pair_product_kernel.bind(
        TOP_K=top_k, SHARED=shared, SPAN=next_power_of_2(top_k), QUANT=FORMATS.index(quant), WIDE=wide, HALVES=halves,
        PAIRED=paired, INTERLEAVED=interleaved, OAI=oai, WEIGH=weigh, HAS_BIAS=bias, IDS_READY=ids_ready,
        EVEN_K=even_k, SPLITS=splits, BLOCK_N=tile.n, BLOCK_K=tile.k, num_warps=tile.warps, num_stages=tile.stages,
        **dependent_launch(device),
    )  # fmt: skip


def _product(
    x: torch.Tensor, scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor | None, bias: torch.Tensor | None,
    route: _Route, out: torch.Tensor, tile: Tile, splits: int, quant: str, wide: bool, halves: int,
    alpha: float, limit: float, oai: bool, interleaved: bool, factor: float,
) -> None:  # fmt: skip
    """Multiply; ``halves`` 2 is the first product, whose result is activated if ``out`` has no splits."""
    (_, rows, columns), first = w.shape, halves == 2
    paired = first and out.dim() == 2
    parts = 1 if interleaved and not paired else halves
    span = tile.n // 2 if paired else tile.n
    tiles = cdiv(rows // parts, span) * (1 if paired else parts)
    # What is in front of an unquantised first product may be what writes the ids.
    ready = not (first and quant == "none")
    bound = _bound_product(
        route.top_k, route.shared, quant, wide, parts, paired, interleaved, oai, not first, bias is not None, ready,
        columns % tile.k == 0, splits, tile, x.device,
    )  # fmt: skip
    bound(
        (tiles, route.pairs, splits),
        x, scale, w, scale if w_scale is None else w_scale, scale if bias is None else bias, route.weights, route.ids,
        out, route.routed, rows // parts, columns, x.stride(0), alpha, limit, 1.0 / factor,
    )  # fmt: skip


def pair_experts(
    x: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: MoEWeights,
    y: torch.Tensor, shared: int, plan: LaunchConfig, quant: str, ue8m0: bool, oai: bool, alpha: float, limit: float,
    factor: float, interleaved: bool,
) -> None:  # fmt: skip
    """Write ``y`` ``[T, D]``; ``ids`` and ``weights`` are the routed experts', the last ``shared`` of all follow.

    ``x`` are codes and ``scale`` their scales, or unquantised rows and anything.
    """
    (experts, hidden, inner), wide = packed.w2.shape, y.dtype == torch.float32
    route = _Route(ids, weights, experts - shared, shared)
    pairs = route.pairs
    a, a_scale = x.new_empty(pairs, inner), scale
    paired = quant == "none" and plan.splits1 == 1
    h = a if paired else x.new_empty(pairs, plan.splits1, 2 * inner, dtype=torch.float32)
    _product(
        x, scale, packed.w13, packed.w13_scale, packed.w13_bias, route, h, plan.first, plan.splits1, quant,
        wide, 2, alpha, limit, oai, interleaved, factor,
    )  # fmt: skip
    if not paired:
        block = next_power_of_2(inner) if quant == "int8" else GROUP
        groups = cdiv(inner, block)
        if quant != "none":
            a_scale = x.new_empty(pairs, groups, dtype=torch.float32)
        pair_activate_kernel[(groups, pairs)](
            h, ids, a, a_scale, route.routed, inner, alpha, limit, EPS, TOP_K=route.top_k, SHARED=shared,
            SPAN=next_power_of_2(route.top_k), QUANT=FORMATS.index(quant),
            MAX=448.0 if quant == "fp8_block" else 127.0, UE8M0=ue8m0, OAI=oai, INTERLEAVED=interleaved,
            SPLITS=plan.splits1, BLOCK=block, num_warps=max(1, min(8, block // 512)), **dependent_launch(x.device),
        )  # fmt: skip
    partial = x.new_empty(pairs, plan.splits, hidden, dtype=torch.float32)
    _product(
        a, a_scale, packed.w2, packed.w2_scale, packed.w2_bias, route, partial, plan.second, plan.splits,
        quant, wide, 1, alpha, limit, oai, False, factor,
    )  # fmt: skip
    pair_sum(partial, ids, y, route.routed, factor, route.top_k, shared, plan.splits)
