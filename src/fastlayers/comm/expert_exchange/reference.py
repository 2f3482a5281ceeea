"""ExpertExchange's oracle: rows gathered, partial rows gathered and added in fp32 in rank order, rounded once."""

from __future__ import annotations

import torch

from fastlayers.comm.collectives import collectives
from fastlayers.comm.expert_exchange.collective import own_part
from fastlayers.comm.expert_exchange.layer import ExpertExchangeConfig, Tokens
from fastlayers.comm.sum_norm.reference import sum_in_order


class ReferenceExpertExchange:
    """fp32 inside."""

    def __init__(self, cfg: ExpertExchangeConfig) -> None:
        self.cfg, self.over, self.local = cfg, collectives(cfg.axis), cfg.num_experts // cfg.axis.size

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Tokens:
        """Return all rows, with the ids that are this rank's."""
        n = self.cfg.axis.size
        gathered = [self.over.all_gather(each).view(n, *each.shape) for each in (x, ids, weights)]
        return self.dispatch_all(*gathered)[self.cfg.axis.rank]

    def combine(self, partial: torch.Tensor, local_ids: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the own rows of the sum."""
        n, tokens = self.cfg.axis.size, ids.shape[0]
        everyones = self.over.all_gather(partial).view(n, n, tokens, -1)
        return self.combine_all(everyones, self.over.all_gather(ids).view(n, *ids.shape))[self.cfg.axis.rank]

    def dispatch_all(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> list[Tokens]:
        """Return what each rank gets of what all bring, ``[n, T, …]``."""
        flat = ids.flatten(0, 1), weights.flatten(0, 1)
        return [(x.flatten(0, 1), *own_part(*flat, rank, self.local)) for rank in range(self.cfg.axis.size)]

    def combine_all(self, partial: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        """Return each rank's result: ``partial [n, n, T, H]`` of each rank for each source, ``ids [n, T, K]``."""
        found = []
        for source in range(self.cfg.axis.size):
            owner = torch.where(ids[source] >= 0, ids[source] // self.local, -1)
            took = torch.stack([(owner == rank).any(-1) for rank in range(self.cfg.axis.size)])
            found.append(sum_in_order(torch.where(took[..., None], partial[:, source], 0)))
        return found
