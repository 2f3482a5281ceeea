"""What a model's parts are built with: configuration, ranks, dtype, and how linears, norms and attention are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import fastlayers as fl
from fastlayers import env
from fastlayers.comm.parallel import ParallelSpec, Shard
from fastlayers.comm.seam import Moves, Seam
from fastlayers.comm.token_moves import TokenMoves, Way, way_of
from fastlayers.embedding.layer import VocabEmbedding
from fastlayers.embedding.lm_head import LMHead
from fastlayers.errors import ArgumentError, describe
from fastlayers.linear.factory import linear
from fastlayers.registry import registry
from fastlayers.rotary.layer import RotaryEmbedding
from fastlayers_models.agreement import meet
from fastlayers_models.concat import ConcatLinears


def check_backend(given: Any) -> None:
    """Raise :class:`ArgumentError` unless ``given`` is text; of a mapping, name the first entry that is wrong.

    One whose entries are right is told as what it is in the environment, where other layers' backends are named.
    """
    if isinstance(given, str):
        return
    told, elsewhere = describe(given), env.BACKEND
    if isinstance(given, Mapping) and given:
        wrong = next((words for entry in given.items() if (words := _wrong_entry(*entry))), None)
        if wrong is None:
            elsewhere += "=" + ",".join(f"{layer}={backend}" for layer, backend in given.items())
        else:
            told += f", in which {wrong}"
    accepted = f"'auto', a name, or a ladder like 'triton:64|torch', for attention; {elsewhere} names others"
    raise ArgumentError("CausalLM", "backend", told, accepted)


def _wrong_entry(layer: Any, backend: Any) -> str | None:
    """Return what is wrong with a backend for a layer, and what would not be."""
    if layer not in fl.layers():
        return f"{layer!r} is no layer (accepted: {', '.join(fl.layers())})"
    known = ("auto", *(row.name for row in registry(layer).ranked))
    names = [rung.partition(":")[0] for rung in backend.split("|")] if isinstance(backend, str) else [backend]
    unknown = [name for name in names if name not in known]
    return f"{layer} has no backend {unknown[0]!r} (accepted: {', '.join(known)})" if unknown else None


class ModelContext:
    """What every part of the model is built with: configuration, topology, placement.

    Parameters
    ----------
    config
        A family's configuration; see :class:`fastlayers_models.config.GQADecoderConfig`.
    parallel : ParallelSpec, optional
        Default: one process.
    device, dtype
        ``dtype`` of activations and of weights that are not quantised.
    page_size, kv_dtype
        Of the cache; ``kv_dtype`` defaults to ``dtype``.
    backend : str
        Of the attention core.
    """

    rounding = "cast_then_scale"  # of norms, see fastlayers.RMSNorm

    def __init__(
        self,
        config: Any,
        parallel: ParallelSpec | None,
        device: torch.device | str | None,
        dtype: torch.dtype,
        page_size: int,
        kv_dtype: torch.dtype | None,
        backend: str,
    ) -> None:
        self.config, self.dtype, self.page_size, self.backend = config, dtype, page_size, backend
        self.parallel = parallel if parallel is not None else ParallelSpec()
        self.device = torch.device(device) if device is not None else torch.get_default_device()
        self.kv_dtype = kv_dtype if kv_dtype is not None else dtype
        meet(self)
        check_backend(backend)
        self._connect()
        self.rotary = self.make_rotary()

    def _connect(self) -> None:
        """Make what rows cross ranks with; collective."""
        parallel, sizes = self.parallel, (self.config.hidden_size, self.dtype, self.device)
        hidden, dtype, device = sizes
        experts, top_k = getattr(self.config, "routed_experts", (0, 0))
        self.token_way = way_of(parallel, hidden, experts, top_k, dtype, device)
        # Experts with slots of their own are exchanged by these.
        slots = experts if parallel.eplb is None or not experts else parallel.eplb.slots(experts, parallel.ep.size)
        tokens = TokenMoves.slots(slots, top_k) if self.token_way.exchange else None
        self.seam = Seam.make(parallel, *sizes, tokens=tokens)
        self.moves = Moves.make(parallel, *sizes, tokens=tokens)
        across = self.moves or self.seam  # whichever is over all ranks
        self.token_moves: TokenMoves | None = None
        if self.token_way.exchange:
            made = TokenMoves.make(parallel, across, hidden, slots, top_k, dtype, device)
            if parallel.expert_exchange == "auto" and (refused := made.refusal) is not None:
                self.token_way = Way(False, refused)
            else:
                self.token_moves = made

    def make_rotary(self) -> RotaryEmbedding:
        """Return the rotary embedding that all layers share."""
        config = self.config
        return RotaryEmbedding.from_config(
            config.rope, head_dim=config.head_dim, max_position=config.max_position_embeddings, device=self.device
        )

    def norm(self) -> fl.RMSNorm:
        """Return a norm over the hidden size."""
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        return fl.RMSNorm(size, eps, rounding=self.rounding, device=self.device, dtype=self.dtype)

    def linear(self, name: str, *sizes: Any, **options: Any) -> nn.Module:
        """Return the linear of checkpoint module ``name`` in its number format."""
        quant = self.config.quant.for_module(name)
        return linear(*sizes, quant=quant, device=self.device, dtype=self.dtype, **options)

    def fused(self, prefix: str, parts: Sequence[str], size: int, bias: bool, shard: Shard) -> nn.Module:
        """Return one linear for checkpoint modules of the same input and output size, if they can be one weight.

        They can where they have the same format and, if that has scale blocks, no block lies across a seam.
        """
        hidden, specs = self.config.hidden_size, [self.config.quant.for_module(f"{prefix}.{part}") for part in parts]
        rows = specs[0].block_size[0] if specs[0].format == "fp8_block" else 1
        if all(spec == specs[0] for spec in specs) and size // shard.axis.size % rows == 0:
            names = [f"../{part}" for part in parts]
            return self.linear(f"{prefix}.{parts[0]}", hidden, [size] * len(parts), bias, names=names, shard=shard)
        return ConcatLinears(
            self.linear(f"{prefix}.{part}", hidden, size, bias, names=[f"../../{part}"], shard=shard) for part in parts
        )

    def attention(
        self,
        name: str,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: float | None = None,
        window: int | None = None,
        sinks: bool = False,
    ) -> fl.Attention:
        """Return the grouped-query attention of checkpoint module ``name``; see :class:`fastlayers.Attention`."""
        config = self.config
        return fl.Attention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            rotary=self.rotary,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            window=window,
            sinks=sinks,
            quant=config.quant,
            prefix=name,
            axis=self.parallel.attn_tp,
            page_size=self.page_size,
            kv_dtype=self.kv_dtype,
            device=self.device,
            dtype=self.dtype,
            backend=self.backend,
        )

    def embedding(self) -> VocabEmbedding:
        """Return the vocabulary embedding, split over the ranks of an attention group."""
        config, shard = self.config, self.parallel.column("attn_tp")
        return VocabEmbedding(config.vocab_size, config.hidden_size, shard=shard, device=self.device, dtype=self.dtype)

    def lm_head(self, tied_to: VocabEmbedding | None = None) -> LMHead:
        """Return the vocabulary head, split alike; ``tied_to`` shares the embedding's weight."""
        config, shard = self.config, self.parallel.column("attn_tp")
        return LMHead(
            config.hidden_size, config.vocab_size, shard=shard, tied_to=tied_to, device=self.device, dtype=self.dtype
        )
