"""fastlayers: composable model layers for LLM inference.

``import fastlayers as fl`` loads torch and nothing else heavy; every public name is imported on first use.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from fastlayers import moved

__version__ = "0.1.0"

# public name -> module that defines it
_PUBLIC = {
    "Attention": "fastlayers.attention.gqa.layer",
    "AttentionBatch": "fastlayers.attention.meta",
    "AttentionState": "fastlayers.attention.meta",
    "Axis": "fastlayers.comm.parallel",
    "Backend": "fastlayers.registry",
    "Bmm": "fastlayers.linear.bmm.layer",
    "BumpAllocator": "fastlayers.allocator",
    "CudaGraphs": "fastlayers.runtime.graphs",
    "Device": "fastlayers.device",
    "EplbConfig": "fastlayers.moe.placement.planner",
    "FP8BlockLinear": "fastlayers.linear.fp8_block.layer",
    "FP8ScaledLinear": "fastlayers.linear.fp8_scaled.layer",
    "FastlayersError": "fastlayers.errors",
    "FusedMoE": "fastlayers.moe.fused_moe.layer",
    "Hidden": "fastlayers.comm.layouts",
    "Int8Linear": "fastlayers.linear.int8.layer",
    "LMHead": "fastlayers.embedding.lm_head",
    "LayerCommunicator": "fastlayers.comm.communicator",
    "Layout": "fastlayers.comm.layouts",
    "Linear": "fastlayers.linear.dense.layer",
    "MLAAttention": "fastlayers.attention.mla.layer",
    "PagePool": "fastlayers.attention.kv_cache.pool",
    "ParallelSpec": "fastlayers.comm.parallel",
    "QuantSpec": "fastlayers.quant.spec",
    "Ranks": "fastlayers.comm.ranks",
    "RMSNorm": "fastlayers.norm.rms_norm.layer",
    "RotaryEmbedding": "fastlayers.rotary.layer",
    "Sampler": "fastlayers.sampler.layer",
    "SamplingParams": "fastlayers.sampler.layer",
    "Shard": "fastlayers.comm.parallel",
    "SiluAndMul": "fastlayers.activation.silu_mul.layer",
    "TopKRouter": "fastlayers.moe.router.layer",
    "TorchCompile": "fastlayers.torch_compile",
    "StepTokens": "fastlayers.comm.padding",
    "VocabEmbedding": "fastlayers.embedding.layer",
    "WeightOnlyLinear": "fastlayers.linear.weight_only.layer",
    "backends": "fastlayers.explain",
    "explain": "fastlayers.explain",
    "finalize": "fastlayers.layer",
    "from_pretrained": "fastlayers.patching",
    "kv_cache_spec": "fastlayers.attention.kv_cache.spec",
    "layers": "fastlayers.explain",
    "linear": "fastlayers.linear.factory",
    "merge_state": "fastlayers.attention.merge_state.layer",
    "patch": "fastlayers.patching",
    "patched": "fastlayers.patching",
    "registry": "fastlayers.registry",
    "repack": "fastlayers.layer",
    "store_bf12": "fastlayers.bf12",
    "unpatch": "fastlayers.patching",
    "warmup": "fastlayers.runtime.warmup",
}

__all__ = ["__version__", *sorted(_PUBLIC)]
_missing = moved.renamed(__name__, {"MXFP8Quant": "fastlayers.quant.mxfp8_quant.layer.MXFP8Quant"})


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        return _missing(name)
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(types.ModuleType):
    """Keeps public functions that share their name with a submodule (``fl.linear``, ``fl.explain``)."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _PUBLIC and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
moved.install()

if TYPE_CHECKING:
    from fastlayers.errors import FastlayersError as FastlayersError
