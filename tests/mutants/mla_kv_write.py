"""Planted bugs of mla_kv_write."""

from __future__ import annotations

import torch

from fastlayers.attention.kv_write.torch import scatter_rows
from fastlayers.attention.mla_kv_write.torch import TorchMLAKVWrite


class _RopeFirst(TorchMLAKVWrite):
    def __call__(self, latent, rope, cache, loc):  # type: ignore[no-untyped-def]
        scatter_rows(cache.flatten(0, 1), loc, torch.cat([rope, latent], -1))


class _PageOffByOne(TorchMLAKVWrite):
    def __call__(self, latent, rope, cache, loc):  # type: ignore[no-untyped-def]
        pages, page_size = cache.shape[:2]
        super().__call__(latent, rope, cache, (loc + page_size) % (pages * page_size))


class _RopeForgotten(TorchMLAKVWrite):
    def __call__(self, latent, rope, cache, loc):  # type: ignore[no-untyped-def]
        scatter_rows(cache.flatten(0, 1)[:, : self.rank], loc, latent)


class _StaleSlots(TorchMLAKVWrite):
    """Takes the first row's slot and counts on, as if the pages lay in order."""

    def __call__(self, latent, rope, cache, loc):  # type: ignore[no-untyped-def]
        slots = cache.shape[0] * cache.shape[1]
        start = loc[:1].long() if loc.numel() else loc.new_zeros(1).long()
        in_order = (start + torch.arange(loc.numel(), device=loc.device)) % slots
        super().__call__(latent, rope, cache, in_order)


MUTANTS = {
    "rope_first": _RopeFirst,
    "page_off_by_one": _PageOffByOne,
    "rope_forgotten": _RopeForgotten,
    "stale_slots": _StaleSlots,
}
