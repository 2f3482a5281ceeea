"""GatherRows in one launch over symmetric memory: :class:`fastlayers.comm.triton_exchange.Exchange`."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.comm.gather_rows.layer import GatherRowsConfig


class TritonGatherRows:
    """Each rank stores its rows, quantised if that is asked for, at all others."""

    def __init__(self, cfg: GatherRowsConfig) -> None:
        self.cfg, self.exchange = cfg, cfg.made()

    def __call__(self, x: torch.Tensor, part: int = 0) -> Any:
        """Return views of the outbox: rows, or codes and scales."""
        if self.cfg.payload == "plain":
            return self.exchange.gather(x, part=part)[0]
        return self.exchange.gather_quantised(x, layout=self.cfg.scale_layout, part=part)[0]
