"""Planted bugs of ``mla``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from fastlayers.attention.meta import AttentionMeta
from fastlayers.attention.mla.config import MLAConfig, RaggedLengths
from fastlayers.attention.mla.torch import TorchMLA


class _FromTensors(TorchMLA):
    """Decodes from the metadata's tensors on every device; :meth:`spoil` is where a bug changes them."""

    def decode(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta) -> tuple[torch.Tensor, torch.Tensor]:
        return self.decode_batched(q, cache, self.spoil(cache, meta))

    def spoil(self, cache: torch.Tensor, meta: AttentionMeta) -> AttentionMeta:
        return meta


class HalfScale(TorchMLA):
    """Scales scores by half."""

    def __init__(self, cfg: MLAConfig) -> None:
        super().__init__(replace(cfg, softmax_scale=cfg.softmax_scale / 2))


class LatentScale(TorchMLA):
    """Scales by the width of a cached row instead of that of the unabsorbed head."""

    def __init__(self, cfg: MLAConfig) -> None:
        super().__init__(replace(cfg, softmax_scale=cfg.latent_width**-0.5))


class PageOffByOne(_FromTensors):
    """Reads the page after the right one."""

    def spoil(self, cache: torch.Tensor, meta: AttentionMeta) -> AttentionMeta:
        return replace(meta, page_table=(meta.page_table + 1) % cache.shape[0])


class StalePositions(_FromTensors):
    """Keeps the positions and lengths of the first plan it sees."""

    kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def spoil(self, cache: torch.Tensor, meta: AttentionMeta) -> AttentionMeta:
        if self.kept is None:
            self.kept = meta.positions.clone(), meta.seq_lens.clone()
        return replace(meta, positions=self.kept[0], seq_lens=self.kept[1])


class NoCausalMask(_FromTensors):
    """Lets every new token see all of its request, in both forms."""

    def spoil(self, cache: torch.Tensor, meta: AttentionMeta) -> AttentionMeta:
        return replace(meta, positions=(meta.seq_lens.long() - 1)[meta.request_of_token.long()])

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: RaggedLengths, need_lse: bool = True
    ) -> Any:
        return super().prefill(q, k, v, replace(lens, causal=False), need_lse)


class TopLeftCausal(TorchMLA):
    """Aligns the causal mask of a prefill with the first key instead of the last."""

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: RaggedLengths, need_lse: bool = True
    ) -> Any:
        if not lens.causal or lens.q_lens == lens.k_lens:
            return super().prefill(q, k, v, lens, need_lse)
        outputs, sums, q_start, k_start = [], [], 0, 0
        for q_len, k_len in zip(lens.q_lens, lens.k_lens, strict=True):
            for i in range(q_len):
                seen, row = slice(k_start, k_start + min(i + 1, k_len)), slice(q_start + i, q_start + i + 1)
                one = RaggedLengths.of((1,), (min(i + 1, k_len),), False, q.device)
                o, lse = super().prefill(q[row], k[seen], v[seen], one)
                outputs.append(o)
                sums.append(lse)
            q_start, k_start = q_start + q_len, k_start + k_len
        return torch.cat(outputs), torch.cat([s for s in sums if s is not None]) if need_lse else None


class SwappedHeads(TorchMLA):
    """Gives each head its neighbour's output."""

    def decode(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = super().decode(q, cache, meta)
        return o.roll(1, 1), lse

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: RaggedLengths, need_lse: bool = True
    ) -> Any:
        o, lse = super().prefill(q, k, v, lens, need_lse)
        return o.roll(1, 1), lse


class IgnoresStarts(_FromTensors):
    """Attends to the left padding."""

    def spoil(self, cache: torch.Tensor, meta: AttentionMeta) -> AttentionMeta:
        return replace(meta, starts=torch.zeros_like(meta.starts))


class LogBaseTwo(TorchMLA):
    """Gives the LSE in base 2."""

    def decode(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = super().decode(q, cache, meta)
        return o, lse / math.log(2)


class LastSplitMissing(_FromTensors):
    """Cuts the cached rows into two splits and adds up only the first, where there are enough rows for two."""

    def spoil(self, cache: torch.Tensor, meta: AttentionMeta) -> AttentionMeta:
        half = torch.where(meta.positions >= 128, meta.positions // 2, meta.positions)
        return replace(meta, positions=half)


class RopePartIgnored(TorchMLA):
    """Scores with the latent part of a cached row only."""

    def decode(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta) -> tuple[torch.Tensor, torch.Tensor]:
        return super().decode(torch.cat([q[..., : self.rank], torch.zeros_like(q[..., self.rank :])], -1), cache, meta)


MUTANTS = {
    "half_scale": HalfScale,
    "latent_scale": LatentScale,
    "page_off_by_one": PageOffByOne,
    "stale_positions": StalePositions,
    "no_causal_mask": NoCausalMask,
    "top_left_causal": TopLeftCausal,
    "swapped_heads": SwappedHeads,
    "ignores_starts": IgnoresStarts,
    "log_base_two": LogBaseTwo,
    "last_split_missing": LastSplitMissing,
    "rope_part_ignored": RopePartIgnored,
}
