"""AllReduce's oracle: the rows of all ranks gathered, added in fp32 in rank order, rounded once."""

from __future__ import annotations

import torch

from fastlayers.comm.all_reduce.layer import AllReduceConfig
from fastlayers.comm.collectives import collectives
from fastlayers.comm.sum_norm.reference import sum_in_order


class ReferenceAllReduce:
    """fp32 inside."""

    def __init__(self, cfg: AllReduceConfig) -> None:
        self.cfg, self.over = cfg, collectives(cfg.axis)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a new tensor like ``x``."""
        return sum_in_order(self.over.all_gather(x).view(self.cfg.axis.size, *x.shape))

    def of_all(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the sum of what all ranks bring, ``[n, T, H]``."""
        return sum_in_order(parts)
