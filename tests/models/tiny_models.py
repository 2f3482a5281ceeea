"""Tiny random DeepSeek checkpoints that vary what real ones vary, and token rows that are not degenerate."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
BASE = dict(
    vocab_size=160, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=48, qk_nope_head_dim=16,
    qk_rope_head_dim=16, v_head_dim=24, n_routed_experts=8, num_experts_per_tok=4, n_shared_experts=1, n_group=1,
    topk_group=1, first_k_dense_replace=1, max_position_embeddings=256, initializer_range=0.15,
    rope_parameters=PLAIN, routed_scaling_factor=2.5, bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip


@dataclass(frozen=True)
class Variation:
    """One configuration: its name, family and what differs from :data:`BASE`."""

    name: str
    family: str = "v3"
    batch: int = 2
    changes: dict[str, Any] = field(default_factory=dict)


VARIATIONS = (
    Variation("v3", batch=3),
    Variation("v3_no_q_lora", batch=1, changes={"q_lora_rank": None}),
    Variation("v3_groups_yarn", batch=2, changes={"n_group": 4, "topk_group": 2, "rope_parameters": YARN}),
    Variation(
        "v3_eight_groups",
        batch=1,
        changes={"n_routed_experts": 32, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8},
    ),
    Variation("v3_two_shared_all_moe", batch=5, changes={"n_shared_experts": 2, "first_k_dense_replace": 0}),
    Variation("v3_no_shared", batch=2, changes={"n_shared_experts": 0, "first_k_dense_replace": 2}),
    Variation("v3_dense_half_split", batch=4, changes={"first_k_dense_replace": 3, "rope_interleave": False}),
    Variation("v3_bias_no_norm", batch=2, changes={"attention_bias": True, "norm_topk_prob": False}),
    Variation("v2", "v2", 2, {"topk_method": "greedy", "n_shared_experts": 2}),
    Variation("v2_lite_yarn", "v2", 3, {"q_lora_rank": None, "topk_method": "greedy", "rope_parameters": YARN}),
    Variation("v2_grouped", "v2", 1, {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
)


def hf_config(variation: Variation) -> Any:
    """Return the Hugging Face configuration of a variation."""
    from transformers import DeepseekV2Config, DeepseekV3Config

    values = BASE | variation.changes
    if variation.family == "v2":
        return DeepseekV2Config(**{k: v for k, v in values.items() if k != "rope_interleave"})
    return DeepseekV3Config(**values)


def hf_model(variation: Variation, folder: Path, seed: int = 0) -> Any:
    """Make a random model, save it to ``folder``, and return it as ``from_pretrained`` loads it in fp32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config(variation))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.uniform_(-0.3, 0.3)
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompts(batch: int, seed: int = 0, vocab: int = 160, length: int = 60) -> list[list[int]]:
    """Return ``batch`` ragged rows with at least 40 distinct tokens each."""
    generator = torch.Generator().manual_seed(seed)
    rows = [(3 + torch.randperm(vocab - 3, generator=generator))[: length - 5 * i].tolist() for i in range(batch)]
    assert all(len(set(row)) >= 40 for row in rows)
    return rows


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖actual − expected‖ / ‖expected‖ in fp64."""
    a, e = actual.double(), expected.double()
    return float((a - e).norm() / e.norm())
