"""Planted bugs of merge_state."""

from __future__ import annotations

import torch

from fastlayers.attention.merge_state.torch import TorchMergeState


class _BaseTwo(TorchMergeState):
    """Takes the natural logarithms for binary ones."""

    def __call__(self, o_a, lse_a, o_b, lse_b):  # type: ignore[no-untyped-def]
        o, lse = super().__call__(o_a, lse_a * 0.6931471805599453, o_b, lse_b * 0.6931471805599453)
        return o, lse / 0.6931471805599453


class _SwappedWeights(TorchMergeState):
    def __call__(self, o_a, lse_a, o_b, lse_b):  # type: ignore[no-untyped-def]
        return super().__call__(torch.nan_to_num(o_b), lse_a, torch.nan_to_num(o_a), lse_b)


class _UnseenCounts(TorchMergeState):
    """Treats -inf as a tiny weight: unseen rows become finite."""

    def __call__(self, o_a, lse_a, o_b, lse_b):  # type: ignore[no-untyped-def]
        return super().__call__(o_a.nan_to_num(), lse_a.clamp_min(-1e4), o_b, lse_b.clamp(-1e4))


class _PositiveInfinityKept(TorchMergeState):
    def __call__(self, o_a, lse_a, o_b, lse_b):  # type: ignore[no-untyped-def]
        o, lse = super().__call__(o_a, lse_a, o_b, lse_b)
        wins = lse_b == torch.inf
        return torch.where(wins[..., None], o_b, o), torch.where(wins, lse_b, lse)


MUTANTS = {
    "base_two": _BaseTwo,
    "swapped_weights": _SwappedWeights,
    "unseen_counts": _UnseenCounts,
    "positive_infinity_kept": _PositiveInfinityKept,
}
