"""GatherRows over the axis' process group: NCCL or Gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastlayers.comm.collectives import collectives
from fastlayers.comm.gather_rows.layer import GatherRowsConfig
from fastlayers.quant.group_quant.layer import GROUP_QUANT, empty_scales
from fastlayers.registry import Ladder


class CollectiveGatherRows:
    """Allocates the result; quantises before it gathers, by what the registry of that layer chooses."""

    def __init__(self, cfg: GatherRowsConfig) -> None:
        self.cfg, self.over = cfg, collectives(cfg.axis)
        self._quants: dict[str, Ladder] = {}

    def __call__(self, x: torch.Tensor, sizes: Sequence[int] | None = None) -> Any:
        """Return a new tensor, or codes and scales; ``sizes``: rows of each rank, where they are not equal."""
        if self.cfg.payload == "plain":
            return self._gather(x, sizes)
        quant = self._quants.get(x.device.type)
        if quant is None:
            quant = self._quants[x.device.type] = GROUP_QUANT.choose(self.cfg.quant, x.device).build()
        codes, scales = quant.pick(x.shape[0])(x)
        # As bytes: not every backend carries e4m3.
        codes = self._gather(codes.view(torch.uint8), sizes).view(codes.dtype)
        scales = self._gather(scales.contiguous(), sizes)
        found = empty_scales(x, scales.shape[0], scales.shape[1], self.cfg.scale_layout)
        return codes, found.copy_(scales)

    def _gather(self, x: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
        return self.over.all_gather(x) if sizes is None else self.over.all_gather_variable(x, sizes)
