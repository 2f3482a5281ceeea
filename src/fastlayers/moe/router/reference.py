"""The router's oracle: fp32, one token at a time, ties by an explicit sort on (-score, id)."""

from __future__ import annotations

import math

import torch

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
        z = logits.float().nan_to_num(nan=-LARGE, posinf=LARGE, neginf=-LARGE).clamp(-LARGE, LARGE)
        score = {"softmax": z.softmax(-1), "sigmoid": z.sigmoid(), "softmax_after_topk": z}[cfg.scoring]
        choice = score if bias is None else score + bias.float()
        choice = choice.nan_to_num(nan=-LARGE, posinf=LARGE, neginf=-LARGE)
        valid = logits.shape[0] if num_valid is None else int(num_valid.item())
        weights = torch.zeros(logits.shape[0], cfg.top_k)
        ids = torch.full((logits.shape[0], cfg.top_k), -1, dtype=torch.int32)
        for token in range(min(valid, logits.shape[0])):
            chosen, weight = self._route(z[token].tolist(), score[token].tolist(), choice[token])
            ids[token] = torch.tensor(chosen, dtype=torch.int32)
            weights[token] = torch.tensor(weight)
        if cfg.weights_dtype is not None:
            weights = weights.to(cfg.weights_dtype).float()
        return weights.to(logits.device), ids.to(logits.device)

    def _route(self, z: list[float], score: list[float], choice: torch.Tensor) -> tuple[list[int], list[float]]:
        cfg = self.cfg
        c, masked = choice.tolist(), set()
        if cfg.grouped:
            members = [list(range(g * cfg.group_size, (g + 1) * cfg.group_size)) for g in range(cfg.num_groups)]
            count = 2 if cfg.group_score == "top2_sum" else 1
            # The sum is rounded to fp32: exact ties of fp32 sums are ties.
            group = [choice[m].sort(descending=True).values[:count].sum().item() for m in members]
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
