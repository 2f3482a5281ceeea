"""Experts through Hugging Face's registries: ``experts_implementation="fastlayers"``, bf16/fp32 and FP8-block.

Layouts: gate rows, then up rows (DeepSeek, Qwen), and GPT-OSS's: columns of gate and up in turns, ``[E, in, out]``.
The torch backend reads the latter through transposed views. Kernels want whole rows of the transposed layout: for
them the parameters get a storage of that order once, and stay what they are by name, shape and value.

No class is swapped: the decorated ``forward`` of the experts looks its function up by the name in the config. Two
small attributes with our prefix mark the modules that were patched; others that share the config (the blocks that
``generate(use_mtp=True)`` builds) run Hugging Face's own implementation.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional as F
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface, _default_apply_gate

from fastlayers import env
from fastlayers.moe.fused_moe.layer import FUSED_MOE, FusedMoEConfig
from fastlayers.moe.fused_moe.weights import GROUP, MoEWeights, activate
from fastlayers.patching.classes import PREFIX, count, new_counters, storage_mode, wants_grad
from fastlayers.registry import Ladder

NAME = "fastlayers"


def experts_config(module: Any) -> FusedMoEConfig:
    """Return what a backend must know about a Hugging Face experts module."""
    fp8, top_k = isinstance(module, FP8Experts), int(getattr(module.config, "num_experts_per_tok", 1))
    if _clamped(module):
        alpha, limit = _clamp(module)
        experts, hidden, columns = module.gate_up_proj.shape
        return FusedMoEConfig(
            int(hidden), int(columns) // 2, int(experts), top_k, activation="swiglu_oai", alpha=alpha, limit=limit,
            bias=True, interleaved=True, dtype=module.down_proj.dtype,
        )  # fmt: skip
    return FusedMoEConfig(
        int(module.hidden_dim), int(module.intermediate_dim), int(module.num_experts), top_k,
        quant="fp8_block" if fp8 else "none",
        dtype=None if fp8 else module.down_proj.dtype,
    )  # fmt: skip


def _clamped(module: Any) -> bool:
    """Return whether ``module`` is laid out as GPT-OSS's experts."""
    return bool(module.is_transposed and not module.is_concatenated)


def _clamp(module: Any) -> tuple[float, float]:
    """Return alpha and limit: attributes of the module, or in newer versions of its config."""
    alpha = getattr(module, "alpha", getattr(module.config, "swiglu_alpha", 1.702))
    limit = getattr(module, "limit", getattr(module.config, "swiglu_limit", 7.0))
    return float(alpha), float(limit)


def choose(module: Any, backend: str) -> Ladder:
    """Choose and build the backend for ``module``."""
    return FUSED_MOE.choose(experts_config(module), module.down_proj.device, backend).build()


def why_not(module: Any) -> str | None:
    """Return why ``module`` cannot run on our experts, or ``None``."""
    if getattr(module, "has_post_expert_norm", False):
        return "custom-gate: a norm follows each expert"
    if module.has_bias or module.is_transposed or not module.is_concatenated or not module.has_gate:
        return "custom-gate: another layout of gate and up"
    if getattr(module.config, "hidden_act", None) != "silu":
        return f"custom-gate: activation {getattr(module.config, 'hidden_act', None)}"
    if isinstance(module, FP8Experts):
        return _why_not_fp8(module)
    if type(module)._apply_gate is not _default_apply_gate:
        return "custom-gate: its own gate function"
    if module.gate_up_proj.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"quantized({module.gate_up_proj.dtype})"
    return None


def why_not_clamped(module: Any) -> str | None:
    """Return why experts laid out as GPT-OSS's cannot run on ours, or ``None``."""
    if getattr(module, "has_post_expert_norm", False):
        return "custom-gate: a norm follows each expert"
    if not (module.has_bias and module.has_gate and _clamped(module)):
        return "custom-gate: another layout of gate and up"
    if type(module)._apply_gate is _default_apply_gate:
        return "custom-gate: not the clamped gate function"
    if module.gate_up_proj.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"quantized({module.gate_up_proj.dtype})"
    return None


def _why_not_fp8(module: Any) -> str | None:
    if module.swiglu_alpha is not None or module.limit is not None:
        return "custom-gate: clamped"
    if module.activation_scheme != "dynamic":
        return f"quantized({module.activation_scheme} activation scales)"
    if module.block_size is None or tuple(module.block_size) != (GROUP, GROUP):
        return f"quantized(blocks {module.block_size})"
    if module.gate_up_proj.element_size() != 1 or module.gate_up_proj_scale_inv.dtype != torch.float32:
        return f"quantized({module.gate_up_proj.dtype}, scales {module.gate_up_proj_scale_inv.dtype})"
    rows, columns = -(-module.intermediate_dim // GROUP), -(-module.hidden_dim // GROUP)
    if tuple(module.gate_up_proj_scale_inv.shape[1:]) != (2 * rows, columns):
        return f"ragged-block: {module.intermediate_dim} rows each of gate and up share a block"
    return None


def prepare(module: Any, backend: str, previous: str | None) -> int:
    """Mark ``module`` as patched and build its backend; ``previous``: the implementation that ran so far.

    Returns the bytes of weights that were moved.
    """
    new_counters(module)
    module._fl_backend, module._fl_previous = backend, previous
    module._fl_core = choose(module, backend)
    if not _clamped(module) or _reads_views(module._fl_core) or module.down_proj.device.type == "meta":
        return 0
    moved = 0
    for weight in (module.gate_up_proj, module.down_proj):
        moved += weight.numel() * weight.element_size()
        with storage_mode(weight):
            weight.data = weight.data.mT.contiguous().mT
    return moved


def restore(module: Any) -> None:
    """Give weights that :func:`prepare` laid out anew the order that they had."""
    core = module.__dict__.get(PREFIX + "core")
    if core is None or not _clamped(module) or _reads_views(core):
        return
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name)
        if not weight.is_contiguous():
            with storage_mode(weight):
                weight.data = weight.data.contiguous()


def _reads_views(core: Ladder) -> bool:
    """Return whether every rung takes weights of any strides."""
    return all(rung.backend.name in ("torch", "reference") for rung in core.choice.rungs)


def _laid_out(module: Any) -> bool:
    """Return whether the parameters have the order that the chosen backend reads."""
    if not _clamped(module) or _reads_views(module._fl_core):
        return True
    return bool(module.gate_up_proj.mT.is_contiguous() and module.down_proj.mT.is_contiguous())


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts ``[T, D]``; what Hugging Face's registries call."""
    if PREFIX + "core" not in self.__dict__:
        return _stock(self, "grouped_mm")(self, hidden_states, top_k_index, top_k_weights)
    if not usable(self, hidden_states):
        count(self._fl_falls)
        return _stock(self, self._fl_previous)(self, hidden_states, top_k_index, top_k_weights)
    count(self._fl_hits)
    if self._fl_core.choice.device.type != hidden_states.device.type:
        self._fl_core = choose(self, self._fl_backend)
    if _runs_grouped(self, hidden_states):
        return grouped(self, hidden_states, top_k_index, top_k_weights)
    return run_packed(self, hidden_states, top_k_index.to(torch.int32), top_k_weights.float())


def usable(module: Any, x: torch.Tensor) -> bool:
    """Return whether our code may run: known dtype and layout, not training, and nobody wants gradients."""
    known = x.dtype == module.down_proj.dtype or module.down_proj.element_size() == 1
    return bool(known and not module.training and _laid_out(module) and not wants_grad(module, x))


def run_packed(module: Any, x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each token's experts ``[T, D]``; ``ids`` int32, ``share`` fp32."""
    # Backends of the checkpoint layout pack without a copy, so nothing can go stale.
    packed = module._fl_core.pack(weights_of(module))
    y: torch.Tensor = module._fl_core.pick(x.shape[0])(x, share, ids, packed)
    return y


def _runs_grouped(module: Any, x: torch.Tensor) -> bool:
    """Return whether torch's grouped product runs: "auto" on a CPU, which spares a step per expert."""
    auto = module._fl_backend == "auto" and "fused_moe" not in env.backend_overrides()
    if torch.compiler.is_compiling() or not auto or x.is_cuda or not hasattr(F, "grouped_mm"):
        return False
    weights = module.gate_up_proj, module.down_proj
    return x.shape[0] > 0 and all(w.element_size() > 1 and w.data_ptr() % 16 == 0 for w in weights)


def grouped(module: Any, x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each token's experts ``[T, D]`` by two grouped products over sorted pairs."""
    (tokens, top_k), clamped = ids.shape, _clamped(module)
    w13, w2 = module.gate_up_proj, module.down_proj
    experts = w13.shape[0]
    owner, order = ids.flatten().sort()
    offsets = torch.bincount(owner, minlength=experts)[:experts].cumsum(0, dtype=torch.int32)
    # Sentinels of expert parallelism come last. Products leave their rows unwritten.
    absent = int(owner[-1]) >= experts
    place = owner.clamp_max(experts - 1) if absent else owner
    inner = F.grouped_mm(x[order // top_k], w13 if clamped else w13.mT, offs=offsets)
    if clamped:
        inner = inner + module.gate_up_proj_bias[place]
        inner = activate(inner, "swiglu_oai", *_clamp(module), True)
    else:
        gate, up = inner.chunk(2, dim=-1)
        inner = F.silu(gate) * up
    out = F.grouped_mm(inner, w2 if clamped else w2.mT, offs=offsets)
    if clamped:
        out = out + module.down_proj_bias[place]
    out = out * share.flatten()[order].float().unsqueeze(-1)
    if absent:
        out = out.masked_fill((owner >= experts).unsqueeze(-1), 0.0)
    pairs = torch.empty_like(out).index_copy_(0, order, out)
    return pairs.view(tokens, top_k, -1).sum(1).to(x.dtype)


def weights_of(module: Any) -> MoEWeights:
    """Return the parameters as backends take them."""
    scales = getattr(module, "gate_up_proj_scale_inv", None), getattr(module, "down_proj_scale_inv", None)
    if _clamped(module):
        biases = module.gate_up_proj_bias, module.down_proj_bias
        return MoEWeights(module.gate_up_proj.mT, module.down_proj.mT, None, None, *biases)
    return MoEWeights(module.gate_up_proj, module.down_proj, *scales)


def _stock(module: Any, name: str | None) -> Any:
    """Return Hugging Face's implementation of that name for this module."""
    original = inspect.unwrap(type(module).forward)
    if name in (None, NAME, "eager"):
        return original
    table = FP8ExpertsInterface if isinstance(module, FP8Experts) else ExpertsInterface
    return table().get(name, original)


@torch.no_grad()
def verify(module: Any, backend: str, tolerance: float) -> str | None:
    """Compare our experts with the original's own loop on a few random tokens; nothing is copied or changed."""
    weight = module.down_proj
    if weight.device.type == "meta" or (weight.element_size() == 1 and not weight.is_cuda):
        return None
    dtype = torch.bfloat16 if weight.element_size() == 1 else weight.dtype
    cfg, generator = experts_config(module), torch.Generator().manual_seed(0)
    top_k = cfg.top_k
    x = torch.randn(3, cfg.hidden_size, generator=generator).to(weight.device, dtype)
    ids = torch.rand(3, cfg.num_experts, generator=generator).topk(top_k).indices.to(weight.device)
    share = torch.rand(3, top_k, generator=generator).to(weight.device)
    # A backend that needs another order of these weights is not built before the patch: torch's computes the same.
    ladder = choose(module, "torch" if _clamped(module) else backend)
    try:
        wanted = _stock(module, "eager")(module, x, ids, share)
    except Exception as error:  # whatever a changed forward raises: the layer is left alone, and says why
        return f"{type(error).__name__}: {error}"
    given = ladder.pick(3)(x, share, ids.to(torch.int32), ladder.pack(weights_of(module)))
    size = float((given.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))
    return None if size <= tolerance else f"relative error {size:.1e} in {dtype}"


def register() -> None:
    """Make the name known to both registries; done when this module is imported."""
    for table in (ExpertsInterface, FP8ExpertsInterface):
        table.register(NAME, experts_forward)


register()
