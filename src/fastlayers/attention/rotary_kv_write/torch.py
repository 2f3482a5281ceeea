"""rotary_kv_write in native torch operations."""

from __future__ import annotations

import torch

from fastlayers.attention.kv_write.torch import scatter_rows
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWriteConfig
from fastlayers.rotary.torch import TorchRotary


class TorchRotaryKVWrite:
    """Any device; traceable."""

    def __init__(self, cfg: RotaryKVWriteConfig) -> None:
        self.cfg = cfg
        self.rotary = TorchRotary(cfg.rotary)

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
        """Write into ``keys`` and ``values``, in place; return the turned ``q``: ``out``, or a new tensor."""
        q, k = self._norm(q, q_weight), self._norm(k, k_weight)
        rotary = self.rotary
        c, s = rotary.gather(cos, positions), rotary.gather(sin, positions)
        k_slots, v_slots = self.cfg.rows(keys, values)
        scatter_rows(k_slots, loc, rotary.rotate(k, c, s))
        scatter_rows(v_slots, loc, v)
        turned = rotary.rotate(q, c, s)
        return turned if out is None else out.copy_(turned)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None or self.cfg.qk_norm is None:
            return x
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.cfg.qk_norm)
        return normalised.to(x.dtype) * weight
