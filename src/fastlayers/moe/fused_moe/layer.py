"""The experts of a mixture-of-experts block as two grouped GEMMs.

    T = tokens, D = hidden_size, I = intermediate_size on this rank, E = local routed experts, k = top_k
    S = num_shared experts that every token takes: they are experts E..E+S-1

    e = topk_ids[t,j]                      pairs with e outside [0,E) cost nothing and add zero
    g, u   = x[t,D] @ w13[e, 2I, D]^T (+ b13[e])          gate rows, then up rows; interleaved: in turns
    a[I]   = silu(g) * u                                  "silu"
           = min(g,L) * sigmoid(alpha*min(g,L)) * (clamp(u,-L,L) + 1)         "swiglu_oai", L = limit
    o[t,j] = topk_weights[t,j] * (a @ w2[e, D, I]^T (+ b2[e]))
    y[t,D] = scaling_factor * sum over j of o[t,j]  +  sum over shared experts (weight 1)

Sums are fp32 and in the order of j; one rounding at the end. scaling_factor is applied here exactly once, or is 1
because the router applied it. Shared experts take part in the grouped GEMM with weight 1/scaling_factor, for
tokens that have any valid pair. Formats of the weights: :mod:`fastlayers.moe.fused_moe.weights`.

    route  →  permute  →  grouped GEMM 1  →  activation  →  grouped GEMM 2  →  combine

    route                caller           fastlayers.moe.router
    permute              pairs by expert  fastlayers.moe.align for our GEMMs, triton/permute.py for packages/
    GEMM 1, activation   w13, then act    triton/*_gemm.py, in one kernel; packages/, then triton/activation.py
    GEMM 2               w2               triton/*_gemm.py, packages/
    combine              fixed order      triton/reduce.py

Which backend runs: ``backends.py``; tiles of ours: ``launch_config.py``; ``triton/backend.py`` goes through the stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from fastlayers import env
from fastlayers.comm.parallel import SINGLE, Axis
from fastlayers.device import as_device
from fastlayers.errors import (
    ArgumentError,
    CheckpointError,
    as_integers,
    check_float,
    check_kind,
    check_plain,
    check_positive,
    check_tensor,
)
from fastlayers.layer import Layer
from fastlayers.linear.weight_only.layer import FORMATS as CODES
from fastlayers.memory import allocate
from fastlayers.moe.fused_moe.backends import FUSED_MOE
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.expert_slots import part_of_features, slots_of_experts
from fastlayers.moe.fused_moe.gpt_oss_slots import (
    PackedExpertNames,
    StackedExpertNames,
    slots_of_packed,
    slots_of_stacked,
)
from fastlayers.moe.fused_moe.weights import GROUP, MoEWeights
from fastlayers.moe.placement.table import ExpertPlacement
from fastlayers.quant.bf12 import TOO_MANY, pack_bf12, why_not_bf12
from fastlayers.quant.mxfp4.codes import BYTES
from fastlayers.quant.mxfp4.codes import GROUP as MX_GROUP
from fastlayers.quant.spec import NONE, QuantSpec
from fastlayers.weights import Slot
from fastlayers.weights_epoch import Packed

_NAME = "FusedMoE"


@dataclass(frozen=True)
class ExpertNames:
    """Names of checkpoint tensors relative to the module, without ``.weight``.

    ``{e}`` is the expert's global number, ``{part}`` one of ``parts`` (gate, up, down).
    """

    expert: str = "{e}.{part}"
    shared: str = "../shared_experts.{part}"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


def why_not_fuse_shared(ep: Axis) -> str | None:
    """Return why shared experts cannot be fused into the routed ones, or ``None``.

    Every rank of an expert-parallel axis would add the shared experts once more.
    """
    return f"experts are split over {ep.size} ranks" if ep.size > 1 else None


class FusedMoE(Layer):
    """All experts of one block: SwiGLU experts, weighted and summed for every token.

    Parameters
    ----------
    hidden_size, intermediate_size, num_experts, top_k : int
        Of the whole layer, before any split. ``top_k`` counts routed experts only.
    num_shared : int
        Shared experts fused as further experts, each with weight 1. Not together with ``ep``, see
        :func:`why_not_fuse_shared`.
    quant : QuantSpec
        ``none``, ``fp8_block`` (128×128 blocks), ``int8``, or ``mxfp4`` (stays packed in memory). Weights alone as
        :class:`~fastlayers.WeightOnlyLinear` has them: ``w4a16``, ``w8a16``, ``fp8_w8a16``; input features in order.
    activation : str
        ``"silu"``, or ``"swiglu_oai"`` with ``alpha`` and ``limit``.
    bias : bool
        Hold biases of both projections.
    interleaved : bool
        Rows of the first projection, of its scales and of its bias are gate 0, up 0, gate 1, up 1, … (GPT-OSS).
    scaling_factor : float
        Applied to the sum of routed experts. 1.0 if the router applies the factor.
    ep : Axis
        Ranks that split the experts: this rank holds ``num_experts / ep.size`` of them and returns its partial
        sum; pairs of other ranks' experts cost nothing.
    tp : Axis
        Ranks that split every expert's intermediate dimension; the output is a partial sum. Packed weights in whole
        groups (mxfp4: of 32), or words of codes where a channel has one scale; the first ranks one more where they do
        not divide evenly.
    placement : ExpertPlacement, optional
        Of these experts over ``ep``: this rank holds its slots' experts, and ``topk_ids`` are slots, as the placement
        returns them. Only where checkpoints hold one tensor per expert. Default: experts in their order, one slot each.
    names : ExpertNames, PackedExpertNames or StackedExpertNames
        Checkpoint names; default: one tensor per expert, or GPT-OSS's with ``interleaved``.
    device, dtype
        ``dtype`` is that of inputs, outputs and unquantised weights (default: torch's).
    backend : str
        ``"auto"``, a name, or a ladder.

    Notes
    -----
    Capture-safe; allocates its output; never writes its input. Not found in checkpoints as such: ``slots`` reads
    one tensor per expert and projection, only those of this rank, or slices of tensors that hold all experts.
    A backend with a weight layout of its own (``triton_kernels``) takes the weights' place in ``finalize``: the
    parameters are empty afterwards, and the layer stays on its device.
    For inference only: quantised experts raise where something requires a gradient, others in the backward pass.
    Source: SGLang's fused experts (alignment, shared experts among them); Fedus et al. 2021; DeepSeek-V3 technical
    report.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> experts = fl.FusedMoE(4, 8, num_experts=2, top_k=1)
    >>> _ = experts.w13.fill_(0.5), experts.w2.fill_(0.25)
    >>> x, weights = torch.ones(2, 4), torch.tensor([[1.0], [0.5]])
    >>> y = experts(x, weights, torch.tensor([[1], [-1]], dtype=torch.int32))
    >>> [round(v, 3) for v in y[:, 0].tolist()]
    [7.046, 0.0]
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        num_shared: int = 0,
        quant: QuantSpec = NONE,
        activation: str = "silu",
        alpha: float = 1.702,
        limit: float = 7.0,
        bias: bool = False,
        interleaved: bool = False,
        scaling_factor: float = 1.0,
        ep: Axis = SINGLE,
        tp: Axis = SINGLE,
        placement: ExpertPlacement | None = None,
        names: ExpertNames | PackedExpertNames | StackedExpertNames | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_positive(_NAME, num_experts=num_experts, top_k=top_k)
        check_positive(_NAME, hidden_size=hidden_size, intermediate_size=intermediate_size)
        check_plain(_NAME, "int >= 0", num_shared=num_shared)
        hidden_size, intermediate_size, num_experts, top_k, num_shared = as_integers(
            hidden_size, intermediate_size, num_experts, top_k, num_shared
        )
        check_plain(_NAME, "bool", bias=bias, interleaved=interleaved)
        check_kind(_NAME, QuantSpec, quant=quant)
        check_kind(_NAME, Axis, ep=ep, tp=tp)
        check_float(_NAME, dtype=dtype)
        check_plain(_NAME, "float", alpha=alpha, limit=limit, scaling_factor=scaling_factor)
        if top_k > num_experts:
            raise ArgumentError(_NAME, "top_k", top_k, f"at most num_experts {num_experts}")
        if num_shared and (why := why_not_fuse_shared(ep)) is not None:
            raise ArgumentError(_NAME, "num_shared", f"{num_shared} while {why}", "0")
        if num_shared and bias:
            raise ArgumentError(_NAME, "num_shared", f"{num_shared} with bias", "0")
        check_kind(_NAME, ExpertPlacement | None, placement=placement)
        self.placement = placement
        if placement is None:
            self.expert_slice = ep.part(num_experts, f"{_NAME} num_experts")
        else:
            self.expert_slice = placement.own_slots
        self.column_slice = part_of_features(quant, intermediate_size, tp)
        local = self.column_slice.stop - self.column_slice.start
        if quant.format == "fp8_block":
            self._check_blocks(quant, local, intermediate_size, tp, num_shared)
        # How the checkpoint packs weights alone of 4 or 8 bits.
        self.layout = quant.layout
        self.intermediate_size = intermediate_size
        # A checkpoint that interleaves rows also holds all experts in one tensor.
        self.names = names or (PackedExpertNames() if interleaved else ExpertNames())
        self.adds_bias = tp.rank == 0
        if quant.format == "mxfp4" and not interleaved:
            raise ArgumentError(_NAME, "interleaved", False, "True for mxfp4, as GPT-OSS ships it")
        if not isinstance(self.names, ExpertNames | PackedExpertNames | StackedExpertNames):
            raise ArgumentError(_NAME, "names", repr(names), "ExpertNames, PackedExpertNames or StackedExpertNames")
        if isinstance(self.names, StackedExpertNames) and (quant.format != "none" or bias or num_shared):
            given = f"StackedExpertNames with quant {quant.format}, bias={bias}, num_shared={num_shared}"
            raise ArgumentError(_NAME, "names", given, "them for plain experts alone")
        if isinstance(self.names, PackedExpertNames) != interleaved:
            given = f"{type(self.names).__name__} with interleaved={interleaved}"
            raise ArgumentError(_NAME, "names", given, "PackedExpertNames with interleaved rows, or neither")
        if placement is not None:
            self._check_placement(placement, num_experts, num_shared, ep)
            num_experts = placement.num_slots
        self.num_experts = num_experts
        local_experts = self.expert_slice.stop - self.expert_slice.start
        cfg = FusedMoEConfig(
            hidden_size, local, local_experts, top_k, num_shared, quant.format, quant.scale_fmt, activation, alpha,
            limit, bias, scaling_factor, interleaved, dtype or torch.get_default_dtype(), quant.group_size,
            quant.zero_point,
        )  # fmt: skip
        self.choose(FUSED_MOE, cfg, device, backend)
        self.dtype = dtype or torch.get_default_dtype()
        self.debug = env.debug()
        self._make_parameters(device)
        self.packed: Any = None  # the backend's own type: MoEWeights, or another layout
        self._finalized = False
        self._biases: Packed | None = None  # of which biases those of another layout are a copy

    @staticmethod
    def _check_blocks(quant: QuantSpec, local: int, full: int, tp: Axis, num_shared: int) -> None:
        if quant.block_size != (GROUP, GROUP):
            raise ArgumentError(_NAME, "quant.block_size", quant.block_size, f"({GROUP}, {GROUP})")
        if tp.size > 1 and local % GROUP:
            raise ArgumentError(
                _NAME, "intermediate_size", f"{full} over {tp.size} ranks", f"a multiple of {GROUP} on each rank"
            )
        if num_shared > 1 and full % GROUP:
            raise ArgumentError(_NAME, "intermediate_size", full, f"a multiple of {GROUP} to split shared experts")

    def _check_placement(self, placement: ExpertPlacement, num_experts: int, num_shared: int, ep: Axis) -> None:
        accepted = f"None, or one of {num_experts} experts over rank {ep.rank} of {ep.size}, without shared ones"
        if placement.num_experts != num_experts or placement.ep != ep or num_shared:
            where = f"rank {placement.ep.rank} of {placement.ep.size}"
            given = f"{placement.num_experts} experts over {where}, num_shared={num_shared}"
            raise ArgumentError(_NAME, "placement", given, accepted)
        if not isinstance(self.names, ExpertNames):
            raise ArgumentError(_NAME, "placement", f"given with {type(self.names).__name__}", "None for such names")

    def _make_parameters(self, device: torch.device | str | None) -> None:
        cfg = self.cfg
        experts, inner, hidden = cfg.all_experts, cfg.intermediate_size, cfg.hidden_size
        formats = {"none": self.dtype, "fp8_block": torch.float8_e4m3fn, "int8": torch.int8, "mxfp4": torch.uint8}
        formats |= CODES
        # Two codes of four bits a byte; of MXFP4 16 bytes a scale.
        packed = {"mxfp4": lambda n: (n // MX_GROUP, BYTES), "w4a16": lambda n: (n // 2,)}
        widths = [packed.get(cfg.quant, lambda n: (n,))(n) for n in (hidden, inner)]

        def parameter(fill: int, dtype: torch.dtype, *shape: int) -> nn.Parameter:
            return nn.Parameter(allocate(_NAME, "weights", shape, dtype, device, fill), requires_grad=False)

        self.w13 = parameter(0, formats[cfg.quant], experts, 2 * inner, *widths[0])
        self.w2 = parameter(0, formats[cfg.quant], experts, hidden, *widths[1])
        self.scale_names: tuple[str, str] | None = None
        if cfg.quant == "fp8_block":
            rows, columns = -(-inner // GROUP), -(-hidden // GROUP)
            self.w13_scale_inv = parameter(1, torch.float32, experts, 2 * rows, columns)
            self.w2_scale_inv = parameter(1, torch.float32, experts, columns, rows)
            self.scale_names = ("w13_scale_inv", "w2_scale_inv")
        elif cfg.quant == "int8":
            self.w13_scale = parameter(1, torch.float32, experts, 2 * inner)
            self.w2_scale = parameter(1, torch.float32, experts, hidden)
            self.scale_names = ("w13_scale", "w2_scale")
        elif cfg.quant == "mxfp4":
            self.w13_scale = parameter(0, torch.uint8, experts, 2 * inner, hidden // MX_GROUP)
            self.w2_scale = parameter(0, torch.uint8, experts, hidden, inner // MX_GROUP)
            self.scale_names = ("w13_scale", "w2_scale")
        elif cfg.quant in CODES:
            shapes = [(experts, n // (cfg.group_size or n), rows) for n, rows in ((hidden, 2 * inner), (inner, hidden))]
            self.w13_scale, self.w2_scale = (parameter(1, torch.float32, *shape) for shape in shapes)
            self.scale_names = ("w13_scale", "w2_scale")
            if cfg.zero_point:
                self.w13_zero, self.w2_zero = (parameter(0, torch.int16, *shape) for shape in shapes)
        if cfg.bias:
            self.w13_bias = parameter(0, self.dtype, experts, 2 * inner)
            self.w2_bias = parameter(0, self.dtype, experts, hidden)

    def weights(self) -> MoEWeights:
        """Return the parameters as backends take them."""
        scales = [None, None] if self.scale_names is None else [getattr(self, n) for n in self.scale_names]
        # Under tp the output is a sum over ranks: one of them adds the second bias.
        b2 = self.w2_bias if self.cfg.bias and self.adds_bias else None
        b13, (z13, z2) = self.w13_bias if self.cfg.bias else None, (None, None)
        if self.cfg.zero_point:
            z13, z2 = self.w13_zero, self.w2_zero
        return MoEWeights(self.w13, self.w2, scales[0], scales[1], b13, b2, z13, z2)

    def finalize(self) -> None:
        """Let the backend pack the loaded weights: zero-copy, or in a layout of its own, which replaces them.

        Raises
        ------
        ArgumentError
            The layer was moved after weights of another layout had replaced the parameters; or only some of those
            were given new values since.
        """
        names = ("w13", "w2", *(self.scale_names or ()))
        if self._replaced:
            if self.packed.w13.device != self.w13.device:
                given = f"{self.w13.device} after finalize()"
                raise ArgumentError(_NAME, "device", given, f"{self.packed.w13.device}, where its weights were packed")
            return
        for name in names:
            if getattr(self, name).numel() == 0:
                given = "empty, as finalize() left it, while another one was replaced"
                raise ArgumentError(_NAME, name, given, f"new values for each of {', '.join(names)}")
        self.packed, self._finalized = self.ladder.pack(self.weights()), True
        if self.choice.rungs[-1].backend.weight_layout != "checkpoint":
            for name in names:
                parameter = getattr(self, name)
                parameter.data = parameter.data.new_empty(0)
            self._biases = Packed(None, self, self.packed_sources()) if self.cfg.bias else None

    @property
    def _replaced(self) -> bool:
        """Whether packed weights took the place of the parameters, which are empty."""
        return self.packed is not None and self.w13.numel() == 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save as ``nn.Module`` does, or raise where that would lose the weights without a word."""
        if self._replaced:
            raise CheckpointError(
                f"{_NAME}: finalize() packed its weights in a layout of their own and left nothing for a state_dict; "
                "take that before finalize(), or save the module itself (torch.save)"
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def weights_changed(self) -> None:
        """Tell, and forget what was packed, unless it is all that is left of the weights."""
        names = ("w13", "w2", *(self.__dict__.get("scale_names") or ()))
        held = [self._parameters.get(name) for name in names]
        if self.__dict__.get("packed") is not None and any(p is None or p.numel() > 0 for p in held):
            self.packed = None
        super().weights_changed()

    def packed_sources(self) -> tuple[torch.Tensor, ...]:
        """Return the biases of weights that lie in a layout of their own: it has copies in fp32."""
        if not self.cfg.bias or self.choice.rungs[-1].backend.weight_layout == "checkpoint":
            return ()
        return self.w13_bias, self.w2_bias

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Yield per-expert checkpoint tensors of this rank: ``{e}.gate_proj.weight``, … and shared experts.

        With interleaved rows: slices of the tensors that hold all experts, ``gate_up_proj_blocks``, ….
        """
        if self._replaced:
            raise CheckpointError(
                f"{_NAME}: finalize() packed its weights in a layout of their own and left nothing to load into; load "
                "before finalize(), or assign new parameters of the checkpoint's shapes"
            )
        if isinstance(self.names, PackedExpertNames):
            held = replace(self.weights(), w2_bias=self.w2_bias if self.cfg.bias else None)
            whole = self.num_experts, self.intermediate_size
            yield from slots_of_packed(self.names, self.cfg, held, whole, self.expert_slice.start, self.column_slice)
            return
        if isinstance(self.names, StackedExpertNames):
            whole = self.num_experts, self.intermediate_size
            first, part = self.expert_slice.start, self.column_slice
            yield from slots_of_stacked(self.names, self.cfg, self.weights(), whole, first, part)
            return
        held, parts = replace(self.weights(), w2_bias=self.w2_bias if self.cfg.bias else None), self.names.parts
        slots_of = partial(
            slots_of_experts, held, self.cfg, self.intermediate_size, self.column_slice, layout=self.layout
        )
        known = range(self.num_experts) if self.placement is None else self.placement.logical
        for local, expert in enumerate(known[self.expert_slice]):
            yield from slots_of([self.names.expert.format(e=expert, part=part) for part in parts], local, 1)
        if count := self.cfg.num_shared:
            names = [self.names.shared.format(part=part) for part in parts]
            yield from slots_of(names, self.cfg.num_experts, count)

    def forward(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *, local: bool = False
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts.

        Parameters
        ----------
        hidden_states : Tensor ``[T, D]``
            In the layer's dtype.
        topk_weights : fp32 Tensor ``[T, k]``
        topk_ids : int32 Tensor ``[T, k]``
            Global expert numbers (with a placement: slots); anything outside ``[0, num_experts)`` (-1: padding) adds
            nothing.
        local : bool
            Whether ids are of this rank's experts, from 0 on, as :class:`~fastlayers.comm.expert_exchange.layer.
            ExpertExchange` returns them.

        Returns
        -------
        Tensor ``[T, D]``
            New; a partial sum under ``ep`` or ``tp``.

        Raises
        ------
        ArgumentError
            Wrong shape, dtype or device; with ``FASTLAYERS_DEBUG=1`` also an id above the last expert.
        """
        if not self.trusted:
            self._check(hidden_states, topk_weights, topk_ids)
        if self.cfg.quant != "none" and (torch.is_grad_enabled() or forward_ad._current_level >= 0):
            self.refuse_grad(hidden_states=hidden_states, topk_weights=topk_weights)
        # Ids of other ranks land outside [0, E) and are dropped by the backend, which never indexes with them.
        own = topk_ids if local or self.expert_slice.start == 0 else self._local_ids(topk_ids)
        core = self.ladder.single or self.ladder.pick(hidden_states.shape[0])
        packed, held = self.packed, self._biases
        if packed is None or not (
            held is None or (not torch.compiler.is_compiling() and held.counter._version == held.at)
        ):
            packed = self._packed()
        y: torch.Tensor = core(hidden_states, topk_weights, own, packed)
        return y

    def store_bf12(self) -> str:
        """Keep copies of the weights in 12 bits a number, which serve one token; return why not (``""``: done).

        See :func:`fastlayers.store_bf12`.
        """
        cfg = self.cfg
        if why := FUSED_MOE.named("triton").why_not(cfg, as_device(self.w13.device)):
            return why
        if cfg.quant != "none" or cfg.bias or cfg.interleaved or cfg.num_shared or self._replaced:
            return "not plain routed experts without biases, gate rows, then up rows"
        sources = self._parameters.get("w13"), self._parameters.get("w2")
        if sources[0] is None or sources[1] is None:
            return "weights are computed, pruned or parametrized"
        if why := next(filter(None, map(why_not_bf12, sources)), ""):
            return why
        w13, w2 = (pack_bf12(weight.flatten(0, 1)) for weight in sources)
        if w13 is None or w2 is None:
            return TOO_MANY
        bf12 = import_module("fastlayers.moe.fused_moe.triton.pair_vector_bf12").BF12Experts(w13, w2, cfg)
        self.serve_one_token((w13, w2), bf12, *sources)
        return ""

    def _check(self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
        cfg = self.cfg
        check_tensor(_NAME, "hidden_states", hidden_states, shape=(None, cfg.hidden_size), dtype=self.dtype)
        check_tensor(_NAME, "hidden_states", hidden_states, device=self.w13.device)
        tokens, where = hidden_states.shape[0], hidden_states.device
        check_tensor(_NAME, "topk_weights", topk_weights, shape=(tokens, cfg.top_k), dtype=torch.float32, device=where)
        check_tensor(_NAME, "topk_ids", topk_ids, shape=(tokens, cfg.top_k), dtype=torch.int32, device=where)
        if self.debug and tokens and int(topk_ids.max()) >= self.num_experts:
            raise ArgumentError(_NAME, "topk_ids", f"up to {int(topk_ids.max())}", f"below {self.num_experts}")

    def _packed(self) -> MoEWeights:
        if self.packed is None:
            if not self._finalized and self.choice.rungs[-1].backend.weight_layout == "checkpoint":
                packed: MoEWeights = self.ladder.pack(self.weights())
                return packed
            self.finalize()
        elif self._biases is not None and torch.compiler.is_compiling():
            # No program may hold copies: it would not ask whether they are fresh.
            return self.packed.with_biases(self.weights())
        elif self._biases is not None and not self._biases.fresh:
            self.packed = self.packed.with_biases(self.weights())
            self.weights_changed()  # a captured step holds the address of the old copy
            self._biases = Packed(None, self, self.packed_sources())
        assert self.packed is not None
        return self.packed

    def _local_ids(self, topk_ids: torch.Tensor) -> torch.Tensor:
        return topk_ids - self.expert_slice.start
