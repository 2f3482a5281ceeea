"""GPT-OSS: which class is replaced by what, and what is particular about it."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.patching import experts, structure
from fastlayers.patching.gqa import FastGQA
from fastlayers.patching.matching import Rule
from fastlayers.patching.norm import FastScaleThenCastRMSNorm
from fastlayers.patching.router import FastTopKFirstRouter


class FastSinkGQA(FastGQA):
    """One learned logit a head in the softmax; every second layer has a window."""

    sliding_window: int | None
    sinks: torch.Tensor

    def _fl_extra(self) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window, "s_aux": self.sinks}


def _mxfp4(module: Any) -> str:
    if isinstance(module.gate_up_proj, torch.Tensor):
        return "quantized(mxfp4): the block's forward is bound to another kernel"
    return "quantized(mxfp4): the weights are swizzled for another kernel"


_attention = structure.with_attributes(structure.gqa_fits, "sliding_window", "sinks")
_router = structure.with_attributes(structure.router_fits, "bias")
_OSS = "transformers.models.gpt_oss.modeling_gpt_oss."

# Blocks of which only the children are replaced; their names look like something else.
BLOCKS = (f"{_OSS}GptOssMLP",)
RULES: dict[str, Rule] = {
    f"{_OSS}GptOssAttention": Rule("attention", FastSinkGQA, _attention, structure.ATTENTION_LINEARS),
    f"{_OSS}GptOssRMSNorm": Rule("norm", FastScaleThenCastRMSNorm, structure.norm_fits),
    f"{_OSS}GptOssTopKRouter": Rule("moe", FastTopKFirstRouter, _router),
    f"{_OSS}GptOssExperts": Rule("moe", experts.FastClampedExperts, experts.why_not_clamped, (), experts.verify),
    "transformers.integrations.mxfp4.Mxfp4GptOssExperts": Rule("moe", None, _mxfp4),
}
