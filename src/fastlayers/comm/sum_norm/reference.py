"""SumNorm's oracle: the rows of all ranks gathered, added in fp32 in rank order, rounded once."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.comm.collectives import collectives
from fastlayers.comm.sum_norm.layer import SumNormConfig
from fastlayers.quant.coded_rows import CodedRows
from fastlayers.quant.group_quant.layer import quantize_groups


def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``parts [n, T, H]`` over ranks: fp32, in rank order, rounded once."""
    total = torch.zeros(parts.shape[1:], dtype=torch.float32, device=parts.device)
    for part in parts:
        total = total + part.float()
    return total.to(parts.dtype)


class ReferenceSumNorm:
    """fp32 inside, one step a line."""

    def __init__(self, cfg: SumNormConfig) -> None:
        self.cfg, self.over = cfg, collectives(cfg.axis)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, *, codes: str | None = None
    ) -> tuple[Any, torch.Tensor]:
        """Return ``(y, h)`` in the model's dtype."""
        parts = self.over.all_gather(x).view(self.cfg.axis.size, *x.shape)
        if not self.cfg.spread:
            return self.of_all(parts, residual, weight)
        y, h = self.of_all(parts, None if residual is None else self.over.all_gather(residual), weight)
        rows = y if codes is None else CodedRows(*quantize_groups(y, scale_layout=codes))
        return rows, self.over.own_slice(h)

    def of_all(
        self, parts: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(y, h)`` for what all ranks bring, ``[n, T, H]``."""
        h = sum_in_order(parts)
        if residual is not None:
            h = (h.float() + residual.float()).to(h.dtype)
        wide = h.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.cfg.eps)
        if self.cfg.rounding == "cast_then_scale":
            y = weight.float() * unit.to(h.dtype).float()
        elif self.cfg.rounding == "scale_then_cast":
            y = weight.float() * unit
        else:
            y = (1.0 + weight.float()) * unit
        return y.to(h.dtype), h
