"""AllReduce in one launch over symmetric memory: :class:`fastlayers.comm.triton_push.PushSum` without a norm."""

from __future__ import annotations

import torch

from fastlayers.comm.all_reduce.layer import AllReduceConfig


class TritonAllReduce:
    """Pushes rows to all ranks and adds up what arrives; up to as many rows as the workspace has slots."""

    def __init__(self, cfg: AllReduceConfig) -> None:
        self.cfg, self.push = cfg, cfg.made()

    def __call__(self, x: torch.Tensor, part: int = 0) -> torch.Tensor:
        """Return a new tensor."""
        self.cfg.check_slots(x.shape[0], self.push.slots)
        total: torch.Tensor = self.push(x, part=part)[1]
        return total
