"""Alignment in Triton without atomics in memory: one launch for few pairs, two for many.

A program has one expert or a few, adds up the padded counts of those before, and writes their runs: a running count
over the pairs keeps their order. Few pairs are counted by every program for itself; many are cut into splits, of which
a launch of its own counts every expert's pairs. Entries from num_post_pad on stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.align.layer import MoEAlignConfig, num_blocks
from fastlayers.operators import operator
from fastlayers.runtime.launch import Part, kernel
from fastlayers.triton_lang import await_inputs, dependent_launch, release_dependents

# Up to this many pairs every program counts for itself.
FEW = 1024
# Of a program where there are more: experts, splits of the pairs, and pairs in one go (counts must fit 16 bits).
EXPERTS, SPLITS = 4, 8
MIN_CHUNK, MAX_CHUNK = 512, 4096


# The number of pairs is not specialised on: no compilation after the warm-up.
@kernel(do_not_specialize=("num_pairs",))
def _few_kernel(
    ids_ptr, sorted_ptr, experts_ptr, total_ptr, num_pairs, num_experts,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    every, pair = tl.arange(0, BLOCK_E), tl.arange(0, CHUNK)
    await_inputs(PDL)
    release_dependents(PDL)
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
    # BLOCK_E is larger than num_experts: there is a bin for dropped pairs.
    ids = tl.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    counts = tl.where(every < num_experts, tl.histogram(ids, BLOCK_E), 0)
    blocks = (counts + (BLOCK - 1)) // BLOCK
    first = tl.sum(tl.where(every < expert, blocks, 0), axis=0)
    mine = tl.sum(tl.where(every == expert, blocks, 0), axis=0)
    count = tl.sum(tl.where(every == expert, counts, 0), axis=0)
    if expert == 0:
        tl.store(total_ptr, tl.sum(blocks, axis=0) * BLOCK)
    if count > 0:
        place = first * BLOCK
        match = (ids == expert).to(tl.int32)
        tl.store(sorted_ptr + place + tl.cumsum(match, axis=0) - 1, pair, mask=match == 1)
        place += count
        slot = tl.arange(0, BLOCK)
        tl.store(sorted_ptr + place + slot, num_pairs, mask=slot < mine * BLOCK - count)
        for start in range(0, mine, CHUNK):
            tl.store(experts_ptr + first + start + pair, expert, mask=start + pair < mine)


@triton.jit
def _marks(ids, first, num_experts, EXPERTS: tl.constexpr):
    """Return which pairs belong to the EXPERTS experts from ``first`` on, the bit of the expert, and 1 << bit.

    Sums of the latter are up to four counts at once, 16 bits each.
    """
    mine = (ids >= first) & (ids < first + EXPERTS) & (ids < num_experts)
    bit = tl.where(mine, (ids - first) * 16, 0).to(tl.int64)
    return mine, bit, mine.to(tl.int64) << bit


@triton.jit
def _unpacked(packed, EXPERTS: tl.constexpr):
    return ((packed >> (tl.arange(0, EXPERTS) * 16).to(packed.dtype)) & 0xFFFF).to(tl.int32)


@kernel(do_not_specialize=("num_pairs", "span"))
def _count_kernel(
    ids_ptr, counts_ptr, num_pairs, span, num_experts, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    first, split = tl.program_id(0) * EXPERTS, tl.program_id(1)
    pair, expert = tl.arange(0, CHUNK), first + tl.arange(0, EXPERTS)
    found = tl.zeros([EXPERTS], tl.int32)
    await_inputs(PDL)
    release_dependents(PDL)
    for start in range(split * span, tl.minimum((split + 1) * span, num_pairs), CHUNK):
        ids = tl.load(ids_ptr + start + pair, mask=start + pair < num_pairs, other=-1)
        _, _, marks = _marks(ids, first, num_experts, EXPERTS)
        found += _unpacked(tl.sum(marks, axis=0), EXPERTS)
    tl.store(counts_ptr + split * num_experts + expert, found, mask=expert < num_experts)


@kernel(do_not_specialize=("num_pairs", "span"))
def _place_kernel(
    ids_ptr, counts_ptr, sorted_ptr, experts_ptr, total_ptr, num_pairs, span, num_experts,
    EXPERTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    first, split = tl.program_id(0) * EXPERTS, tl.program_id(1)
    every, pair, expert = tl.arange(0, BLOCK_E), tl.arange(0, CHUNK), first + tl.arange(0, EXPERTS)
    await_inputs(PDL)
    release_dependents(PDL)
    part = tl.arange(0, SPLITS)[:, None]
    parts = tl.load(counts_ptr + part * num_experts + every[None, :], mask=(every < num_experts)[None, :], other=0)
    counts = tl.sum(parts, axis=0)
    earlier = tl.sum(tl.where(part < split, parts, 0), axis=0)
    here = tl.sum(tl.where(part == split, parts, 0), axis=0)
    blocks = (counts + (BLOCK - 1)) // BLOCK
    own = every[None, :] == expert[:, None]
    before = tl.sum(tl.where(every[None, :] < expert[:, None], blocks[None, :], 0), axis=1)
    mine = tl.sum(tl.where(own, blocks[None, :], 0), axis=1)
    count = tl.sum(tl.where(own, counts[None, :], 0), axis=1)
    place = before * BLOCK + tl.sum(tl.where(own, earlier[None, :], 0), axis=1)
    if (first == 0) & (split == 0):
        tl.store(total_ptr, tl.sum(blocks, axis=0) * BLOCK)
    if tl.sum(tl.where((every >= first) & (every < first + EXPERTS), here, 0), axis=0) > 0:
        for start in range(split * span, tl.minimum((split + 1) * span, num_pairs), CHUNK):
            ids = tl.load(ids_ptr + start + pair, mask=start + pair < num_pairs, other=-1)
            belongs, bit, marks = _marks(ids, first, num_experts, EXPERTS)
            rank = ((tl.cumsum(marks, axis=0) >> bit) & 0xFFFF).to(tl.int32) - 1
            for i in tl.static_range(EXPERTS):
                rank += tl.where(bit == 16 * i, tl.sum(tl.where(expert == first + i, place, 0), axis=0), 0)
            tl.store(sorted_ptr + rank, start + pair, mask=belongs)
            place += _unpacked(tl.sum(marks, axis=0), EXPERTS)
    if split == SPLITS - 1:
        slot = tl.arange(0, BLOCK)[None, :]
        unused = mine * BLOCK - count
        filler = tl.zeros([EXPERTS, BLOCK], tl.int32) + num_pairs
        tl.store(sorted_ptr + place[:, None] + slot, filler, mask=slot < unused[:, None])
    if split == 0:
        block = tl.arange(0, 128)[None, :]
        owner = tl.zeros([EXPERTS, 128], tl.int32) + expert[:, None]
        for start in range(0, tl.max(mine, axis=0), 128):
            tl.store(experts_ptr + before[:, None] + start + block, owner, mask=start + block < mine[:, None])


@lru_cache(maxsize=4096)
def launch_few(
    pairs: int, experts: int, block: int, device: torch.device, parts: tuple[tuple[int, Part], ...] | None = None
) -> Callable[..., None]:
    """Return what aligns at most :data:`FEW` pairs, called with the ids and what is written."""
    chunk = max(32, next_power_of_2(pairs))
    return _few_kernel.at(  # type: ignore[no-any-return]
        (experts,), pairs, experts, parts=parts, BLOCK=block, CHUNK=chunk, BLOCK_E=next_power_of_2(experts + 1),
        num_warps=max(1, chunk // 256), **dependent_launch(device),
    )  # fmt: skip


def _fake(topk_ids: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    blocks = num_blocks(topk_ids.numel(), experts, block)
    return topk_ids.new_empty(blocks * block), topk_ids.new_empty(blocks), topk_ids.new_empty(1)


def align(topk_ids: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group pairs by expert; ``block`` is a power of two. See :mod:`fastlayers.moe.align.layer`.

    For the experts' operators, which nobody looks into; others call :data:`moe_align`.
    """
    ids, pairs, device = topk_ids.contiguous(), topk_ids.numel(), topk_ids.device
    sorted_ids, expert_ids, total = _fake(ids, experts, block)
    if pairs == 0:
        return sorted_ids, expert_ids, total.zero_()
    if pairs <= FEW:
        launch_few(pairs, experts, block, device)(ids, sorted_ids, expert_ids, total)
        return sorted_ids, expert_ids, total
    chunk = max(MIN_CHUNK, min(MAX_CHUNK, next_power_of_2(cdiv(pairs, SPLITS))))
    span, warps = cdiv(cdiv(pairs, SPLITS), chunk) * chunk, min(8, chunk // 256)
    counts, grid = (
        ids.new_empty(SPLITS, experts),
        (cdiv(experts, EXPERTS), SPLITS),
    )
    launch = dependent_launch(device)
    _count_kernel[grid](
        ids, counts, pairs, span, experts, EXPERTS=EXPERTS, CHUNK=chunk, num_warps=warps, **launch,
    )  # fmt: skip
    _place_kernel[grid](
        ids, counts, sorted_ids, expert_ids, total, pairs, span, experts, EXPERTS=EXPERTS, SPLITS=SPLITS,
        BLOCK=block, CHUNK=chunk, BLOCK_E=next_power_of_2(experts + 1), num_warps=warps, **launch,
    )  # fmt: skip
    return sorted_ids, expert_ids, total


moe_align = operator("moe_align", _fake)(align)


class TritonMoEAlign:
    """One or two launches; the block must be a power of two."""

    def __init__(self, cfg: MoEAlignConfig) -> None:
        self.cfg = cfg

    def __call__(self, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``(sorted_ids, expert_ids, num_post_pad)``; nothing is written from num_post_pad on."""
        sorted_ids, expert_ids, total = moe_align(topk_ids, self.cfg.num_experts, self.cfg.block)
        return sorted_ids, expert_ids, total
