"""Llama: which class is replaced by what."""

from __future__ import annotations

from fastlayers.patching import structure
from fastlayers.patching.gqa import FastGQA
from fastlayers.patching.matching import Rule, silu_gate
from fastlayers.patching.mlp import FastMLP
from fastlayers.patching.norm import FastRMSNorm

_LLAMA = "transformers.models.llama.modeling_llama."

RULES: dict[str, Rule] = {
    f"{_LLAMA}LlamaAttention": Rule("attention", FastGQA, structure.gqa_fits, structure.ATTENTION_LINEARS),
    f"{_LLAMA}LlamaRMSNorm": Rule("norm", FastRMSNorm, structure.norm_fits),
    f"{_LLAMA}LlamaMLP": Rule("mlp", FastMLP, silu_gate, structure.MLP_LINEARS),
}
