"""ExpertExchange over symmetric memory: :class:`fastlayers.comm.triton_tokens.TokenExchange`."""

from __future__ import annotations

import torch

from fastlayers.comm.expert_exchange.layer import ExpertExchangeConfig, Tokens


class TritonExpertExchange:
    """A token is stored once on each rank that has one of its experts."""

    def __init__(self, cfg: ExpertExchangeConfig) -> None:
        self.cfg, self.tokens = cfg, cfg.made()

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, part: int = 0) -> Tokens:
        """Return views that hold until the next dispatch."""
        found: Tokens = self.tokens.dispatch(x, ids, weights, part=part)
        return found

    def combine(self, partial: torch.Tensor, local_ids: torch.Tensor, ids: torch.Tensor, part: int = 0) -> torch.Tensor:
        """Return a new tensor."""
        found: torch.Tensor = self.tokens.combine(partial, local_ids, ids, part=part)
        return found
