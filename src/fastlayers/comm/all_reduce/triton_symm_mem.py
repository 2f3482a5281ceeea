"""AllReduce in one launch over symmetric memory: :class:`fastlayers.comm.triton_push.PushSum` without a norm."""

from __future__ import annotations

import torch

from fastlayers.comm.all_reduce.layer import AllReduceConfig
from fastlayers.errors import ArgumentError


class TritonAllReduce:
    """Pushes rows to all ranks and adds up what arrives; up to as many rows as the workspace has slots."""

    def __init__(self, cfg: AllReduceConfig) -> None:
        self.cfg, self.push = cfg, cfg.made()

    def __call__(self, x: torch.Tensor, part: int = 0) -> torch.Tensor:
        """Return a new tensor."""
        if x.shape[0] > self.push.slots:
            accepted = f"at most {self.push.slots}, for which the workspace was made"
            raise ArgumentError("AllReduce", "rows", x.shape[0], accepted)
        total: torch.Tensor = self.push(x, part=part)[1]
        return total
