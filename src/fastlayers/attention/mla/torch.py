"""MLA's core in native torch operations: matrix products over gathered pages, softmax in fp32."""

from __future__ import annotations

import torch
from torch.nn import functional

from fastlayers.attention.meta import AttentionMeta
from fastlayers.attention.mla.core import MLAConfig, Varlen

# Largest score tensor held at once; longer queries go in pieces.
MAX_SCORES = 1 << 26


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked attention of ``M`` query rows on ``S`` shared rows, batched over ``B``.

    Parameters
    ----------
    q : Tensor ``[B, M, D]``
    keys, values : Tensor ``[B, S, D]``, ``[B, S, E]``
    seen : Tensor bool ``[B, M, S]`` or broadcastable
    scale : float

    Returns
    -------
    (Tensor ``[B, M, E]`` of q's dtype, Tensor fp32 ``[B, M]``)
        Output and natural-log LSE; rows that see nothing give 0 and -inf.
    """
    scores = torch.bmm(q, keys.transpose(1, 2)).float() * scale
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(-1)
    blind = lse == float("-inf")
    probabilities = torch.exp(scores - lse.masked_fill(blind, 0.0).unsqueeze(-1))
    return torch.bmm(probabilities.to(values.dtype), values), lse


def absorbed_attention(
    q: torch.Tensor, rows: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, scale: float, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed MLA over latent rows held densely.

    Parameters
    ----------
    q : Tensor ``[B, Q, H, L + R]``
    rows : Tensor ``[B, S, L + R]``
        Finite everywhere, also where nobody looks.
    lower : Tensor int ``[B]``
        First row of each request that counts.
    upper : Tensor int ``[B, Q]``
        Last row that each query sees.
    scale : float
    rank : int
        L: the leading part of a row that is also its value.

    Returns
    -------
    (Tensor ``[B, Q, H, L]``, Tensor fp32 ``[B, Q, H]``)
    """
    batch, queries, heads, width = q.shape
    index = torch.arange(rows.shape[1], device=rows.device)
    outputs, sums = [], []
    step = max(1, MAX_SCORES // max(1, batch * heads * rows.shape[1]))
    for first in range(0, queries, step):
        part = q[:, first : first + step]
        count = part.shape[1]
        seen = (index >= lower[:, None, None]) & (index <= upper[:, first : first + step, None])
        seen = seen[:, :, None, :].expand(batch, count, heads, -1).reshape(batch, count * heads, -1)
        o, lse = attend(part.reshape(batch, count * heads, width), rows, rows[..., :rank], seen, scale)
        outputs.append(o.view(batch, count, heads, rank))
        sums.append(lse.view(batch, count, heads))
    if not outputs:
        return q.new_empty(batch, 0, heads, rank), q.new_empty(batch, 0, heads, dtype=torch.float32)
    return torch.cat(outputs, 1), torch.cat(sums, 1)


def gather_rows(cache: torch.Tensor, meta: AttentionMeta, dtype: torch.dtype) -> torch.Tensor:
    """Return each request's rows ``[B, S, ...]`` in ``dtype``, zero beyond its length. Allocates a copy."""
    pages = -(-meta.max_seq_len // meta.page_size)
    table = meta.page_table[:, :pages].long()
    rows = cache[table].flatten(1, 2)[:, : meta.max_seq_len].to(dtype)
    # A stale page may hold anything, and 0 · NaN is NaN.
    beyond = torch.arange(rows.shape[1], device=rows.device) >= meta.seq_lens[:, None]
    return rows.masked_fill_(beyond.view(*beyond.shape, *[1] * (rows.dim() - 2)), 0.0)


class TorchMLA:
    """Any device; no host synchronisation, so it can be captured."""

    def __init__(self, cfg: MLAConfig) -> None:
        self.cfg, self.scale, self.rank = cfg, cfg.softmax_scale, cfg.kv_lora_rank

    def decode(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o [T,H,L] of q's dtype, lse [T,H] fp32)``."""
        tokens, heads, width = q.shape
        if tokens == 0:
            return q.new_empty(0, heads, self.rank), q.new_empty(0, heads, dtype=torch.float32)
        rows = gather_rows(cache, meta, q.dtype)
        if meta.max_query_len == 1 and tokens == meta.num_requests:
            upper = meta.positions[:, None]
            o, lse = absorbed_attention(q[:, None], rows, meta.starts, upper, self.scale, self.rank)
            return o[:, 0], lse[:, 0]
        request = meta.request_of_token.long()
        column = torch.arange(tokens, device=q.device) - meta.cu_seqlens_q[request]
        padded = q.new_zeros(meta.num_requests, meta.max_query_len, heads, width)
        padded[request, column] = q
        upper = torch.full(padded.shape[:2], -1, dtype=torch.int64, device=q.device)
        upper[request, column] = meta.positions
        o, lse = absorbed_attention(padded, rows, meta.starts, upper, self.scale, self.rank)
        return o[request, column], lse[request, column]

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: Varlen
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o [T,H,V] of q's dtype, lse [T,H] fp32)``."""
        outputs, sums, q_start, k_start = [], [], 0, 0
        for q_len, k_len in zip(lens.q_lens, lens.k_lens, strict=True):
            part = slice(k_start, k_start + k_len)
            o, lse = self._prefill_one(q[q_start : q_start + q_len], k[part], v[part], lens.causal)
            outputs.append(o)
            sums.append(lse)
            q_start, k_start = q_start + q_len, k_start + k_len
        if not outputs:
            return q.new_empty(0, q.shape[1], v.shape[-1]), q.new_empty(0, q.shape[1], dtype=torch.float32)
        return torch.cat(outputs), torch.cat(sums)

    def _prefill_one(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_len, k_len = q.shape[0], k.shape[0]
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        index = torch.arange(k_len, device=q.device)
        outputs, sums = [], []
        step = max(1, MAX_SCORES // max(1, q.shape[1] * k_len))
        for first in range(0, max(q_len, 1), step):
            part = q[first : first + step].transpose(0, 1)
            last = torch.arange(first, first + part.shape[1], device=q.device) + (k_len - q_len if causal else k_len)
            # Keys after the last query of this piece are never seen: leave them out of the products.
            limit = min(k_len, max(0, k_len - q_len + first + part.shape[1])) if causal else k_len
            seen = (index[:limit] <= last[:, None])[None]
            o, lse = attend(part, keys[:, :limit], values[:, :limit], seen, self.scale)
            outputs.append(o.transpose(0, 1))
            sums.append(lse.transpose(0, 1))
        return torch.cat(outputs), torch.cat(sums)


def sdpa_prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
    """Dense batched attention ``[B,H,Q,D]`` through torch's fused kernel; ``mask=None`` means plain causal."""
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
