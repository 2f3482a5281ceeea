"""ScatterRows's oracle: rows of all ranks added in fp32 in rank order, rounded once."""

from __future__ import annotations

import torch

from fastlayers.comm.collectives import collectives
from fastlayers.comm.scatter_rows.layer import ScatterRowsConfig
from fastlayers.comm.sum_norm.reference import sum_in_order


class ReferenceScatterRows:
    """fp32 inside."""

    def __init__(self, cfg: ScatterRowsConfig) -> None:
        self.cfg, self.over = cfg, collectives(cfg.axis)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a new tensor."""
        found = self.of_all(self.over.all_gather(x).view(self.cfg.axis.size, *x.shape))
        return self.over.own_slice(found)

    def of_all(self, parts: torch.Tensor) -> torch.Tensor:
        """Return what the ranks together get, of what they bring ``[n, T, H]``."""
        return sum_in_order(parts)
