"""Tiny random DeepSeek models whose tokens do not collapse, and prompts for them."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

VOCAB = 199
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "max_position_embeddings": 512, "initializer_range": 0.15,
    "rms_norm_eps": 1e-5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "attention_dropout": 0.0,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.0,
}  # fmt: skip

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("v3", {"q_lora_rank": 40, "n_group": 4, "topk_group": 2, "norm_topk_prob": True}),
    "v3_yarn_bias": (
        "v3",
        {"q_lora_rank": 40, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "attention_bias": True,
         "rope_interleave": False, "rope_parameters": _YARN},
    ),
    "v2": ("v2", {"q_lora_rank": 40, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}),
    "v2_lite": ("v2", {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy"}),
    "v3_dense": (
        "v3",
        {"q_lora_rank": 40, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 9},
    ),
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, attn: str = "sdpa", **changes: Any) -> Any:
    """Return a model of :data:`CONFIGS` in evaluation mode; rotary tables and router biases stay fp32."""
    family, own = CONFIGS[name]
    torch.manual_seed(seed)
    options = {**_COMMON, **own, **changes}
    config: Any
    if family == "v3":
        config, model_class = DeepseekV3Config(**options), DeepseekV3ForCausalLM
    else:
        config, model_class = DeepseekV2Config(**options), DeepseekV2ForCausalLM  # type: ignore[assignment]
    model: Any = model_class(config)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.copy_(0.05 * torch.randn(config.n_routed_experts))
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key:
                value.copy_(1 + 0.2 * torch.randn_like(value))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return model_class.from_pretrained(folder, dtype=dtype, attn_implementation=attn).eval()


def prompt(batch: int = 1, length: int = 48, seed: int = 1, pads: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Return rows of distinct tokens; ``pads[i]`` leading ones of row i are padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(VOCAB - 2, generator=generator)[:length] + 2 for _ in range(batch)])
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        ids[row, :count], mask[row, :count] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}
