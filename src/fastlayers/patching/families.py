"""All families: which Hugging Face class is replaced by what, and the fingerprints of code that is known."""

from __future__ import annotations

from fastlayers.patching import deepseek, gpt_oss, llama, llama4, llama4_experts, qwen
from fastlayers.patching.matching import Rule

RULES: dict[str, Rule] = {
    **deepseek.RULES, **qwen.RULES, **gpt_oss.RULES, **llama.RULES, **llama4.RULES, **llama4_experts.RULES,
}  # fmt: skip
# The families' names as config.json has them in model_type.
MODEL_TYPES = tuple(sorted({path.split(".")[2] for path in RULES if path.startswith("transformers.models.")}))
# Composites of which only the children are replaced.
BLOCKS: tuple[str, ...] = gpt_oss.BLOCKS
