"""The router's oracle: fp32, one token at a time, ties by an explicit sort on (-score, id)."""

from __future__ import annotations

import math

import torch
from torch.autograd import forward_ad

from fastlayers.gradients import refuse
from fastlayers.moe.router.layer import LARGE, RouterConfig


class ReferenceRouter:
    """See :mod:`fastlayers.moe.router.layer` for the formula."""

    def __init__(self, cfg: RouterConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, logits: torch.Tensor, bias: torch.Tensor | None, num_valid: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(topk_weights fp32 [T,k], topk_ids int32 [T,k])``."""
        cfg = self.cfg
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:  # it computes with Python's numbers
            refuse("TopKRouter", [("logits", logits)], "logits that need no gradient, or backend='torch'")
        z = logits.float().nan_to_num(nan=-LARGE, posinf=LARGE, neginf=-LARGE).clamp(-LARGE, LARGE)
        score = {"softmax": z.softmax(-1), "sigmoid": z.sigmoid(), "softmax_after_topk": z}[cfg.scoring]
        choice = score if bias is None else score + bias.float()
        choice = choice.nan_to_num(nan=-LARGE, posinf=LARGE, neginf=-LARGE)
        valid = logits.shape[0] if num_valid is None else int(num_valid.item())
        weights = torch.zeros(logits.shape[0], cfg.top_k, device="cpu")
        ids = torch.full((logits.shape[0], cfg.top_k), -1, dtype=torch.int32, device="cpu")
        # One copy to the host, not several for each token.
        rows = zip(z.tolist(), score.tolist(), choice.tolist(), self._group_scores(choice), strict=True)
        routed = [self._route(*row) for row, _ in zip(rows, range(valid), strict=False)]
        if routed:
            ids[: len(routed)] = torch.tensor([chosen for chosen, _ in routed], dtype=torch.int32, device="cpu")
            weights[: len(routed)] = torch.tensor([weight for _, weight in routed], device="cpu")
        if cfg.weights_dtype is not None:
            weights = weights.to(cfg.weights_dtype).float()
        return weights.to(logits.device), ids.to(logits.device)

    def _group_scores(self, choice: torch.Tensor) -> list[list[float]]:
        """Return the maximum, or the sum of the two largest, of each group of each token."""
        best = choice.unflatten(-1, (self.cfg.num_groups, self.cfg.group_size)).sort(-1, descending=True).values
        # The sum is rounded to fp32: exact ties of fp32 sums are ties.
        scores: list[list[float]] = best[..., : 2 if self.cfg.group_score == "top2_sum" else 1].sum(-1).tolist()
        return scores

    def _route(
        self, z: list[float], score: list[float], c: list[float], group: list[float]
    ) -> tuple[list[int], list[float]]:
        cfg = self.cfg
        masked: set[int] = set()
        if cfg.grouped:
            members = [list(range(g * cfg.group_size, (g + 1) * cfg.group_size)) for g in range(cfg.num_groups)]
            kept = sorted(range(cfg.num_groups), key=lambda g: (-group[g], g))[: cfg.topk_groups]
            masked = {e for g in range(cfg.num_groups) if g not in kept for e in members[g]}
            for e in masked:
                c[e] = 0.0 if cfg.masked_score == "zero" else -math.inf
        chosen = sorted(range(cfg.num_experts), key=lambda e: (-c[e], e))[: cfg.top_k]
        if cfg.scoring == "softmax_after_topk":
            weight = [math.exp(z[e] - max(z[i] for i in chosen)) for e in chosen]
            weight = [w / sum(weight) for w in weight]
        else:
            weight = [0.0 if e in masked else score[e] for e in chosen]
        if cfg.renormalize:
            total = sum(weight) + cfg.renorm_eps
            weight = [w / total for w in weight]
        return chosen, [w * cfg.factor for w in weight]
