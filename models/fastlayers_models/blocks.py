"""What model families share: how their parts are built, the dense MLP, the decoder layer's frame, the model's frame.

    tokens ─► embed ─► [ norm ─► self_attn ─► norm ─► mlp ] × layers ─► norm ─► lm_head ─► logits

A family's file says what ``self_attn`` and ``mlp`` are. Number formats are in ``config.quant``, ranks in
``ParallelSpec``, collectives in ``LayerCommunicator``: none of them appears in a branch of a family.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn.functional import pad

import fastlayers as fl
from fastlayers import env, moved
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.meta import AttentionMeta
from fastlayers.comm.collectives import collectives, gather_logits, reduce_embedding
from fastlayers.comm.communicator import LayerCommunicator
from fastlayers.comm.layouts import BETWEEN, Hidden
from fastlayers.comm.padding import StepTokens
from fastlayers.comm.parallel import REPLICATED, ParallelSpec
from fastlayers.errors import ArgumentError, check_tensor
from fastlayers.layer import check_move, trust
from fastlayers.linear.split_rows import SplitRows, bare, join_and_norm, leaves, rows_of, takes_split
from fastlayers.quant.coded_rows import codes_behind
from fastlayers.weights_epoch import WeightsEpoch, epoch_of
from fastlayers_models.agreement import same_choices
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.context import ModelContext
from fastlayers_models.experts import ExpertBalancer, check_experts_are_there, experts_held
from fastlayers_models.loading import load_model
from fastlayers_models.overlap import Planned, run_layers

__getattr__ = moved.renamed(__name__, {"Build": "ModelContext", "SideBySide": "fastlayers_models.concat.ConcatLinears"})


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``; partial sums over ``tp``, or with ``whole`` everything on each rank."""

    reads = "gate_up_proj"  # what alone sees the input, see linear_of

    def __init__(
        self, context: ModelContext, name: str, intermediate_size: int, *, bias: bool = False, whole: bool = False
    ) -> None:
        super().__init__()
        hidden, parallel = context.config.hidden_size, context.parallel
        column, row = (REPLICATED, REPLICATED) if whole else (parallel.column(), parallel.row())
        self.gate_up_proj = context.fused(name, ("gate_proj", "up_proj"), intermediate_size, bias, column)
        self.act_fn = fl.SiluAndMul(intermediate_size // column.axis.size, device=context.device, dtype=context.dtype)
        self.down_proj = context.linear(f"{name}.down_proj", intermediate_size, hidden, bias, shard=row)
        down = self.down_proj
        self.act_quant = down.quantised_activation(self.act_fn) if isinstance(down, fl.FP8BlockLinear) else None

    @takes_split
    def forward(self, x: torch.Tensor, valid: torch.Tensor | None = None, *, split: bool = False) -> torch.Tensor:
        """Return ``[T, D]``, with ``split`` maybe as ``SplitRows``, see ``leaves``; ``valid`` is not needed here."""
        held: Any = self._modules
        gate_up, down, activation = held["gate_up_proj"](x), held["down_proj"], held["act_fn"]
        quant = self.act_quant
        if quant is not None:
            out: torch.Tensor = down.gated(gate_up, activation, quant)
            return out
        out = rows_of(down, activation(gate_up)) if split else down(activation(gate_up))
        return out


class DecoderLayer(nn.Module):
    """One decoder layer; the communicator decides what is gathered, reduced and normed where.

    Parameters
    ----------
    context : ModelContext
    self_attn : nn.Module
        Called as ``self_attn(hidden, meta, cache)``; returns a partial sum over ``attn_tp``.
    mlp : nn.Module
        Called as ``mlp(hidden, valid)``; returns a partial sum over ``tp``, or experts whose tokens are exchanged the
        whole of this rank's rows. ``valid`` is ``None``, or tells which rows are padding, see :meth:`CausalLM.forward`.
    mlp_kind : str
        ``"dense"`` or ``"moe"``.
    is_last : bool
    """

    # What a step does, in this order: COMPUTED on this rank, the others are hooks of the communicator.
    STAGES = ("prepare_attn", "attention", "prepare_mlp", "mlp", "postprocess")
    COMPUTED = ("attention", "mlp")
    # The mlp's name among the modules: the checkpoint's, so a family whose files have another sets it.
    MLP = "mlp"

    def __init__(
        self, context: ModelContext, self_attn: nn.Module, mlp: nn.Module, *,
        mlp_kind: str = "dense", is_last: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.self_attn = self_attn
        setattr(self, self.MLP, mlp)
        self.input_layernorm, self.post_attention_layernorm = context.norm(), context.norm()
        self.mlp_kind = mlp_kind
        self.exchanges = mlp_kind == "moe" and context.token_moves is not None
        self.communicator = LayerCommunicator(
            context.parallel,
            input_layernorm=self.input_layernorm,
            post_attention_layernorm=self.post_attention_layernorm,
            mlp_kind=mlp_kind,
            all_to_all=self.exchanges,
            is_last=is_last,
            seam=context.seam,
            moves=context.moves,
            codes=codes_behind(self, self.MLP),
        )

    @takes_split
    def forward(
        self, hidden: Hidden, meta: AttentionMeta, cache: LayerCache, step: StepTokens, valid: Any = None, *,
        split: Collection[str] = (),
    ) -> Hidden:  # fmt: skip
        """Return the next layer's input; writes the new tokens' rows to ``cache``.

        ``valid``: which of the step's rows are real, see :func:`routed_rows`; ``None``: all. ``split``: which of
        :attr:`COMPUTED` may leave splits to a norm, see :meth:`leaves_to`; what is returned may have ``SplitRows``.
        """
        norms = self.communicator.bare_norms(hidden, coded=meta.checked)
        x: Any = hidden.tensor
        if norms is None or x.shape[0] != meta.positions.shape[0]:
            hidden.tensor = x.joined() if type(x) is SplitRows else x
            for stage in self.STAGES:
                hidden = self.run(stage, hidden, meta, cache, step, valid)
            return hidden
        # The same stages where the hooks are the norms and nothing else.
        held: Any = self._modules
        residual: Any = hidden.residual
        if type(x) is SplitRows:
            x, residual = join_and_norm(norms[0], x, residual)
        else:
            x, residual = (norms[0](x), x) if residual is None else norms[0](x, residual)
        attention, mlp = held["self_attn"], held[self.MLP]
        x = attention(x, meta, cache, split=True) if "attention" in split else attention(x, meta, cache)
        x, residual = join_and_norm(norms[1], x, residual) if type(x) is SplitRows else norms[1](x, residual)
        return Hidden(mlp(x, valid, split=True) if "mlp" in split else mlp(x, valid), residual, BETWEEN)

    def leaves_to(self, behind: nn.Module | None) -> Collection[str]:
        """Return which of :attr:`COMPUTED` may leave splits, to a norm of this layer or of the next one.

        The MLP only where that layer, ``behind``, alone reads what this one returns.
        """
        held: Any = self._modules
        mlp = behind is not None and leaves(held[self.MLP], "down_proj") and bare(self) and bare(behind)
        return ("attention",) * leaves(held["self_attn"], "o_proj") + ("mlp",) * mlp

    def run(
        self, stage: str, hidden: Hidden, meta: AttentionMeta, cache: LayerCache, step: StepTokens, valid: Any
    ) -> Hidden:
        """Return what one of :attr:`STAGES` makes of what the one before it returned."""
        held: Any = self._modules
        if stage == "mlp":
            out = held[self.MLP](hidden.tensor, valid)
            return hidden.complete(out) if self.exchanges else hidden.partial(out, "tp")
        if stage != "attention":
            return self.communicator.run(stage, hidden, step)
        x, rows, tokens = hidden.tensor, hidden.tensor.shape[0], meta.positions.shape[0]
        if rows == tokens:
            return hidden.partial(held["self_attn"](x, meta, cache), "attn_tp")
        # Rows that only make this group's count a round number take no part in attention.
        return hidden.partial(pad(held["self_attn"](x[:tokens], meta, cache), (0, 0, 0, rows - tokens)), "attn_tp")


class Decoder(nn.Module):
    """Embedding, decoder layers and final norm, under the checkpoint's names.

    Parameters
    ----------
    context : ModelContext
    make_layer : callable
        ``make_layer(context, index, is_last=...)`` returns a :class:`DecoderLayer`.
    """

    def __init__(self, context: ModelContext, make_layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        count = context.config.num_hidden_layers
        self.embed_tokens = context.embedding()
        self.layers: Any = nn.ModuleList(make_layer(context, i, is_last=i == count - 1) for i in range(count))
        self.norm = context.norm()


class CausalLM(nn.Module):
    """A decoder and its vocabulary head: what a serving loop calls.

    Parameters
    ----------
    config
        Of :attr:`config_class`.
    parallel, device, dtype, page_size, kv_dtype, backend
        As of :class:`ModelContext`.

    Attributes
    ----------
    config_class : type
        Of every family: its configuration, with ``from_hf(parsed config.json)``.
    layer_class : type
        Of every family: its :class:`DecoderLayer`, called as ``layer_class(context, index, is_last=...)``.
    spread_rows : range
        Of how many rows steps are spread over ranks, see :class:`~fastlayers.StepTokens`; empty: none are.
    context_class : type
        What the parts are built with: :class:`ModelContext`, where a family has no other norm or rotation.
    """

    config_class: Any
    layer_class: Any
    context_class: type[ModelContext] = ModelContext
    merged_tensors: ClassVar[Mapping[str, Sequence[str]]] = {}  # see fastlayers_models.loading.in_one_tensor

    def __init__(
        self,
        config: Any,
        *,
        parallel: ParallelSpec | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        page_size: int = 64,
        kv_dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        self._assemble(self.context_class(config, parallel, device, dtype, page_size, kv_dtype, backend))

    def make_model(self, context: ModelContext) -> nn.Module:
        """Return the decoder, or a module that holds it (see :attr:`decoder`)."""
        return Decoder(context, self.layer_class)

    def _assemble(self, context: ModelContext) -> None:
        super().__init__()
        self.config, self.parallel, self.device = context.config, context.parallel, context.device
        self.page_size, self.kv_dtype = context.page_size, context.kv_dtype
        self.attention_group = collectives(context.parallel.attn_tp)
        self.seam, self.moves, self.token_moves = context.seam, context.moves, context.token_moves
        self.token_way = context.token_way if context.parallel.ep.size > 1 else None
        self.model: Any = self.make_model(context)
        self.lm_head = context.lm_head(self.decoder.embed_tokens if context.config.tie_word_embeddings else None)
        # What comes in is checked here, once a step.
        self._debug = env.debug()
        trust(self.decoder.layers)
        # Only rows that are scattered over ranks must be a number that they divide.
        scattered = any(layer.communicator.place == "scattered" for layer in self.decoder.layers)
        self.row_multiple = context.parallel.attn_tp.size if scattered or context.parallel.attn_dp.size > 1 else 1
        for layer in self.decoder.layers:
            layer.communicator.trusted = not self._debug
        self.spread_rows = self.seam.spread_rows if self.seam is not None else range(0)
        same_choices(self)
        self.balancer = ExpertBalancer.make(self)
        check_experts_are_there(self)
        self._checked: tuple[weakref.ref[LayerCache], weakref.ref[Any]] | None = None
        # Weights whose gradients end at a cache, listed when the epoch had this value.
        self._before_caches: tuple[WeightsEpoch, int, list[tuple[Any, torch.Tensor]]] | None = None

    @property
    def decoder(self) -> Any:
        """The module with ``embed_tokens``, ``layers`` and ``norm``."""
        return self.model

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> Any:
        """Return the configuration of a checkpoint."""
        return cls.config_class.from_hf(checkpoint.config)

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> Self:
        """Build the model of a checkpoint directory and load its weights.

        Parameters
        ----------
        path : str or Path
            Directory with ``config.json`` and safetensors shards.
        **options
            As for the constructor.

        Raises
        ------
        UnknownModelError, CheckpointError, ArgumentError
            Another family's checkpoint; files or tensors that do not fit (see :func:`load_weights`); a value in
            ``config.json`` that the model cannot be built from.
        """
        checkpoint = Checkpoint(path)
        return load_model(cls, checkpoint, cls.read_config(checkpoint), **options)

    @property
    def ignored_tensors(self) -> Sequence[str]:
        """Patterns of tensors with no place here: derived buffers, a tied head."""
        return [r"rotary_emb\.inv_freq$", *([r"^lm_head\.weight$"] if self.config.tie_word_embeddings else [])]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move or cast as ``nn.Module`` does, or raise (see :class:`fastlayers.layer.Layer`) with nothing changed."""
        check_move(self, fn)
        return super()._apply(fn, recurse)

    def other_experts(self, num_experts: int) -> list[str]:
        """Return the pattern of those experts' tensors that other ranks hold, if there are any."""
        others = sorted(set(range(num_experts)) - experts_held(self.parallel, num_experts))
        return [rf"\.mlp\.experts\.(?:{'|'.join(map(str, others))})\."] if others else []

    def forward(
        self,
        input_ids: torch.Tensor,
        meta: AttentionMeta,
        caches: Sequence[LayerCache],
        step: StepTokens | None = None,
        valid: torch.Tensor | None = None,
        images: Any = None,
        halves: Sequence[Planned] = (),
    ) -> torch.Tensor:
        """Run the decoder layers.

        Parameters
        ----------
        input_ids : int64 Tensor ``[T]``
            New tokens of all requests of this attention group, one after another.
        meta : AttentionMeta
        caches : sequence of LayerCache
            One per attention layer; mutated.
        step : StepTokens, optional
            Token counts of all attention groups; default: one group, no padding.
        valid : Tensor, optional
            Which rows are real: bool ``[rows]``, or with one attention group int32 ``[1]``, how many from the first
            on (costs no launch). A captured step's is one tensor, refreshed between replays; default: made here, once.
        images : ImageRows, optional
            Rows that take the place of embedded tokens, see :mod:`fastlayers_models.images`.
        halves : sequence of (meta, step, valid), optional
            The same step as two, which are computed in turns: see :mod:`fastlayers_models.overlap`.

        Returns
        -------
        Tensor ``[T, D]``
            Hidden states before the final norm: what :meth:`compute_logits` takes.
        """
        if not torch.compiler.is_compiling():
            self._check(input_ids, meta, caches)
        return run_layers(self, input_ids, halves or ((meta, step, valid),), caches, meta.checked, images)

    def _check(self, input_ids: torch.Tensor, meta: AttentionMeta, caches: Sequence[LayerCache]) -> None:
        """Raise :class:`ArgumentError` unless the step fits the model; layers trust this. Caches are looked at once."""
        name = type(self).__name__
        if not isinstance(meta, AttentionMeta):
            raise ArgumentError(name, "meta", repr(meta), "an AttentionMeta, as AttentionState.plan returns")
        check_tensor(name, "input_ids", input_ids, shape=(meta.num_tokens,), device=self.device)
        if len(caches) < self.config.num_hidden_layers:
            accepted = f"one for each of {self.config.num_hidden_layers} layers"
            raise ArgumentError(name, "caches", f"{len(caches)} caches", accepted)
        known = self._checked
        if self._debug:  # every layer looks at every step
            return
        if torch.is_grad_enabled():
            self._refuse_grad()
        if known is None or known[0]() is not caches[0] or known[1]() is not meta.plans:
            for _, layer, cache in zip(range(self.config.num_hidden_layers), self.decoder.layers, caches, strict=False):
                layer.self_attn.check_step(meta, cache)
            self._checked = weakref.ref(caches[0]), weakref.ref(meta.plans)
        meta.vouch()

    def _refuse_grad(self) -> None:
        """Raise as an attention layer does that is called by itself, if a weight before its cache wants a gradient."""
        held = self._before_caches
        if held is None or held[0].value != held[1]:
            epoch, layers = epoch_of(self), [each.self_attn for each in self.decoder.layers]
            weights = [(each, weight) for each in layers for weight in each.before_the_cache().values()]
            held = self._before_caches = epoch, epoch.value, weights
        for attention, weight in held[2]:
            if weight.requires_grad:
                attention.refuse_grad(**attention.before_the_cache())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_checked": None, "_before_caches": None}

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits ``[R, vocab]`` for rows of :meth:`forward`'s result."""
        logits: torch.Tensor = self.lm_head(self.decoder.norm(hidden_states))
        return gather_logits(logits, self.attention_group)[..., : self.config.vocab_size]

    def warm_up_calls(self, tokens: Sequence[int]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield what :func:`fastlayers.warmup` runs, with a generator that is just large enough.

        Kernels may depend on how long requests can become: warm up the generator itself to get exactly its own.
        """
        from fastlayers_models.generate import Generator

        longest = min(max(tokens) + 8, self.config.max_position_embeddings)
        rows = min(max(tokens), 256)
        pages = max(rows + 1, -(-longest // self.page_size) + 1)
        yield from Generator(self, max_batch=rows, max_length=longest, num_pages=pages).warm_up_calls(tokens)

    def single_step(self, meta: AttentionMeta) -> StepTokens:
        """Return the token counts of a step of one attention group."""
        if self.parallel.attn_dp.size > 1:
            raise ArgumentError(type(self).__name__, "step", None, "token counts of all attention groups (attn_dp > 1)")
        spread = meta.num_tokens in self.spread_rows
        multiple = self.parallel.attn_tp.size if spread else self.row_multiple
        return StepTokens.plan([meta.num_tokens], attn_tp=multiple, extend=not meta.batch.is_decode, spread=spread)

    def valid_rows(self, step: StepTokens) -> torch.Tensor | None:
        """Return which rows of the step are real, on the model's device; ``None`` if all are."""
        return step.valid_rows().to(self.device) if sum(step.real) < step.full_rows else None

    def embed(self, embedding: nn.Module, input_ids: torch.Tensor, step: StepTokens) -> torch.Tensor:
        """Return the embedded tokens, padded to this group's rows of the step."""
        missing = step.rows[self.parallel.attn_dp.rank] - input_ids.shape[0]
        embedded: torch.Tensor = embedding(pad(input_ids, (0, missing)) if missing else input_ids)
        if self.seam is not None:
            return self.seam.all_reduce(embedded)
        return reduce_embedding(embedded, self.attention_group)
