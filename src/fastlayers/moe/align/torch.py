"""Alignment in vectorised torch operations: one stable sort, no host sync, static shapes."""

from __future__ import annotations

import torch

from fastlayers.moe.align.layer import MoEAlignConfig, num_blocks


class TorchMoEAlign:
    """Any device."""

    def __init__(self, cfg: MoEAlignConfig) -> None:
        self.cfg = cfg

    def __call__(self, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``(sorted_ids, expert_ids, num_post_pad)``, unused entries filled with P and -1."""
        return align(topk_ids, self.cfg.num_experts, self.cfg.block)


def align(topk_ids: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group pairs by expert; see :mod:`fastlayers.moe.align.layer`."""
    device, pairs = topk_ids.device, topk_ids.numel()
    blocks = num_blocks(pairs, experts, block)
    ids = topk_ids.reshape(-1).long()
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)  # dropped pairs go last
    owner, order = ids.sort(stable=True)
    start = torch.searchsorted(owner, torch.arange(experts + 1, device=device))
    padded = (start.diff() + (block - 1)) // block * block
    end = padded.cumsum(0)
    first = torch.cat([end - padded, end.new_full((1,), blocks * block)])
    rank = torch.arange(pairs, device=device) - start[owner]
    # Dropped pairs all go to one place behind the end, which is cut off.
    place = torch.where(owner < experts, first[owner] + rank, blocks * block)
    sorted_ids = torch.full((blocks * block + 1,), pairs, dtype=torch.int32, device=device)
    sorted_ids = sorted_ids.scatter(0, place, order.int())[:-1]
    opened = torch.searchsorted(end, torch.arange(blocks, device=device) * block, right=True)
    return sorted_ids, torch.where(opened < experts, opened, -1).int(), end[-1:].int()
