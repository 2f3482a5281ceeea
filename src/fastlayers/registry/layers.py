"""The layers by name, and where each keeps its registry."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastlayers.registry.registry import Registry

# Layer name -> where its registry lives. The key is the name in FASTLAYERS_BACKEND, explain() and the docs.
LAYERS: dict[str, str] = {
    "linear": "fastlayers.linear.dense.layer:LINEAR",
    "embedding": "fastlayers.embedding.layer:EMBEDDING",
    "rms_norm": "fastlayers.norm.rms_norm.layer:RMS_NORM",
    "silu_mul": "fastlayers.activation.silu_mul.layer:SILU_MUL",
    "silu_mul_quant": "fastlayers.activation.silu_mul_quant.layer:SILU_MUL_QUANT",
    "group_quant": "fastlayers.quant.group_quant.layer:GROUP_QUANT",
    "mxfp8_quant": "fastlayers.quant.mxfp8_quant.layer:MXFP8_QUANT",
    "nvfp4_quant": "fastlayers.quant.nvfp4_quant.layer:NVFP4_QUANT",
    "fp8_linear": "fastlayers.linear.fp8_block.layer:FP8_LINEAR",
    "int8_linear": "fastlayers.linear.int8.layer:INT8_LINEAR",
    "weight_only_linear": "fastlayers.linear.weight_only.layer:WEIGHT_ONLY_LINEAR",
    "fp8_scaled_linear": "fastlayers.linear.fp8_scaled.layer:FP8_SCALED_LINEAR",
    "bmm": "fastlayers.linear.bmm.layer:BMM",
    "rotary": "fastlayers.rotary.layer:ROTARY",
    "rotary_kv_write": "fastlayers.attention.rotary_kv_write.layer:ROTARY_KV_WRITE",
    "kv_write": "fastlayers.attention.kv_write.layer:KV_WRITE",
    "mla_kv_write": "fastlayers.attention.mla_kv_write.layer:MLA_KV_WRITE",
    "merge_state": "fastlayers.attention.merge_state.layer:MERGE_STATE",
    "mla": "fastlayers.attention.mla.config:MLA",
    "gqa": "fastlayers.attention.gqa.config:GQA",
    "router": "fastlayers.moe.router.layer:ROUTER",
    "moe_align": "fastlayers.moe.align.layer:MOE_ALIGN",
    "fused_moe": "fastlayers.moe.fused_moe.layer:FUSED_MOE",
    "sampler": "fastlayers.sampler.layer:SAMPLER",
}
# Layers over several ranks: their backends move rows, none of them is torch's or Triton's alone.
COLLECTIVES: dict[str, str] = {
    "all_reduce": "fastlayers.comm.all_reduce.layer:ALL_REDUCE",
    "sum_norm": "fastlayers.comm.sum_norm.layer:SUM_NORM",
    "gather_rows": "fastlayers.comm.gather_rows.layer:GATHER_ROWS",
    "expert_exchange": "fastlayers.comm.expert_exchange.layer:EXPERT_EXCHANGE",
    "scatter_rows": "fastlayers.comm.scatter_rows.layer:SCATTER_ROWS",
}
# Parts that are no layer: their rows say what serves them where, and nobody chooses among them by shape.
PARTS: dict[str, str] = {
    "bump_allocator": "fastlayers.allocator:BUMP_ALLOCATOR",
    "communicator": "fastlayers.comm.communicator:COMMUNICATOR",
    "expert_placement": "fastlayers.moe.placement.table:EXPERT_PLACEMENT",
}


def no_layer(name: object) -> str:
    """Return the sentence of what is asked to choose for a name that it cannot choose for."""
    what = "is a part, which chooses for itself" if isinstance(name, str) and name in PARTS else "is unknown"
    return f"layer {name!r} {what}; known: {', '.join((*LAYERS, *COLLECTIVES))}"


def builtin_registry(layer: str) -> Registry:
    module, _, attribute = (LAYERS.get(layer) or PARTS.get(layer) or COLLECTIVES[layer]).partition(":")
    found: Registry = getattr(importlib.import_module(module), attribute)
    return found
