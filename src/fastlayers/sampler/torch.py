"""The sampler in native torch operations."""

from __future__ import annotations

import torch

from fastlayers.sampler.layer import RowParams, SamplerConfig
from fastlayers.sampler.philox import uniform


class TorchSampler:
    """Any device; traceable; sorts only in mode ``"filtered"``."""

    def __init__(self, cfg: SamplerConfig) -> None:
        self.vocab_size = cfg.vocab_size

    def __call__(self, logits: torch.Tensor, rows: RowParams, mode: str) -> torch.Tensor:
        """Return ids ``[B]`` and advance the offsets in place."""
        x = logits.float()
        x = x.masked_fill(x.isnan(), float("-inf"))
        greedy = x.argmax(-1)
        if mode == "greedy":
            rows.offset.add_(1)
            return greedy
        kept, is_greedy = self.kept(x, greedy, rows, mode)
        running = kept.cumsum(-1)
        target = uniform(rows.seed, rows.offset).unsqueeze(-1) * running[:, -1:]
        # Where rounding leaves no running sum above the target: the last token that adds to it.
        last = torch.searchsorted(running, running[:, -1:].contiguous())
        drawn = torch.minimum(torch.searchsorted(running, target, right=True), last).squeeze(-1)
        rows.offset.add_(1)
        return torch.where(is_greedy, greedy, drawn)

    def kept(
        self, x: torch.Tensor, greedy: torch.Tensor, rows: RowParams, mode: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight of each token that the filters keep, and which rows take ``greedy`` instead."""
        largest = x.gather(-1, greedy.unsqueeze(-1))
        is_greedy = (rows.temperature <= 0) | (largest.squeeze(-1) == float("-inf"))
        temperature = rows.temperature.double().masked_fill(is_greedy, 1.0).unsqueeze(-1)
        weight = self._weight(x, largest, temperature)
        keep = weight >= rows.min_p.double().unsqueeze(-1)
        if mode == "filtered":
            keep &= x >= self._threshold(x, largest, temperature, rows)
        return weight.masked_fill(~keep, 0.0), is_greedy

    @staticmethod
    def _weight(x: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        weight = ((x.double() - largest.double()) / temperature).exp()
        return weight.masked_fill(x == largest, 1.0)  # also where inf - inf is NaN

    def _threshold(
        self, x: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor, rows: RowParams
    ) -> torch.Tensor:
        """Return the smallest logit that top-k and top-p keep, ``[B, 1]``."""
        ranked = x.sort(-1, descending=True).values
        k, p = rows.top_k.long().unsqueeze(-1), rows.top_p.double().unsqueeze(-1)
        k = torch.where((k > 0) & (k < self.vocab_size), k, self.vocab_size)
        smallest = ranked.gather(-1, k - 1)
        running = self._weight(ranked, largest, temperature).masked_fill(ranked < smallest, 0.0).cumsum(-1)
        # A token stays if the weight before it is less than p of the whole; the first one always does.
        stays = (running[:, :-1] < p * running[:, -1:]).sum(-1, keepdim=True)
        return torch.where(p < 1, torch.maximum(smallest, ranked.gather(-1, stays)), smallest)


def probabilities(logits: torch.Tensor, rows: RowParams) -> torch.Tensor:
    """Return the distribution ``[B, V]`` in fp64 of which mode "filtered" draws; a greedy row has one token."""
    x = logits.float()
    x = x.masked_fill(x.isnan(), float("-inf"))
    greedy = x.argmax(-1)
    kept, is_greedy = TorchSampler(SamplerConfig(x.shape[-1])).kept(x, greedy, rows, "filtered")
    one = torch.zeros_like(kept).scatter_(-1, greedy.unsqueeze(-1), 1.0)
    return torch.where(is_greedy.unsqueeze(-1), one, kept / kept.sum(-1, keepdim=True))
