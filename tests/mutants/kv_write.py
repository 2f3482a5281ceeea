"""Planted bugs of kv_write."""

from __future__ import annotations

import torch

from fastlayers.attention.kv_write.torch import TorchKVWrite, scatter_rows


class _NextSlot(TorchKVWrite):
    def __call__(self, k, v, k_cache, v_cache, loc):  # type: ignore[no-untyped-def]
        slots = k_cache.shape[0] * k_cache.shape[1]
        super().__call__(k, v, k_cache, v_cache, (loc + 1) % slots)


class _PageOffByOne(TorchKVWrite):
    def __call__(self, k, v, k_cache, v_cache, loc):  # type: ignore[no-untyped-def]
        pages, page_size = k_cache.shape[:2]
        super().__call__(k, v, k_cache, v_cache, (loc + page_size) % (pages * page_size))


class _SwappedHeads(TorchKVWrite):
    def __call__(self, k, v, k_cache, v_cache, loc):  # type: ignore[no-untyped-def]
        super().__call__(k.flip(1), v, k_cache, v_cache, loc)


class _ValuesForgotten(TorchKVWrite):
    def __call__(self, k, v, k_cache, v_cache, loc):  # type: ignore[no-untyped-def]
        scatter_rows(k_cache.flatten(0, 1), loc, k)


class _NotSaturating(TorchKVWrite):
    """e4m3 without the clamp: large values become NaN (or whatever the cast gives)."""

    def __call__(self, k, v, k_cache, v_cache, loc):  # type: ignore[no-untyped-def]
        if k_cache.dtype != torch.float8_e4m3fn:
            return super().__call__(k, v, k_cache, v_cache, loc)
        for cache, rows in ((k_cache, k), (v_cache, v)):
            raw = torch.where(rows.abs() > 448.0, torch.nan, rows.float()).to(cache.dtype)
            cache.view(torch.uint8).flatten(0, 1)[loc.long()] = raw.view(torch.uint8)
        return None


MUTANTS = {
    "next_slot": _NextSlot,
    "page_off_by_one": _PageOffByOne,
    "swapped_heads": _SwappedHeads,
    "values_forgotten": _ValuesForgotten,
    "not_saturating": _NotSaturating,
}
