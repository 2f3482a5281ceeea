"""mla_kv_write in native torch operations."""

from __future__ import annotations

import torch

from fastlayers.attention.kv_write.torch import scatter_rows
from fastlayers.attention.mla_kv_write.layer import MLAKVWriteConfig


class TorchMLAKVWrite:
    """Any device; two indexed writes into the two parts of the rows."""

    def __init__(self, cfg: MLAKVWriteConfig) -> None:
        self.rank = cfg.kv_lora_rank

    def __call__(self, latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, loc: torch.Tensor) -> None:
        """Write, in place."""
        slots = cache.flatten(0, 1)
        scatter_rows(slots[:, : self.rank], loc, latent)
        scatter_rows(slots[:, self.rank :], loc, rope)
