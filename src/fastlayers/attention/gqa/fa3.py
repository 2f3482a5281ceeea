"""Grouped-query attention by FlashAttention 3, from whatever package offers ``flash_attn_interface``.

It reads the page table, masks windows, and takes sinks itself, in bfloat16 as checkpoints hold them. How keys are split
depends on what the page table could hold, so nothing is planned and nothing changes under capture.
"""

from __future__ import annotations

import torch

from fastlayers.attention.gqa.config import GQAConfig, check_no_padding
from fastlayers.attention.meta import AttentionMeta
from fastlayers.operators import operator


class NoPadding:
    """Checks each step: the package has no way to leave out the first keys of a request."""

    def plan(self, meta: AttentionMeta) -> None:
        """Raise :class:`ArgumentError` for left padding."""
        check_no_padding("fa3", meta)


def _empty(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(*q.shape), q.new_empty(*q.shape[:2], dtype=torch.float32)


@operator("gqa_fa3", _empty)
def _attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sinks: torch.Tensor | None,
    page_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, max_query_len: int,
    scale: float, window: int, softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    from flash_attn_interface import flash_attn_with_kvcache

    one_each = max_query_len == 1 and q.shape[0] == seq_lens.shape[0]
    varlen = {} if one_each else {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_query_len}
    o, lse, *_ = flash_attn_with_kvcache(
        q.unsqueeze(1) if one_each else q, k_cache, v_cache, cache_seqlens=seq_lens, page_table=page_table,
        softmax_scale=scale, causal=True, window_size=(window - 1, 0) if window else (-1, -1), softcap=softcap,
        sinks=None if sinks is None else sinks.bfloat16(), return_softmax_lse=True, **varlen,
    )  # fmt: skip
    # [B, H, 1] for one query each, [H, T] for ragged queries.
    lse = lse.squeeze(2) if one_each else lse.transpose(0, 1)
    return o.view(q.shape), lse.contiguous()


class FA3:
    """Capture-safe after one call; allocates its outputs."""

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
        cfg = self.cfg
        if not q.shape[0]:
            return _empty(q)
        meta.plan_of("fa3", lambda _: NoPadding())
        o, lse = _attend(
            q, k_cache, v_cache, sinks, meta.page_table, meta.seq_lens, meta.cu_seqlens_q, meta.max_query_len,
            cfg.softmax_scale, cfg.window or 0, cfg.softcap or 0.0,
        )  # fmt: skip
        return o, lse
