"""AllReduce over the axis' process group: NCCL or Gloo."""

from __future__ import annotations

import torch

from fastlayers.comm.all_reduce.layer import AllReduceConfig
from fastlayers.comm.collectives import collectives


class CollectiveAllReduce:
    """Sums in the order and dtype of the group's backend; overwrites its input."""

    def __init__(self, cfg: AllReduceConfig) -> None:
        self.over = collectives(cfg.axis)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        return self.over.all_reduce_(x)
