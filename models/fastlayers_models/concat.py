"""Linears of one input whose weights cannot be one: of several formats, or with scale blocks across a seam."""

from __future__ import annotations

import torch
from torch import nn


class ConcatLinears(nn.ModuleList):
    """Linears of one input; their outputs side by side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[T, sum of the output sizes]``."""
        return torch.cat([part(x) for part in self], -1)
