"""Experts of Hugging Face models on the backends of ``fused_moe``: bf16, fp16, fp32 and FP8 blocks.

Layouts: gate rows, then up rows (DeepSeek, Qwen), and GPT-OSS's: columns of gate and up in turns, ``[E, in, out]``.
The torch backend reads the latter through transposed views. Kernels want whole rows of the transposed layout: for
them the parameters get a storage of that order once, and stay what they are by name, shape and value.

The decorated ``forward`` of the originals looks a function up by the name in the configuration. Ours runs in place of
transformers' own for ``eager``, ``grouped_mm`` and ``batched_mm``, and of the one that ran when the model was patched;
a name that somebody asks for afterwards, or a function of somebody else's under one of these names, is theirs.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional as F
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from fastlayers import env
from fastlayers.errors import ArgumentError, PatchError, dtype_name
from fastlayers.moe.fused_moe.layer import FUSED_MOE, FusedMoEConfig
from fastlayers.moe.fused_moe.weights import GROUP, MoEWeights, activate
from fastlayers.patching.classes import FastModule, count, storage_mode
from fastlayers.patching.guard import foreign
from fastlayers.patching.matching import SILU, apart, setting, silu
from fastlayers.registry import Ladder
from fastlayers.weights_epoch import is_aliased

# Implementations of transformers that compute the same.
_SAME = ("grouped_mm", "batched_mm")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    dtype = module.down_proj.dtype
    if dtype not in DTYPES and dtype.itemsize > 1:
        raise ArgumentError("patch", "moe", f"experts of {dtype_name(dtype)}", "float32, bfloat16, float16 or FP8")
    return FUSED_MOE.choose(experts_config(module), module.down_proj.device, backend).build()


def why_not(module: Any) -> str | None:
    """Return why ``module`` cannot run on our experts, or ``None``."""
    if getattr(module, "has_post_expert_norm", False):
        return "custom-gate: a norm follows each expert"
    if module.has_bias or module.is_transposed or not module.is_concatenated or not module.has_gate:
        return "custom-gate: another layout of gate and up"
    if getattr(module.config, "hidden_act", None) != "silu":
        return f"custom-gate: activation {getattr(module.config, 'hidden_act', None)}"
    if reason := silu(module) or _why_not_alike(module):
        return reason
    if isinstance(module, FP8Experts):
        return _why_not_fp8(module)
    if type(module)._apply_gate is not _default_apply_gate:
        return "custom-gate: its own gate function"
    if module.gate_up_proj.dtype not in DTYPES:
        return f"quantized({module.gate_up_proj.dtype})"
    return None


def why_not_clamped(module: Any) -> str | None:
    """Return why experts laid out as GPT-OSS's cannot run on ours, or ``None``."""
    if getattr(module, "has_post_expert_norm", False):
        return "custom-gate: a norm follows each expert"
    if not (module.has_bias and module.has_gate and _clamped(module)):
        return "custom-gate: another layout of gate and up"
    if reason := _why_not_alike(module):
        return reason
    if type(module)._apply_gate is _default_apply_gate:
        return "custom-gate: not the clamped gate function"
    if module.gate_up_proj.dtype not in DTYPES:
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


def _why_not_alike(module: Any) -> str | None:
    """Return a reason if somebody else's implementation runs, or if the weights are of another dtype than the rest."""
    name = _named(module)
    if name not in (None, "eager") and (home := foreign(_table(module).get(name))):
        return f"experts-implementation: {name!r} is code of {home}"
    if "_apply_gate" in module.__dict__:
        return "custom-gate: its own gate function"
    return None


def _named(module: Any) -> str | None:
    name: str | None = setting(module.config, "_experts_implementation_internal", "_experts_implementation")
    return name


def _table(module: Any) -> Any:
    return ALL_FP8_EXPERTS_FUNCTIONS if isinstance(module, FP8Experts) else ALL_EXPERTS_FUNCTIONS


def reads_views(core: Ladder) -> bool:
    """Return whether every rung takes weights of any strides."""
    return all(rung.backend.name in ("torch", "reference") for rung in core.choice.rungs)


class FastExperts(FastModule):
    """The weighted sum of each token's experts."""

    _fl_relies: tuple[str, ...] = ("forward", "_apply_gate")
    _fl_bypassed = {"act_fn": SILU}  # noqa: RUF012
    _fl_functions = ("linear", "silu")
    _fl_baked: tuple[str, ...] = ("num_experts", "alpha", "limit")
    _fl_shaped = ("gate_up_proj", "down_proj")
    _fl_core: Ladder
    _fl_auto: bool
    _fl_stock: dict[str, Any]
    _fl_table: Any = ALL_EXPERTS_FUNCTIONS
    # Whether outputs are weighted, and not inputs.
    _fl_weighs = True
    _parameters: dict[str, Any]
    config: Any

    def _fl_choose(self) -> None:
        self._fl_take(choose(self, self._fl_backend))
        table = self._fl_table
        names = [*_SAME, _named(self) or "eager"]
        self._fl_stock = {name: table[name] for name in names if name in table and not foreign(table[name])}

    def _fl_take(self, core: Ladder) -> None:
        """Compute with ``core``; where "auto" chose it, torch's grouped product may take its place on a CPU."""
        self._fl_core = core
        self._fl_auto = self._fl_backend == "auto" and "fused_moe" not in env.backend_overrides()
        weights: list[torch.Tensor] = [getattr(self, name) for name in FastExperts._fl_shaped]
        # It wants whole 16 bytes in each row, of what lies between the two products as well.
        self._fl_auto &= all(size * w.element_size() % 16 == 0 for w in weights for size in w.shape[1:])

    def _fl_implementation(self) -> str:
        return f"fused_moe={self._fl_core.choice.name}"

    def _fl_other(self, x: torch.Tensor) -> str:
        weight = self._parameters["down_proj"]
        if x.dtype != weight.dtype and weight.element_size() > 1:
            return f"input of {x.dtype}, weights of {weight.dtype}"
        name, table = _named(self), self._fl_table
        found = table._local_mapping.get(name) or table._global_mapping.get(name)
        if name is not None and name != "eager" and self._fl_stock.get(name, "") is not found:
            return f"experts_implementation {name!r} is asked for"
        return ""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts ``[T, D]``."""
        if not self._fl_usable(hidden_states, top_k_weights):
            original: torch.Tensor = super().forward(hidden_states, top_k_index, top_k_weights)  # type: ignore[misc]
            return original
        count(self._fl_hits)
        if self._fl_core.choice.device.type != hidden_states.device.type:
            self._fl_choose()
        if runs_grouped(self, hidden_states):
            return grouped(self, hidden_states, top_k_index, top_k_weights)
        return self._fl_run(hidden_states, top_k_index.to(torch.int32), top_k_weights.float())

    def _fl_run(self, x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts ``[T, D]``; ``ids`` int32, ``share`` fp32."""
        # Backends of the checkpoint layout pack without a copy, so nothing can go stale.
        packed = self._fl_core.pack(weights_of(self))
        y: torch.Tensor = self._fl_core.pick(x.shape[0])(x, share, ids, packed)
        return y


class FastFP8Experts(FastExperts):
    """FP8 blocks; transformers wraps this class's ``forward`` anew for each model that it loads."""

    _fl_rewrapped = ("forward",)
    _fl_table = ALL_FP8_EXPERTS_FUNCTIONS


class FastClampedExperts(FastExperts):
    """GPT-OSS's layout, transposed for backends that are kernels."""

    _fl_strides: dict[str, tuple[int, ...]]
    _fl_views: bool

    def forward(self, hidden_states: torch.Tensor, router_indices: Any = None, routing_weights: Any = None) -> Any:
        """Return the weighted sum of each token's experts ``[T, D]``; the names are the original's."""
        return super().forward(hidden_states, router_indices, routing_weights)

    def _fl_choose(self) -> None:
        super()._fl_choose()
        self._fl_views = reads_views(self._fl_core)

    def _fl_pack(self, again: bool = False) -> int:
        module: Any = self
        weights = {name: getattr(module, name) for name in ("gate_up_proj", "down_proj")}
        self._fl_strides = self.__dict__.get("_fl_strides", {})
        if self._fl_views or module.down_proj.device.type == "meta":
            return 0
        if not again and any(is_aliased(weight) for weight in weights.values()):
            raise PatchError(
                f"patch: moe: {self._fl_core.choice.name} reads these experts in another order, but another tensor "
                "looks at the weights (a state_dict, say): delete it before the patch, or leave them out"
            )
        moved = 0
        for name, weight in weights.items():
            if not weight.mT.is_contiguous():
                self._fl_strides.setdefault(name, weight.stride())
                moved += weight.nbytes
                with storage_mode(weight):
                    weight.data = weight.data.mT.contiguous().mT
        return moved

    def _fl_unpack(self) -> None:
        for name, strides in self.__dict__.get("_fl_strides", {}).items():
            weight = getattr(self, name)
            with storage_mode(weight):
                weight.data = torch.empty_strided(
                    weight.shape, strides, dtype=weight.dtype, device=weight.device
                ).copy_(weight.data)

    def _fl_other(self, x: torch.Tensor) -> str:
        return super()._fl_other(x) or self._fl_misplaced()

    def _fl_misplaced(self) -> str:
        """Return a reason if the weights do not lie as the backend reads them."""
        weights = self._parameters
        if self._fl_views or weights["gate_up_proj"].stride(1) == weights["down_proj"].stride(1) == 1:
            return ""
        return "weights in another order than the backend reads"


def runs_grouped(module: Any, x: torch.Tensor) -> bool:
    """Return whether torch's grouped product runs: "auto" on a CPU, which spares a step per expert."""
    if x.is_cuda or not module._fl_auto or torch.compiler.is_compiling() or not hasattr(F, "grouped_mm"):
        return False
    weights = module._parameters["gate_up_proj"], module._parameters["down_proj"]
    return x.shape[0] > 0 and all(w.element_size() > 1 and w.data_ptr() % 16 == 0 for w in weights)


def grouped(
    module: Any, x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor, transposed: bool = False
) -> torch.Tensor:
    """Return the weighted sum of each token's experts ``[T, D]`` by two grouped products over sorted pairs.

    ``transposed``: weights ``[E, in, out]`` of gate, then up.
    """
    (tokens, top_k), clamped = ids.shape, not transposed and _clamped(module)
    w13, w2 = module._parameters["gate_up_proj"], module._parameters["down_proj"]
    if not (clamped or transposed):
        w13, w2 = w13.mT, w2.mT
    experts = w13.shape[0]
    owner, order = ids.flatten().sort()
    offsets = torch.bincount(owner, minlength=experts)[:experts].cumsum(0, dtype=torch.int32)
    # Sentinels of expert parallelism come last. Products leave their rows unwritten.
    absent = int(owner[-1]) >= experts
    place = owner.clamp_max(experts - 1) if absent else owner
    inner = F.grouped_mm(x[order // top_k], w13, offs=offsets)
    if clamped:
        inner = inner + module.gate_up_proj_bias[place]
        inner = activate(inner, "swiglu_oai", *_clamp(module), True)
    else:
        gate, up = inner.chunk(2, dim=-1)
        inner = F.silu(gate) * up
    out = F.grouped_mm(inner, w2, offs=offsets)
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
        biases = module.gate_up_proj_bias.contiguous(), module.down_proj_bias.contiguous()
        return MoEWeights(module.gate_up_proj.mT, module.down_proj.mT, None, None, *biases)
    return MoEWeights(module.gate_up_proj, module.down_proj, *scales)


@torch.no_grad()
def verify(module: Any, backend: str) -> str | None:
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
    code, packed = inspect.unwrap(type(module).forward), ladder.pack(weights_of(module))
    return apart(
        dtype,
        lambda: [code(module, x, ids, share)],
        lambda: [ladder.pick(3)(x, share, ids.to(torch.int32), packed)],
    )
