"""DeepSeek-V2, V2-Lite, V3 and R1 from fastlayers layers, with the NextN (multi-token prediction) layer.

    tokens ─► embed ─► [ norm ─► MLA ─► norm ─► MLP or MoE ] × layers ─► norm ─► lm_head ─► logits

What differs between the models is in the configuration; number formats are in ``config.quant``, ranks in
``ParallelSpec``, collectives in ``LayerCommunicator``: none of them appears in a branch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

import fastlayers as fl
from fastlayers.attention.buckets import LATENT_TOKENS
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.meta import AttentionMeta
from fastlayers.attention.mla.prefix_chunks import MLAThresholds
from fastlayers.comm.collectives import gather_logits
from fastlayers.comm.layouts import Hidden
from fastlayers.comm.padding import StepTokens
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.device import as_device
from fastlayers.errors import ArgumentError, check_kind, check_plain
from fastlayers.linear.factory import linear
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.expert_slots import part_of_features
from fastlayers.moe.fused_moe.layer import why_not_fuse_shared
from fastlayers.quant.block_quant import BLOCK
from fastlayers.quant.spec import NONE
from fastlayers.rotary.layer import RotaryEmbedding
from fastlayers.rotary.scaling import RopeScaling, attention_scale
from fastlayers.tuning.table import find
from fastlayers_models.blocks import CausalLM, Decoder, DecoderLayer, ModelContext, SwiGLU
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.config import DeepseekConfig
from fastlayers_models.experts import (
    OwnRows,
    PlacedRows,
    exchanged_experts,
    placement_of,
    quant_of_experts,
    route,
    routed_rows,
)
from fastlayers_models.loading import load_model


class DeepseekContext(ModelContext):
    """What every part of the model is built with, MLA's options included."""

    def __init__(
        self,
        *options: Any,
        thresholds: MLAThresholds | None = None,
        fp8_math: bool = False,
        fp8_absorb: bool = False,
        fuse_shared: bool | None = None,
    ) -> None:
        super().__init__(*options)
        self.thresholds, self.fp8_math, self.fp8_absorb = thresholds, fp8_math, fp8_absorb
        check_kind("DeepseekForCausalLM", bool | None, fuse_shared=fuse_shared)
        self.fuse_shared = fuse_shared
        self.alt_stream = torch.cuda.Stream() if self.device.type == "cuda" else None

    def make_rotary(self) -> RotaryEmbedding:
        """Return the rotary embedding that all layers share."""
        config = self.config
        return RotaryEmbedding.from_config(
            config.rope,
            head_dim=config.qk_rope_head_dim,
            max_position=config.max_position_embeddings,
            interleaved_in=config.rope_interleave,
            interleaved_out=config.model_type == "deepseek_v2",
            device=self.device,
        )


def fused_experts(context: DeepseekContext, name: str) -> int:
    """Return how many shared experts of a block run as further routed ones: all of them, or none.

    They can where they are split over the same ranks, and of the same format; by default they do where experts of that
    shape were tuned for this GPU. A context that asks for what cannot be raises :class:`ArgumentError`.
    """
    config, parallel, count = context.config, context.parallel, context.config.n_shared_experts
    spec, shared = (
        config.quant.for_module(f"{name}.{part}") for part in ("experts.0.gate_proj", "shared_experts.gate_proj")
    )
    why = why_not_fuse_shared(parallel.ep) or ("there are none" if not count else None)
    if why is None and (spec != shared or config.mlp_bias):
        why = f"they have a bias: {config.mlp_bias}; formats are {spec.format} and {shared.format}"
    if why is None and spec.format == "fp8_block" and count > 1 and config.moe_intermediate_size % BLOCK[0]:
        why = f"moe_intermediate_size {config.moe_intermediate_size} is not whole blocks"
    if why is not None:
        if context.fuse_shared:
            raise ArgumentError("DeepseekForCausalLM", "fuse_shared", f"True, while {why}", "False or None")
        return 0
    if context.fuse_shared is None:
        if context.device.type != "cuda":
            return 0
        part = part_of_features(spec, config.moe_intermediate_size, parallel.moe_tp)
        sizes = config.hidden_size, part.stop - part.start, config.n_routed_experts
        cfg = FusedMoEConfig(
            *sizes, config.num_experts_per_tok, count, spec.format, dtype=context.dtype, group_size=spec.group_size,
            zero_point=spec.zero_point,
        )  # fmt: skip
        return count if find("fused_moe", cfg.tuning_key(), as_device(context.device)) is not None else 0
    return count if context.fuse_shared else 0


class DeepseekMoE(nn.Module):
    """Router, routed experts and shared experts; partial sums over ``tp``.

    Where tokens are exchanged own rows, whole; shared experts are then whole on each rank, too.
    """

    def __init__(self, context: DeepseekContext, name: str) -> None:
        super().__init__()
        self.token_moves = context.token_moves
        config, parallel = context.config, context.parallel
        v3 = config.topk_method == "noaux_tc"
        grouped = config.topk_method != "greedy"
        self.gate = fl.TopKRouter(
            config.hidden_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            scoring="sigmoid" if v3 else "softmax",
            num_groups=config.n_group if grouped else 1,
            topk_groups=config.topk_group if grouped else 1,
            group_score="top2_sum" if v3 else "max",
            masked_score="-inf" if v3 else "zero",
            correction_bias=v3,
            renormalize=config.norm_topk_prob,
            scaling_factor=config.routed_scaling_factor,
            apply_scaling=False,
            device=context.device,
            dtype=context.dtype,
        )
        self.experts = fl.FusedMoE(
            config.hidden_size,
            config.moe_intermediate_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            num_shared=(fused := fused_experts(context, name)),
            scaling_factor=config.routed_scaling_factor,
            quant=quant_of_experts(config.quant, f"{name}.experts", config.n_routed_experts),
            ep=parallel.ep,
            tp=parallel.moe_tp,
            placement=placement_of(context, config.n_routed_experts),
            device=context.device,
            dtype=context.dtype,
        )
        shared = (config.n_shared_experts - fused) * config.moe_intermediate_size
        self.shared_experts = (
            SwiGLU(context, f"{name}.shared_experts", shared, bias=config.mlp_bias, whole=self.token_moves is not None)
            if shared
            else None
        )

    def forward(self, x: torch.Tensor, valid: torch.Tensor | PlacedRows | OwnRows | None = None) -> torch.Tensor:
        """Return ``[T, D]``; rows that ``valid`` excludes cost no expert work."""
        held: Any = self._modules
        shared = held.get("shared_experts")
        experts = held["experts"]
        if self.token_moves is None:
            routed = experts(x, *route(held["gate"], x, valid, experts.placement))
        else:
            routed = exchanged_experts(held["gate"], experts, self.token_moves, x, valid)
        return routed if shared is None else routed + shared(x)


class DeepseekLayer(DecoderLayer):
    """One decoder layer: MLA, then an MLP or experts."""

    def __init__(self, context: DeepseekContext, index: int, *, is_last: bool = False) -> None:
        config, name = context.config, f"model.layers.{index}"
        self_attn = fl.MLAAttention(
            config.hidden_size,
            config.num_attention_heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            rotary=context.rotary,
            softmax_scale=attention_scale(
                config.qk_nope_head_dim + config.qk_rope_head_dim, RopeScaling.from_config(config.rope)
            ),
            bias=config.attention_bias,
            quant=config.quant,
            prefix=f"{name}.self_attn",
            axis=context.parallel.attn_tp,
            page_size=context.page_size,
            kv_dtype=context.kv_dtype,
            fp8_math=context.fp8_math,
            fp8_absorb=context.fp8_absorb,
            thresholds=context.thresholds,
            alt_stream=context.alt_stream,
            device=context.device,
            dtype=context.dtype,
            backend=context.backend,
        )
        if config.is_moe(index):
            super().__init__(context, self_attn, DeepseekMoE(context, f"{name}.mlp"), mlp_kind="moe", is_last=is_last)
        else:
            mlp = SwiGLU(context, f"{name}.mlp", config.intermediate_size, bias=config.mlp_bias)
            super().__init__(context, self_attn, mlp, is_last=is_last)


class SharedHead(nn.Module):
    """The MTP layer's norm and vocabulary head."""

    def __init__(self, context: DeepseekContext, name: str) -> None:
        super().__init__()
        self.norm, self.head = context.norm(), context.lm_head()


class DeepseekMTPLayer(DeepseekLayer):
    """The NextN layer: predicts one token further from the main model's hidden state and the next token.

    ``x = eh_proj([enorm(embed(next token)) ; hnorm(hidden)])``, one decoder layer, ``shared_head``.
    """

    def __init__(self, context: DeepseekContext, index: int) -> None:
        super().__init__(context, index, is_last=True)
        config = context.config
        self.embed_tokens = context.embedding()
        self.enorm, self.hnorm = context.norm(), context.norm()
        # Kept in the model's dtype by every checkpoint, quantised or not.
        self.eh_proj = linear(
            2 * config.hidden_size, config.hidden_size, quant=NONE, device=context.device, dtype=context.dtype
        )
        self.shared_head = SharedHead(context, f"model.layers.{index}.shared_head")


class DeepseekModel(Decoder):
    """Embedding, decoder layers (MTP layers behind them, as checkpoints number them), final norm."""

    def __init__(self, context: DeepseekContext) -> None:
        super().__init__(context, DeepseekLayer)
        count = context.config.num_hidden_layers
        self.layers.extend(DeepseekMTPLayer(context, count + i) for i in range(context.config.num_nextn_predict_layers))


class DeepseekForCausalLM(CausalLM):
    """DeepSeek-V2 or V3 for generation over a paged latent cache.

    Parameters
    ----------
    config : DeepseekConfig
    parallel : ParallelSpec
    device, dtype
        ``dtype`` of activations and of weights that are not quantised.
    page_size, kv_dtype, fp8_math, fp8_absorb, thresholds
        See :class:`fastlayers.MLAAttention`.
    fuse_shared : bool, optional
        Whether shared experts run as further routed ones, in the same launches; not with ``ep``. Default: where a tuned
        table has experts of that shape.
    backend : str
        Of the attention core.

    Notes
    -----
    ``forward`` and ``compute_logits`` are what a serving loop calls; ``fastlayers_models.generate`` is one.

    Attributes
    ----------
    captured_tokens : int
        Largest bucket of captured extends by default: those attend to latents.
    """

    config_class, layer_class, context_class = DeepseekConfig, DeepseekLayer, DeepseekContext
    captured_tokens = LATENT_TOKENS

    def __init__(
        self,
        config: DeepseekConfig,
        *,
        parallel: ParallelSpec | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        page_size: int = 64,
        kv_dtype: torch.dtype | None = None,
        fp8_math: bool = False,
        fp8_absorb: bool = False,
        fuse_shared: bool | None = None,
        thresholds: MLAThresholds | None = None,
        backend: str = "auto",
    ) -> None:
        options = (config, parallel, device, dtype, page_size, kv_dtype, backend)
        more: dict[str, Any] = {"thresholds": thresholds, "fp8_math": fp8_math, "fp8_absorb": fp8_absorb}
        self._assemble(DeepseekContext(*options, **more, fuse_shared=fuse_shared))

    def make_model(self, context: Any) -> nn.Module:
        """Return the decoder, MTP layers included."""
        return DeepseekModel(context)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, load_mtp: bool = True, **options: Any) -> DeepseekForCausalLM:
        """Build the model of a checkpoint directory and load its weights.

        Parameters
        ----------
        path : str or Path
            Directory with ``config.json`` and safetensors shards.
        load_mtp : bool
            Load the MTP layers, if the checkpoint has them (Hugging Face drops them on saving).
        **options
            As for the constructor.

        Raises
        ------
        UnknownModelError, CheckpointError, ArgumentError
            See :meth:`DeepseekConfig.from_hf` and :func:`load_weights`.
        """
        check_plain("DeepseekForCausalLM", "bool", load_mtp=load_mtp)
        checkpoint = Checkpoint(path)
        config = cls.read_config(checkpoint)
        first, count = config.num_hidden_layers, config.num_nextn_predict_layers
        unwanted: list[str] = []
        if not load_mtp or not any(name.startswith(f"model.layers.{first}.") for name in checkpoint.names()):
            config = replace(config, num_nextn_predict_layers=0)
            unwanted = [rf"^model\.layers\.{i}\." for i in range(first, first + count)]
        return load_model(cls, checkpoint, config, unwanted, **options)

    @property
    def ignored_tensors(self) -> Sequence[str]:
        """Patterns of tensors with no place here: derived buffers, a tied head, other ranks' experts."""
        return [*super().ignored_tensors, *self.other_experts(self.config.n_routed_experts)]

    def mtp(
        self,
        hidden_states: torch.Tensor,
        next_ids: torch.Tensor,
        meta: AttentionMeta,
        cache: LayerCache,
        step: StepTokens | None = None,
        *,
        index: int = 0,
    ) -> torch.Tensor:
        """Predict the token after next.

        Parameters
        ----------
        hidden_states : Tensor ``[T, D]``
            Of :meth:`forward` for the same tokens.
        next_ids : int64 Tensor ``[T]``
            The token that follows each position.
        meta, step
            As for :meth:`forward`.
        cache : LayerCache
            The MTP layer's own; mutated.
        index : int
            Which MTP layer.

        Returns
        -------
        Tensor ``[T, vocab]``
            Logits of the token two positions on.

        Raises
        ------
        ArgumentError
            The model has no such layer.
        """
        states = self.mtp_states(self.model.norm(hidden_states), next_ids, meta, cache, step, index=index)
        return self.mtp_logits(states, index=index)

    def mtp_logits(self, states: torch.Tensor, *, index: int = 0) -> torch.Tensor:
        """Return logits ``[R, vocab]`` for rows of :meth:`mtp_states`."""
        head = self.model.layers[self.config.num_hidden_layers + index].shared_head.head
        return gather_logits(head(states), self.attention_group)[..., : self.config.vocab_size]

    def mtp_states(
        self,
        normed_states: torch.Tensor,
        next_ids: torch.Tensor,
        meta: AttentionMeta,
        cache: LayerCache,
        step: StepTokens | None = None,
        *,
        index: int = 0,
    ) -> torch.Tensor:
        """Return the MTP layer's normalised states ``[T, D]``, from which :meth:`mtp_logits` predicts.

        Parameters
        ----------
        normed_states : Tensor ``[T, D]``
            Behind the final norm; or what this returned one position earlier, to draft several tokens.
        next_ids, meta, cache, step, index
            As for :meth:`mtp`.

        Raises
        ------
        ArgumentError
            The model has no such layer.
        """
        count = self.config.num_nextn_predict_layers
        if not 0 <= index < count:
            raise ArgumentError("DeepseekForCausalLM.mtp", "index", index, f"0 <= index < {count} MTP layers")
        layer = self.model.layers[self.config.num_hidden_layers + index]
        layer.self_attn.check_step(meta, cache)
        step = step if step is not None else self.single_step(meta)
        embedded = self.embed(layer.embed_tokens, next_ids, step)
        previous = pad(normed_states, (0, 0, 0, embedded.shape[0] - normed_states.shape[0]))
        both = torch.cat([layer.enorm(embedded), layer.hnorm(previous)], -1)
        hidden = layer(Hidden.start(layer.eh_proj(both)), meta, cache, step, routed_rows(self, step, meta))
        final: torch.Tensor = layer.communicator.finish(hidden, layer.shared_head.norm, step)
        return final[: meta.num_tokens]
