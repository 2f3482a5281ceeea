"""Decode by the XQA kernel that FlashInfer ships: one token a request, sinks inside, no LSE.

The kernel splits keys by what the page table could hold, so nothing is planned; the last program of a request to finish
adds the parts up in a fixed order, found by counters that every launch leaves at zero.
"""

from __future__ import annotations

import torch

from fastlayers.attention.gqa.config import GQAConfig, check_no_padding
from fastlayers.attention.meta import AttentionMeta
from fastlayers.device import as_device
from fastlayers.operators import like_x, operator
from fastlayers.runtime.package_builds import Module


class Scratch:
    """Partial results and counters, used by one launch at a time."""

    def __init__(self, cfg: GQAConfig, meta: AttentionMeta) -> None:
        device = meta.positions.device
        # Split keys only where a request and key head leave multiprocessors idle: at most as many parts as there are.
        parts = as_device(device).sm_count if device.type == "cuda" else 1
        size = parts * (64 * cfg.head_dim * 2 + 4096)
        self.parts = torch.empty(size, dtype=torch.uint8, device=device)
        self.counters = torch.zeros(meta.num_requests * cfg.num_kv_heads, dtype=torch.int32, device=device)
        self.num_kv_heads = cfg.num_kv_heads

    def plan(self, meta: AttentionMeta) -> None:
        """Nothing depends on lengths; more requests than ever before need more counters."""
        check_no_padding("xqa", meta)
        needed = meta.num_requests * self.num_kv_heads
        if self.counters.numel() < needed:
            self.counters = self.counters.new_zeros(needed)


@operator("gqa_xqa", like_x, writes=("parts", "counters"))
def _attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sinks: torch.Tensor | None,
    page_table: torch.Tensor, seq_lens: torch.Tensor, parts: torch.Tensor, counters: torch.Tensor,
    scale: float, window: int,
) -> torch.Tensor:  # fmt: skip
    from flashinfer.xqa import xqa

    o, kv_heads = q.new_empty(*q.shape), k_cache.shape[2]
    # The kernel multiplies by 1 / sqrt(head_dim) itself.
    xqa(
        q.contiguous().unsqueeze(1), k_cache, v_cache, page_table, seq_lens.view(torch.uint32).unsqueeze(1),
        o.unsqueeze(1), parts, counters.view(torch.uint32), kv_heads, k_cache.shape[1],
        sinks=None if sinks is None else sinks.view(kv_heads, -1), q_scale=scale * q.shape[2] ** 0.5,
        sliding_win_size=window,
    )  # fmt: skip
    return o


class XQA:
    """Capture-safe after one call of the step; allocates its output."""

    def __init__(self, cfg: GQAConfig) -> None:
        self.cfg, self.key = cfg, ("xqa", cfg.num_kv_heads, cfg.head_dim)

    @staticmethod
    def modules(cfg: GQAConfig) -> list[Module]:
        """Return what the package compiles for a configuration."""
        sizes = cfg.page_size, cfg.head_dim, cfg.group, cfg.window is not None
        return [
            Module("flashinfer", "flashinfer.jit.xqa:gen_xqa_module", (cfg.dtype, cfg.kv_dtype, *sizes, cfg.dtype, 1))
        ]

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMeta,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``o``, a new tensor, and an LSE without rows."""
        none = q.new_empty(0, q.shape[1], dtype=torch.float32)
        if not q.shape[0]:
            return q.new_empty(*q.shape), none
        scratch: Scratch = meta.plan_of(self.key, lambda step: Scratch(self.cfg, step))
        cfg = self.cfg
        o = _attend(
            q, k_cache, v_cache, sinks, meta.page_table, meta.seq_lens, scratch.parts, scratch.counters,
            cfg.softmax_scale, cfg.window or 0,
        )  # fmt: skip
        return o, none
