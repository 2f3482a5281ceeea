"""The few layers that ``fastlayers bench ablation`` times: of real size on a GPU, small on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastlayers.errors import ArgumentError
from fastlayers_models.auto import family_of

# On a CPU: the same structure in small.
_SMALL = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
}  # fmt: skip
SMALL: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {
        **_SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 128, "n_routed_experts": 8, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 128, "v_head_dim": 128,
    },
    "gpt_oss": {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def sized(config: Mapping[str, Any], place: Any) -> dict[str, Any]:
    """Return a configuration at the sizes that are timed there: as it is on a GPU, small on a CPU."""
    return dict(config) | (dict(SMALL[config["model_type"]]) if torch.device(place).type == "cpu" else {})


def check(name: str, config: Mapping[str, Any], place: Any, context: int) -> None:
    """Raise an :class:`ArgumentError` of another family, or where a step has a position that the model has not."""
    if (family := config.get("model_type")) not in SMALL:
        raise ArgumentError("bench ablation", "MODEL", f"{name!r} of type {family!r}", ", ".join(SMALL))
    timed = sized(config, place)
    parsed: Any = family_of(timed).config_class.from_hf(timed)
    if context >= (most := parsed.max_position_embeddings):
        whose = "the small model that a CPU times" if torch.device(place).type == "cpu" else "the model"
        accepted = f"1 to {most - 1}: {whose} has {most} positions, and a decode step adds a token"
        raise ArgumentError("bench ablation", "--context", context, accepted)


def stack_of(name: str, config: Mapping[str, Any], place: Any, dtype: Any, layers: int) -> Any:
    """Return a random model of a few layers: of real size on a GPU, small on a CPU."""
    from fastlayers_server.random_models import random_model

    changes = sized(config, place)
    if changes["model_type"] == "deepseek_v3":
        changes["first_k_dense_replace"] = min(1, layers - 1)
        return random_model(changes, place, dtype=dtype, layers=layers, fuse_shared=False)
    return random_model(changes, place, dtype=dtype, layers=layers)
