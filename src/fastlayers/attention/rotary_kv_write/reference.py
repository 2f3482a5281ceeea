"""The oracle of rotary_kv_write: turn by rotary's oracle, round once, write row after row."""

from __future__ import annotations

import torch

from fastlayers.attention.kv_write.reference import write_rows
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWriteConfig
from fastlayers.rotary.reference import ReferenceRotary


class ReferenceRotaryKVWrite:
    """See :mod:`fastlayers.attention.rotary_kv_write.layer` for the formula. Returns fp32 ``q``."""

    def __init__(self, cfg: RotaryKVWriteConfig) -> None:
        self.cfg, self.rotary = cfg, ReferenceRotary(cfg.rotary)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        loc: torch.Tensor,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write into ``keys`` and ``values``, in place; return the turned ``q``."""
        q, k = self._norm(q, q_weight), self._norm(k, k_weight)
        turned, k_turned = self.rotary(q, k, cos, sin, positions)
        assert k_turned is not None
        k_turned = k_turned.to(k.dtype)
        if self.cfg.latent:
            write_rows(torch.cat([v[:, 0], k_turned[:, 0]], dim=-1), keys, loc)
        else:
            assert values is not None
            write_rows(k_turned, keys, loc)
            write_rows(v, values, loc)
        return turned if out is None else out.copy_(turned)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        eps = self.cfg.qk_norm
        if weight is None or eps is None:
            return x
        y = torch.empty_like(x)
        for h in range(x.shape[1]):
            row = x[:, h].float()
            y[:, h] = (row / (row.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype) * weight
        return y
