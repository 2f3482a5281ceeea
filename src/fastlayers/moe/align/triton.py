"""Alignment in Triton: one program an expert, no atomics in memory; one launch for few pairs, else two.

Every expert adds up the padded counts before it, and writes its own run: a running count over the pairs keeps their
order. Few pairs are counted by every program for itself, many by a launch of their own. Entries from num_post_pad on
stay as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.moe.align.layer import MoEAlignConfig, num_blocks
from fastlayers.operators import operator
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import await_inputs, dependent_launch, release_dependents

MAX_CHUNK = 4096


# The number of pairs is not specialised on: no compilation after the warm-up.
@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(ids_ptr, counts_ptr, num_pairs, CHUNK: tl.constexpr, PDL: tl.constexpr):
    expert = tl.program_id(0)
    pair = tl.arange(0, CHUNK)
    found = tl.zeros([CHUNK], tl.int32)
    await_inputs(PDL)
    release_dependents(PDL)
    for start in range(0, num_pairs, CHUNK):
        ids = tl.load(ids_ptr + start + pair, mask=start + pair < num_pairs, other=-1)
        found += (ids == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, axis=0))


@triton.jit(do_not_specialize=["num_pairs"])
def _place_kernel(
    ids_ptr, counts_ptr, sorted_ptr, experts_ptr, total_ptr, num_pairs, num_experts,
    COUNTED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    every, pair = tl.arange(0, BLOCK_E), tl.arange(0, CHUNK)
    await_inputs(PDL)
    release_dependents(PDL)
    if COUNTED:
        counts = tl.load(counts_ptr + every, mask=every < num_experts, other=0)
    else:
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
        for start in range(0, num_pairs, CHUNK):
            ids = tl.load(ids_ptr + start + pair, mask=start + pair < num_pairs, other=-1)
            match = (ids == expert).to(tl.int32)
            tl.store(sorted_ptr + place + tl.cumsum(match, axis=0) - 1, start + pair, mask=match == 1)
            place += tl.sum(match, axis=0)
        slot = tl.arange(0, BLOCK)
        tl.store(sorted_ptr + place + slot, num_pairs, mask=slot < mine * BLOCK - count)
        for start in range(0, mine, CHUNK):
            tl.store(experts_ptr + first + start + pair, expert, mask=start + pair < mine)


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
    chunk = max(32, min(MAX_CHUNK, triton.next_power_of_2(pairs)))
    warps, counted, launch = max(1, min(8, chunk // 256)), pairs > chunk, dependent_launch(ids)
    counts = total
    if counted:
        counts = torch.empty(experts, dtype=torch.int32, device=device)
        _count_kernel[(experts,)](ids, counts, pairs, CHUNK=chunk, num_warps=warps, **launch)
    _place_kernel[(experts,)](
        ids, counts, sorted_ids, expert_ids, total, pairs, experts, COUNTED=counted,
        BLOCK=block, CHUNK=chunk, BLOCK_E=triton.next_power_of_2(experts + 1), num_warps=warps, **launch,
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


COMPILE = [
    KernelBuild(
        "moe_align_count",
        _count_kernel,
        {"ids_ptr": "*i32", "counts_ptr": "*i32", "num_pairs": "i32"},
        {"CHUNK": MAX_CHUNK, "PDL": True},
        num_warps=8,
    )
] + [
    KernelBuild(
        f"moe_align_place_{experts}_{block}_{chunk}_{counted}",
        _place_kernel,
        {
            "ids_ptr": "*i32", "counts_ptr": "*i32", "sorted_ptr": "*i32", "experts_ptr": "*i32",
            "total_ptr": "*i32",
            "num_pairs": "i32", "num_experts": "i32",
        },
        {
            "COUNTED": counted, "BLOCK": block, "CHUNK": chunk, "BLOCK_E": triton.next_power_of_2(experts + 1),
            "PDL": True,
        },
        num_warps=max(1, min(8, chunk // 256)),
    )
    for experts, block, chunk, counted in (
        (257, 16, 32, False), (257, 16, 4096, False), (128, 128, 4096, True), (128, 16, 512, False),
    )
]  # fmt: skip
