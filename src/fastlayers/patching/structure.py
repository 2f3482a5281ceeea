"""Whether modules that many families share have the structure that we rely on."""

from __future__ import annotations

from typing import Any

from fastlayers.patching.matching import attributes_fit

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


def norm_fits(module: Any) -> str | None:
    """Return a reason unless ``module`` is an RMSNorm with a weight."""
    return attributes_fit(module, ("weight", "variance_epsilon"))


def gqa_fits(module: Any) -> str | None:
    """Return a reason unless ``module`` is attention with grouped queries."""
    wanted = ("config", "layer_idx", "head_dim", "num_key_value_groups", "scaling", *ATTENTION_LINEARS)
    missing = attributes_fit(module, wanted)
    if missing:
        return missing
    rows = [getattr(module, name).out_features for name in ("q_proj", "k_proj", "v_proj")]
    if rows[0] != rows[1] * module.num_key_value_groups or rows[1] != rows[2] or rows[1] % module.head_dim:
        return f"unknown-class: q, k and v have {rows} rows"
    return None


def normed_gqa_fits(module: Any) -> str | None:
    """Return a reason unless ``module`` is attention with grouped queries and norms over heads."""
    return attributes_fit(module, ("q_norm", "k_norm")) or gqa_fits(module)


def router_fits(module: Any) -> str | None:
    """Return a reason unless ``module`` is a router without groups."""
    return attributes_fit(module, ("weight", "hidden_dim", "num_experts", "top_k"))
