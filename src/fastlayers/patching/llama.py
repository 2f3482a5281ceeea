"""Llama: which class is replaced by what."""

from __future__ import annotations

from fastlayers.patching import structure
from fastlayers.patching.gqa import FastGQA
from fastlayers.patching.matching import Rule

_ATTENTION = Rule("attention", FastGQA, structure.gqa_fits, structure.ATTENTION_LINEARS)

RULES: dict[str, Rule] = structure.rules("transformers.models.llama.modeling_llama.Llama", _ATTENTION)
