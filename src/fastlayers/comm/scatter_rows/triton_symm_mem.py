"""ScatterRows in one launch over symmetric memory: :class:`fastlayers.comm.triton_exchange.Exchange`."""

from __future__ import annotations

import torch

from fastlayers.comm.scatter_rows.layer import ScatterRowsConfig


class TritonScatterRows:
    """Each rank stores rows at their owner, which adds them up."""

    def __init__(self, cfg: ScatterRowsConfig) -> None:
        self.cfg, self.exchange = cfg, cfg.made()

    def __call__(self, x: torch.Tensor, part: int = 0) -> torch.Tensor:
        """Return a new tensor."""
        found: torch.Tensor = self.exchange.scatter(x, part=part)[0]
        return found
