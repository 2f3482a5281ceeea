"""Small models with random weights, of a config.json that lies nowhere."""

from __future__ import annotations

from typing import Any

import torch

import fastlayers as fl
from fastlayers_models.auto import family_of

COMMON: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, rms_norm_eps=1e-6, eos_token_id=95,
)  # fmt: skip
QWEN3 = COMMON | {"model_type": "qwen3"}
QWEN3_MOE = COMMON | dict(
    model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
)
GPT_OSS = COMMON | dict(model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=8)


def small_model(
    hf: dict[str, Any], device: str = "cpu", dtype: torch.dtype = torch.float32, page_size: int = 16
) -> Any:
    """Return a model whose weights are the same each time."""
    family: Any = family_of(hf)
    model = family(family.config_class.from_hf(hf), device=device, dtype=dtype, page_size=page_size)
    random = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    return fl.finalize(model).eval()
