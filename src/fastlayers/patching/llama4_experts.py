"""Llama 4's experts: a sparse block that gives each token to the experts that its router chose, and to no other.

    x[T, D]  scores[T, E]: sigmoid of the best logits, zero elsewhere
    y = shared(x) + sum over the best e of expert_e(x * scores[:, e])

The original gives every expert every token, most of them times zero. Scores come before the experts, so that outputs
are summed as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from fastlayers.errors import ArgumentError, dtype_name
from fastlayers.moe.fused_moe.layer import FUSED_MOE, FusedMoEConfig
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.moe.router.layer import RouterConfig
from fastlayers.patching import experts
from fastlayers.patching.classes import FastModule, count
from fastlayers.patching.matching import Rule, apart, attributes_fit, bare, silu
from fastlayers.patching.router import FastRouter, rounded
from fastlayers.registry import Ladder

Scored = tuple[torch.Tensor, torch.Tensor]


class FastLlama4Router(FastRouter):
    """Sigmoid of the best logits, zero elsewhere: scores and logits of the model's dtype ``[T, E]``."""

    _fl_functions = ("linear",)
    _fl_logits_dtype = None

    def _fl_config(self) -> RouterConfig:
        return RouterConfig(
            self.num_experts, self.top_k, "sigmoid", renormalize=False, weights_dtype=rounded(self.weight)
        )

    def _fl_logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)

    def forward(self, hidden_states: torch.Tensor) -> Scored:  # type: ignore[override]
        """Return scores and logits."""
        if not self._fl_usable(hidden_states):
            original: Scored = super(FastRouter, self).forward(hidden_states)  # type: ignore[misc]
            return original
        if self._fl_core is not None:
            share, ids, logits = self._fl_chosen(hidden_states)
            return torch.zeros_like(logits).scatter_(1, ids.long(), share), logits
        count(self._fl_hits)
        logits = self._fl_logits(hidden_states)
        best, ids = torch.topk(logits, self.top_k, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter_(1, ids, best)
        return torch.sigmoid(scores.float()).to(logits.dtype), logits

    def _fl_chosen(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the scores and numbers of the best ``[T, k]`` by a backend, and all logits."""
        count(self._fl_hits)
        logits, ladder = self._fl_logits(x), self._fl_core
        assert ladder is not None
        core: Any = ladder.pick(logits.shape[0])
        weights, ids = core(logits, None, None)
        return weights.to(logits.dtype), ids, logits


class FastLlama4Experts(experts.FastClampedExperts):
    """Each token's experts, asked by the block; weights ``[E, in, out]``, columns of gate, then of up."""

    _fl_relies = ("forward",)
    _fl_baked = ("num_experts",)
    _fl_weighs = False

    def _fl_choose(self) -> None:
        self._fl_take(choose(self, self._fl_backend))
        self._fl_views = experts.reads_views(self._fl_core)

    def _fl_other(self, x: torch.Tensor) -> str:
        weights = self._parameters
        if x.dtype != weights["down_proj"].dtype:
            return f"input of {x.dtype}, weights of {weights['down_proj'].dtype}"
        return self._fl_misplaced()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return what the original does of every token for every expert: the block asks otherwise."""
        self._fl_fell("every token is given to every expert")
        original: torch.Tensor = super(experts.FastExperts, self).forward(hidden_states)  # type: ignore[misc]
        return original

    def _fl_routed(self, x: torch.Tensor, share: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's experts ``ids [T, k]``, of inputs ``x [T, D]`` times ``share [T, k]``."""
        count(self._fl_hits)
        if self._fl_core.choice.device.type != x.device.type:
            self._fl_choose()
        rows, ones, each = pairs(x, share, ids)
        if experts.runs_grouped(self, rows):
            y = experts.grouped(self, rows, each, ones, transposed=True)
        else:
            y = self._fl_core.pick(rows.shape[0])(rows, ones, each, self._fl_core.pack(weights_of(self)))
        return y.view(*ids.shape, -1).sum(1)


def pairs(x: torch.Tensor, share: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a row for each token and each of its experts: inputs times scores, one, and the expert's number."""
    rows = (x[:, None, :] * share[:, :, None]).view(-1, x.shape[1])
    each = ids.to(torch.int32).view(-1, 1)
    return rows, torch.ones(each.shape, dtype=torch.float32, device=x.device), each


def weights_of(module: Any) -> MoEWeights:
    """Return the parameters as backends take them."""
    return MoEWeights(module.gate_up_proj.mT, module.down_proj.mT, None, None)


def choose(module: Any, backend: str) -> Ladder:
    """Choose and build the backend for these experts, one a row."""
    dtype = module.down_proj.dtype
    if dtype not in experts.DTYPES:
        raise ArgumentError("patch", "moe", f"experts of {dtype_name(dtype)}", "float32, bfloat16 or float16")
    count, inner, hidden = module.down_proj.shape
    cfg = FusedMoEConfig(int(hidden), int(inner), int(count), 1, dtype=dtype)
    return FUSED_MOE.choose(cfg, module.down_proj.device, backend).build()


class FastLlama4MoE(FastModule):
    """A shared expert, and of the routed ones those that the router chose."""

    _modules: dict[str, Any]
    top_k: int
    hidden_dim: int

    def _fl_implementation(self) -> str:
        return "each token's experts alone"

    def _fl_other(self, x: torch.Tensor) -> str:
        routed = self._modules["experts"]
        if not isinstance(routed, FastLlama4Experts) or not bare(routed):
            return "the experts are not patched, or hooked"
        why = routed._fl_why_not(x)
        return f"experts: {why}" if why else ""

    def forward(self, hidden_states: torch.Tensor) -> Scored:
        """Return the sum of all experts ``[T, D]`` and the router's logits."""
        if not self._fl_usable(hidden_states):
            original: Scored = super().forward(hidden_states)  # type: ignore[misc]
            return original
        count(self._fl_hits)
        parts = self._modules
        x = hidden_states.reshape(-1, self.hidden_dim)
        router: Any = parts["router"]
        if (
            isinstance(router, FastLlama4Router)
            and router._fl_core is not None
            and bare(router)
            and router._fl_usable(x)
        ):
            share, ids, logits = router._fl_chosen(x)
        else:
            scores, logits = router(x)
            share, ids = scores.topk(self.top_k, dim=-1)
        return parts["shared_expert"](x) + parts["experts"]._fl_routed(x, share, ids), logits


def _experts_fit(module: Any) -> str | None:
    missing = attributes_fit(module, ("gate_up_proj", "down_proj", "num_experts", "act_fn"))
    if reason := missing or silu(module):
        return reason
    (count, inner, hidden), given = module.down_proj.shape, tuple(module.gate_up_proj.shape)
    if given != (count, hidden, 2 * inner):
        return f"unknown-class: gate and up of {given}, down of {(count, inner, hidden)}"
    return None if module.down_proj.dtype in experts.DTYPES else f"quantized({module.down_proj.dtype})"


def _sparse(module: Any, x: torch.Tensor, scores: torch.Tensor, top_k: int) -> torch.Tensor:
    # A backend that needs another order of these weights is not built before the patch: torch's computes the same.
    ladder = choose(module, "torch")
    share, ids = scores.topk(top_k, dim=-1)
    rows, ones, each = pairs(x, share, ids)
    y: torch.Tensor = ladder.pick(rows.shape[0])(rows, ones, each, ladder.pack(weights_of(module)))
    return y.view(*ids.shape, -1).sum(1)


def _rows(weight: torch.Tensor) -> torch.Tensor:
    return torch.randn(5, weight.shape[2], generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)


@torch.no_grad()
def _verify_block(block: Any, backend: str) -> str | None:
    """Compare a block's own code with one that gives each token to its experts alone; nothing is changed."""
    weight = block.experts.down_proj
    if weight.device.type == "meta":
        return None
    x = _rows(weight)
    return apart(
        weight.dtype,
        lambda: [type(block).forward(block, x)[0]],
        lambda: [block.shared_expert(x) + _sparse(block.experts, x, block.router(x)[0], block.top_k)],
    )


@torch.no_grad()
def _verify_experts(module: Any, backend: str) -> str | None:
    """Compare the experts' own code, every one given every token, with each token's alone."""
    weight = module.down_proj
    if weight.device.type == "meta":
        return None
    x, count = _rows(weight), weight.shape[0]
    scores = torch.zeros(5, count, device=x.device, dtype=x.dtype)
    scores[torch.arange(5), torch.arange(5) % count] = 0.75
    rows = x.repeat(count, 1) * scores.t().reshape(-1, 1)
    return apart(
        weight.dtype,
        lambda: [type(module).forward(module, rows).view(count, 5, -1).sum(0)],
        lambda: [_sparse(module, x, scores, 1)],
    )


_LLAMA4 = "transformers.models.llama4.modeling_llama4.Llama4"
_router = partial(attributes_fit, wanted=("weight", "num_experts", "top_k"))
_block = partial(attributes_fit, wanted=("experts", "router", "shared_expert", "top_k", "hidden_dim"))

RULES: dict[str, Rule] = {
    f"{_LLAMA4}TextMoe": Rule("moe", FastLlama4MoE, _block, (), _verify_block),
    f"{_LLAMA4}TextExperts": Rule("moe", FastLlama4Experts, _experts_fit, (), _verify_experts),
    f"{_LLAMA4}Router": Rule("moe", FastLlama4Router, _router),
}
