"""Routers of DeepSeek-V2 and V3, Qwen-MoE and GPT-OSS.

They return ``(router_logits, topk_weights, topk_ids)`` like the originals. On a CPU "auto" runs the original's own
operations, without those that change nothing, so that choices and weights are bit-equal even where scores tie
(``torch.topk`` leaves ties open). On CUDA the backends of ``router`` run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from fastlayers import env
from fastlayers.errors import ArgumentError
from fastlayers.moe.router.layer import ROUTER, RouterConfig
from fastlayers.patching.classes import FastModule, count
from fastlayers.registry import Ladder

Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def rounded(weight: torch.Tensor) -> torch.dtype | None:
    """Return what weights are rounded to in a router of the model's dtype."""
    return None if weight.dtype == torch.float32 else weight.dtype


class FastRouter(FastModule):
    """Common part; families differ in ``_fl_config`` and ``_fl_exact``."""

    _fl_functions: tuple[str, ...] = ("linear", "softmax")
    # Of the logits; None: the model's dtype.
    _fl_logits_dtype: torch.dtype | None = torch.float32
    _fl_baked = (
        "num_experts", "top_k", "num_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "topk_method",
    )  # fmt: skip
    _fl_shaped = ("weight",)
    _fl_core: Ladder | None
    weight: torch.Tensor
    hidden_dim: int
    num_experts: int
    num_group: int
    topk_group: int
    top_k: int
    routed_scaling_factor: float
    e_score_correction_bias: torch.Tensor

    def _fl_config(self) -> RouterConfig:
        raise TypeError(f"{type(self).__name__} has no router configuration")

    def _fl_exact(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise TypeError(f"{type(self).__name__} has no torch path")

    def _fl_choose(self) -> None:
        auto = self._fl_backend == "auto" and "router" not in env.backend_overrides()
        self._fl_core = None
        if self.weight.dtype == torch.float64:
            raise ArgumentError("patch", "moe", "a router of float64", "float32, bfloat16 or float16")
        if not auto or self.weight.device.type == "cuda":
            self._fl_core = ROUTER.choose(self._fl_config(), self.weight.device, self._fl_backend).build()

    def _fl_implementation(self) -> str:
        return "torch, the original's operations" if self._fl_core is None else f"router={self._fl_core.choice.name}"

    def _fl_keep_groups(self, choice: torch.Tensor, group_scores: torch.Tensor, fill: float) -> torch.Tensor:
        """Return ``choice`` with the experts of all but the best groups set to ``fill``."""
        if self.topk_group >= self.num_group:
            return choice
        best = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]
        kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, True)
        members = choice.view(-1, self.num_group, self.num_experts // self.num_group)
        return members.masked_fill(~kept.unsqueeze(-1), fill).view_as(choice)

    def forward(self, hidden_states: torch.Tensor) -> Routing:
        """Return logits ``[T,E]``, weights of their dtype ``[T,k]`` and expert numbers int64 ``[T,k]``."""
        if not self._fl_usable(hidden_states):
            original: Routing = super().forward(hidden_states)  # type: ignore[misc]
            return original
        count(self._fl_hits)
        logits = self._fl_logits(hidden_states.reshape(-1, self.hidden_dim))
        if self._fl_core is None:
            weights, ids = self._fl_exact(logits)
            return logits, weights, ids
        core: Any = self._fl_core.pick(logits.shape[0])
        weights, ids = core(logits, self._fl_read("e_score_correction_bias"), None)
        return logits, weights.to(logits.dtype), ids.long()

    def _fl_read(self, name: str) -> torch.Tensor | None:
        """Return a tensor as kernels read it, if there is one of this name."""
        held = getattr(self, name, None)
        return None if held is None else held.contiguous()

    def _fl_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits ``[T,E]`` in fp32."""
        weight = self.weight
        if x.is_cuda and x.dtype == weight.dtype and x.dtype != torch.float32:
            # Products of 16-bit numbers are exact in fp32: the same sums without fp32 copies.
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return F.linear(x.float(), weight.float())

    def _fl_step_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same logits in a decode step: by the core, where it has a kernel for a few tokens."""
        assert self._fl_core is not None
        core: Any = self._fl_core.pick(x.shape[0])
        own = None
        if hasattr(core, "logits"):
            own = core.logits(x, self._fl_read("weight"), self._fl_read("bias"), self._fl_logits_dtype)
        return self._fl_logits(x) if own is None else own


class FastV3Router(FastRouter):
    """Sigmoid scores, biased choice, groups by the sum of their two best."""

    norm_topk_prob: bool

    def _fl_config(self) -> RouterConfig:
        return RouterConfig(
            self.num_experts, self.top_k, "sigmoid", self.num_group, self.topk_group, "top2_sum", "-inf", True,
            bool(self.norm_topk_prob), 1e-20, float(self.routed_scaling_factor),
        )  # fmt: skip

    def _fl_exact(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.sigmoid()
        choice = scores + self.e_score_correction_bias
        if self.topk_group < self.num_group:
            members = choice.view(-1, self.num_group, self.num_experts // self.num_group)
            choice = self._fl_keep_groups(choice, members.topk(2, dim=-1)[0].sum(dim=-1), float("-inf"))
        ids = torch.topk(choice, k=self.top_k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, ids)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.routed_scaling_factor, ids


class FastV2Router(FastRouter):
    """Softmax scores, greedy or groups by their best expert; weights are never normalised."""

    topk_method: str

    def _fl_groups(self) -> tuple[int, int]:
        return (self.num_group, self.topk_group) if self.topk_method == "group_limited_greedy" else (1, 1)

    def _fl_config(self) -> RouterConfig:
        groups, kept = self._fl_groups()
        return RouterConfig(
            self.num_experts, self.top_k, "softmax", groups, kept, "max", "zero", False, False, 1e-20,
            float(self.routed_scaling_factor),
        )  # fmt: skip

    def _fl_exact(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.softmax(dim=-1, dtype=torch.float32)
        if self.topk_method == "group_limited_greedy":
            members = scores.view(-1, self.num_group, self.num_experts // self.num_group)
            scores = self._fl_keep_groups(scores, members.max(dim=-1).values, 0.0)
        weights, ids = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
        return weights * self.routed_scaling_factor, ids


class FastSoftmaxRouter(FastRouter):
    """Softmax in fp32 over logits of the model's dtype, greedy; weights of the model's dtype (Qwen)."""

    _fl_logits_dtype = None
    norm_topk_prob: bool

    def _fl_config(self) -> RouterConfig:
        # The original divides without an epsilon; a sum of the largest probabilities is never near 0.
        return RouterConfig(
            self.num_experts, self.top_k, renormalize=bool(self.norm_topk_prob), weights_dtype=rounded(self.weight)
        )

    def _fl_logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)

    def _fl_exact(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = torch.topk(logits.softmax(dim=-1, dtype=torch.float32), self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(logits.dtype), ids


class FastTopKFirstRouter(FastRouter):
    """The best logits, then a softmax over them, all in the model's dtype (GPT-OSS)."""

    _fl_logits_dtype = None
    bias: torch.Tensor

    def _fl_config(self) -> RouterConfig:
        return RouterConfig(
            self.num_experts, self.top_k, "softmax_after_topk", renormalize=False, weights_dtype=rounded(self.weight)
        )

    def _fl_logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def _fl_exact(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best, ids = torch.topk(logits, self.top_k, dim=-1)
        return best.softmax(dim=1, dtype=best.dtype), ids
