"""The slots of experts, and their counts, in one launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton.language as tl

from fastlayers.integers import cdiv
from fastlayers.operators import operator
from fastlayers.runtime.launch import kernel

BLOCK = 256


# Pairs differ from step to step: no compilation after the warm-up.
@kernel(do_not_specialize=("num_pairs",))
def _slots_kernel(
    ids_ptr, positions_ptr, replicas_ptr, count_ptr, load_ptr, slots_ptr, num_pairs, num_experts, top_k, most,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < num_pairs
    expert = tl.load(ids_ptr + pair, mask=inside, other=-1)
    real = (expert >= 0) & (expert < num_experts)
    expert = tl.where(real, expert, 0)
    position = tl.load(positions_ptr + pair // top_k, mask=inside, other=0)
    which = (position % tl.load(count_ptr + expert)).to(tl.int32)
    slot = tl.load(replicas_ptr + expert * most + which)
    tl.store(slots_ptr + pair, tl.where(real, slot, -1), mask=inside)
    # Integers: the order of the additions is nobody's business.
    tl.atomic_add(load_ptr + expert, 1, mask=real, sem="relaxed")


@lru_cache
def _bound(device: torch.device) -> Callable[..., None]:
    return _slots_kernel.bind(BLOCK=BLOCK, num_warps=4)  # type: ignore[no-any-return]


def _empty(topk_ids: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(topk_ids, memory_format=torch.contiguous_format)


@operator("expert_slots", _empty, writes=("load",))
def expert_slots(
    topk_ids: torch.Tensor, positions: torch.Tensor, replicas: torch.Tensor, count: torch.Tensor, load: torch.Tensor
) -> torch.Tensor:
    """Return the slots ``[T, k]`` of experts; adds to ``load``. See :mod:`fastlayers.moe.placement.table`."""
    ids, slots, pairs = topk_ids.contiguous(), _empty(topk_ids), topk_ids.numel()
    if pairs:
        experts, most = replicas.shape
        grid, at = (cdiv(pairs, BLOCK),), positions.contiguous()
        _bound(ids.device)(grid, ids, at, replicas, count, load, slots, pairs, experts, ids.shape[1], most)
    return slots


class TritonSlots:
    """One launch."""

    def __init__(self, cfg: object) -> None:
        pass

    def __call__(
        self, topk_ids: torch.Tensor, positions: torch.Tensor, replicas: torch.Tensor, count: torch.Tensor,
        load: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return the slots ``[T, k]``; adds to ``load``."""
        return expert_slots(topk_ids, positions, replicas, count, load)
