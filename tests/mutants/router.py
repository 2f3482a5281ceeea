"""Planted bugs of the router."""

from __future__ import annotations

import torch

from fastlayers.moe.router.layer import RouterConfig
from fastlayers.moe.router.torch import TorchRouter


class BiasedWeights(TorchRouter):
    """Takes the weights from the biased scores."""

    def __call__(self, logits, bias, num_valid):  # type: ignore[no-untyped-def]
        weights, ids = super().__call__(logits, bias, num_valid)
        if bias is None:
            return weights, ids
        score = logits.float().sigmoid() + bias
        return self.weights(score.gather(-1, ids.long().clamp_min(0))), ids


class NoBias(TorchRouter):
    """Forgets the correction bias."""

    def __call__(self, logits, bias, num_valid):  # type: ignore[no-untyped-def]
        return super().__call__(logits, None, num_valid)


class GroupMax(TorchRouter):
    """Ranks groups by their maximum where the sum of the two largest is asked for."""

    def kept(self, choice: torch.Tensor) -> torch.Tensor:
        """Swap the two rules."""
        cfg = self.cfg
        swapped = "max" if cfg.group_score == "top2_sum" else "top2_sum"
        self.cfg = RouterConfig(
            cfg.num_experts,
            cfg.top_k,
            cfg.scoring,
            cfg.num_groups,
            cfg.topk_groups,
            swapped,
            cfg.masked_score,
        )
        try:
            return super().kept(choice)
        finally:
            self.cfg = cfg


class HighestIdWinsTies(TorchRouter):
    """Breaks ties towards the highest id."""

    def __call__(self, logits, bias, num_valid):  # type: ignore[no-untyped-def]
        flipped = None if bias is None else bias.flip(-1)
        weights, ids = super().__call__(logits.flip(-1), flipped, num_valid)
        return weights, torch.where(ids < 0, ids, self.cfg.num_experts - 1 - ids)


class DoubledFactor(TorchRouter):
    """Applies the routed scaling factor twice."""

    def weights(self, chosen: torch.Tensor) -> torch.Tensor:
        """Multiply once more."""
        return super().weights(chosen) * self.cfg.scaling_factor


class PaddingRouted(TorchRouter):
    """Routes padded rows like real ones."""

    def __call__(self, logits, bias, num_valid):  # type: ignore[no-untyped-def]
        return super().__call__(logits, bias, None)


class NotRenormalised(TorchRouter):
    """Forgets to divide by the sum."""

    def weights(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the scores as they are."""
        return chosen * self.cfg.factor


MUTANTS = {
    "biased_weights": BiasedWeights,
    "no_bias": NoBias,
    "wrong_group_rule": GroupMax,
    "ties_to_highest": HighestIdWinsTies,
    "doubled_factor": DoubledFactor,
    "padding_routed": PaddingRouted,
    "not_renormalised": NotRenormalised,
}
