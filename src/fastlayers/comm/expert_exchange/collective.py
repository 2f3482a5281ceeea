"""ExpertExchange by all-gather and reduce-scatter over the axis' process group: every row goes everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastlayers.comm.collectives import collectives
from fastlayers.comm.expert_exchange.layer import ExpertExchangeConfig, Tokens


def own_part(ids: torch.Tensor, weights: torch.Tensor, rank: int, local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return local ids and weights of one rank: -1 and 0 where another rank has the expert."""
    mine = (ids >= rank * local) & (ids < (rank + 1) * local)
    return torch.where(mine, ids - rank * local, -1), torch.where(mine, weights, 0.0)


class CollectiveExpertExchange:
    """Sums in the order and dtype of the group's backend."""

    def __init__(self, cfg: ExpertExchangeConfig) -> None:
        self.over, self.local = collectives(cfg.axis), cfg.num_experts // cfg.axis.size

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, sizes: Sequence[int] | None = None
    ) -> Tokens:
        """Return all rows, with the ids that are this rank's; ``sizes``: tokens of each rank, where they differ."""
        rows, everyones, theirs = (
            self.over.all_gather(each) if sizes is None else self.over.all_gather_variable(each, sizes)
            for each in (x, ids, weights)
        )
        return rows, *own_part(everyones, theirs, self.over.rank, self.local)

    def combine(
        self, partial: torch.Tensor, local_ids: torch.Tensor, ids: torch.Tensor, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return the own rows of the sum."""
        took = (local_ids >= 0).any(-1, keepdim=True)
        masked = torch.where(took, partial, 0)
        return self.over.reduce_scatter(masked) if sizes is None else self.over.reduce_scatter_variable(masked, sizes)
