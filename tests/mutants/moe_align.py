"""Planted bugs of the alignment."""

from __future__ import annotations

import torch

from fastlayers.moe.align.torch import TorchMoEAlign

Aligned = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Wraps(TorchMoEAlign):
    """Lets -1 wrap to the last expert."""

    def __call__(self, topk_ids: torch.Tensor) -> Aligned:
        """Index from the end, as a Python list would."""
        return super().__call__(torch.where(topk_ids == -1, self.cfg.num_experts - 1, topk_ids))


class Unstable(TorchMoEAlign):
    """Reverses the pairs inside an expert."""

    def __call__(self, topk_ids: torch.Tensor) -> Aligned:
        """Sort the flipped pairs."""
        sorted_ids, expert_ids, total = super().__call__(topk_ids.flatten().flip(0))
        pairs = topk_ids.numel()
        return torch.where(sorted_ids < pairs, pairs - 1 - sorted_ids, pairs), expert_ids, total


class UnpaddedTotal(TorchMoEAlign):
    """Counts pairs without their padding."""

    def __call__(self, topk_ids: torch.Tensor) -> Aligned:
        """Return the number of real pairs."""
        sorted_ids, expert_ids, _ = super().__call__(topk_ids)
        real = (topk_ids >= 0) & (topk_ids < self.cfg.num_experts)
        return sorted_ids, expert_ids, real.sum().int().view(1)


class ShiftedOwner(TorchMoEAlign):
    """Gives every block the next block's expert."""

    def __call__(self, topk_ids: torch.Tensor) -> Aligned:
        """Roll the owners."""
        sorted_ids, expert_ids, total = super().__call__(topk_ids)
        return sorted_ids, expert_ids.roll(-1), total


MUTANTS = {
    "minus_one_wraps": Wraps,
    "reversed_order": Unstable,
    "unpadded_total": UnpaddedTotal,
    "shifted_owner": ShiftedOwner,
}
