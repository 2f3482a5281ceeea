"""GatherRows's oracle: rows side by side, then quantised where that is asked for."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.comm.collectives import collectives
from fastlayers.comm.gather_rows.layer import GatherRowsConfig
from fastlayers.comm.layouts import normed
from fastlayers.quant.coded_rows import CodedRows
from fastlayers.quant.group_quant.layer import quantize_groups
from fastlayers.quant.group_quant.reference import ReferenceGroupQuant


class ReferenceGatherRows:
    """What is computed is the quantisation alone; its codes are fp32 values."""

    def __init__(self, cfg: GatherRowsConfig) -> None:
        self.cfg, self.over = cfg, collectives(cfg.axis)

    def __call__(self, x: torch.Tensor, *, codes: str | None = None) -> Any:
        """Return new tensors."""
        if codes is not None:
            return CodedRows(*quantize_groups(self.over.all_gather(x), scale_layout=codes))
        return self.of_all(self.over.all_gather(x).view(self.cfg.axis.size, *x.shape))

    def normed(
        self, norm: Any, x: torch.Tensor, residual: torch.Tensor | None, *, codes: str | None = None
    ) -> tuple[Any, torch.Tensor]:
        """Return the rows of all ranks behind residual and norm, and the own sum."""
        y, h = normed(norm, x, residual)
        return self(y, codes=codes), h

    def of_all(self, parts: torch.Tensor) -> Any:
        """Return what all ranks get, of what they bring ``[n, T, H]``."""
        rows = parts.flatten(0, 1)
        return rows if self.cfg.payload == "plain" else ReferenceGroupQuant(self.cfg.quant)(rows)
