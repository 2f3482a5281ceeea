"""Extends by ``F.scaled_dot_product_attention``: torch's own kernels, which read no pages, so keys are gathered first.

Outside a capture each request goes by itself and needs no mask, so torch takes FlashAttention or cuDNN. Under capture
the lengths may change before a replay: then all requests go at once, padded and masked on the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from fastlayers.attention.gqa.config import GQAConfig, check_no_padding
from fastlayers.attention.meta import AttentionMeta


class SDPA:
    """Capture-safe; allocates gathered keys and values besides its output."""

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
        """Return ``o``, a new tensor, and an LSE without rows."""
        check_no_padding("sdpa", meta)
        caches = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        if not q.shape[0]:
            o = q.new_empty(*q.shape)
        elif q.is_cuda and torch.cuda.is_current_stream_capturing():
            o = self._padded(q, caches, meta)
        else:
            o = self._one_by_one(q, caches, meta)
        return o, q.new_empty(0, q.shape[1], dtype=torch.float32)

    def _gather(
        self, caches: tuple[torch.Tensor, torch.Tensor], meta: AttentionMeta, first: int, last: int, keys: int
    ) -> list[torch.Tensor]:
        """Return keys and values ``[B, Hkv, S, D]`` of the requests from ``first`` to ``last``."""
        place = torch.arange(keys, device=meta.page_table.device).expand(last - first, -1)
        # Places behind a request's last key read that key: another request's rows might hold NaN.
        place = torch.minimum(place, (meta.seq_lens[first:last, None] - 1).clamp_min(0))
        table = meta.page_table[first:last].long()
        slot = table.gather(1, place // meta.page_size) * meta.page_size + place % meta.page_size
        return [cache[slot].transpose(1, 2) for cache in caches]

    def _one_by_one(
        self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], meta: AttentionMeta
    ) -> torch.Tensor:
        o, token = q.new_empty(*q.shape), 0
        for request, (count, length) in enumerate(zip(meta.batch.query_lens, meta.batch.seq_lens, strict=True)):
            if not count:
                continue
            k, v = self._gather(caches, meta, request, request + 1, length)
            rows = q[token : token + count].transpose(0, 1).unsqueeze(0)
            # One query sees every key; as many queries as keys are plainly causal.
            mask = causal_lower_right(count, length) if 1 < count < length else None
            part = F.scaled_dot_product_attention(
                rows, k, v, mask, is_causal=1 < count == length, scale=self.cfg.softmax_scale, enable_gqa=True
            )
            o[token : token + count] = part[0].transpose(0, 1)
            token += count
        return o

    def _padded(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], meta: AttentionMeta) -> torch.Tensor:
        keys, group = meta.max_seq_len, self.cfg.group
        k, v = self._gather(caches, meta, 0, meta.num_requests, keys)
        offset = torch.arange(meta.max_query_len, device=q.device)
        row = (meta.cu_seqlens_q[:-1, None] + offset).clamp_max(q.shape[0] - 1).long()
        # Key 0 is never masked: every row sees one.
        seen = torch.arange(keys, device=q.device) <= meta.positions[row][..., None]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        o = F.scaled_dot_product_attention(
            q[row].transpose(1, 2), k, v, seen[:, None], scale=self.cfg.softmax_scale
        ).transpose(1, 2)
        request = meta.request_of_token.long()
        place = torch.arange(q.shape[0], device=q.device) - meta.cu_seqlens_q[request]
        return o[request, place]
