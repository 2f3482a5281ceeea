"""MLA decode by FlashMLA, as ``sgl_kernel`` ships it: pages of 64, one new token a request, or a few to verify.

The kernel walks a schedule that depends on the lengths. It is made on the device from ``meta.seq_lens``, once a step
for all layers; a captured graph reads it from static buffers. With an e4m3 cache the products are e4m3, too: queries
are rounded (scale 1, saturating) in a launch of their own.

Of several tokens the kernel takes the same number of every request, the last one at the request's end. Where requests
bring fewer, or a bucket's padding is among the tokens, rows are copied to where the kernel wants them, and back.
"""

from __future__ import annotations

import torch

from fastlayers.attention.meta import AttentionMeta
from fastlayers.attention.mla.config import MLAConfig, check_no_padding, empty_decode
from fastlayers.attention.mla.triton import rounded_to_e4m3
from fastlayers.operators import operator


@operator("mla_flashmla", empty_decode)
def _decode(
    q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, schedule: torch.Tensor,
    splits: torch.Tensor, one: torch.Tensor, places: torch.Tensor | None, each: int, rank: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    from sgl_kernel.flash_mla import flash_mla_with_kvcache

    e4m3, requests = cache.dtype == torch.float8_e4m3fn, seq_lens.shape[0]
    rows = q
    if places is not None:
        # One row more: nobody's tokens go there.
        rows = q.new_zeros(requests * each + 1, *q.shape[1:]).index_copy_(0, places, q)[:-1]
    queries, unit = (rounded_to_e4m3(rows), one) if e4m3 else (rows, None)
    o, lse = flash_mla_with_kvcache(
        queries.view(requests, each, *q.shape[1:]), cache.unsqueeze(2), page_table, seq_lens, rank, schedule, splits,
        scale, causal=each > 1, descale_q=unit, descale_k=unit, is_fp8_kvcache=e4m3,
    )  # fmt: skip
    o, lse = o.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
    if places is None:
        return o, lse.contiguous()
    kept = places.clamp_max(requests * each - 1)
    return o.index_select(0, kept), lse.index_select(0, kept)


class Schedule:
    """Which multiprocessor reads which part of which request; the same addresses after every plan of one shape.

    ``places``: int64 ``[T]``, the row of each token where requests do not bring the same number of them.
    """

    def __init__(self, cfg: MLAConfig, meta: AttentionMeta) -> None:
        self.num_heads, self.e4m3 = cfg.num_heads, cfg.kv_dtype == torch.float8_e4m3fn
        self.parts = self.splits = torch.empty(0, dtype=torch.int32, device="cpu")
        self.places: torch.Tensor | None = None
        # The scale of e4m3 queries and caches.
        self.one = torch.ones(1, device=meta.positions.device)

    @torch.inference_mode()
    def plan(self, meta: AttentionMeta) -> None:
        """Make the schedule on the device; no host synchronisation."""
        from sgl_kernel.flash_mla import get_mla_metadata

        check_no_padding("flashmla", meta)
        each = 1 if meta.is_decode else meta.max_query_len
        parts, splits = get_mla_metadata(meta.seq_lens, each * self.num_heads, 1, is_fp8_kvcache=self.e4m3)
        if parts.shape == self.parts.shape and splits.shape == self.splits.shape:
            self.parts.copy_(parts)
            self.splits.copy_(splits)
        else:
            self.parts, self.splits = parts, splits
        alike = meta.is_decode or (meta.bucket is None and set(meta.batch.query_lens) == {each})
        places = None if alike else _places(meta, each)
        if places is not None and self.places is not None and places.shape == self.places.shape:
            self.places.copy_(places)
        else:
            self.places = places


def _places(meta: AttentionMeta, each: int) -> torch.Tensor:
    """Return the row of each token where every request has ``each``, its own at the end; behind all: nobody's."""
    request, first = meta.request_of_token.long(), meta.cu_seqlens_q
    token = torch.arange(meta.num_tokens, device=request.device)
    row = (request + 1) * each - (first[request + 1] - token)
    return torch.where(token < first[-1], row, meta.num_requests * each)


class FlashMLA:
    """Decode only, also of a few tokens a request. Capture-safe after one call of the step; allocates its outputs."""

    def __init__(self, cfg: MLAConfig) -> None:
        self.cfg, self.key = cfg, ("flashmla", cfg.num_heads, cfg.kv_dtype)

    def decode(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o [T,H,L] of q's dtype, lse [T,H] fp32)``."""
        if q.shape[0] == 0:
            return empty_decode(q, self.cfg.kv_lora_rank)
        schedule: Schedule = meta.plan_of(self.key, lambda m: Schedule(self.cfg, m))
        o, lse = _decode(
            q, cache, meta.page_table, meta.seq_lens, schedule.parts, schedule.splits, schedule.one, schedule.places,
            1 if meta.is_decode else meta.max_query_len, self.cfg.kv_lora_rank, self.cfg.softmax_scale,
        )  # fmt: skip
        return o, lse
