"""Rotary embedding's oracle: one frequency at a time, fp32."""

from __future__ import annotations

import torch

from fastlayers.rotary.layer import RotaryConfig


class ReferenceRotary:
    """See :mod:`fastlayers.rotary.layer` for the formula. Returns fp32 tensors."""

    def __init__(self, cfg: RotaryConfig) -> None:
        self.cfg = cfg

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(q, k)`` rotated."""
        rotated = [None if x is None else self._rotate(x.float(), cos, sin, positions.long()) for x in (q, k)]
        assert rotated[0] is not None
        return rotated[0], rotated[1]

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half, out = self.cfg.rotary_dim // 2, x.clone()
        for f, axis in enumerate(self.cfg.axes()):
            where = positions if positions.dim() == 1 else positions[axis]
            c, s = (table[:, f, None].index_select(0, where) for table in (cos, sin))
            first, second = (2 * f, 2 * f + 1) if self.cfg.interleaved_in else (f, f + half)
            a, b = x[..., first], x[..., second]
            first, second = (2 * f, 2 * f + 1) if self.cfg.interleaved_out else (f, f + half)
            out[..., first] = a * c - b * s
            out[..., second] = b * c + a * s
        return out
