"""What many families share: the structure that we rely on in their modules, and which of them are replaced by what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastlayers.patching import experts
from fastlayers.patching.matching import Rule, attributes_fit, silu_gate
from fastlayers.patching.mlp import FastMLP
from fastlayers.patching.norm import FastRMSNorm

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


def router_fits(module: Any) -> str | None:
    """Return a reason unless ``module`` is a router without groups."""
    return attributes_fit(module, ("weight", "hidden_dim", "num_experts", "top_k"))


def with_attributes(fits: Callable[[Any], str | None], *names: str) -> Callable[[Any], str | None]:
    """Return what asks for these attributes, and then what ``fits`` does."""
    return lambda module: attributes_fit(module, names) or fits(module)


def rules(family: str, attention: Rule, sparse: bool = False) -> dict[str, Rule]:
    """Return the rules of a family whose norms and MLPs are Llama's; ``sparse``: and whose experts are DeepSeek's.

    ``family``: what the names of its classes begin with, their module included.
    """
    found = {
        f"{family}Attention": attention,
        f"{family}RMSNorm": Rule("norm", FastRMSNorm, norm_fits),
        f"{family}MLP": Rule("mlp", FastMLP, silu_gate, MLP_LINEARS),
    }
    return found | (
        {f"{family}Experts": Rule("moe", experts.FastExperts, experts.why_not, (), experts.verify)} if sparse else {}
    )
