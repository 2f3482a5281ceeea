"""MLA's core in native torch operations: matrix products over gathered pages, softmax in fp32.

Scores are never rounded below fp32. On a CPU, where nothing is captured, decode reads the host's description of
the batch: consecutive pages are attended to in place and only rows that count are touched; prefill takes torch's
fused CPU kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from fastlayers.attention.meta import AttentionMeta, seen_in_tree
from fastlayers.attention.mla.config import MLAConfig, RaggedLengths

# Largest score tensor held at once; longer queries go in pieces.
MAX_SCORES = 1 << 26


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the batched matrix product of ``a`` and ``b`` in fp32, whatever their dtype (the same for both)."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


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
    scores = (product(q, keys.transpose(1, 2)) * scale).masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(-1)
    blind = lse == float("-inf")
    probabilities = torch.exp(scores - lse.masked_fill(blind, 0.0).unsqueeze(-1))
    return product(probabilities.to(values.dtype), values).to(q.dtype), lse


def absorbed_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    scale: float,
    rank: int,
    tree: tuple[torch.Tensor, torch.Tensor] | None = None,
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
    tree : (Tensor ``[B, Q]``, Tensor ``[B]``), optional
        See :func:`fastlayers.attention.meta.seen_in_tree`: instead of the bounds.

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
        if tree is not None:
            seen = seen_in_tree(tree[0][:, first : first + step], index[None], tree[1])
        seen = seen[:, :, None, :].expand(batch, count, heads, -1).reshape(batch, count * heads, -1)
        o, lse = attend(part.reshape(batch, count * heads, width), rows, rows[..., :rank], seen, scale)
        outputs.append(o.view(batch, count, heads, rank))
        sums.append(lse.view(batch, count, heads))
    if not outputs:
        return q.new_empty(batch, 0, heads, rank), q.new_empty(batch, 0, heads, dtype=torch.float32)
    return torch.cat(outputs, 1), torch.cat(sums, 1)


def gather_rows(cache: torch.Tensor, meta: AttentionMeta, dtype: torch.dtype) -> torch.Tensor:
    """Return each request's rows ``[B, S, ...]`` in ``dtype``, zero outside ``[start, length)``. Allocates a copy."""
    pages = -(-meta.max_seq_len // meta.page_size)
    table = meta.page_table[:, :pages].long()
    rows = cache[table].flatten(1, 2)[:, : meta.max_seq_len].to(dtype)
    # A stale page may hold anything, and 0 · NaN is NaN.
    index = torch.arange(rows.shape[1], device=rows.device)
    outside = (index >= meta.seq_lens[:, None]) | (index < meta.starts[:, None])
    return rows.masked_fill_(outside.view(*outside.shape, *[1] * (rows.dim() - 2)), 0.0)


def request_rows(cache: torch.Tensor, pages: Sequence[int], low: int, high: int) -> torch.Tensor:
    """Return the cached rows of one request's positions ``[low, high)``; a view where its pages are consecutive.

    Parameters
    ----------
    cache : Tensor ``[pages, page_size, ...]``
    pages : sequence of int
        Host page table of the request.
    low, high : int
        ``0 <= low < high``.
    """
    size = cache.shape[1]
    first, last = low // size, -(-high // size)
    used = list(pages[first:last])
    if used == list(range(used[0], used[0] + len(used))):
        rows = cache[used[0] : used[0] + len(used)]
    else:
        rows = cache[torch.tensor(used, device=cache.device)]
    return rows.flatten(0, 1)[low - first * size : high - first * size]


def attend_rows(q: torch.Tensor, rows: torch.Tensor, scale: float, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed attention of the last ``Q`` tokens of one request on its fp32 rows, causal.

    Parameters
    ----------
    q : Tensor fp32 ``[Q, H, L + R]``
    rows : Tensor fp32 ``[S, L + R]``
        ``S >= Q``; query i sees the first ``S - Q + i + 1``.
    scale : float
    rank : int

    Returns
    -------
    (Tensor fp32 ``[Q, H, L]``, Tensor fp32 ``[Q, H]``)
    """
    queries, heads, _ = q.shape
    outputs, sums = [], []
    step = max(1, MAX_SCORES // max(1, heads * rows.shape[0]))
    for first in range(0, queries, step):
        part = q[first : first + step]
        count = part.shape[0]
        kept = rows[: rows.shape[0] - queries + first + count]
        scores = torch.mm(part.reshape(count * heads, -1), kept.T).mul_(scale)
        if count > 1:
            # Only the last columns of a piece hold keys that some of its queries do not see.
            hidden = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
            scores.view(count, heads, -1)[..., -count:].masked_fill_(hidden[:, None], float("-inf"))
        sums.append(scores.logsumexp(-1).view(count, heads))
        outputs.append(torch.mm(scores.softmax(-1), kept[:, :rank]).view(count, heads, rank))
    return (outputs[0], sums[0]) if len(outputs) == 1 else (torch.cat(outputs), torch.cat(sums))


def fused_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request through torch's fused CPU kernel, which also gives the LSE.

    Parameters
    ----------
    q, k, v : Tensor ``[Q, H, N + R]``, ``[S, H, N + R]``, ``[S, H, V]`` on the CPU
    scale : float
    causal : bool
        Bottom-right.

    Returns
    -------
    (Tensor ``[Q, H, V]``, Tensor fp32 ``[Q, H]``)
    """
    q_len, k_len, value = q.shape[0], k.shape[0], v.shape[-1]
    blind = min(q_len, max(0, q_len - k_len)) if causal else (0 if k_len else q_len)
    if blind:
        o, lse = q.new_zeros(q_len, q.shape[1], value), q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
        if blind < q_len:
            o[blind:], lse[blind:] = fused_prefill(q[blind:], k, v, scale, causal)
        return o, lse
    # The kernel wants one width for all three. In fp32, because its 16-bit form has a coarse exponential and is no
    # faster.
    width, dtype = max(q.shape[-1], value), q.dtype
    q, k, v = (
        t.float() if t.shape[-1] == width else functional.pad(t.float(), (0, width - t.shape[-1])) for t in (q, k, v)
    )

    def attend_to(part: slice, masked: bool) -> tuple[torch.Tensor, torch.Tensor]:
        batched = (t.transpose(0, 1).unsqueeze(0) for t in (q, k[part], v[part]))
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*batched, 0.0, masked, scale=scale)
        return o[0, ..., :value].transpose(0, 1), lse[0].transpose(0, 1)

    if not causal or k_len == q_len:
        o, lse = attend_to(slice(None), causal)
        return o.to(dtype), lse
    # Its causal mask is top-left: the earlier keys, which every query sees, go first, and both are merged.
    (o_early, early), (o_late, late) = (
        attend_to(slice(0, k_len - q_len), False),
        attend_to(slice(k_len - q_len, None), True),
    )
    lse = torch.logaddexp(early, late)
    o = o_early * torch.exp(early - lse).unsqueeze(-1) + o_late * torch.exp(late - lse).unsqueeze(-1)
    return o.to(dtype), lse


class TorchMLA:
    """Any device; on CUDA no host synchronisation, so it can be captured."""

    def __init__(self, cfg: MLAConfig) -> None:
        self.cfg, self.scale, self.rank = cfg, cfg.softmax_scale, cfg.kv_lora_rank

    def decode(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o [T,H,L] of q's dtype, lse [T,H] fp32)``."""
        # The batch of a captured bucket says nothing about its requests.
        told = len(meta.batch.query_lens) == meta.num_requests
        if told and meta.tree is None and q.device.type == "cpu" and not torch.compiler.is_compiling():
            return self.decode_host(q, cache, meta)
        return self.decode_batched(q, cache, meta)

    def decode_host(
        self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode request by request, from ``meta.batch`` alone."""
        tokens, heads, _ = q.shape
        batch, token, wide = meta.batch, 0, q.float()
        # Rows of padding, and queries before their request's start, see nothing.
        o = q.new_zeros(tokens, heads, self.rank)
        lse = q.new_full((tokens, heads), float("-inf"), dtype=torch.float32)
        starts = batch.starts or (0,) * len(batch.query_lens)
        for query_len, end, pages, start in zip(
            batch.query_lens, batch.seq_lens, batch.page_table, starts, strict=True
        ):
            first = token + min(query_len, max(0, start - (end - query_len)))
            token += query_len
            if first < token:
                rows = request_rows(cache, pages, start, end).float()
                o[first:token], lse[first:token] = attend_rows(wide[first:token], rows, self.scale, self.rank)
        return o, lse

    def decode_batched(
        self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode all requests at once, from tensors alone: what is captured and compiled."""
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
        most = meta.max_query_len
        if meta.is_extend_bucket and most < tokens:
            # Padding belongs to no request, and may be more than a request brings: it has a column of its own.
            column, most = column.clamp_max(most), most + 1
        padded = q.new_zeros(meta.num_requests, most, heads, width)
        padded[request, column] = q
        upper = torch.full(padded.shape[:2], -1, dtype=torch.int64, device=q.device)
        upper[request, column] = meta.positions
        tree = None
        if meta.tree is not None:
            masks = torch.zeros_like(upper)
            masks[request, column] = meta.tree
            tree = masks, meta.seq_lens - meta.cu_seqlens_q.diff()
        o, lse = absorbed_attention(padded, rows, meta.starts, upper, self.scale, self.rank, tree)
        return o[request, column], lse[request, column]

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: RaggedLengths, need_lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(o [T,H,V] of q's dtype, lse [T,H] fp32 or None)``."""
        one = fused_prefill if q.device.type == "cpu" else prefill_pieces
        outputs, sums, q_start, k_start = [], [], 0, 0
        for q_len, k_len in zip(lens.q_lens, lens.k_lens, strict=True):
            part = slice(k_start, k_start + k_len)
            if q_len:
                o, lse = one(q[q_start : q_start + q_len], k[part], v[part], self.scale, lens.causal)
                outputs.append(o)
                sums.append(lse)
            q_start, k_start = q_start + q_len, k_start + k_len
        if not outputs:
            outputs, sums = [q.new_empty(0, q.shape[1], v.shape[-1])], [q.new_empty(0, q.shape[1], dtype=torch.float32)]
        return torch.cat(outputs), torch.cat(sums) if need_lse else None


def prefill_pieces(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request in plain products, ``MAX_SCORES`` scores at a time."""
    q_len, k_len = q.shape[0], k.shape[0]
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    index = torch.arange(k_len, device=q.device)
    outputs, sums = [], []
    step = max(1, MAX_SCORES // max(1, q.shape[1] * k_len))
    for first in range(0, q_len, step):
        part = q[first : first + step].transpose(0, 1)
        last = torch.arange(first, first + part.shape[1], device=q.device) + (k_len - q_len if causal else k_len)
        # Keys after the last query of this piece are never seen: leave them out of the products.
        limit = min(k_len, max(0, k_len - q_len + first + part.shape[1])) if causal else k_len
        seen = (index[:limit] <= last[:, None])[None]
        o, lse = attend(part, keys[:, :limit], values[:, :limit], seen, scale)
        outputs.append(o.transpose(0, 1))
        sums.append(lse.transpose(0, 1))
    return torch.cat(outputs), torch.cat(sums)
