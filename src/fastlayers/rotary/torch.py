"""Rotary embedding in native torch operations: fp32 inside, one rounding."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional as F

from fastlayers.rotary.layer import RotaryConfig


class TorchRotary:
    """Any device; traceable."""

    def __init__(self, cfg: RotaryConfig) -> None:
        self.dim, self.interleaved_in, self.interleaved_out = (
            cfg.rotary_dim,
            cfg.interleaved_in,
            cfg.interleaved_out,
        )
        self.axes = cfg.axes()

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(q, k)`` rotated, new tensors of the inputs' dtype."""
        c, s = self.gather(cos, positions), self.gather(sin, positions)
        return self.rotate(q, c, s), None if k is None else self.rotate(k, c, s)

    def gather(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the table's rows ``[T, 1, d/2]``, with MRoPE each frequency's of its own axis."""
        rows = F.embedding(positions, table)  # unlike an index, it takes no negative one for the table's end
        if positions.dim() == 1:
            return rows.unsqueeze(1)
        # [3, T, d/2]
        picked = [rows[axis, :, start:stop] for axis, start, stop in self._runs()]
        return torch.cat(picked, -1).unsqueeze(1)

    def _runs(self) -> list[tuple[int, int, int]]:
        """Return (axis, start, stop) of each run of frequencies with the same axis."""
        axes = self.axes
        edges = [0, *(f for f in range(1, len(axes)) if axes[f] != axes[f - 1]), len(axes)]
        return [(axes[a], a, b) for a, b in pairwise(edges)]

    def rotate(self, x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """Return ``x`` ``[T, H, D]`` turned by what :meth:`gather` returned for its tokens, rounded once."""
        rotating = x[..., : self.dim].float()
        if self.interleaved_in:
            a, b = rotating[..., 0::2], rotating[..., 1::2]
        else:
            a, b = rotating.chunk(2, -1)
        first, second = a * c - b * s, b * c + a * s
        if self.interleaved_out:
            rotated = torch.stack((first, second), -1).flatten(-2).to(x.dtype)
        else:
            rotated = torch.cat((first, second), -1).to(x.dtype)
        return rotated if self.dim == x.shape[-1] else torch.cat((rotated, x[..., self.dim :]), -1)
