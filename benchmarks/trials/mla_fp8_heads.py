"""Try decode over an e4m3 cache with 64 or 128 heads in exact fp16, warp groups with a task each (Gluon, sm_90).

    python benchmarks/trials/mla_fp8_heads.py --out FILE        on a GPU: each variant checked, then all timed by turns
    python benchmarks/trials/mla_fp8_heads.py --small           without one: plan, twin and merging against the oracle

    program = (part of a request's cached rows, 64 of its query rows), four kinds of work at once:
      convert  4 warps   codes from memory into registers a tile ahead, to fp16, into a ring of tiles in shared memory
      score    4 warps   queries in fp16 once; each tile's products with them, softmax, weights into shared memory
      value    8 warps   64 x 512 sums in fp32, half of the latent columns a warp group: rescale, add weights · latents

Who reads a tile next is told by barriers in shared memory. Requests are cut by their lengths on the host, once a step;
the library's own reduction adds the parts up. Each check runs in a process of its own under a time limit, so that a
variant that fails or hangs loses itself alone.
"""

# ruff: noqa: RUF005
# Inside a Gluon kernel tuples grow in unrolled loops.
# mypy: disable-error-code="assignment, has-type, var-annotated"

from __future__ import annotations

import argparse
import heapq
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fastlayers.runtime.launch import kernel

RANK, ROPE, ROWS = 512, 64, 64
LOG2_E = 1.4426950408889634
LOWEST = gl.constexpr(-1e30)
LN_2 = gl.constexpr(0.6931471805599453)
QUERY_UNIT = gl.constexpr(2.0**-14)
WEIGHT_UNIT = gl.constexpr(2.0**14)
SMALLEST = gl.constexpr(2.0**-100)
# Four codes of a word, two and two.
CONVERT = gl.constexpr(
    "{.reg .b16 low, high; .reg .b32 first, last; mov.b32 {low, high}, $4;"
    " cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 last, high;"
    " mov.b32 {$0, $1}, first; mov.b32 {$2, $3}, last;}"
)


@gluon.jit
def _halves(words, ROWS_: gl.constexpr):
    """Return fp16 ``[ROWS_, 64]`` of words ``[ROWS_, 16]`` of four codes each."""
    v = gl.inline_asm_elementwise(
        CONVERT, "=h,=h,=h,=h,r", [words], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1
    )
    return gl.reshape(gl.join(gl.join(v[0], v[2]), gl.join(v[1], v[3])), [ROWS_, 64])


@gluon.jit
def _places(cache_ptr, page, key, page_stride, row_stride, word, PAGE: gl.constexpr):
    """Return where each key's first words lie."""
    rows = cache_ptr + page.to(gl.int64) * page_stride + (key % PAGE) * row_stride
    return rows[:, None] + word


@gluon.jit
def _convert(
    cache_ptr, table, low, high, page_stride, row_stride, latents, ropes, full, empty, PAGE: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """Bring codes from memory, a tile in registers while the one before is converted, piece by piece of 64 columns."""
    by: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, by))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, by))[None, :]
    key = low + row
    page = gl.load(table + key // PAGE, mask=key < high, other=0)
    places = _places(cache_ptr, page, key, page_stride, row_stride, word, PAGE)
    raw = ()
    for s in gl.static_range(9):
        raw = raw + (gl.load(places + s * 16, mask=(key < high)[:, None], other=0),)
    key += KEYS
    page = gl.load(table + key // PAGE, mask=key < high, other=0)
    for tile in range(gl.cdiv(high - low, KEYS)):
        places = _places(cache_ptr, page, key, page_stride, row_stride, word, PAGE)
        inside = (key < high)[:, None]
        key += KEYS
        page = gl.load(table + key // PAGE, mask=key < high, other=0)
        here = tile % STAGES
        mbarrier.wait(empty.index(here), (tile // STAGES & 1) ^ 1)
        latent, rope = latents.index(here), ropes.index(here)
        coming = ()
        for s in gl.static_range(9):
            # The words' registers are at once those of the next tile's.
            values = _halves(raw[s], KEYS)
            if s < 8:
                latent.slice(s * 64, 64, dim=1).store(values)
            else:
                rope.store(values)
            if not LATE:
                coming = coming + (gl.load(places + s * 16, mask=inside, other=0),)
        hopper.fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(here), count=1)
        if LATE:
            # The fence may wait for loads as well: behind it they hold nobody up, and have less time.
            for s in gl.static_range(9):
                coming = coming + (gl.load(places + s * 16, mask=inside, other=0),)
        raw = coming


@gluon.jit
def _queries(q, q_stride, q_latent, q_rope, BY: gl.constexpr):
    """Write 64 rows of queries as fp16 and return what each row is multiples of: a power of two."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, BY))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, BY))
    places = q + row[:, None] * q_stride + column[None, :]
    largest = gl.zeros([64], gl.float32, gl.SliceLayout(1, BY))
    for s in gl.static_range(9):
        largest = gl.maximum(largest, gl.max(gl.abs(gl.load(places + s * 64).to(gl.float32)), axis=1))
    bits = gl.maximum(largest, SMALLEST).to(gl.int32, bitcast=True) & 0x7F800000
    unit = bits.to(gl.float32, bitcast=True) * QUERY_UNIT
    times = (1.0 / unit)[:, None]
    # Read again behind a barrier: held, they would spill.
    gl.thread_barrier()
    for s in gl.static_range(9):
        values = (gl.load(places + s * 64).to(gl.float32) * times).to(gl.float16)
        if s < 8:
            q_latent.slice(s * 64, 64, dim=1).store(values)
        else:
            q_rope.store(values)
    return unit


@gluon.jit
def _product(q_latent, q_rope, latent, rope, KEYS: gl.constexpr, MMA: gl.constexpr):
    """Begin a tile's products with all queries."""
    nothing = gl.zeros([64, KEYS], gl.float32, MMA)
    score = hopper.warpgroup_mma(q_latent, latent.permute((1, 0)), nothing, use_acc=False, is_async=True)
    return hopper.warpgroup_mma(q_rope, rope.permute((1, 0)), score, is_async=True)


@gluon.jit
def _softmax(
    score, factor, highest, total, left, weights, decays, weights_full, weights_empty, tile, KEYS: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """Hand a tile's weights and the decay of earlier sums on; return the softmax state."""
    score = score * factor[:, None]
    if left < KEYS:
        key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, MMA))[None, :]
        score = gl.where(key < left, score, LOWEST * 2.0)
    new = gl.maximum(highest, gl.max(score, axis=1))
    weight = gl.exp2(score - new[:, None])
    decay = gl.exp2(highest - new)
    total = total * decay + gl.sum(weight, axis=1)
    mbarrier.wait(weights_empty, (tile & 1) ^ 1)
    weights.store((weight * WEIGHT_UNIT).to(gl.float16))
    decays.store(decay)
    hopper.fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(weights_full, count=1)
    return new, total


@gluon.jit
def _score(
    q, q_stride, lse_ptr, scale, value_scale, length, q_latent, q_rope, latents, ropes, weights, decays, full,
    weights_full, weights_empty, KEYS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Multiply queries by each tile's rows, make weights of the products."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    BY: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    unit = _queries(q, q_stride, q_latent, q_rope, BY)
    hopper.fence_async_shared()
    gl.thread_barrier()
    factor = gl.convert_layout(unit, gl.SliceLayout(1, MMA)) * scale
    highest = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, MMA))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, MMA))
    tiles = gl.cdiv(length, KEYS)
    if AHEAD:
        # The next tile's products run beside this one's softmax.
        mbarrier.wait(full.index(0), 0)
        coming = _product(q_latent, q_rope, latents.index(0), ropes.index(0), KEYS, MMA)
        score = hopper.warpgroup_mma_wait(0, deps=[coming])
        for tile in range(1, tiles):
            here = tile % STAGES
            mbarrier.wait(full.index(here), tile // STAGES & 1)
            coming = _product(q_latent, q_rope, latents.index(here), ropes.index(here), KEYS, MMA)
            highest, total = _softmax(
                score, factor, highest, total, KEYS, weights, decays, weights_full, weights_empty, tile - 1, KEYS, MMA
            )
            score = hopper.warpgroup_mma_wait(0, deps=[coming])
        highest, total = _softmax(
            score, factor, highest, total, length - (tiles - 1) * KEYS, weights, decays, weights_full, weights_empty,
            tiles - 1, KEYS, MMA,
        )  # fmt: skip
    else:
        for tile in range(tiles):
            here = tile % STAGES
            mbarrier.wait(full.index(here), tile // STAGES & 1)
            coming = _product(q_latent, q_rope, latents.index(here), ropes.index(here), KEYS, MMA)
            score = hopper.warpgroup_mma_wait(0, deps=[coming])
            highest, total = _softmax(
                score, factor, highest, total, length - tile * KEYS, weights, decays, weights_full, weights_empty, tile,
                KEYS, MMA,
            )  # fmt: skip
    # The last message: by what the sums are divided. The codes' scale is that of values, too.
    mbarrier.wait(weights_empty, (tiles & 1) ^ 1)
    decays.store(value_scale / (total * WEIGHT_UNIT))
    gl.thread_barrier()
    mbarrier.arrive(weights_full, count=1)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    gl.store(lse_ptr + row, (highest + gl.log2(total)) * LN_2)


@gluon.jit
def _value(
    o_ptr, length, latents, weights, decays, full, empty, weights_full, weights_empty, KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Add weights times latents, and write the sums."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16])
    acc = gl.zeros([64, 512], gl.float32, MMA)
    tiles = gl.cdiv(length, KEYS)
    for tile in range(tiles):
        here = tile % STAGES
        mbarrier.wait(full.index(here), tile // STAGES & 1)
        mbarrier.wait(weights_full, tile & 1)
        acc = acc * decays.load(gl.SliceLayout(1, MMA))[:, None]
        coming = hopper.warpgroup_mma(weights, latents.index(here), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[coming])
        gl.thread_barrier()
        mbarrier.arrive(weights_empty, count=1)
        mbarrier.arrive(empty.index(here), count=1)
    mbarrier.wait(weights_full, tiles & 1)
    acc = acc * decays.load(gl.SliceLayout(1, MMA))[:, None]
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))[:, None]
    column = gl.arange(0, 512, layout=gl.SliceLayout(0, MMA))[None, :]
    gl.store(o_ptr + row * 512 + column, acc.to(o_ptr.dtype.element_ty))


@kernel(do_not_specialize=("num_rows", "table_stride"), jit=gluon.jit)
def heads_kernel(
    q_ptr, cache_ptr, table_ptr, plan_ptr, o_ptr, lse_ptr, q_stride_t, q_stride_h, page_stride, row_stride,
    table_stride, scale, value_scale, num_rows, HEADS: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, LATE: gl.constexpr,
    SCORE_REGISTERS: gl.constexpr, CONVERT_REGISTERS: gl.constexpr,
):  # fmt: skip
    """``plan_ptr``: request, first and last cached row, and which part of its request, of each part.

    ``cache_ptr``, and its strides: words of four codes. Every part has a row, every request has one new token.
    """
    BLOCKS: gl.constexpr = HEADS // 64
    part, block = gl.program_id(0) // BLOCKS, gl.program_id(0) % BLOCKS
    request = gl.load(plan_ptr + part * 4)
    low, high = gl.load(plan_ptr + part * 4 + 1), gl.load(plan_ptr + part * 4 + 2)
    split = gl.load(plan_ptr + part * 4 + 3)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_latent = gl.allocate_shared_memory(gl.float16, [64, 512], swizzled)
    q_rope = gl.allocate_shared_memory(gl.float16, [64, 64], swizzled)
    latents = gl.allocate_shared_memory(gl.float16, [STAGES, KEYS, 512], swizzled)
    ropes = gl.allocate_shared_memory(gl.float16, [STAGES, KEYS, 64], swizzled)
    weights = gl.allocate_shared_memory(gl.float16, [64, KEYS], gl.NVMMASharedLayout(2 * KEYS, 16, 2))
    decays = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    weights_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    weights_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(weights_full, count=1)
    mbarrier.init(weights_empty, count=1)
    gl.thread_barrier()
    first = split.to(gl.int64) * num_rows + request.to(gl.int64) * HEADS + block * 64
    q = q_ptr + request.to(gl.int64) * q_stride_t + block * 64 * q_stride_h
    table = table_ptr + request.to(gl.int64) * table_stride
    length = high - low
    gl.warp_specialize(
        [
            (_value, (
                o_ptr + first * 512, length, latents, weights, decays, full, empty, weights_full, weights_empty, KEYS,
                STAGES,
            )),
            (_score, (
                q, q_stride_h, lse_ptr + first, scale, value_scale, length, q_latent, q_rope, latents, ropes, weights,
                decays, full, weights_full, weights_empty, KEYS, STAGES, AHEAD,
            )),
            (_convert, (
                cache_ptr, table, low, high, page_stride, row_stride, latents, ropes, full, empty, PAGE, KEYS, STAGES,
                LATE,
            )),
        ],
        [4, 4], [SCORE_REGISTERS, CONVERT_REGISTERS],
    )  # fmt: skip


# Rows a tile, tiles in the ring, whether products run a tile ahead, whether the next codes are asked for behind the
# hand-over; registers a thread that scores or converts has.
NAMES = ("KEYS", "STAGES", "AHEAD", "LATE", "SCORE_REGISTERS", "CONVERT_REGISTERS")
VARIANTS = {
    name: dict(zip(NAMES, values, strict=True))
    for name, values in {
        "64x2": (64, 2, 0, 0, 72, 112), "64x2 late": (64, 2, 0, 1, 72, 112), "32x4": (32, 4, 0, 0, 80, 88),
        "32x4 ahead": (32, 4, 1, 0, 96, 72),
    }.items()
}  # fmt: skip
VALUE_WARPS = 8
PLACES = 132
# What a program costs beside its rows, and what a part's results cost all programs, in rows of a program.
PROGRAM_ROWS, RESULT_ROWS, STEP = 128, 1.0, 64
MOST_PARTS = 64


def makespan(parts: Sequence[int], places: int) -> float:
    """Return when the last of these programs ends, longest first, each on the place that is free first."""
    busy = [0.0] * places
    for rows in sorted(parts, reverse=True):
        heapq.heapreplace(busy, busy[0] + rows + PROGRAM_ROWS)
    return max(busy)


def cut(lengths: Sequence[int], size: int) -> list[tuple[int, int, int, int]]:
    """Return parts of at most ``size`` rows: request, first row, the row behind the last, which of its request."""
    return [
        (request, low, min(low + size, length), number)
        for request, length in enumerate(lengths)
        for number, low in enumerate(range(0, length, size))
    ]


def plan(lengths: Sequence[int], heads: int, places: int = PLACES) -> list[tuple[int, int, int, int]]:
    """Return the parts of a step, longest first: of several sizes the one with which all end soonest."""
    blocks, longest = heads // ROWS, max(lengths)
    best: tuple[float, list[tuple[int, int, int, int]]] | None = None
    sizes = {-(-longest // count // STEP) * STEP or STEP for count in range(1, MOST_PARTS + 1)}
    for size in sorted(sizes, reverse=True):
        if -(-longest // size) > MOST_PARTS:
            continue
        parts = cut(lengths, size)
        split = len(parts) > len(lengths)
        cost = makespan([high - low for _, low, high, _ in parts for _ in range(blocks)], places)
        cost += split * (PROGRAM_ROWS + RESULT_ROWS * len(parts) * blocks)
        if best is None or cost < best[0]:
            best = cost, parts
    assert best is not None
    return sorted(best[1], key=lambda part: part[1] - part[2])


@dataclass
class Step:
    """What lengths settle, once a step: parts on the device, the most parts of a request, and of each row how many."""

    parts: torch.Tensor
    splits: int
    of_row: torch.Tensor

    @classmethod
    def of(cls, parts: list[tuple[int, int, int, int]], requests: int, heads: int, device: torch.device) -> Step:
        """Return the step of these parts."""
        counts = [0] * requests
        for request, *_ in parts:
            counts[request] += 1
        of_row = torch.tensor(counts, dtype=torch.int32)[:, None].expand(-1, heads).contiguous()
        return cls(torch.tensor(parts, dtype=torch.int32).to(device), max(counts), of_row.to(device))


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Step, float, float, torch.Tensor, torch.Tensor], None]


def through_kernel(
    variant: str, q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, step: Step, scale: float, k_scale: float,
    o: torch.Tensor, lse: torch.Tensor,
) -> None:  # fmt: skip
    """Launch a variant: softmax states of all parts, and their outputs."""
    words, heads = cache.view(torch.int32), q.shape[1]
    heads_kernel[(step.parts.shape[0] * (heads // ROWS),)](
        q, words, table, step.parts, o, lse, *q.stride()[:2], *words.stride()[:2], table.stride(0),
        scale * k_scale * LOG2_E, k_scale, q.shape[0] * heads, HEADS=heads, PAGE=cache.shape[1],
        **VARIANTS[variant], num_warps=VALUE_WARPS,
    )  # fmt: skip


def through_torch(
    variant: str, q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, step: Step, scale: float, k_scale: float,
    o: torch.Tensor, lse: torch.Tensor,
) -> None:  # fmt: skip
    """Do the same in torch: same parts, tiles, rounding and order of tiles; products sum in another order."""
    keys, page, heads = VARIANTS[variant]["KEYS"], cache.shape[1], q.shape[1]
    o, lse = o.view(-1, q.shape[0], heads, RANK), lse.view(-1, q.shape[0], heads)
    for request, low, high, split in step.parts.tolist():
        rows = q[request].float()
        unit = 2.0 ** rows.abs().amax(1).clamp_min(2.0**-100).log2().floor() * 2.0**-14
        queries, factor = (rows / unit[:, None]).half().float(), unit * (scale * k_scale * LOG2_E)
        highest, total = torch.full_like(unit, -1e30), torch.zeros_like(unit)
        acc = torch.zeros(heads, RANK, device=q.device)
        for first in range(low, high, keys):
            at = torch.arange(first, min(first + keys, high), device=q.device)
            latents = cache[table[request][at // page].long(), at % page].float()
            score = queries @ latents.T * factor[:, None]
            new = torch.maximum(highest, score.amax(1))
            weight, decay = torch.exp2(score - new[:, None]), torch.exp2(highest - new)
            total, highest = total * decay + weight.sum(1), new
            acc = acc * decay[:, None] + (weight * 2.0**14).half().float() @ latents[:, :RANK]
        o[split, request] = (acc * (k_scale / (total * 2.0**14))[:, None]).to(o.dtype)
        lse[split, request] = (highest + total.log2()) / LOG2_E


def decode(
    attend: Any, variant: str, q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, step: Step, scale: float,
    k_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return ``(o [T, H, 512], lse [T, H])``; parts, if requests have several, are added up by the library's kernel."""
    from fastlayers.attention.mla import triton as mla_triton

    (tokens, heads, _), rows = q.shape, q.shape[0] * q.shape[1]
    o, lse = q.new_empty(tokens, heads, RANK), q.new_empty(tokens, heads, dtype=torch.float32)
    if step.splits == 1:
        attend(variant, q, cache, table, step, scale, k_scale, o, lse)
        return o, lse
    partial_o = q.new_empty(step.splits, tokens, heads, RANK, dtype=torch.float32)
    partial_lse = q.new_empty(step.splits, tokens, heads, dtype=torch.float32)
    attend(variant, q, cache, table, step, scale, k_scale, partial_o, partial_lse)
    mla_triton._reduce_kernel[(rows,)](
        partial_o, partial_lse, step.of_row, o, lse, step.splits, rows, RANK=RANK, MAX_SPLITS=MOST_PARTS, BLOCK=8,
        OWN=True, PDL=False, num_warps=4,
    )  # fmt: skip
    return o, lse


def inputs(
    lengths: Sequence[int], heads: int, page: int, device: torch.device, stale: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, a cache whose pages are in no order, and the page table; ``stale``: other rows are NaN."""
    generator = torch.Generator(device).manual_seed(len(lengths) * 1000 + heads)
    most = -(-max(lengths) // page)
    table = 1 + torch.randperm(most * len(lengths), generator=generator, device=device).view(len(lengths), most)
    cache = torch.empty(1 + table.numel(), page, RANK + ROPE, dtype=torch.float8_e4m3fn, device=device)
    for at in range(0, cache.shape[0], 4096):
        piece = cache[at : at + 4096]
        drawn = torch.randn(piece.shape, generator=generator, device=device)
        piece.copy_(drawn + torch.linspace(-0.5, 0.5, RANK + ROPE, device=device))
    if stale:
        seen = torch.zeros(cache.shape[:2], dtype=torch.bool, device=device)
        for request, length in enumerate(lengths):
            at = torch.arange(length, device=device)
            seen[table[request][at // page], at % page] = True
        cache.view(torch.uint8)[~seen] = 255
    # Rows of different size; scores spread by about two.
    q = torch.randn(len(lengths), heads, RANK + ROPE, generator=generator, device=device)
    q *= 2.0 * torch.linspace(0.5, 1.5, heads, device=device)[:, None]
    return q.bfloat16(), cache, table.int()


def exact(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: Sequence[int], scale: float, k_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the oracle's results: one softmax a request, fp32."""
    outs, lses = [], []
    for request, length in enumerate(lengths):
        at = torch.arange(length, device=q.device)
        rows = cache[table[request][at // cache.shape[1]].long(), at % cache.shape[1]].double() * k_scale
        scores = scale * q[request].double() @ rows.T
        lses.append(scores.logsumexp(-1))
        outs.append(scores.softmax(-1) @ rows[:, :RANK])
    return torch.stack(outs).float(), torch.stack(lses).float()


SCALE = (128 + 64) ** -0.5 / 8
# Lengths, heads, rows a page, and the most rows a part (0: as planned).
CHECKS = (
    ((1, 63, 64, 65), 64, 64, 0), ((200, 31, 129), 128, 64, 0), ((330, 7), 128, 64, 64), ((257, 128, 500), 64, 64, 128),
    ((200, 31, 129), 128, 1, 64),
)  # fmt: skip
SMALL_CHECKS = (((1, 63, 65), 64, 16, 0), ((70, 7), 64, 1, 64), ((33,), 128, 64, 0))
LARGE_CHECKS = (((4096, 1000, 2049, 77), 128, 64, 0), ((16384,), 128, 64, 0), ((700,) * 140, 64, 64, 0))
# bf16 results: half a unit of eight bits, with room; softmax weights have eleven.
BOUND_O, BOUND_LSE = 4e-3, 1e-4


def check(
    variant: str, attend: Any, shapes: Any, device: torch.device, k_scales: Sequence[float] = (1.0, 0.5)
) -> list[dict[str, Any]]:
    """Return errors of a variant at each shape."""
    rows = []
    for lengths, heads, page, size in shapes:
        q, cache, table = inputs(lengths, heads, page, device, stale=True)
        step = Step.of(cut(lengths, size) if size else plan(lengths, heads), len(lengths), heads, device)
        for k_scale in k_scales:
            o, lse = decode(attend, variant, q, cache, table, step, SCALE, k_scale)
            again = o if device.type == "cpu" else decode(attend, variant, q, cache, table, step, SCALE, k_scale)[0]
            wanted, wanted_lse = exact(q, cache, table, lengths, SCALE, k_scale)
            error = float((o.float() - wanted).norm() / wanted.norm())
            off = float((lse - wanted_lse).abs().max())
            rows.append({
                "what": "check", "name": variant, "requests": len(lengths), "longest": max(lengths), "heads": heads,
                "page": page, "splits": step.splits, "k_scale": k_scale, "error": error, "lse_off": off,
                "right": error < BOUND_O and off < BOUND_LSE and torch.equal(o, again),
            })  # fmt: skip
    return rows


# Requests, drawn lengths, heads; 4,096 rows each in the mean. The contract's own point first.
POINTS = (
    (128, False, 128), (64, False, 128), (16, False, 128), (1, False, 128), (128, True, 128), (64, True, 128),
    (128, False, 64), (64, False, 64), (16, False, 64), (1, False, 64), (64, True, 64),
)  # fmt: skip


def peers(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: Sequence[int]) -> dict[str, Any]:
    """Return calls of FlashInfer's and our own Triton row, whose results are whole."""
    from dataclasses import replace

    from fastlayers.attention.meta import AttentionBatch, AttentionState
    from fastlayers.device import as_device
    from fastlayers.registry import registry
    from fastlayers.registry.spec import spec_of

    known = spec_of("mla").case("deepseek_e4m3").cfg
    cfg = replace(known, num_heads=q.shape[1], page_size=cache.shape[1], phase="decode", kv_dtype=cache.dtype)
    state = AttentionState(len(lengths), len(lengths), table.shape[1], cache.shape[1], q.device)
    prefix = tuple(length - 1 for length in lengths)
    meta = state.plan(AttentionBatch((1,) * len(lengths), prefix, table.tolist(), (0,) * len(lengths)))
    found: dict[str, Any] = {}
    for name in ("flashinfer_fa3", "triton"):
        row = registry("mla").named(name)
        if (why := row.why_not(cfg, as_device(q.device))) is not None:
            print(f"{name}: {why}", file=sys.stderr)
            continue
        found[name] = partial(row.load()(cfg).decode, q, cache, meta), cfg.softmax_scale
    return found


def timed(variants: Sequence[str], rounds: int, say: Callable[[dict[str, Any]], None]) -> None:
    """Time all by turns at each point, how far each is from the first beside it."""
    from fastlayers.tuning.bench import describe_run
    from fastlayers.tuning.clock import CudaClock

    sys.path.insert(0, str(Path(__file__).parents[1]))
    import performance

    device, clock = torch.device("cuda"), CudaClock("cuda")
    say(describe_run(device) | {"run": "latents of e4m3 with many heads, trial"})
    for requests, drawn, heads in POINTS:
        lengths = performance.drawn_lengths(requests, 4096) if drawn else (4096,) * requests
        q, cache, table = inputs(lengths, heads, 64, device)
        step = Step.of(plan(lengths, heads), requests, heads, device)
        others = peers(q, cache, table, lengths)
        scale = next((scale for _, scale in others.values()), SCALE)
        calls = {name: call for name, (call, _) in others.items()}
        for name in variants:
            calls[name] = partial(decode, through_kernel, name, q, cache, table, step, scale)
        ready, wanted, apart = {}, None, {}
        for name, call in calls.items():
            try:
                found = call()[0].float()
                wanted = found if wanted is None else wanted
                apart[name] = float((found - wanted).norm() / wanted.norm())
                ready[name] = clock.prepare(call)
            except Exception as error:  # one row less, the others stand
                say({"what": "failed", "name": name, "requests": requests, "heads": heads, "why": str(error)[:300]})
        for name, timing in clock.measure(ready, rounds).items():
            say({
                "what": "timed", "heads": heads, "requests": requests, "rows": 4096, "drawn": drawn, "name": name,
                "parts": step.parts.shape[0], "us": round(timing.us, 2), "spread": round(timing.spread_us, 2),
                "apart": apart[name],
            })  # fmt: skip
        del q, cache, table, calls, ready, others
        torch.cuda.empty_cache()


def stage(options: argparse.Namespace, say: Callable[[dict[str, Any]], None]) -> None:
    """Do one stage in this process, which ends by itself when its time is up, in the middle of a launch, too."""
    watchdog = threading.Timer(options.limit, os._exit, (3,))
    watchdog.daemon = True
    watchdog.start()
    device = torch.device("cuda")
    if options.stage == "check":
        for shape in CHECKS + LARGE_CHECKS:
            for row in check(options.variants[0], through_kernel, (shape,), device):
                say(row)
                if not row["right"]:
                    raise SystemExit(1)
    else:
        timed(options.variants, options.rounds, say)
    watchdog.cancel()


@torch.inference_mode()
def main() -> None:
    """Check each variant in a process of its own, then time those that are right, in one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON lines, each as it is known")
    parser.add_argument("--small", action="store_true", help="the twin on the CPU instead of the kernel")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit", type=float, default=45.0, help="seconds a stage may take")
    parser.add_argument("--stage", choices=("check", "time"), help=argparse.SUPPRESS)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    options = parser.parse_args()

    def say(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    if options.stage:
        return stage(options, say)
    if options.out:
        options.out.write_text("")
    if options.small:
        for name in options.variants:
            for row in check(name, through_torch, SMALL_CHECKS, torch.device("cpu"), (0.5,)):
                say(row)
        return None

    def child(what: str, limit: float, names: Sequence[str]) -> int:
        arguments = ["--stage", what, "--limit", str(limit), "--rounds", str(options.rounds), "--variants", *names]
        arguments += ["--out", str(options.out)] if options.out else []
        try:
            done = subprocess.run([sys.executable, __file__, *arguments], timeout=limit + 10, check=False)
        except subprocess.TimeoutExpired:
            return 3
        return done.returncode

    # All at once: most of it is compiling, and what is timed later finds the compiled kernels.
    with ThreadPoolExecutor() as pool:
        ends = list(pool.map(lambda name: child("check", options.limit, [name]), options.variants))
    right = []
    for name, ended in zip(options.variants, ends, strict=True):
        say({"what": "checked", "name": name, "ended": ended})
        right += [name] * (ended == 0)
    say({"what": "timing", "ended": child("time", options.limit, right) if right else "no variant is right"})
    return None


if __name__ == "__main__":
    main()
