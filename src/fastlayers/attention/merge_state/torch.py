"""merge_state in native torch operations."""

from __future__ import annotations

import torch

from fastlayers.attention.merge_state.layer import MergeStateConfig


class TorchMergeState:
    """Any device; fp32 inside, rounded once to the outputs' dtype."""

    def __init__(self, cfg: MergeStateConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o, lse)``, both new tensors."""
        lse_a = lse_a.masked_fill(lse_a == torch.inf, -torch.inf)
        lse_b = lse_b.masked_fill(lse_b == torch.inf, -torch.inf)
        largest = torch.maximum(lse_a, lse_b)
        # Where both are -inf any finite shift will do: both weights come out as 0.
        shift = largest.masked_fill(largest == -torch.inf, 0.0)
        weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
        total = weight_a + weight_b
        share = torch.where(total > 0, 1.0 / total, 0.0)
        # An output with weight 0 may hold anything, NaN included.
        part_a = (o_a.float() * (weight_a * share)[..., None]).masked_fill((lse_a == -torch.inf)[..., None], 0.0)
        part_b = (o_b.float() * (weight_b * share)[..., None]).masked_fill((lse_b == -torch.inf)[..., None], 0.0)
        return (part_a + part_b).to(o_a.dtype), shift + torch.log(total)
