"""The oracle of merge_state: fp32, one step a line."""

from __future__ import annotations

import torch

from fastlayers.attention.merge_state.layer import MergeStateConfig


class ReferenceMergeState:
    """See :mod:`fastlayers.attention.merge_state.layer` for the formula. Returns fp32 tensors."""

    def __init__(self, cfg: MergeStateConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o, lse)``."""
        lse = torch.stack([lse_a, lse_b]).double()
        lse[lse == torch.inf] = -torch.inf
        outputs = torch.stack([o_a, o_b]).double()
        outputs[lse == -torch.inf] = 0.0
        total = torch.logsumexp(lse, dim=0)
        weights = torch.exp(lse - total)
        weights[:, total == -torch.inf] = 0.0
        return (weights[..., None] * outputs).sum(0).float(), total.float()
