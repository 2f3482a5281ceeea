"""Linear's oracle: one fp32 product."""

from __future__ import annotations

import torch

from fastlayers.linear.dense.layer import LinearConfig


class ReferenceLinear:
    """See :mod:`fastlayers.linear.dense.layer` for the formula. Returns fp32 (fp64 for an fp64 layer)."""

    def __init__(self, cfg: LinearConfig) -> None:
        self.wide = torch.promote_types(cfg.dtype, torch.float32)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``y`` ``[..., N]``."""
        y = x.to(self.wide) @ weight.to(self.wide).T
        return y if bias is None else y + bias.to(self.wide)
