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
        self.gather = TorchRotary(cfg.rotary).gather

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
        c, s = self.gather(cos, positions), self.gather(sin, positions)
        k_slots, v_slots = self.cfg.rows(keys, values)
        scatter_rows(k_slots, loc, self._turn(k, c, s))
        scatter_rows(v_slots, loc, v)
        turned = self._turn(q, c, s)
        return turned if out is None else out.copy_(turned)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None or self.cfg.qk_norm is None:
            return x
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.cfg.qk_norm)
        return normalised.to(x.dtype) * weight

    def _turn(self, x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        cfg = self.cfg
        turning = x[..., : cfg.rotary_dim].float()
        if cfg.interleaved_in:
            a, b = turning[..., 0::2], turning[..., 1::2]
        else:
            a, b = turning.chunk(2, -1)
        first, second = a * c - b * s, b * c + a * s
        if cfg.interleaved_out:
            turned = torch.stack((first, second), -1).flatten(-2).to(x.dtype)
        else:
            turned = torch.cat((first, second), -1).to(x.dtype)
        if cfg.rotary_dim == cfg.head_dim:
            return turned
        return torch.cat((turned, x[..., cfg.rotary_dim :]), -1)
