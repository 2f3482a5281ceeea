"""Model families written from `fastlayers` layers: DeepSeek, Qwen, GPT-OSS, Llama and Llama 4.

Every public name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# public name -> module that defines it
_PUBLIC = {
    "AutoModel": "fastlayers_models.auto",
    "Checkpoint": "fastlayers_models.checkpoint",
    "DeepseekForCausalLM": "fastlayers_models.deepseek",
    "Generator": "fastlayers_models.generate",
    "GptOssForCausalLM": "fastlayers_models.gpt_oss",
    "Llama4ForCausalLM": "fastlayers_models.llama4",
    "LlamaForCausalLM": "fastlayers_models.llama",
    "QwenForCausalLM": "fastlayers_models.qwen",
    "QwenVLForCausalLM": "fastlayers_models.qwen_vl",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fastlayers_models' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from fastlayers_models.auto import AutoModel as AutoModel
    from fastlayers_models.checkpoint import Checkpoint as Checkpoint
    from fastlayers_models.deepseek import DeepseekForCausalLM as DeepseekForCausalLM
    from fastlayers_models.generate import Generator as Generator
    from fastlayers_models.gpt_oss import GptOssForCausalLM as GptOssForCausalLM
    from fastlayers_models.llama import LlamaForCausalLM as LlamaForCausalLM
    from fastlayers_models.llama4 import Llama4ForCausalLM as Llama4ForCausalLM
    from fastlayers_models.qwen import QwenForCausalLM as QwenForCausalLM
    from fastlayers_models.qwen_vl import QwenVLForCausalLM as QwenVLForCausalLM
