"""Planted bugs of the sampler."""

from __future__ import annotations

import torch

from fastlayers.sampler.layer import RowParams
from fastlayers.sampler.torch import TorchSampler


class OffsetNotAdvanced(TorchSampler):
    """Draws the same token again and again."""

    def __call__(self, logits: torch.Tensor, rows: RowParams, mode: str) -> torch.Tensor:
        return super().__call__(logits, rows._replace(offset=rows.offset.clone()), mode)


class SharedSeed(TorchSampler):
    """Uses the first row's seed for all rows."""

    def __call__(self, logits: torch.Tensor, rows: RowParams, mode: str) -> torch.Tensor:
        return super().__call__(logits, rows._replace(seed=rows.seed[:1].expand_as(rows.seed).contiguous()), mode)


class SeedTruncated(TorchSampler):
    """Drops the upper half of the seed."""

    def __call__(self, logits: torch.Tensor, rows: RowParams, mode: str) -> torch.Tensor:
        return super().__call__(logits, rows._replace(seed=rows.seed & 0xFFFFFFFF), mode)


class TopKOffByOne(TorchSampler):
    """Keeps one token too many."""

    def __call__(self, logits: torch.Tensor, rows: RowParams, mode: str) -> torch.Tensor:
        return super().__call__(logits, rows._replace(top_k=rows.top_k + (rows.top_k > 0).int()), mode)


class TopPIgnored(TorchSampler):
    """Keeps the tail."""

    def __call__(self, logits: torch.Tensor, rows: RowParams, mode: str) -> torch.Tensor:
        return super().__call__(logits, rows._replace(top_p=torch.ones_like(rows.top_p)), mode)


class MinPIgnored(TorchSampler):
    """Keeps unlikely tokens."""

    def __call__(self, logits: torch.Tensor, rows: RowParams, mode: str) -> torch.Tensor:
        return super().__call__(logits, rows._replace(min_p=torch.zeros_like(rows.min_p)), mode)


class TemperatureInverted(TorchSampler):
    """Multiplies by the temperature."""

    def __call__(self, logits: torch.Tensor, rows: RowParams, mode: str) -> torch.Tensor:
        hot = torch.where(rows.temperature > 0, 1 / rows.temperature, 0.0)
        return super().__call__(logits, rows._replace(temperature=hot), mode)


class LastOfTies(TorchSampler):
    """Greedy takes the highest id on ties."""

    def __call__(self, logits: torch.Tensor, rows: RowParams, mode: str) -> torch.Tensor:
        ids = super().__call__(logits, rows, mode)
        last = logits.shape[1] - 1 - logits.float().nan_to_num(float("-inf")).flip(-1).argmax(-1)
        return torch.where(rows.temperature <= 0, last, ids)


MUTANTS = {
    "offset_not_advanced": OffsetNotAdvanced,
    "shared_seed": SharedSeed,
    "seed_truncated": SeedTruncated,
    "top_k_off_by_one": TopKOffByOne,
    "top_p_ignored": TopPIgnored,
    "min_p_ignored": MinPIgnored,
    "temperature_inverted": TemperatureInverted,
    "last_of_ties": LastOfTies,
}
