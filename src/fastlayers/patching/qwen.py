"""Qwen2, Qwen2-MoE, Qwen3 and Qwen3-MoE: which class is replaced by what, and where the families differ."""

from __future__ import annotations

from typing import Any

from fastlayers.patching import structure
from fastlayers.patching.gqa import FastGQA, FastNormedGQA
from fastlayers.patching.matching import Rule
from fastlayers.patching.router import FastSoftmaxRouter


class FastQwen2GQA(FastGQA):
    """Biases of q, k and v; windows in some layers."""

    sliding_window: int | None

    def _fl_extra(self) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window}


class FastQwen3GQA(FastNormedGQA):
    """Norms over the heads of q and k; windows in some layers."""

    sliding_window: int | None

    def _fl_extra(self) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window}


_windowed = structure.with_attributes(structure.gqa_fits, "sliding_window")
_normed = structure.with_attributes(structure.with_attributes(structure.gqa_fits, "q_norm", "k_norm"), "sliding_window")
_router = Rule("moe", FastSoftmaxRouter, structure.with_attributes(structure.router_fits, "norm_topk_prob"))
_LINEARS = structure.ATTENTION_LINEARS
_Q2 = "transformers.models.qwen2.modeling_qwen2.Qwen2"
_Q2M = "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2Moe"
_Q3 = "transformers.models.qwen3.modeling_qwen3.Qwen3"
_Q3M = "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3Moe"

RULES: dict[str, Rule] = {
    **structure.rules(_Q2, Rule("attention", FastQwen2GQA, _windowed, _LINEARS)),
    **structure.rules(_Q2M, Rule("attention", FastGQA, structure.gqa_fits, _LINEARS), sparse=True),
    **structure.rules(_Q3, Rule("attention", FastQwen3GQA, _normed, _LINEARS)),
    **structure.rules(_Q3M, Rule("attention", FastQwen3GQA, _normed, _LINEARS), sparse=True),
    **{f"{family}TopKRouter": _router for family in (_Q2M, _Q3M)},
}
