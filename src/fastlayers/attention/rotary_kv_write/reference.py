"""The oracle of rotary_kv_write: turn pair by pair in fp32, round once, write row after row."""

from __future__ import annotations

import torch

from fastlayers.attention.kv_write.reference import write_rows
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWriteConfig


class ReferenceRotaryKVWrite:
    """See :mod:`fastlayers.attention.rotary_kv_write.layer` for the formula. Returns fp32 ``q``."""

    def __init__(self, cfg: RotaryKVWriteConfig) -> None:
        self.cfg = cfg

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
        if positions.dim() == 1:
            positions = positions.expand(3, -1)
        of = [positions[axis] for axis in self.cfg.rotary.axes()]
        c, s = (torch.stack([table.index_select(0, at)[:, f] for f, at in enumerate(of)], -1) for table in (cos, sin))
        k_turned = self._turn(k, c, s).to(k.dtype)
        if self.cfg.latent:
            write_rows(torch.cat([v[:, 0], k_turned[:, 0]], dim=-1), keys, loc)
        else:
            assert values is not None
            write_rows(k_turned, keys, loc)
            write_rows(v, values, loc)
        turned = self._turn(q, c, s)
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

    def _turn(self, x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        cfg, half = self.cfg, self.cfg.rotary_dim // 2
        y = x.float().clone()
        for f in range(half):
            a_in, b_in = (2 * f, 2 * f + 1) if cfg.interleaved_in else (f, f + half)
            a_out, b_out = (2 * f, 2 * f + 1) if cfg.interleaved_out else (f, f + half)
            a, b = x[..., a_in].float(), x[..., b_in].float()
            y[..., a_out] = a * c[:, None, f] - b * s[:, None, f]
            y[..., b_out] = b * c[:, None, f] + a * s[:, None, f]
        return y
