"""Old public names: whoever uses one is told the new one, for one release."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

# old module -> new module
MODULES = {
    "fastlayers.attention.contexts": "fastlayers.attention.context_buckets",
    "fastlayers.attention.gqa.core": "fastlayers.attention.gqa.config",
    "fastlayers.attention.mla.configs": "fastlayers.attention.mla.launch_config",
    "fastlayers.attention.mla.core": "fastlayers.attention.mla.config",
    "fastlayers.attention.mla.paths": "fastlayers.attention.mla.prefix_chunks",
    "fastlayers.attention.staging": "fastlayers.attention.pinned_copy",
    "fastlayers.collector": "fastlayers.runtime.gc_pause",
    "fastlayers.compiles": "fastlayers.runtime.compile_log",
    "fastlayers.fingerprint": "fastlayers.tuning.staleness",
    "fastlayers.graphs": "fastlayers.runtime.graphs",
    "fastlayers.kernel_cache": "fastlayers.runtime.kernel_cache",
    "fastlayers.moe.fused_moe.configs": "fastlayers.moe.fused_moe.launch_config",
    "fastlayers.moe.fused_moe.packed": "fastlayers.moe.fused_moe.gpt_oss_slots",
    "fastlayers.moe.fused_moe.triton.mxfp4_blocks": "fastlayers.moe.fused_moe.triton.mxfp4.blocks",
    "fastlayers.moe.fused_moe.triton.mxfp4_gemm": "fastlayers.moe.fused_moe.triton.mxfp4.gemm",
    "fastlayers.moe.fused_moe.triton.mxfp4_hopper": "fastlayers.moe.fused_moe.triton.mxfp4.hopper",
    "fastlayers.moe.fused_moe.triton.mxfp4_mma": "fastlayers.moe.fused_moe.triton.mxfp4.mma",
    "fastlayers.moe.fused_moe.triton.mxfp4_plans": "fastlayers.moe.fused_moe.triton.mxfp4.plans",
    "fastlayers.moe.fused_moe.triton.mxfp4_rows": "fastlayers.moe.fused_moe.triton.mxfp4.rows",
    "fastlayers.moe.fused_moe.triton.mxfp4_wgmma": "fastlayers.moe.fused_moe.triton.mxfp4.wgmma",
    "fastlayers.probing": "fastlayers.tuning.probe",
    "fastlayers.quant.bmm": "fastlayers.linear.bmm",
    "fastlayers.quant.fp8_linear": "fastlayers.linear.fp8_block",
    "fastlayers.quant.fp8_scaled_linear": "fastlayers.linear.fp8_scaled",
    "fastlayers.quant.int8_linear": "fastlayers.linear.int8",
    "fastlayers.quant.notice": "fastlayers.quant.slow_formats",
    "fastlayers.testing.bench": "fastlayers.tuning.bench",
    "fastlayers.testing.samples": "fastlayers.tuning.samples",
    "fastlayers.testing.sweep": "fastlayers.tuning.sweep",
    "fastlayers.testing.timing": "fastlayers.tuning.clock",
    "fastlayers.testing.tuner": "fastlayers.tuning.search",
    "fastlayers.warmup": "fastlayers.runtime.warmup",
    "fastlayers_models.contradictions": "fastlayers_models.check_quantization",
    "fastlayers_models.decode": "fastlayers_models.step",
    "fastlayers_models.convert_readme": "fastlayers_models.convert.readme",
    "fastlayers_models.shard_writer": "fastlayers_models.convert.shard_writer",
    "fastlayers_models.tasks": "fastlayers_server.tasks",
}
# old module -> what of it has another name, or another place than the rest
NAMES = {
    "fastlayers.attention.gqa.core": "phase_of: fastlayers.attention.batch.AttentionBatch",
    "fastlayers.attention.mla.core": (
        "Varlen: fastlayers.attention.mla.config.RaggedLengths; phase_of: fastlayers.attention.batch.AttentionBatch"
    ),
    "fastlayers.collector": "frozen_collector: fastlayers.runtime.gc_pause.gc_pause",
    "fastlayers.moe.fused_moe.configs": "Plan: fastlayers.moe.fused_moe.launch_config.LaunchConfig",
    "fastlayers.quant.fp8_linear": "blocks: fastlayers.quant.block_quant",
    "fastlayers_models.contradictions": "contradictions: fastlayers_models.check_quantization.check_quantization",
    "fastlayers_models.decode": "DecodeStep: fastlayers_models.step.ModelStep",
}


class OldModules:
    """A finder, first in the line, that refuses the modules of :data:`MODULES` by telling their new names.

    Last in the line it would not be asked for a folder in which an update left nothing but compiled files.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Raise for an old name; everything else is somebody else's."""
        if name in MODULES:
            also = f" ({NAMES[name]})" if name in NAMES else ""
            raise ImportError(f"{name} is now {MODULES[name]}{also}", name=name)
        return None


def install() -> None:
    """Put the finder into the interpreter's line, once."""
    if OldModules not in sys.meta_path:
        sys.meta_path.insert(0, OldModules)


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that tells the new names of what ``module`` once had.

    Parameters
    ----------
    module : str
        ``__name__`` of the module.
    names : mapping
        Old name to new name; one in another module with that module's name.
    """

    def missing(name: str) -> Any:
        if name in names:
            raise ImportError(f"{module}.{name} is now {names[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing
