"""The oracle of mla_kv_write: concatenate, then write row after row."""

from __future__ import annotations

import torch

from fastlayers.attention.kv_write.reference import write_rows
from fastlayers.attention.mla_kv_write.layer import MLAKVWriteConfig


class ReferenceMLAKVWrite:
    """See :mod:`fastlayers.attention.mla_kv_write.layer` for the formula."""

    def __init__(self, cfg: MLAKVWriteConfig) -> None:
        self.cfg = cfg

    def __call__(self, latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, loc: torch.Tensor) -> None:
        """Write, in place."""
        write_rows(torch.cat([latent, rope], dim=-1), cache, loc)
