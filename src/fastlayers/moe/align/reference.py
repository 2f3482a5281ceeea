"""The oracle of the alignment: lists, one expert at a time."""

from __future__ import annotations

import torch

from fastlayers.moe.align.layer import MoEAlignConfig, num_blocks


class ReferenceMoEAlign:
    """See :mod:`fastlayers.moe.align.layer`."""

    def __init__(self, cfg: MoEAlignConfig) -> None:
        self.cfg = cfg

    def __call__(self, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``(sorted_ids, expert_ids, num_post_pad)``, unused entries filled with P and -1."""
        experts, block = self.cfg.num_experts, self.cfg.block
        ids = topk_ids.flatten().tolist()
        blocks = num_blocks(len(ids), experts, block)
        pairs: list[int] = []
        owners: list[int] = []
        for expert in range(experts):
            run = [pair for pair, owner in enumerate(ids) if owner == expert]
            run += [len(ids)] * (-len(run) % block)
            pairs += run
            owners += [expert] * (len(run) // block)
        used = len(pairs)
        pairs += [len(ids)] * (blocks * block - used)
        owners += [-1] * (blocks - len(owners))
        tensors = (torch.tensor(v, dtype=torch.int32, device=topk_ids.device) for v in (pairs, owners, [used]))
        sorted_ids, expert_ids, num_post_pad = tensors
        return sorted_ids, expert_ids, num_post_pad
