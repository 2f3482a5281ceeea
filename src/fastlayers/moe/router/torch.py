"""The router in vectorised torch operations; no host sync on any device."""

from __future__ import annotations

import torch

from fastlayers.moe.router.layer import LARGE, RouterConfig


def stable_topk(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices ``[..., k]`` of the largest fp32 ``values``, descending; ties: lowest index first.

    ``torch.topk`` leaves ties open, so it runs on unique 64-bit keys: the value's bits in integer order,
    then the reversed index.
    """
    count = values.shape[-1]
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    reverse = torch.arange(count - 1, -1, -1, device=values.device)
    keys = (ordered.long() << 16) | reverse
    return (count - 1) - (keys.topk(k, dim=-1).values & 0xFFFF)


class TorchRouter:
    """Any device; deterministic."""

    def __init__(self, cfg: RouterConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, logits: torch.Tensor, bias: torch.Tensor | None, num_valid: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(topk_weights fp32 [T,k], topk_ids int32 [T,k])``."""
        cfg = self.cfg
        z = logits.float().nan_to_num(nan=-LARGE).clamp(-LARGE, LARGE)
        score = self.scores(z)
        choice = score
        if bias is not None:
            choice = (score + bias).nan_to_num(nan=-LARGE).clamp(-LARGE, LARGE)
        if cfg.grouped:
            keep = self.kept(choice)
            choice = choice.masked_fill(~keep, 0.0 if cfg.masked_score == "zero" else float("-inf"))
            if cfg.masked_score == "zero":
                score = score.masked_fill(~keep, 0.0)
        ids = stable_topk(choice, cfg.top_k)
        weights = self.weights(score.gather(-1, ids))
        ids = ids.int()
        if num_valid is not None:
            padding = (torch.arange(logits.shape[0], device=logits.device) >= num_valid).unsqueeze(-1)
            ids, weights = ids.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)
        return weights, ids

    def scores(self, z: torch.Tensor) -> torch.Tensor:
        """Return what experts are compared by, before bias and groups."""
        if self.cfg.scoring == "softmax":
            return z.softmax(-1)
        return z.sigmoid() if self.cfg.scoring == "sigmoid" else z

    def kept(self, choice: torch.Tensor) -> torch.Tensor:
        """Return which experts belong to the best groups, bool ``[T,E]``."""
        cfg = self.cfg
        members = choice.view(-1, cfg.num_groups, cfg.group_size)
        if cfg.group_score == "top2_sum":
            group = members.topk(2, dim=-1).values.sum(-1)
        else:
            group = members.amax(-1)
        best = stable_topk(group, cfg.topk_groups)
        kept = torch.zeros_like(group, dtype=torch.bool).scatter(1, best, True)
        return kept.unsqueeze(-1).expand_as(members).reshape(choice.shape)

    def weights(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the routing weights for the chosen experts' scores ``[T,k]``."""
        cfg = self.cfg
        weights = chosen.softmax(-1) if cfg.scoring == "softmax_after_topk" else chosen
        if cfg.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + cfg.renorm_eps)
        weights = weights * cfg.factor if cfg.factor != 1.0 else weights
        return weights if cfg.weights_dtype is None else weights.to(cfg.weights_dtype).float()
