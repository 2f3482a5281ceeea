"""Tiny random models of every family whose tokens do not collapse, and prompts for them."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
import transformers

from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime

VOCAB = 199
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.15, "rms_norm_eps": 1e-5,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "attention_dropout": 0.0,
}  # fmt: skip
_MLA: dict[str, Any] = {
    "moe_intermediate_size": 48, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24, "v_head_dim": 20, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
_GQA: dict[str, Any] = {"num_key_value_heads": 2, "num_hidden_layers": 2, "initializer_range": 0.3}
_SPARSE: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.0,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2", _MLA), "v3": ("DeepseekV3", _MLA), "qwen2": ("Qwen2", _GQA),
    "qwen2_moe": ("Qwen2Moe", {**_GQA, **_SPARSE, "shared_expert_intermediate_size": 40}), "qwen3": ("Qwen3", _GQA),
    "qwen3_moe": ("Qwen3Moe", {**_GQA, **_SPARSE}), "llama": ("Llama", _GQA),
    "gpt_oss": ("GptOss", {**_GQA, "num_local_experts": 16, "num_experts_per_tok": 4, "head_dim": 16}),
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
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen2_moe": ("qwen2_moe", {"norm_topk_prob": False, "mlp_only_layers": [0], "qkv_bias": True}),
    "qwen3": ("qwen3", {"head_dim": 24, "initializer_range": 0.6}),
    "qwen3_moe": ("qwen3_moe", {
        "head_dim": 24, "initializer_range": 0.6, "norm_topk_prob": True, "decoder_sparse_step": 2,
        "attention_bias": True,
    }),
    "gpt_oss": ("gpt_oss", {"sliding_window": 12}),
    "llama": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
}  # fmt: skip


# One configuration of each family with grouped-query attention, and those of them without experts.
GQA = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gpt_oss", "llama")
DENSE = ("qwen2", "qwen3", "llama")


_built: dict[str, tuple[Any, torch.Tensor]] = {}


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, attn: str | None = None, **changes: Any) -> Any:
    """Return a model of :data:`CONFIGS` in evaluation mode; rotary tables and router biases stay fp32.

    A copy of one that was loaded before takes an eighth of the time; random numbers go on as behind the first.
    """
    key = repr((name, dtype, seed, attn, sorted(changes.items())))
    if key not in _built:
        model = _load(name, dtype, seed, attn, changes)
        _built[key] = model, torch.get_rng_state()
    model, random = _built[key]
    torch.set_rng_state(random)
    return copy.deepcopy(model)


def _load(name: str, dtype: torch.dtype, seed: int, attn: str | None, changes: dict[str, Any]) -> Any:
    family, own = CONFIGS[name]
    torch.manual_seed(seed)
    prefix, of_family = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**_COMMON, **of_family, **own, **changes})
    model_class = getattr(transformers, f"{prefix}ForCausalLM")
    model: Any = model_class(config)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.copy_(0.05 * torch.randn(config.n_routed_experts))
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key:
                value.copy_(1 + 0.2 * torch.randn_like(value))
            elif key.endswith(("bias", "sinks")) and not prefix.startswith("Deepseek"):
                value.copy_(0.5 * torch.randn_like(value))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return model_class.from_pretrained(folder, dtype=dtype, attn_implementation=attn or _stock(prefix)).eval()


def _stock(prefix: str) -> str:
    """Return the attention that transformers takes by itself."""
    return "eager" if prefix == "GptOss" else "sdpa"


def eager_graphs(device: torch.device) -> CudaGraphs:
    """Return graphs that need no GPU; a function of a module, so that models can be pickled with it."""
    return CudaGraphs(runtime=EagerRuntime(), warm_ups=1, freeze=False)


def prompt(batch: int = 1, length: int = 48, seed: int = 1, pads: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Return rows of distinct tokens; ``pads[i]`` leading ones of row i are padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(VOCAB - 2, generator=generator)[:length] + 2 for _ in range(batch)])
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        ids[row, :count], mask[row, :count] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}
