"""The embedding's oracle: row by row."""

from __future__ import annotations

import torch

from fastlayers.embedding.layer import EmbeddingConfig


class ReferenceEmbedding:
    """See :mod:`fastlayers.embedding.layer` for the formula. Returns fp32."""

    def __init__(self, cfg: EmbeddingConfig) -> None:
        self.cfg = cfg

    def __call__(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``y``."""
        y = torch.zeros(ids.numel(), self.cfg.hidden_size, dtype=torch.float32, device=weight.device)
        for position, token in enumerate(ids.flatten().tolist()):
            row = token - self.cfg.start
            if 0 <= row < self.cfg.rows:
                y[position] = weight[row].float()
        return y.view(*ids.shape, self.cfg.hidden_size)
