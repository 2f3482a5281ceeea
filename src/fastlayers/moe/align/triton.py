"""Alignment in Triton without atomics in memory: one launch for few pairs, two for many.

Few pairs: one program an expert. Each counts all pairs, adds up the padded counts before its own, and writes its run: a
running count over the pairs keeps their order. Many pairs are cut into parts: one launch counts every part's pairs of
every expert, and in the next a program places a part's pairs. A pair's place is where its expert's run begins, plus
the expert's pairs in the parts before, plus those before it in its own part. Entries from num_post_pad on stay as they
are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.moe.align.layer import MoEAlignConfig, num_blocks
from fastlayers.operators import operator
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import await_inputs, dependent_launch, release_dependents

FEW = 1024
# Pairs that are ranked among each other at a time.
STEP = 256


@triton.jit(do_not_specialize=["num_pairs"])
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
def _experts_of(ids_ptr, pair, num_pairs, num_experts):
    """Return the pairs' experts, ``num_experts`` for dropped ones."""
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
    return tl.where((ids >= 0) & (ids < num_experts), ids, num_experts)


@triton.jit(do_not_specialize=["num_pairs", "span"])
def _count_kernel(
    ids_ptr, counts_ptr, num_pairs, span, num_experts,
    STEP: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    counts = tl.zeros([BLOCK_E], tl.int32)
    await_inputs(PDL)
    release_dependents(PDL)
    for start in range(part * span, tl.minimum((part + 1) * span, num_pairs), STEP):
        counts += tl.histogram(_experts_of(ids_ptr, start + tl.arange(0, STEP), num_pairs, num_experts), BLOCK_E)
    tl.store(counts_ptr + part * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit
def _rank(ids_ptr, ids, start, num_pairs, num_experts, STEP: tl.constexpr):
    """Return how many of the STEP pairs from ``start`` on are before each pair and of its expert."""
    index, rank = tl.arange(0, STEP), tl.zeros([STEP], tl.int32)
    for first in tl.static_range(0, STEP, 32):
        other = first + tl.arange(0, 32)
        others = _experts_of(ids_ptr, start + other, num_pairs, num_experts)
        before = (ids[:, None] == others[None, :]) & (other[None, :] < index[:, None])
        rank += tl.sum(before.to(tl.int32), axis=1)
    return rank


@triton.jit(do_not_specialize=["num_pairs", "span", "capacity"])
def _many_kernel(
    ids_ptr, counts_ptr, sorted_ptr, experts_ptr, total_ptr, num_pairs, span, capacity, num_experts,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part, every = tl.program_id(0), tl.arange(0, BLOCK_E)
    await_inputs(PDL)
    release_dependents(PDL)
    counts, place = tl.zeros([BLOCK_E], tl.int32), tl.zeros([BLOCK_E], tl.int32)
    for first in tl.static_range(0, PARTS, 16):
        other = first + tl.arange(0, 16)[:, None]
        there = tl.load(counts_ptr + other * BLOCK_E + every[None, :])
        counts += tl.sum(there, axis=0)
        place += tl.sum(tl.where(other < part, there, 0), axis=0)
    counts = tl.where(every < num_experts, counts, 0)
    blocks = (counts + (BLOCK - 1)) // BLOCK
    end = tl.cumsum(blocks, axis=0)
    begin = (end - blocks) * BLOCK
    place += begin
    used = tl.sum(blocks, axis=0)
    if part == 0:
        tl.store(total_ptr, used * BLOCK)
    index = tl.arange(0, STEP)
    for start in range(part * span, tl.minimum((part + 1) * span, num_pairs), STEP):
        ids = _experts_of(ids_ptr, start + index, num_pairs, num_experts)
        target = tl.gather(place, ids, 0) + _rank(ids_ptr, ids, start, num_pairs, num_experts, STEP)
        tl.store(sorted_ptr + target, start + index, mask=ids < num_experts)
        place += tl.histogram(ids, BLOCK_E)
    # Every program names the experts of some blocks, and fills what they leave empty.
    share, slot = tl.cdiv(capacity, PARTS), tl.arange(0, BLOCK)[None, :]
    for start in range(part * share, tl.minimum((part + 1) * share, used), 32):
        block = start + tl.arange(0, 32)
        inside = block < tl.minimum((part + 1) * share, used)
        owner = tl.minimum(tl.sum((end[None, :] <= block[:, None]).to(tl.int32), axis=1), num_experts)
        tl.store(experts_ptr + block, owner, mask=inside)
        empty = tl.gather(begin + counts, owner, 0)[:, None] <= block[:, None] * BLOCK + slot
        filler = tl.zeros([32, BLOCK], tl.int32) + num_pairs
        tl.store(sorted_ptr + block[:, None] * BLOCK + slot, filler, mask=inside[:, None] & empty)


def _fake(topk_ids: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    blocks = num_blocks(topk_ids.numel(), experts, block)
    return topk_ids.new_empty(blocks * block), topk_ids.new_empty(blocks), topk_ids.new_empty(1)


@operator("moe_align(Tensor topk_ids, int num_experts, int block) -> (Tensor, Tensor, Tensor)", _fake)
def moe_align(topk_ids: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group pairs by expert; ``block`` is a power of two. See :mod:`fastlayers.moe.align.layer`."""
    ids, pairs, device = topk_ids.contiguous(), topk_ids.numel(), topk_ids.device
    blocks = num_blocks(pairs, experts, block)
    sorted_ids = torch.empty(blocks * block, dtype=torch.int32, device=device)
    expert_ids = torch.empty(blocks, dtype=torch.int32, device=device)
    if pairs == 0:
        return sorted_ids, expert_ids, torch.zeros(1, dtype=torch.int32, device=device)
    total = torch.empty(1, dtype=torch.int32, device=device)
    block_e, launch = triton.next_power_of_2(experts + 1), dependent_launch(ids)
    if pairs <= FEW:
        chunk = max(32, triton.next_power_of_2(pairs))
        _few_kernel[(experts,)](
            ids, sorted_ids, expert_ids, total, pairs, experts,
            BLOCK=block, CHUNK=chunk, BLOCK_E=block_e, num_warps=max(1, chunk // 256), **launch,
        )  # fmt: skip
        return sorted_ids, expert_ids, total
    parts = 16 if pairs <= 16 * 2 * STEP else 64
    span = triton.cdiv(triton.cdiv(pairs, parts), STEP) * STEP
    counts = torch.empty(parts, block_e, dtype=torch.int32, device=device)
    _count_kernel[(parts,)](ids, counts, pairs, span, experts, STEP=STEP, BLOCK_E=block_e, num_warps=4, **launch)
    _many_kernel[(parts,)](
        ids, counts, sorted_ids, expert_ids, total, pairs, span, blocks, experts,
        PARTS=parts, BLOCK=block, STEP=STEP, BLOCK_E=block_e, num_warps=8, **launch,
    )  # fmt: skip
    return sorted_ids, expert_ids, total


class TritonMoEAlign:
    """One or two launches; the block must be a power of two."""

    def __init__(self, cfg: MoEAlignConfig) -> None:
        self.cfg = cfg

    def __call__(self, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``(sorted_ids, expert_ids, num_post_pad)``; nothing is written from num_post_pad on."""
        sorted_ids, expert_ids, total = moe_align(topk_ids, self.cfg.num_experts, self.cfg.block)
        return sorted_ids, expert_ids, total


_POINTERS = dict.fromkeys(("ids_ptr", "counts_ptr", "sorted_ptr", "experts_ptr", "total_ptr"), "*i32")
COMPILE = [
    KernelBuild(
        f"moe_align_few_{experts}_{block}_{chunk}",
        _few_kernel,
        {**_POINTERS, "num_pairs": "i32", "num_experts": "i32"},
        {"BLOCK": block, "CHUNK": chunk, "BLOCK_E": triton.next_power_of_2(experts + 1), "PDL": True},
        num_warps=max(1, chunk // 256),
    )
    for experts, block, chunk in ((257, 16, 32), (257, 16, 1024), (128, 16, 512))
]
COMPILE += [
    KernelBuild(
        f"moe_align_count_{experts}",
        _count_kernel,
        {**_POINTERS, "num_pairs": "i32", "span": "i32", "num_experts": "i32"},
        {"STEP": STEP, "BLOCK_E": triton.next_power_of_2(experts + 1), "PDL": True},
        num_warps=4,
    )
    for experts in (32, 257)
]
COMPILE += [
    KernelBuild(
        f"moe_align_many_{experts}_{block}_{parts}",
        _many_kernel,
        {**_POINTERS, "num_pairs": "i32", "span": "i32", "capacity": "i32", "num_experts": "i32"},
        {
            "PARTS": parts, "BLOCK": block, "STEP": STEP, "BLOCK_E": triton.next_power_of_2(experts + 1), "PDL": True,
        },
        num_warps=8,
    )
    for experts, block, parts in ((257, 16, 16), (257, 128, 64), (128, 128, 64), (32, 64, 16))
]  # fmt: skip
