"""MXFP4 experts of few tokens in Triton, over weights in the order of the tensor cores' operands.

Four launches: tokens are ordered as :mod:`fastlayers.moe.fused_moe.triton.mxfp4.mma` reads them, gate·up with the
activation, down with the routing weight, sum. Few tokens' pairs are by themselves: the products are here. More are
aligned first: :mod:`fastlayers.moe.fused_moe.triton.mxfp4.rows`, and from 40 tokens on, where shapes and card allow it,
:mod:`fastlayers.moe.fused_moe.triton.mxfp4.wgmma`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastlayers.device import as_device
from fastlayers.errors import ArgumentError
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.align.triton import align
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.experts_operator import ExpertsBackend, experts_operator
from fastlayers.moe.fused_moe.launch_config import MAX_TOKENS
from fastlayers.moe.fused_moe.swizzle import SwizzledWeights, swizzle
from fastlayers.moe.fused_moe.token_chunks import token_chunks
from fastlayers.moe.fused_moe.triton.mxfp4 import wgmma
from fastlayers.moe.fused_moe.triton.mxfp4.blocks import blocks_of
from fastlayers.moe.fused_moe.triton.mxfp4.mma import (
    MAX_SCALE,
    ask,
    column_at,
    inner_bias,
    inner_columns,
    inner_of,
    multiply,
    multiply_held,
    place_of,
)
from fastlayers.moe.fused_moe.triton.mxfp4.plans import HopperLaunchConfig, plan_for, plans, steps_ahead
from fastlayers.moe.fused_moe.triton.mxfp4.rows import (
    fragment_columns,
    gather_kernel,
    rows_down_kernel,
    rows_gate_up_kernel,
)
from fastlayers.moe.fused_moe.triton.reduce import launch_reduce
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.runtime.launch import Part, kernel, side_by_side
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents


@triton.jit
def _tiles_of(ids_ptr, num_experts, ROWS: tl.constexpr, R: tl.constexpr):
    """Return a program's pair, its expert, whether there is one (else the first stands for it), and its first tile."""
    TILES: tl.constexpr = (ROWS + 16 * R - 1) // (16 * R)
    pair = tl.program_id(0) // TILES
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    here = (expert >= 0) & (expert < num_experts)
    return pair, tl.where(here, expert, 0), here, tl.program_id(0) % TILES * R


@triton.jit
def _first(pair):
    """Return in which of the numbers ``[1, 128]`` of a product the pair is: of its eight tokens the first is one."""
    e = tl.arange(0, 128)[None, :]
    return (e // 4 % 4 * 2 + e % 2 == 0) & (pair >= 0)


@triton.jit
def _store_inner(both, bias, out_ptr, tile, pair, alpha, limit, INNER: tl.constexpr, R: tl.constexpr):
    """Store what the activation makes of ``both`` ``[R, 128]`` in x's order."""
    column, f = inner_columns(tile), tl.arange(0, 64)[None, :]
    out = out_ptr + pair.to(tl.int64) * INNER + column // 32 * 32 + place_of(column)
    inner = cast(inner_of(both, bias, alpha, limit, R), out_ptr.dtype.element_ty)
    tl.store(out, inner, mask=(column < INNER) & (f // 4 % 4 * 2 + f % 2 == 0))


@kernel(do_not_specialize=("num_experts",))
def swizzled_gate_up_kernel(
    x_ptr, w_ptr, ws_ptr, bias_ptr, out_ptr, ids_ptr, num_experts, alpha, limit,
    PER_TOKEN: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a pair's token by R tiles of gate and up rows of its expert, apply the activation."""
    LAST: tl.constexpr = (2 * INNER + 15) // 16 - 1
    await_inputs(PDL)
    release_dependents(PDL)
    pair, expert, here, first = _tiles_of(ids_ptr, num_experts, 2 * INNER, R)
    if not here:
        return
    both = multiply(
        x_ptr, tl.zeros([1, 1, 128], tl.int32) + pair // PER_TOKEN,
        w_ptr + expert * ((2 * INNER + 63) // 64 * 16 * ((HIDDEN + 127) // 128 * 64)),
        ws_ptr + expert * ((2 * INNER + 255) // 256 * 8 * ((HIDDEN + 63) // 64 * 64)),
        tl.minimum(first + tl.arange(0, R)[:, None, None], LAST), HIDDEN, R, W, STAGES,
    )  # fmt: skip
    tile = first + tl.arange(0, R)[:, None]
    bias = inner_bias(bias_ptr + expert * 2 * INNER, tile, INNER, HAS_BIAS)
    _store_inner(both, bias, out_ptr, tile, pair, alpha, limit, INNER, R)


@kernel(do_not_specialize=("num_experts",))
def swizzled_down_kernel(
    a_ptr, w_ptr, ws_ptr, bias_ptr, weights_ptr, out_ptr, ids_ptr, num_experts,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a pair's inner row by R tiles of down rows, add the bias, weigh; fp32 rows of pairs."""
    LAST: tl.constexpr = (HIDDEN + 15) // 16 - 1
    await_inputs(PDL)
    release_dependents(PDL)
    pair, expert, here, first = _tiles_of(ids_ptr, num_experts, HIDDEN, R)
    if not here:
        return
    sums = multiply(
        a_ptr, tl.zeros([1, 1, 128], tl.int32) + pair,
        w_ptr + expert * ((HIDDEN + 63) // 64 * 16 * ((INNER + 127) // 128 * 64)),
        ws_ptr + expert * ((HIDDEN + 255) // 256 * 8 * ((INNER + 63) // 64 * 64)),
        tl.minimum(first + tl.arange(0, R)[:, None, None], LAST), INNER, R, W, STAGES,
    )  # fmt: skip
    e = tl.arange(0, 128)[None, :]
    row = (first + tl.arange(0, R)[:, None]) * 16 + e // 2 % 2 * 8 + e // 16
    bias = tl.zeros([R, 128], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * HIDDEN + row, mask=row < HIDDEN, other=0.0)
    weight = tl.load(weights_ptr + pair)
    tl.store(out_ptr + pair.to(tl.int64) * HIDDEN + row, (sums + bias) * weight, mask=_first(pair) & (row < HIDDEN))


@kernel(do_not_specialize=("num_experts",))
def held_gate_up_kernel(
    x_ptr, w_ptr, ws_ptr, bias_ptr, out_ptr, ids_ptr, num_experts, alpha, limit,
    PER_TOKEN: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``swizzled_gate_up_kernel``; codes of a warp's first AHEAD steps are asked for before the wait.

    Ids were there before the kernel in front, which orders the tokens, began.
    """
    LAST: tl.constexpr = (2 * INNER + 15) // 16 - 1
    pair, expert, here, first = _tiles_of(ids_ptr, num_experts, 2 * INNER, R)
    w_ptr += expert * ((2 * INNER + 63) // 64 * 16 * ((HIDDEN + 127) // 128 * 64))
    ws_ptr += expert * ((2 * INNER + 255) // 256 * 8 * ((HIDDEN + 63) // 64 * 64))
    tiles = tl.minimum(first + tl.arange(0, R)[:, None, None], LAST)
    words, scales, held, held_scales = ask(w_ptr, ws_ptr, tiles, HIDDEN, W, AHEAD)
    tile = first + tl.arange(0, R)[:, None]
    bias = inner_bias(bias_ptr + expert * 2 * INNER, tile, INNER, HAS_BIAS)
    await_inputs(PDL)
    release_dependents(PDL)
    if not here:
        return
    row = tl.zeros([1, 1, 128], tl.int32) + pair // PER_TOKEN
    both = multiply_held(words, scales, held, held_scales, x_ptr, row, w_ptr, HIDDEN, R, W, AHEAD)
    _store_inner(both, bias, out_ptr, tile, pair, alpha, limit, INNER, R)


@kernel(do_not_specialize=("num_experts",))
def held_down_kernel(
    a_ptr, w_ptr, ws_ptr, bias_ptr, weights_ptr, out_ptr, ids_ptr, num_experts,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``swizzled_down_kernel``; codes of a warp's first AHEAD steps are asked for while the first product runs."""
    LAST: tl.constexpr = (HIDDEN + 15) // 16 - 1
    pair, expert, here, first = _tiles_of(ids_ptr, num_experts, HIDDEN, R)
    w_ptr += expert * ((HIDDEN + 63) // 64 * 16 * ((INNER + 127) // 128 * 64))
    ws_ptr += expert * ((HIDDEN + 255) // 256 * 8 * ((INNER + 63) // 64 * 64))
    tiles = tl.minimum(first + tl.arange(0, R)[:, None, None], LAST)
    words, scales, held, held_scales = ask(w_ptr, ws_ptr, tiles, INNER, W, AHEAD)
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
    token = tl.zeros([1, 1, 128], tl.int32) + pair
    sums = multiply_held(words, scales, held, held_scales, a_ptr, token, w_ptr, INNER, R, W, AHEAD)
    tl.store(out_ptr + pair.to(tl.int64) * HIDDEN + row, (sums + bias) * weight, mask=_first(pair) & (row < HIDDEN))


@kernel
def order_kernel(x_ptr, out_ptr, x_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Write columns (q, h, t, c) of each block of 32 in the order (t, q, h, c)."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_inputs(PDL)
    release_dependents(PDL)
    x = tl.load(x_ptr + row * x_stride + column_at(place), mask=place < width)
    tl.store(out_ptr + row * width + place, x, mask=place < width)


def _as_words(part: Part) -> Part:
    """Return 16-bit values as words, which the products read."""
    return part._replace(numel=part.numel // 2, dtype=torch.int32)


@lru_cache(maxsize=1024)
def _plan_of(numbers: tuple[int, ...], hidden: int, inner: int, device: torch.device) -> HopperLaunchConfig:
    """Return the plan as it runs here."""
    return HopperLaunchConfig(*numbers).here(hidden, inner, as_device(device))


class _Launches(NamedTuple):
    """What computes tokens of one shape, and the memory that lies between its launches.

    ``align``: ``None`` where each pair is by itself, and where there are so many that they are aligned by themselves.
    ``order``: given the memory, the tokens, and with alignment apart its first and last part. ``direct``: a first
    product that takes the tokens' rows as they lie, at 16 bytes; then nothing is ordered.
    """

    size: int
    align: Callable[..., None] | None
    order: Callable[..., None]
    gate_up: Callable[..., None]
    down: Callable[..., None]
    reduce: Callable[..., None]
    direct: Callable[..., None] | None = None


@lru_cache(maxsize=4096)
def _launches(
    tokens: int, per_token: int, experts: int, hidden: int, inner: int, x_stride: int, alpha: float, limit: float,
    factor: float, bias13: bool, bias2: bool, dtype: torch.dtype, numbers: tuple[int, ...], device: torch.device,
) -> _Launches:  # fmt: skip
    """Return what launches the alignment, the order of the rows, both products and the sums."""
    plan = _plan_of(numbers, hidden, inner, device)
    make = wgmma.launches if plan.wgmma else _blocks if plan.tokens else _pairs
    size, partial, align, order, gate_up, down, *direct = make(
        tokens, per_token, experts, hidden, inner, x_stride, alpha, limit, bias13, bias2, dtype, plan, device
    )
    reduce = launch_reduce(tokens, hidden, per_token, experts, factor, 1, device, ((0, partial),))
    return _Launches(size, align, order, gate_up, down, reduce, *direct)


def _pairs(
    tokens: int, per_token: int, experts: int, hidden: int, inner: int, x_stride: int, alpha: float, limit: float,
    bias13: bool, bias2: bool, dtype: torch.dtype, plan: HopperLaunchConfig, device: torch.device,
) -> tuple[Any, ...]:  # fmt: skip
    """Return bytes, where the pairs' rows lie, and the launches for pairs by themselves; those of ``plan.held``."""
    launch, pairs, width = dependent_launch(device), tokens * per_token, min(1024, next_power_of_2(hidden))
    size, (ordered, rows, partial) = side_by_side(
        (tokens * hidden, dtype), (pairs * inner, dtype), (pairs * hidden, torch.float32)
    )
    into, out = ((0, _as_words(ordered)), (4, rows)), ((0, _as_words(rows)), (5, partial))
    sizes = {"HIDDEN": hidden, "INNER": inner} | launch
    first = sizes | {"PER_TOKEN": per_token, "HAS_BIAS": bias13, "R": plan.r1, "W": plan.w1, "num_warps": plan.w1}
    second = sizes | {"HAS_BIAS": bias2, "R": plan.r2, "W": plan.w2, "num_warps": plan.w2}
    grids = (pairs * cdiv(2 * inner, 16 * plan.r1),), (pairs * cdiv(hidden, 16 * plan.r2),)
    return (
        size, partial, None,
        order_kernel.at((tokens, cdiv(hidden, width)), x_stride, hidden, parts=((1, ordered),), BLOCK=width, **launch),
        held_gate_up_kernel.at(
            grids[0], experts, alpha, limit, parts=into, **first, AHEAD=steps_ahead(hidden, plan.w1, plan.s1)
        )
        if plan.held & 1
        else swizzled_gate_up_kernel.at(grids[0], experts, alpha, limit, parts=into, **first, STAGES=plan.s1),
        held_down_kernel.at(grids[1], experts, parts=out, **second, AHEAD=steps_ahead(inner, plan.w2, plan.s2))
        if plan.held & 2
        else swizzled_down_kernel.at(grids[1], experts, parts=out, **second, STAGES=plan.s2),
    )  # fmt: skip


def _blocks(
    tokens: int, per_token: int, experts: int, hidden: int, inner: int, x_stride: int, alpha: float, limit: float,
    bias13: bool, bias2: bool, dtype: torch.dtype, plan: HopperLaunchConfig, device: torch.device,
) -> tuple[Any, ...]:  # fmt: skip
    """Return bytes, where the pairs' rows lie, and the launches for blocks of pairs of one expert."""
    launch, pairs = dependent_launch(device), tokens * per_token
    columns = fragment_columns(hidden), fragment_columns(inner)
    of = blocks_of(
        gather_kernel, tokens, per_token, experts, hidden, inner, columns, x_stride, dtype, plan, device
    )  # fmt: skip
    sizes = {"HIDDEN": hidden, "INNER": inner, "TOKENS": plan.tokens} | launch
    first = sizes | {"HAS_BIAS": bias13, "R": plan.r1, "W": plan.w1, "AHEAD": plan.s1, "num_warps": plan.w1}
    second = sizes | {"HAS_BIAS": bias2, "R": plan.r2, "W": plan.w2, "AHEAD": plan.s2, "num_warps": plan.w2}
    into, out = (0, _as_words(of.ordered)), (0, _as_words(of.rows))
    return (
        of.size, of.partial, of.align, of.order,
        rows_gate_up_kernel.at(of.grids[0], pairs, alpha, limit, parts=(into, (4, of.rows), *of.first), **first),
        rows_down_kernel.at(of.grids[1], pairs, parts=(out, (5, of.partial), *of.second), **second),
    )  # fmt: skip


def _chunk(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, y: torch.Tensor, packed: SwizzledWeights,
    cfg: FusedMoEConfig, numbers: tuple[int, ...],
) -> None:  # fmt: skip
    """Compute ``y`` for at most MAX_TOKENS tokens."""
    plan = _plan_of(numbers, x.shape[1], cfg.intermediate_size, x.device)
    _run(_launches_of(x, ids, packed, cfg, numbers), cfg.num_experts, plan, x, weights, ids, y, packed)


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
    # Which pairs: their ids, or an alignment: part of the memory, or of its own. It lies behind the kernel in front of
    # the products, so that those read it before they wait.
    aligned: tuple[torch.Tensor, ...] = ()
    if how.align is not None:
        how.align(memory, ids)
    elif plan.tokens:
        aligned = align(ids, experts, plan.tokens)
    which = aligned if plan.tokens else (ids,)
    w13, w2, scales13, scales2 = packed.words if plan.wgmma else packed.rows
    if how.direct is not None and x.data_ptr() % 16 == 0:
        how.direct(memory, x, w13, scales13, weights if bias13 is None else bias13, *which)
    else:
        how.order(memory, x, *aligned[::2])
        how.gate_up(memory, w13, scales13, weights if bias13 is None else bias13, *which)
    how.down(memory, w2, scales2, weights if bias2 is None else bias2, weights, *which)
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
    """Four launches, five with alignment, and four again where the first product gathers its rows; one operator.

    Parameters
    ----------
    cfg : FusedMoEConfig
    config : mapping, optional
        What :meth:`candidates` gives; without it the plan depends on the number of tokens by a rule.
    """

    experts = _fused_moe

    def __init__(self, cfg: FusedMoEConfig, config: Mapping[str, int] | None = None) -> None:
        super().__init__(cfg)
        self.plan = None if config is None else HopperLaunchConfig.of(config)

    @staticmethod
    def candidates(cfg: FusedMoEConfig, num_tokens: int) -> list[dict[str, int]]:
        """Return the configurations to measure for ``num_tokens`` tokens, the rule's own first."""
        return [plan.config() for plan in plans(num_tokens, cfg.hidden_size, cfg.intermediate_size)]

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
        if self.plan is None:
            return plan_for(x.shape[0], self.cfg.hidden_size, self.cfg.intermediate_size).numbers()
        return self.plan.numbers()

    def bound(self, x: torch.Tensor, topk_ids: torch.Tensor, packed: SwizzledWeights) -> Callable[..., None]:
        """Return what computes a chunk."""
        numbers = tuple(self.numbers_for(x))
        how = _launches_of(x, topk_ids, packed, self.cfg, numbers)
        plan = _plan_of(numbers, x.shape[1], self.cfg.intermediate_size, x.device)
        return functools.partial(_run, how, self.cfg.num_experts, plan)
