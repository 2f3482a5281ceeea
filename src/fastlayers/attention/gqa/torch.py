"""Grouped-query attention in native torch operations: gather the rows of the cache, then batched matmuls.

With a window, no more than the window is gathered. On CUDA, and for small decode batches on a CPU, the whole batch
goes at once, padded to its longest query and keys; otherwise a CPU goes request by request, which copies less.
Scores exist for a block of queries at a time.
"""

from __future__ import annotations

import torch

from fastlayers.attention.gqa.config import GQAConfig
from fastlayers.attention.meta import AttentionMeta, seen_in_tree

# fp32 scores that may exist at a time: 8 MiB in a CPU's cache; on a GPU 256 MiB, or launches take all the time.
MAX_SCORES, MAX_SCORES_CUDA = 2 * 2**20, 64 * 2**20
# Keys and values of a decode batch, in elements, up to which a CPU takes all requests at once.
MAX_BATCHED = 2**18


class TorchGQA:
    """Any device; scores, softmax and the weighted sum in fp32."""

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
        """Return ``(o, lse)``, both new tensors."""
        tokens, requests = q.shape[0], meta.num_requests
        if not tokens:
            return q.new_empty(*q.shape), q.new_empty(*q.shape[:2], dtype=torch.float32)
        caches = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        alone = q.device.type == "cpu" and len(meta.batch.query_lens) == requests
        decode = tokens == requests and meta.max_query_len == 1
        cfg, keys = self.cfg, meta.max_seq_len
        if decode and not (alone and requests * keys * cfg.num_kv_heads * cfg.head_dim > MAX_BATCHED):
            positions = meta.positions[:, None]
            o, lse = self._attend(q[:, None], caches, meta, slice(0, requests), positions, sinks, meta.max_seq_len)
            return o[:, 0], lse[:, 0]
        if alone:
            return self._one_by_one(q, caches, meta, sinks)
        return self._padded(q, caches, meta, sinks)

    def _one_by_one(
        self,
        q: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        meta: AttentionMeta,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts, first = [], 0
        for b, (count, length) in enumerate(zip(meta.batch.query_lens, meta.batch.seq_lens, strict=True)):
            if count:
                tokens = slice(first, first + count)
                positions, tree = meta.positions[None, tokens], None if meta.tree is None else meta.tree[None, tokens]
                one = slice(b, b + 1)
                parts.append(self._attend(q[None, tokens], caches, meta, one, positions, sinks, length, tree))
                first += count
        return torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts])

    def _padded(
        self,
        q: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        meta: AttentionMeta,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        offset = torch.arange(meta.max_query_len, device=q.device)
        row = (meta.cu_seqlens_q[:-1, None] + offset).clamp_max(q.shape[0] - 1).long()
        # A bucket's padding belongs to no request, and may be more than a request brings: what it reads is not read.
        everyone = slice(0, meta.num_requests)
        tree = None if meta.tree is None else meta.tree[row]
        o, lse = self._attend(q[row], caches, meta, everyone, meta.positions[row], sinks, meta.max_seq_len, tree)
        request = meta.request_of_token.long()
        place = (torch.arange(q.shape[0], device=q.device) - meta.cu_seqlens_q[request]).clamp_max(o.shape[1] - 1)
        return o[request, place], lse[request, place]

    def _attend(
        self,
        q: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        meta: AttentionMeta,
        requests: slice,
        positions: torch.Tensor,
        sinks: torch.Tensor | None,
        max_seq_len: int,
        tree: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend ``q [B, Q, Hq, D]`` at ``positions [B, Q]`` to at most ``max_seq_len`` keys each."""
        cfg, (batch, queries) = self.cfg, q.shape[:2]
        if not cfg.causal:
            positions = (meta.seq_lens[requests, None] - 1).expand(-1, queries)
        place = torch.arange(max_seq_len, device=q.device).expand(batch, -1)
        if cfg.window is not None and cfg.window + queries - 1 < max_seq_len:
            # Of each request only the keys that its first query's window and all later ones reach.
            place = (positions[:, :1] - (cfg.window - 1)).clamp_min(0) + place[:, : cfg.window + queries - 1]
        k, v = self._gather(caches, meta, requests, place)
        start = meta.starts[requests, None]
        heads = q.unflatten(2, (cfg.num_kv_heads, cfg.group)).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, Q, D]
        sink = None if sinks is None else sinks.float().view(cfg.num_kv_heads, cfg.group, 1, 1)
        most = MAX_SCORES_CUDA if q.is_cuda else MAX_SCORES
        step = max(1, most // (batch * cfg.num_heads * max(1, place.shape[1])))
        done = []
        for i in range(0, queries, step):
            block, at = heads[:, :, :, i : i + step], positions[:, i : i + step, None]
            # The last query of a request sees all of its keys; one that is n rows earlier sees n fewer.
            fewer = max(0, queries - (i + step)) if batch == 1 and cfg.causal else 0
            reach = place.shape[1] - fewer
            keys = place[:, None, :reach]
            seen = (keys <= at) & (keys >= start[..., None])
            if tree is not None:
                first = (meta.seq_lens - meta.cu_seqlens_q.diff())[requests, None]
                seen = seen_in_tree(tree[:, i : i + step], keys[:, 0], first[:, 0])
                if cfg.window is not None:
                    new = keys[:, 0] - first
                    own = positions.gather(1, new.clamp(0, queries - 1))
                    keys = torch.where(new < 0, keys[:, 0], own)[:, None]
            if cfg.window is not None:
                seen &= at - keys < cfg.window
            done.append(self._softmax(block, k[:, :, :reach], v[:, :, :reach], seen[:, None, None], sink))
        o, lse = (torch.cat(parts, 3) if len(parts) > 1 else parts[0] for parts in zip(*done, strict=True))
        return o.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype), lse.permute(0, 3, 1, 2).flatten(2, 3)

    def _gather(
        self,
        caches: tuple[torch.Tensor, torch.Tensor],
        meta: AttentionMeta,
        requests: slice,
        place: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Return keys and values ``[B, Hkv, S, D]`` in fp32, at ``place [B, S]`` of each request."""
        # Places outside a request's keys read a place inside: another request's rows might hold NaN.
        last = (meta.seq_lens[requests, None] - 1).clamp_min(0)
        place = torch.minimum(place, last)
        table = meta.page_table[requests].long()
        slot = table.gather(1, place // meta.page_size) * meta.page_size + place % meta.page_size
        found = []
        for cache in caches:
            if cache.dtype == torch.float8_e4m3fn:  # torch gathers no e4m3
                picked = cache.view(torch.uint8).index_select(0, slot.flatten()).view(cache.dtype)
            else:
                picked = cache.index_select(0, slot.flatten())
            rows = picked.float().unflatten(0, slot.shape).transpose(1, 2)
            # Several requests in one product need contiguous rows; for one, strides do.
            found.append(rows if len(slot) == 1 else rows.contiguous())
        return found

    def _softmax(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``o [B, Hkv, G, Q, D]`` in fp32 and ``lse [B, Hkv, G, Q]``."""
        group, queries = q.shape[2:4]
        scores = torch.matmul(q.flatten(2, 3).float() * self.cfg.softmax_scale, k.transpose(-1, -2))
        scores = scores.unflatten(2, (group, queries))
        if self.cfg.softcap is not None:
            scores = self.cfg.softcap * torch.tanh(scores / self.cfg.softcap)
        scores = scores.masked_fill_(~seen, -torch.inf)
        shift = scores.amax(-1, keepdim=True)
        if sink is not None:
            shift = torch.maximum(shift, sink)
        # A row that sees nothing keeps a finite shift: its weights and their sum are then 0, not NaN.
        shift = shift.masked_fill(shift == -torch.inf, 0.0)
        weights = scores.sub_(shift).exp_()
        total = weights.sum(-1, keepdim=True)
        if sink is not None:
            total = total + torch.exp(sink - shift)
        o = torch.matmul(weights.flatten(2, 3), v).unflatten(2, (group, queries))
        return o / total.masked_fill(total == 0, 1.0), (shift + torch.log(total)).squeeze(-1)
