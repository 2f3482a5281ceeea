"""Qwen2, Qwen2-MoE, Qwen3 and Qwen3-MoE: which class is replaced by what, and where the families differ."""

from __future__ import annotations

from typing import Any

from fastlayers.patching import experts, structure
from fastlayers.patching.gqa import FastGQA, FastNormedGQA
from fastlayers.patching.matching import Rule, attributes_fit, silu_gate
from fastlayers.patching.mlp import FastMLP
from fastlayers.patching.norm import FastRMSNorm
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


def _windowed(module: Any) -> str | None:
    return attributes_fit(module, ("sliding_window",)) or structure.gqa_fits(module)


def _normed(module: Any) -> str | None:
    return attributes_fit(module, ("sliding_window",)) or structure.normed_gqa_fits(module)


def _router_fits(module: Any) -> str | None:
    return attributes_fit(module, ("norm_topk_prob",)) or structure.router_fits(module)


def _rules(family: str, package: str, attention: Rule, sparse: bool) -> dict[str, Rule]:
    prefix = f"transformers.models.{package}.modeling_{package}.{family}"
    rules = {
        f"{prefix}Attention": attention,
        f"{prefix}RMSNorm": Rule("norm", FastRMSNorm, structure.norm_fits),
        f"{prefix}MLP": Rule("mlp", FastMLP, silu_gate, structure.MLP_LINEARS),
    }
    if sparse:
        rules[f"{prefix}Experts"] = Rule("moe", experts.FastExperts, experts.why_not)
        rules[f"{prefix}TopKRouter"] = Rule("moe", FastSoftmaxRouter, _router_fits)
    return rules


_LINEARS = structure.ATTENTION_LINEARS

RULES: dict[str, Rule] = {
    **_rules("Qwen2", "qwen2", Rule("attention", FastQwen2GQA, _windowed, _LINEARS), sparse=False),
    **_rules("Qwen2Moe", "qwen2_moe", Rule("attention", FastGQA, structure.gqa_fits, _LINEARS), sparse=True),
    **_rules("Qwen3", "qwen3", Rule("attention", FastQwen3GQA, _normed, _LINEARS), sparse=False),
    **_rules("Qwen3Moe", "qwen3_moe", Rule("attention", FastQwen3GQA, _normed, _LINEARS), sparse=True),
}
