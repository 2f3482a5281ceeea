"""kv_write in native torch operations."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from fastlayers.attention.kv_write.layer import KVWriteConfig

E4M3_MAX = 448.0


def to_cache_dtype(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``values`` in a cache's dtype; e4m3 saturates, which torch's own cast does not."""
    if dtype == torch.float8_e4m3fn:
        return values.float().clamp(-E4M3_MAX, E4M3_MAX).to(dtype)
    return values.to(dtype)


def scatter_rows(slots: torch.Tensor, loc: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values [T, ...]`` to the rows ``loc`` of ``slots [num_slots, ...]``, in place, in its dtype.

    ``slots`` may be a strided view. e4m3 is moved as bytes: torch has no scatter for it.
    """
    # The cache is state: were it part of a graph, that would grow with every later step; nor is it a tangent's.
    rows = to_cache_dtype(
        values.detach() if values.requires_grad or forward_ad._current_level >= 0 else values, slots.dtype
    )
    if slots.dtype == torch.float8_e4m3fn:
        slots, rows = slots.view(torch.uint8), rows.view(torch.uint8)
    slots.index_put_((loc.long(),), rows)


class TorchKVWrite:
    """Any device; one indexed write for the keys, one for the values."""

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
        scatter_rows(k_cache.flatten(0, 1), loc, k)
        scatter_rows(v_cache.flatten(0, 1), loc, v)
