"""Llama 4's language model: norms and MLPs are replaced; attention and experts are left alone, each with its reason."""

from __future__ import annotations

from typing import Any

from fastlayers.patching import structure
from fastlayers.patching.matching import SILU, Rule, attributes_fit, silu
from fastlayers.patching.mlp import FastMLP
from fastlayers.patching.norm import FastRMSNorm


class FastLlama4RMSNorm(FastRMSNorm):
    """As Llama's; the original calls it ``eps``."""

    _fl_baked = ("eps",)
    eps: float

    def _fl_epsilon(self) -> float:
        return float(self.eps)


class FastLlama4MLP(FastMLP):
    """As Llama's, dense or a shared expert; the original calls it ``activation_fn``."""

    _fl_bypassed = {"activation_fn": SILU}  # noqa: RUF012


def _norm_fits(module: Any) -> str | None:
    return attributes_fit(module, ("weight", "eps"))


def _mlp_fits(module: Any) -> str | None:
    return attributes_fit(module, (*structure.MLP_LINEARS, "activation_fn")) or silu(module, "activation_fn")


def _attention(module: Any) -> str:
    # A mask that transformers makes says which chunk a token sees; ours are made from lengths.
    return "custom-attention: chunks, or queries scaled by position"


def _experts(module: Any) -> str:
    return "custom-gate: every expert is given every token, scaled before it"


_LLAMA4 = "transformers.models.llama4.modeling_llama4.Llama4"

RULES: dict[str, Rule] = {
    f"{_LLAMA4}TextRMSNorm": Rule("norm", FastLlama4RMSNorm, _norm_fits),
    f"{_LLAMA4}TextMLP": Rule("mlp", FastLlama4MLP, _mlp_fits, structure.MLP_LINEARS),
    f"{_LLAMA4}TextAttention": Rule("attention", None, _attention),
    f"{_LLAMA4}TextExperts": Rule("moe", None, _experts),
    f"{_LLAMA4}Router": Rule("moe", None, _experts),
}
