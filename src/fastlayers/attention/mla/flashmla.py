"""MLA decode by FlashMLA, as ``sgl_kernel`` ships it: pages of 64, one new token a request.

The kernel walks a schedule that depends on the lengths. It is made on the device from ``meta.seq_lens``, once a step
for all layers; a captured graph reads it from static buffers. With an e4m3 cache the products are e4m3, too: queries
are rounded (scale 1, saturating) in a launch of their own.
"""

from __future__ import annotations

import torch

from fastlayers.attention.meta import AttentionMeta
from fastlayers.attention.mla.config import MLAConfig, check_no_padding
from fastlayers.attention.mla.triton import rounded_to_e4m3
from fastlayers.operators import operator


def _fake(
    q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, schedule: torch.Tensor,
    splits: torch.Tensor, one: torch.Tensor, rank: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return q.new_empty(*q.shape[:2], rank), q.new_empty(q.shape[:2], dtype=torch.float32)


@operator("mla_flashmla", _fake)
def _decode(
    q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, schedule: torch.Tensor,
    splits: torch.Tensor, one: torch.Tensor, rank: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    from sgl_kernel.flash_mla import flash_mla_with_kvcache

    e4m3 = cache.dtype == torch.float8_e4m3fn
    queries, unit = (rounded_to_e4m3(q), one) if e4m3 else (q, None)
    o, lse = flash_mla_with_kvcache(
        queries.unsqueeze(1), cache.unsqueeze(2), page_table, seq_lens, rank, schedule, splits, scale,
        descale_q=unit, descale_k=unit, is_fp8_kvcache=e4m3,
    )  # fmt: skip
    return o.squeeze(1), lse.squeeze(2)


class Schedule:
    """Which multiprocessor reads which part of which request; the same addresses after every plan of one shape."""

    def __init__(self, cfg: MLAConfig, meta: AttentionMeta) -> None:
        self.num_heads, self.e4m3 = cfg.num_heads, cfg.kv_dtype == torch.float8_e4m3fn
        self.parts = self.splits = torch.empty(0, dtype=torch.int32)
        # The scale of e4m3 queries and caches.
        self.one = torch.ones(1, device=meta.positions.device)

    @torch.inference_mode()
    def plan(self, meta: AttentionMeta) -> None:
        """Make the schedule on the device; no host synchronisation."""
        from sgl_kernel.flash_mla import get_mla_metadata

        check_no_padding("flashmla", meta)
        parts, splits = get_mla_metadata(meta.seq_lens, self.num_heads, 1, is_fp8_kvcache=self.e4m3)
        if parts.shape == self.parts.shape and splits.shape == self.splits.shape:
            self.parts.copy_(parts)
            self.splits.copy_(splits)
        else:
            self.parts, self.splits = parts, splits


class FlashMLA:
    """Decode only. Capture-safe after one call of the step; allocates its outputs."""

    def __init__(self, cfg: MLAConfig) -> None:
        self.cfg, self.key = cfg, ("flashmla", cfg.num_heads, cfg.kv_dtype)

    def decode(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o [T,H,L] of q's dtype, lse [T,H] fp32)``."""
        if q.shape[0] == 0:
            return q.new_empty(0, q.shape[1], self.cfg.kv_lora_rank), q.new_empty(0, q.shape[1], dtype=torch.float32)
        schedule: Schedule = meta.plan_of(self.key, lambda m: Schedule(self.cfg, m))
        o, lse = _decode(
            q, cache, meta.page_table, meta.seq_lens, schedule.parts, schedule.splits, schedule.one,
            self.cfg.kv_lora_rank, self.cfg.softmax_scale,
        )  # fmt: skip
        return o, lse
