"""ScatterRows over the axis' process group: NCCL or Gloo."""

from __future__ import annotations

import torch

from fastlayers.comm.collectives import collectives
from fastlayers.comm.scatter_rows.layer import ScatterRowsConfig


class CollectiveScatterRows:
    """Sums in the order and dtype of the group's backend."""

    def __init__(self, cfg: ScatterRowsConfig) -> None:
        self.over = collectives(cfg.axis)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a new tensor."""
        return self.over.reduce_scatter(x)
