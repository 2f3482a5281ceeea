"""Planted bugs of the embedding."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from fastlayers.embedding.layer import EmbeddingConfig
from fastlayers.embedding.torch import TorchEmbedding


class RowOffByOne(TorchEmbedding):
    """Takes the next row."""

    def __call__(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().__call__(ids, weight.roll(-1, 0))


class OutsideNotZero(TorchEmbedding):
    """Gives its first row for ids of other ranks."""

    def __call__(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = ids - self.cfg.start
        return F.embedding(rows.masked_fill((rows < 0) | (rows >= self.cfg.rows), 0), weight)


class WrongRank(TorchEmbedding):
    """Believes that it holds the first rank's slice."""

    def __init__(self, cfg: EmbeddingConfig) -> None:
        super().__init__(replace(cfg, start=0))


class LastRowMissing(TorchEmbedding):
    """Gives zeros for the last row that it holds."""

    def __call__(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = super().__call__(ids, weight)
        return y.masked_fill((ids == self.cfg.start + self.cfg.rows - 1).unsqueeze(-1), 0)


MUTANTS = {
    "row_off_by_one": RowOffByOne,
    "outside_not_zero": OutsideNotZero,
    "wrong_rank": WrongRank,
    "last_row_missing": LastRowMissing,
}
