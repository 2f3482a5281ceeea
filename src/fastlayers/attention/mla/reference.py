"""MLA's oracle: one request at a time, one softmax, fp32."""

from __future__ import annotations

import torch

from fastlayers.attention.batch import MAX_TREE
from fastlayers.attention.meta import AttentionMeta
from fastlayers.attention.mla.config import MLAConfig, RaggedLengths


class ReferenceMLA:
    """See :mod:`fastlayers.attention.mla.config`. Reads lengths on the host; not for use under capture."""

    def __init__(self, cfg: MLAConfig) -> None:
        self.cfg = cfg

    def decode(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o [T,H,L], lse [T,H])`` in fp32."""
        rank = self.cfg.kv_lora_rank
        o = torch.zeros(*q.shape[:2], rank, device=q.device)
        lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
        for token in range(q.shape[0]):
            request, position = int(meta.request_of_token[token]), int(meta.positions[token])
            kept = list(range(int(meta.starts[request]), position + 1))
            if meta.tree is not None:
                first = int(meta.seq_lens[request] - meta.cu_seqlens_q.diff()[request])
                path = int(meta.tree[token])
                kept = [*range(first), *(first + node for node in range(MAX_TREE) if path >> node & 1)]
            if not kept:
                continue
            pages, size = meta.page_table[request].tolist(), meta.page_size
            slots = [pages[p // size] * size + p % size for p in kept]
            rows = cache.reshape(-1, cache.shape[-1])[slots].float()
            scores = self.cfg.softmax_scale * q[token].float() @ rows.T
            lse[token] = scores.logsumexp(-1)
            o[token] = scores.softmax(-1) @ rows[:, :rank]
        return o, lse

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: RaggedLengths, need_lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(o [T,H,V], lse [T,H] or None)`` in fp32."""
        o = torch.zeros(*q.shape[:2], v.shape[-1], device=q.device)
        lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
        q_start = k_start = 0
        for q_len, k_len in zip(lens.q_lens, lens.k_lens, strict=True):
            keys, values = k[k_start : k_start + k_len].float(), v[k_start : k_start + k_len].float()
            for i in range(q_len):
                seen = max(0, min(k_len, k_len - q_len + i + 1)) if lens.causal else k_len
                if seen:
                    scores = self.cfg.softmax_scale * torch.einsum("hd,shd->hs", q[q_start + i].float(), keys[:seen])
                    lse[q_start + i] = scores.logsumexp(-1)
                    o[q_start + i] = torch.einsum("hs,shd->hd", scores.softmax(-1), values[:seen])
            q_start, k_start = q_start + q_len, k_start + k_len
        return o, lse if need_lse else None


class RoundedQueries(ReferenceMLA):
    """The oracle where ``fp8_math`` lets a backend round queries to e4m3 (scale 1, saturating)."""

    def decode(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o [T,H,L], lse [T,H])`` in fp32."""
        if self.cfg.fp8_math:
            q = q.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return super().decode(q, cache, meta)
