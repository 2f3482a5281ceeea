"""The oracle of gqa: request by request, the full matrix of scores in fp32."""

from __future__ import annotations

import torch

from fastlayers.attention.gqa.config import GQAConfig
from fastlayers.attention.meta import AttentionMeta


class ReferenceGQA:
    """See :mod:`fastlayers.attention.gqa.config` for the formula. Returns fp32; reads metadata on the host."""

    def __init__(self, cfg: GQAConfig) -> None:
        self.cfg = cfg

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMeta,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o, lse)``."""
        o = q.new_zeros(q.shape, dtype=torch.float32)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        edges, lengths, starts = (x.tolist() for x in (meta.cu_seqlens_q, meta.seq_lens, meta.starts))
        for b, length in enumerate(lengths):
            tokens = slice(edges[b], edges[b + 1])
            place = torch.arange(length, device=q.device)
            page = meta.page_table[b].long()[place // meta.page_size]
            k, v = (cache[page, place % meta.page_size].float() for cache in (k_cache, v_cache))
            prefix = length - (edges[b + 1] - edges[b])
            position = torch.arange(prefix, length, device=q.device)
            last = position if self.cfg.causal else position.new_full(position.shape, length - 1)
            seen = (place[None, :] <= last[:, None]) & (place >= starts[b])[None, :]
            if meta.tree is not None:
                position = meta.positions[tokens]
                for node, mask in enumerate(meta.tree[tokens].tolist()):
                    for other in range(length - prefix):
                        seen[node, prefix + other] = bool(mask >> other & 1)
            if self.cfg.window is not None:
                keys = torch.cat([place[:prefix], position])
                seen &= position[:, None] - keys[None, :] < self.cfg.window
            for h in range(self.cfg.num_heads):
                sink = None if sinks is None else sinks[h]
                kv = h // self.cfg.group
                o[tokens, h], lse[tokens, h] = self._head(q[tokens, h].float(), k[:, kv], v[:, kv], seen, sink)
        return o, lse

    def _head(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.cfg.softmax_scale * (q @ k.T)
        if self.cfg.softcap is not None:
            scores = self.cfg.softcap * torch.tanh(scores / self.cfg.softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sink is not None:
            scores = torch.cat([scores, sink.float().expand(len(q), 1)], dim=1)
            v = torch.cat([v, v.new_zeros(1, v.shape[1])])  # beside no keys as well
        lse = torch.logsumexp(scores, dim=1)
        weights = torch.exp(scores - lse[:, None]).masked_fill((lse == -torch.inf)[:, None], 0.0)
        return weights @ v, lse
