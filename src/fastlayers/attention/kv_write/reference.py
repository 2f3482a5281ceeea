"""The oracle of kv_write: one row after the other."""

from __future__ import annotations

import torch

from fastlayers.attention.kv_write.layer import KVWriteConfig


def write_rows(rows: torch.Tensor, cache: torch.Tensor, loc: torch.Tensor) -> None:
    """Write ``rows [T, ...]`` into ``cache [pages, page_size, ...]`` at slots ``loc``; e4m3 saturates."""
    page_size, rows = cache.shape[1], rows.detach()
    for row, slot in zip(rows, loc.tolist(), strict=True):
        value = row.float().clamp(-448.0, 448.0) if cache.dtype == torch.float8_e4m3fn else row
        cache[slot // page_size, slot % page_size] = value.to(cache.dtype)


class ReferenceKVWrite:
    """See :mod:`fastlayers.attention.kv_write.layer` for the formula."""

    def __init__(self, cfg: KVWriteConfig) -> None:
        self.cfg = cfg

    def __call__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        loc: torch.Tensor,
    ) -> None:
        """Write both, in place."""
        write_rows(k, k_cache, loc)
        write_rows(v, v_cache, loc)
