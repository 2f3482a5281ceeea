"""The embedding in native torch operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastlayers.embedding.layer import EmbeddingConfig


class TorchEmbedding:
    """Any device; traceable."""

    def __init__(self, cfg: EmbeddingConfig) -> None:
        self.cfg = cfg

    def __call__(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``y``, a new tensor of the weight's dtype."""
        if not self.cfg.partial:
            return F.embedding(ids, weight)
        rows = ids - self.cfg.start
        outside = (rows < 0) | (rows >= self.cfg.rows)
        return F.embedding(rows.masked_fill(outside, 0), weight).masked_fill(outside.unsqueeze(-1), 0)
