"""MXFP4 experts of few tokens in Triton, over weights in the order of the tensor cores' operands.

Four launches: tokens are ordered as :mod:`fastlayers.moe.fused_moe.triton.mxfp4_mma` reads them, gate·up with the
activation, down with the routing weight, sum; and the alignment where there are more than a few tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastlayers.errors import ArgumentError
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.align.layer import num_blocks
from fastlayers.moe.align.triton import FEW, align, launch_few
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.experts_operator import ExpertsBackend, experts_operator
from fastlayers.moe.fused_moe.launch_config import MAX_TOKENS
from fastlayers.moe.fused_moe.swizzle import SwizzledWeights, swizzle
from fastlayers.moe.fused_moe.token_chunks import token_chunks
from fastlayers.moe.fused_moe.triton.activation import activation_of
from fastlayers.moe.fused_moe.triton.grouped_gemm import block_is_empty
from fastlayers.moe.fused_moe.triton.mxfp4_mma import MAX_SCALE, ask, multiply, multiply_held
from fastlayers.moe.fused_moe.triton.reduce import launch_reduce
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.runtime.launch import kernel, side_by_side
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents


@triton.jit
def _pairs_of(sorted_ptr, block, slot, num_pairs, DIRECT: tl.constexpr, WIDE: tl.constexpr):
    """Return the pairs in slots of a block, and those eight slots further on (WIDE; else the same); num_pairs: none."""
    if DIRECT:
        pair = tl.where(slot == 0, block, num_pairs)
        return pair, pair
    elif WIDE:
        return tl.load(sorted_ptr + block * 16 + slot), tl.load(sorted_ptr + block * 16 + 8 + slot)
    else:
        pair = tl.load(sorted_ptr + block * 8 + slot)
        return pair, pair


@triton.jit
def _inner_columns(tile):
    """Return the inner columns of tiles ``[R, 1]`` as ``_store_inner`` has them, ``[R, 64]``."""
    f = tl.arange(0, 64)[None, :]  # (g // 2, t, b, n)
    return tile * 8 + f // 2 % 2 * 4 + f // 16


@triton.jit
def _inner_bias(bias_ptr, tile, INNER: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return the biases of gate and up rows of tiles ``[R, 1]``."""
    column = _inner_columns(tile)
    if HAS_BIAS:
        gate = tl.load(bias_ptr + column * 2, mask=column < INNER, other=0.0)
        return gate, tl.load(bias_ptr + column * 2 + 1, mask=column < INNER, other=0.0)
    else:
        return 0.0, 0.0


@triton.jit
def _store_inner(
    both, bias, out_ptr, tile, pair, num_pairs, alpha, limit, INNER: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Apply bias and activation to ``both`` ``[R, 128]``, gate and up rows in turns, and store it in x's order."""
    column = _inner_columns(tile)
    inside = column < INNER
    turned = tl.permute(tl.reshape(both, [R, 4, 2, 16]), (0, 1, 3, 2))
    gate, up = tl.split(turned)
    gate, up = tl.reshape(gate, [R, 64]) + bias[0], tl.reshape(up, [R, 64]) + bias[1]
    inner = activation_of(gate, up, alpha, limit, True)
    # Columns (q, h, t, c) of a block of 32 lie in the order (t, q, h, c).
    place = column // 32 * 32 + column % 8 // 2 * 8 + column // 8 % 4 * 2 + column % 2
    out = out_ptr + pair.to(tl.int64) * INNER + place
    tl.store(out, cast(inner, out_ptr.dtype.element_ty), mask=inside & (pair < num_pairs))


@kernel(do_not_specialize=("num_pairs", "num_experts"))
def swizzled_gate_up_kernel(
    x_ptr, w_ptr, ws_ptr, bias_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr, num_pairs, num_experts, alpha, limit,
    PER_TOKEN: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr,
    DIRECT: tl.constexpr, R: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    ASYNC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a block's tokens by R tiles of gate and up rows of one expert, apply the activation."""
    TILES: tl.constexpr = (2 * INNER + 16 * R - 1) // (16 * R)
    LAST: tl.constexpr = (2 * INNER + 15) // 16 - 1
    block, first = tl.program_id(0) // TILES, tl.program_id(0) % TILES * R
    await_inputs(PDL)
    release_dependents(PDL)
    if block_is_empty(expert_ptr, total_ptr, block, num_experts, DIRECT, 16 if WIDE else 8):
        return
    expert = tl.load(expert_ptr + block).to(tl.int64)
    pair0, pair1 = _pairs_of(sorted_ptr, block, tl.arange(0, 128)[None, None, :] // 16, num_pairs, DIRECT, WIDE)
    both0, both1 = multiply(
        x_ptr, tl.where(pair0 < num_pairs, pair0 // PER_TOKEN, 0), tl.where(pair1 < num_pairs, pair1 // PER_TOKEN, 0),
        w_ptr + expert * ((2 * INNER + 63) // 64 * 16 * ((HIDDEN + 127) // 128 * 64)),
        ws_ptr + expert * ((2 * INNER + 255) // 256 * 8 * ((HIDDEN + 63) // 64 * 64)),
        tl.minimum(first + tl.arange(0, R)[:, None, None], LAST), HIDDEN, R, W, WIDE, STAGES, ASYNC,
    )  # fmt: skip
    tile, f = first + tl.arange(0, R)[:, None], tl.arange(0, 64)[None, :]
    bias = _inner_bias(bias_ptr + expert * 2 * INNER, tile, INNER, HAS_BIAS)
    pair0, pair1 = _pairs_of(sorted_ptr, block, f // 4 % 4 * 2 + f % 2, num_pairs, DIRECT, WIDE)
    _store_inner(both0, bias, out_ptr, tile, pair0, num_pairs, alpha, limit, INNER, R)
    if WIDE:
        _store_inner(both1, bias, out_ptr, tile, pair1, num_pairs, alpha, limit, INNER, R)


@triton.jit
def _store_outer(
    sums, bias_ptr, weights_ptr, out_ptr, tile, pair, num_pairs, HIDDEN: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Add the bias to ``sums`` ``[R, 128]``, weigh, and store them."""
    e = tl.arange(0, 128)[None, :]
    row = tile * 16 + e // 2 % 2 * 8 + e // 16
    real = pair < num_pairs
    if HAS_BIAS:
        sums += tl.load(bias_ptr + row, mask=row < HIDDEN, other=0.0)
    sums = sums * tl.load(weights_ptr + pair, mask=real, other=0.0)
    tl.store(out_ptr + pair.to(tl.int64) * HIDDEN + row, sums, mask=real & (row < HIDDEN))


@kernel(do_not_specialize=("num_pairs", "num_experts"))
def swizzled_down_kernel(
    a_ptr, w_ptr, ws_ptr, bias_ptr, weights_ptr, out_ptr, sorted_ptr, expert_ptr, total_ptr, num_pairs, num_experts,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr,
    DIRECT: tl.constexpr, R: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    ASYNC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a block's inner rows by R tiles of down rows, add the bias, weigh; fp32 rows of pairs."""
    TILES: tl.constexpr = (HIDDEN + 16 * R - 1) // (16 * R)
    LAST: tl.constexpr = (HIDDEN + 15) // 16 - 1
    block, first = tl.program_id(0) // TILES, tl.program_id(0) % TILES * R
    await_inputs(PDL)
    release_dependents(PDL)
    if block_is_empty(expert_ptr, total_ptr, block, num_experts, DIRECT, 16 if WIDE else 8):
        return
    expert = tl.load(expert_ptr + block).to(tl.int64)
    pair0, pair1 = _pairs_of(sorted_ptr, block, tl.arange(0, 128)[None, None, :] // 16, num_pairs, DIRECT, WIDE)
    # An empty slot reads the first pair's row: the block has that.
    some = tl.min(pair0)
    sums0, sums1 = multiply(
        a_ptr, tl.where(pair0 < num_pairs, pair0, some), tl.where(pair1 < num_pairs, pair1, some),
        w_ptr + expert * ((HIDDEN + 63) // 64 * 16 * ((INNER + 127) // 128 * 64)),
        ws_ptr + expert * ((HIDDEN + 255) // 256 * 8 * ((INNER + 63) // 64 * 64)),
        tl.minimum(first + tl.arange(0, R)[:, None, None], LAST), INNER, R, W, WIDE, STAGES, ASYNC,
    )  # fmt: skip
    bias = bias_ptr + expert * HIDDEN
    tile, e = first + tl.arange(0, R)[:, None], tl.arange(0, 128)[None, :]
    pair0, pair1 = _pairs_of(sorted_ptr, block, e // 4 % 4 * 2 + e % 2, num_pairs, DIRECT, WIDE)
    _store_outer(sums0, bias, weights_ptr, out_ptr, tile, pair0, num_pairs, HIDDEN, HAS_BIAS)
    if WIDE:
        _store_outer(sums1, bias, weights_ptr, out_ptr, tile, pair1, num_pairs, HIDDEN, HAS_BIAS)


@kernel(do_not_specialize=("num_experts",))
def held_gate_up_kernel(
    x_ptr, w_ptr, ws_ptr, bias_ptr, out_ptr, ids_ptr, num_experts, alpha, limit,
    PER_TOKEN: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``swizzled_gate_up_kernel`` for one pair; all codes of a program are asked for before the wait.

    Ids were there before the kernel in front, which orders the tokens, began.
    """
    TILES: tl.constexpr = (2 * INNER + 16 * R - 1) // (16 * R)
    LAST: tl.constexpr = (2 * INNER + 15) // 16 - 1
    pair, first = tl.program_id(0) // TILES, tl.program_id(0) % TILES * R
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    here = (expert >= 0) & (expert < num_experts)
    expert = tl.where(here, expert, 0)
    w_ptr += expert * ((2 * INNER + 63) // 64 * 16 * ((HIDDEN + 127) // 128 * 64))
    ws_ptr += expert * ((2 * INNER + 255) // 256 * 8 * ((HIDDEN + 63) // 64 * 64))
    tile = tl.minimum(first + tl.arange(0, R)[:, None, None], LAST)
    held, held_scales = ask(w_ptr, ws_ptr, tile, HIDDEN, W)
    tile, f = first + tl.arange(0, R)[:, None], tl.arange(0, 64)[None, :]
    bias = _inner_bias(bias_ptr + expert * 2 * INNER, tile, INNER, HAS_BIAS)
    await_inputs(PDL)
    release_dependents(PDL)
    if not here:
        return
    row = tl.zeros([1, 1, 128], tl.int32) + pair // PER_TOKEN
    both = multiply_held(held, held_scales, x_ptr, row, w_ptr, HIDDEN, R, W)
    # Of the eight tokens of a product the first is one.
    slot = tl.where(f // 4 % 4 * 2 + f % 2 == 0, pair, pair + 1)
    _store_inner(both, bias, out_ptr, tile, slot, pair + 1, alpha, limit, INNER, R)


@kernel(do_not_specialize=("num_experts",))
def held_down_kernel(
    a_ptr, w_ptr, ws_ptr, bias_ptr, weights_ptr, out_ptr, ids_ptr, num_experts,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As ``swizzled_down_kernel`` for one pair; all codes of a program are asked for while the first product runs."""
    TILES: tl.constexpr = (HIDDEN + 16 * R - 1) // (16 * R)
    LAST: tl.constexpr = (HIDDEN + 15) // 16 - 1
    pair, first = tl.program_id(0) // TILES, tl.program_id(0) % TILES * R
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    here = (expert >= 0) & (expert < num_experts)
    expert = tl.where(here, expert, 0)
    w_ptr += expert * ((HIDDEN + 63) // 64 * 16 * ((INNER + 127) // 128 * 64))
    ws_ptr += expert * ((HIDDEN + 255) // 256 * 8 * ((INNER + 63) // 64 * 64))
    tile = tl.minimum(first + tl.arange(0, R)[:, None, None], LAST)
    held, held_scales = ask(w_ptr, ws_ptr, tile, INNER, W)
    e = tl.arange(0, 128)[None, :]
    row = (first + tl.arange(0, R)[:, None]) * 16 + e // 2 % 2 * 8 + e // 16
    weight = tl.load(weights_ptr + pair)
    bias = tl.zeros([R, 128], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * HIDDEN + row, mask=row < HIDDEN, other=0.0)
    await_inputs(PDL)
    release_dependents(PDL)
    if not here:
        return
    sums = multiply_held(
        held, held_scales, a_ptr, tl.zeros([1, 1, 128], tl.int32) + pair, w_ptr, INNER, R, W
    )  # fmt: skip
    # Of the eight tokens of a product the first is one.
    real = (e // 4 % 4 * 2 + e % 2 == 0) & (row < HIDDEN)
    tl.store(out_ptr + pair.to(tl.int64) * HIDDEN + row, (sums + bias) * weight, mask=real)


@kernel
def order_kernel(x_ptr, out_ptr, x_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Write columns (q, h, t, c) of each block of 32 in the order (t, q, h, c)."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = place // 32 * 32 + place // 2 % 4 * 8 + place // 8 % 4 * 2 + place % 2
    await_inputs(PDL)
    release_dependents(PDL)
    x = tl.load(x_ptr + row * x_stride + column, mask=place < width)
    tl.store(out_ptr + row * width + place, x, mask=place < width)


@dataclass(frozen=True)
class HopperLaunchConfig:
    """``tokens`` of a block: 8 or 16, 0: each pair by itself; then tiles of a program, its warps and stages, twice.

    ``l1``: tokens are read through L1 and not copied ahead with the weights. ``held``: which products (1, 2; 3: both)
    hold all codes of a program in registers, from before the wait on; only where ``tokens`` is 0.
    """

    tokens: int
    r1: int
    w1: int
    s1: int
    r2: int
    w2: int
    s2: int
    l1: int
    held: int = 0

    def numbers(self) -> list[int]:
        """Return the plan as an operator takes it; spelt out, because torch.compile traces it."""
        return [self.tokens, self.r1, self.w1, self.s1, self.r2, self.w2, self.s2, self.l1, self.held]

    def config(self) -> dict[str, int]:
        """Return the plan as a table holds it."""
        return asdict(self)


def _alike(tokens: int, tiles: int, warps: int, stages: int, l1: int) -> HopperLaunchConfig:
    return HopperLaunchConfig(tokens, tiles, warps, stages, tiles, warps, stages, l1)


def plan_for(tokens: int) -> HopperLaunchConfig:
    """Return how ``tokens`` tokens run without a table."""
    if tokens <= 2:
        return _alike(0, 1, 4, 4, 1)
    if tokens <= 24:
        return _alike(0 if tokens <= 4 else 8, 2, 2, 6, 1)
    return _alike(8, 4, 2, 4, 0) if tokens <= 64 else _alike(16, 4, 2, 4, 1)


# Tiles, warps, stages, l1: the best first.
_SHAPES = {
    0: [(1, 4, 4, 1), (2, 2, 6, 1), (1, 4, 6, 1), (2, 4, 6, 1), (2, 4, 4, 1), (4, 4, 4, 1), (4, 2, 4, 0)],
    8: [(4, 2, 4, 0), (2, 2, 6, 1), (4, 2, 4, 1), (4, 4, 3, 0), (8, 2, 4, 1), (4, 4, 4, 1), (2, 4, 4, 1)],
    16: [(4, 2, 4, 1), (4, 2, 4, 0), (2, 2, 6, 1), (8, 2, 4, 1), (4, 4, 3, 0)],
}  # fmt: skip


# One tile a program: with two, Triton brings what is held into the lanes' layout by way of shared memory.
HELD = [
    replace(_alike(0, 1, 4, 4, 1), held=3),
    replace(_alike(0, 1, 8, 4, 1), held=3),
    HopperLaunchConfig(0, 2, 2, 6, 1, 4, 6, 1, held=2),
    HopperLaunchConfig(0, 2, 2, 6, 1, 8, 6, 1, held=2),
]


def plans(tokens: int) -> list[HopperLaunchConfig]:
    """Return the rule's plan, both products alike, and mixtures of the best shapes: 10 to 24."""
    blocks = (
        [0] if tokens <= 2 else [0, 8] if tokens <= 4 else [8] if tokens <= 48 else [8, 16] if tokens <= 96 else [16]
    )
    found = [plan_for(tokens)]
    for block in blocks:
        shapes = _SHAPES[block]
        found += [_alike(block, *shape) for shape in shapes]
        pairs = [(a, b) for a in shapes[:5] for b in shapes[:5] if a != b and a[3] == b[3]]
        found += [HopperLaunchConfig(block, *a[:3], *b[:3], a[3]) for a, b in pairs[:6]]
        found += HELD if block == 0 else []
    return list(dict.fromkeys(found))


@lru_cache(maxsize=1024)
def _plan_of(numbers: tuple[int, ...]) -> HopperLaunchConfig:
    return HopperLaunchConfig(*numbers)


class _Launches(NamedTuple):
    """What computes tokens of one shape, and the memory that lies between its launches.

    Many pairs are aligned by themselves: then ``align`` is ``None`` although ``plan.tokens`` is not 0.
    """

    size: int
    order: Callable[..., None]
    align: Callable[..., None] | None
    gate_up: Callable[..., None]
    down: Callable[..., None]
    reduce: Callable[..., None]


@lru_cache(maxsize=4096)
def _launches(
    tokens: int, per_token: int, experts: int, hidden: int, inner: int, x_stride: int, alpha: float, limit: float,
    factor: float, bias13: bool, bias2: bool, dtype: torch.dtype, numbers: tuple[int, ...], device: torch.device,
) -> _Launches:  # fmt: skip
    """Return what launches the order of the rows, the alignment, both products and the sums.

    Products of ``plan.held`` are of pairs by themselves, all codes of a program in registers.
    """
    plan, launch, pairs, width = _plan_of(numbers), dependent_launch(device), tokens * per_token, _order_width(hidden)
    blocks = num_blocks(pairs, experts, plan.tokens) if plan.tokens else pairs
    few, i32 = 0 < plan.tokens and pairs <= FEW, torch.int32
    size, (ordered, rows, partial, *aligned) = side_by_side(
        (tokens * hidden, dtype), (pairs * inner, dtype), (pairs * hidden, torch.float32),
        *(((blocks * plan.tokens, i32), (blocks, i32), (1, i32)) if few else ()),
    )  # fmt: skip
    # As words, which the products read.
    words, row_words = (part._replace(numel=part.numel // 2, dtype=i32) for part in (ordered, rows))
    sizes = {"HIDDEN": hidden, "INNER": inner} | launch
    shared = sizes | {"DIRECT": plan.tokens == 0, "WIDE": plan.tokens == 16, "ASYNC": not plan.l1}
    first = {"PER_TOKEN": per_token, "HAS_BIAS": bias13, "R": plan.r1, "W": plan.w1, "num_warps": plan.w1}
    second = {"HAS_BIAS": bias2, "R": plan.r2, "W": plan.w2, "num_warps": plan.w2}
    grids = (blocks * cdiv(2 * inner, 16 * plan.r1),), (blocks * cdiv(hidden, 16 * plan.r2),)
    into = (0, words), (4, rows), *zip((5, 6, 7), aligned, strict=False)
    out = (0, row_words), (5, partial), *zip((6, 7, 8), aligned, strict=False)
    return _Launches(
        size,
        order_kernel.at((tokens, cdiv(hidden, width)), x_stride, hidden, parts=((1, ordered),), BLOCK=width, **launch),
        launch_few(pairs, experts, plan.tokens, device, tuple(zip((1, 2, 3), aligned, strict=True))) if few else None,
        held_gate_up_kernel.at(grids[0], experts, alpha, limit, parts=into, **sizes, **first)
        if plan.held & 1
        else swizzled_gate_up_kernel.at(
            grids[0], pairs, experts, alpha, limit, parts=into, **shared, **first, STAGES=plan.s1
        ),
        held_down_kernel.at(grids[1], experts, parts=out, **sizes, **second)
        if plan.held & 2
        else swizzled_down_kernel.at(grids[1], pairs, experts, parts=out, **shared, **second, STAGES=plan.s2),
        launch_reduce(tokens, hidden, per_token, experts, factor, 1, device, ((0, partial),)),
    )  # fmt: skip


def _order_width(hidden: int) -> int:
    return min(1024, next_power_of_2(hidden))


def _chunk(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, y: torch.Tensor, packed: SwizzledWeights,
    cfg: FusedMoEConfig, numbers: tuple[int, ...],
) -> None:  # fmt: skip
    """Compute ``y`` for at most MAX_TOKENS tokens."""
    _run(_launches_of(x, ids, packed, cfg, numbers), cfg.num_experts, _plan_of(numbers), x, weights, ids, y, packed)


def _launches_of(
    x: torch.Tensor, ids: torch.Tensor, packed: SwizzledWeights, cfg: FusedMoEConfig, numbers: tuple[int, ...]
) -> _Launches:
    return _launches(
        *ids.shape, cfg.num_experts, x.shape[1], cfg.intermediate_size, x.stride()[0], cfg.alpha, cfg.limit,
        cfg.scaling_factor, packed.w13_bias is not None, packed.w2_bias is not None, x.dtype, numbers, x.device,
    )  # fmt: skip


def _run(
    how: _Launches, experts: int, plan: HopperLaunchConfig, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
    y: torch.Tensor, packed: SwizzledWeights,
) -> None:  # fmt: skip
    bias13, bias2 = packed.w13_bias, packed.w2_bias
    memory = x.new_empty(how.size, dtype=torch.uint8)
    how.order(memory, x)
    aligned: tuple[torch.Tensor, ...] = ()
    if how.align is not None:
        how.align(memory, ids)
    else:
        aligned = align(ids, experts, plan.tokens) if plan.tokens else (ids, ids, ids)
    w13, w2, scales13, scales2 = packed.rows
    how.gate_up(
        memory, w13, scales13, weights if bias13 is None else bias13, *(aligned[:1] if plan.held & 1 else aligned)
    )
    how.down(
        memory, w2, scales2, weights if bias2 is None else bias2, weights, *(aligned[:1] if plan.held & 2 else aligned)
    )
    how.reduce(memory, ids, y)


@experts_operator("fused_moe_swizzled", SwizzledWeights)
def _fused_moe(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: SwizzledWeights, cfg: FusedMoEConfig,
    numbers: list[int],
) -> torch.Tensor:  # fmt: skip
    y, how = x.new_empty(*x.shape), tuple(numbers)
    for chunk in token_chunks(x, topk_weights, topk_ids, y, MAX_TOKENS):
        _chunk(*chunk, packed, cfg, how)
    return y


class TritonSwizzledFusedMoE(ExpertsBackend):
    """Four launches, five with alignment; one operator.

    Parameters
    ----------
    cfg : FusedMoEConfig
    config : mapping, optional
        What :meth:`candidates` gives; without it the plan depends on the number of tokens by a rule.
    """

    experts = _fused_moe

    def __init__(self, cfg: FusedMoEConfig, config: Mapping[str, int] | None = None) -> None:
        super().__init__(cfg)
        self.plan = (
            None
            if config is None
            else HopperLaunchConfig(*(config.get(field.name, 0) for field in fields(HopperLaunchConfig)))
        )

    @staticmethod
    def candidates(cfg: FusedMoEConfig, num_tokens: int) -> list[dict[str, int]]:
        """Return the configurations to measure for ``num_tokens`` tokens, the rule's own first."""
        return [plan.config() for plan in plans(num_tokens)]

    def pack(self, weights: MoEWeights) -> SwizzledWeights:
        """Return the weights in the kernels' layout; the given ones are of no further use to them.

        Raises
        ------
        ArgumentError
            A scale is above 2^65.
        """
        for name in ("w13_scale", "w2_scale"):
            largest = int(getattr(weights, name).max())
            if largest > MAX_SCALE:
                raise ArgumentError("FusedMoE", name, f"up to 2^{largest - 127}", "scales of at most 2^65")
        return swizzle(weights)

    def numbers_for(self, x: torch.Tensor) -> list[int]:
        """Return the plan of so many tokens."""
        return (plan_for(x.shape[0]) if self.plan is None else self.plan).numbers()

    def bound(self, x: torch.Tensor, topk_ids: torch.Tensor, packed: SwizzledWeights) -> Callable[..., None]:
        """Return what computes a chunk."""
        numbers = tuple(self.numbers_for(x))
        how = _launches_of(x, topk_ids, packed, self.cfg, numbers)
        return functools.partial(_run, how, self.cfg.num_experts, _plan_of(numbers))
