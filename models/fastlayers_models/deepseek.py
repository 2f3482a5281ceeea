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
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.meta import AttentionMeta
from fastlayers.attention.mla.paths import MLAThresholds
from fastlayers.comm.collectives import collectives, gather_logits, reduce_embedding
from fastlayers.comm.communicator import LayerCommunicator
from fastlayers.comm.layouts import Hidden
from fastlayers.comm.padding import StepTokens
from fastlayers.comm.parallel import ParallelSpec, Shard
from fastlayers.embedding.layer import VocabEmbedding
from fastlayers.embedding.lm_head import LMHead
from fastlayers.errors import ArgumentError
from fastlayers.layer import finalize
from fastlayers.linear.factory import linear
from fastlayers.quant.spec import NONE
from fastlayers.rotary.layer import RotaryEmbedding
from fastlayers.rotary.scaling import RopeScaling, attention_scale
from fastlayers_models.checkpoint import Checkpoint, load_weights
from fastlayers_models.config import DeepseekConfig


class Build:
    """What every part of the model is built with: configuration, topology, placement."""

    def __init__(
        self, config: DeepseekConfig, parallel: ParallelSpec, device: Any, dtype: torch.dtype, page_size: int,
        kv_dtype: torch.dtype | None, thresholds: MLAThresholds | None, backend: str,
    ) -> None:  # fmt: skip
        self.config, self.parallel, self.device, self.dtype = config, parallel, device, dtype
        self.page_size, self.kv_dtype, self.thresholds, self.backend = page_size, kv_dtype, thresholds, backend
        self.rotary = RotaryEmbedding.from_config(
            config.rope,
            head_dim=config.qk_rope_head_dim,
            max_position=config.max_position_embeddings,
            interleaved_in=config.rope_interleave,
            interleaved_out=config.model_type == "deepseek_v2",
            device=device,
        )
        cuda = torch.device(device).type == "cuda" if device is not None else False
        self.alt_stream = torch.cuda.Stream() if cuda else None

    def norm(self) -> fl.RMSNorm:
        """Return a norm over the hidden size."""
        return fl.RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, device=self.device, dtype=self.dtype)

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
        return SideBySide(
            self.linear(f"{prefix}.{part}", hidden, size, bias, names=[f"../../{part}"], shard=shard) for part in parts
        )


class SideBySide(nn.ModuleList):
    """Linears of one input; their outputs side by side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[T, sum of the output sizes]``."""
        return torch.cat([part(x) for part in self], -1)


class DeepseekMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``; partial sums over ``tp``."""

    def __init__(self, build: Build, name: str, intermediate_size: int) -> None:
        super().__init__()
        config, parallel = build.config, build.parallel
        self.gate_up_proj = build.fused(
            name, ("gate_proj", "up_proj"), intermediate_size, config.mlp_bias, parallel.column()
        )
        self.act_fn = fl.SiluAndMul(intermediate_size // parallel.tp.size, device=build.device)
        self.down_proj = build.linear(
            f"{name}.down_proj", intermediate_size, config.hidden_size, config.mlp_bias, shard=parallel.row()
        )

    def forward(self, x: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``[T, D]``; ``valid`` is not needed here."""
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_up_proj(x)))
        return out


class DeepseekMoE(nn.Module):
    """Router, routed experts and shared experts; partial sums over ``tp``."""

    def __init__(self, build: Build, name: str) -> None:
        super().__init__()
        config, parallel = build.config, build.parallel
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
            device=build.device,
            dtype=build.dtype,
        )
        self.experts = fl.FusedMoE(
            config.hidden_size,
            config.moe_intermediate_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            scaling_factor=config.routed_scaling_factor,
            quant=config.quant.for_module(f"{name}.experts.0.gate_proj"),
            ep=parallel.ep,
            tp=parallel.moe_tp,
            device=build.device,
            dtype=build.dtype,
            backend=build.backend if build.backend == "auto" else "auto",
        )
        shared = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = DeepseekMLP(build, f"{name}.shared_experts", shared) if shared else None

    def forward(self, x: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``[T, D]``; rows where ``valid`` is false cost no expert work."""
        topk_weights, topk_ids = self.gate(x)
        if valid is not None:
            topk_ids = topk_ids.masked_fill(~valid[:, None], -1)
        routed: torch.Tensor = self.experts(x, topk_weights, topk_ids)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)


class DeepseekLayer(nn.Module):
    """One decoder layer; the communicator decides what is gathered, reduced and normed where."""

    def __init__(self, build: Build, index: int, *, is_last: bool = False) -> None:
        super().__init__()
        config, name = build.config, f"model.layers.{index}"
        self.self_attn = fl.MLAAttention(
            config.hidden_size,
            config.num_attention_heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            rotary=build.rotary,
            softmax_scale=attention_scale(
                config.qk_nope_head_dim + config.qk_rope_head_dim, RopeScaling.from_config(config.rope)
            ),
            bias=config.attention_bias,
            quant=config.quant,
            prefix=f"{name}.self_attn",
            axis=build.parallel.attn_tp,
            page_size=build.page_size,
            kv_dtype=build.kv_dtype,
            thresholds=build.thresholds,
            alt_stream=build.alt_stream,
            device=build.device,
            dtype=build.dtype,
            backend=build.backend,
        )
        moe = config.is_moe(index)
        self.mlp = (
            DeepseekMoE(build, f"{name}.mlp") if moe else DeepseekMLP(build, f"{name}.mlp", config.intermediate_size)
        )
        self.input_layernorm = build.norm()
        self.post_attention_layernorm = build.norm()
        self.communicator = LayerCommunicator(
            build.parallel,
            input_layernorm=self.input_layernorm,
            post_attention_layernorm=self.post_attention_layernorm,
            mlp_kind="moe" if moe else "dense",
            is_last=is_last,
        )

    def forward(self, hidden: Hidden, meta: AttentionMeta, cache: LayerCache, step: StepTokens) -> Hidden:
        """Return the next layer's input; writes the new tokens' latents to ``cache``."""
        hidden = self.communicator.prepare_attn(hidden, step)
        rows = hidden.tensor.shape[0]
        attended = self.self_attn(hidden.tensor[: meta.num_tokens], meta, cache)
        # Rows that only make this group's count a round number take no part in attention.
        attended = pad(attended, (0, 0, 0, rows - attended.shape[0])) if rows > attended.shape[0] else attended
        hidden = self.communicator.prepare_mlp(hidden.partial(attended, "attn_tp"), step)
        valid = step.valid_rows().to(hidden.tensor.device) if sum(step.real) < step.full_rows else None
        hidden = hidden.partial(self.mlp(hidden.tensor, valid), "tp")
        return self.communicator.postprocess(hidden, step)


class SharedHead(nn.Module):
    """The MTP layer's norm and vocabulary head."""

    def __init__(self, build: Build, name: str) -> None:
        super().__init__()
        self.norm, self.head = build.norm(), _lm_head(build)


class DeepseekMTPLayer(DeepseekLayer):
    """The NextN layer: predicts one token further from the main model's hidden state and the next token.

    ``x = eh_proj([enorm(embed(next token)) ; hnorm(hidden)])``, one decoder layer, ``shared_head``.
    """

    def __init__(self, build: Build, index: int) -> None:
        super().__init__(build, index, is_last=True)
        config = build.config
        self.embed_tokens = _embedding(build)
        self.enorm, self.hnorm = build.norm(), build.norm()
        # Kept in the model's dtype by every checkpoint, quantised or not.
        self.eh_proj = linear(
            2 * config.hidden_size, config.hidden_size, quant=NONE, device=build.device, dtype=build.dtype
        )
        self.shared_head = SharedHead(build, f"model.layers.{index}.shared_head")


class DeepseekModel(nn.Module):
    """Embedding, decoder layers (MTP layers behind them, as checkpoints number them), final norm."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        count = build.config.num_hidden_layers
        self.embed_tokens = _embedding(build)
        self.layers: Any = nn.ModuleList(DeepseekLayer(build, i, is_last=i == count - 1) for i in range(count))
        self.layers.extend(DeepseekMTPLayer(build, count + i) for i in range(build.config.num_nextn_predict_layers))
        self.norm = build.norm()


class DeepseekForCausalLM(nn.Module):
    """DeepSeek-V2 or V3 for generation over a paged latent cache.

    Parameters
    ----------
    config : DeepseekConfig
    parallel : ParallelSpec
    device, dtype
        ``dtype`` of activations and of weights that are not quantised.
    page_size, kv_dtype, thresholds
        See :class:`fastlayers.MLAAttention`.
    backend : str
        Of the attention core.

    Notes
    -----
    ``forward`` and ``compute_logits`` are what a serving loop calls; ``fastlayers_models.generate`` is one.
    """

    def __init__(
        self,
        config: DeepseekConfig,
        *,
        parallel: ParallelSpec | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        page_size: int = 64,
        kv_dtype: torch.dtype | None = None,
        thresholds: MLAThresholds | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.config, self.parallel = config, parallel if parallel is not None else ParallelSpec()
        self.device = torch.device(device) if device is not None else torch.get_default_device()
        self.attention_group = collectives(self.parallel.attn_tp)
        build = Build(config, self.parallel, self.device, dtype, page_size, kv_dtype, thresholds, backend)
        self.page_size, self.kv_dtype = page_size, kv_dtype if kv_dtype is not None else dtype
        self.model = DeepseekModel(build)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = _lm_head(build, tied)

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
        checkpoint = Checkpoint(path)
        config = DeepseekConfig.from_hf(checkpoint.config)
        first, count = config.num_hidden_layers, config.num_nextn_predict_layers
        unwanted: list[str] = []
        if not load_mtp or not any(name.startswith(f"model.layers.{first}.") for name in checkpoint.names()):
            config = replace(config, num_nextn_predict_layers=0)
            unwanted = [rf"^model\.layers\.{i}\." for i in range(first, first + count)]
        model = cls(config, **options)
        load_weights(model, checkpoint, ignore=[*model.ignored_tensors, *unwanted])
        finalize(model)
        return model.eval()

    @property
    def ignored_tensors(self) -> Sequence[str]:
        """Patterns of tensors with no place here: derived buffers, a tied head, other ranks' experts."""
        patterns = [r"rotary_emb\.inv_freq$"]
        if not self.config.n_shared_experts:
            patterns.append(r"\.shared_experts\.")
        if self.config.tie_word_embeddings:
            patterns.append(r"^lm_head\.")
        experts = self.config.n_routed_experts
        local = self.parallel.ep.part(experts, "DeepseekForCausalLM n_routed_experts")
        others = [str(i) for i in range(experts) if not local.start <= i < local.stop]
        if others:
            patterns.append(rf"\.mlp\.experts\.(?:{'|'.join(others)})\.")
        return patterns

    def forward(
        self, input_ids: torch.Tensor, meta: AttentionMeta, caches: Sequence[LayerCache], step: StepTokens | None = None
    ) -> torch.Tensor:
        """Run the decoder layers.

        Parameters
        ----------
        input_ids : int64 Tensor ``[T]``
            New tokens of all requests of this attention group, one after another.
        meta : AttentionMeta
        caches : sequence of LayerCache
            One per attention layer (MTP layers included); mutated.
        step : StepTokens, optional
            Token counts of all attention groups; default: one group, no padding.

        Returns
        -------
        Tensor ``[T, D]``
            Hidden states before the final norm: what :meth:`compute_logits` and :meth:`mtp` take.
        """
        step = step if step is not None else self._single_step(meta)
        hidden = Hidden.start(self._embed(self.model.embed_tokens, input_ids, step))
        layers = self.model.layers[: self.config.num_hidden_layers]
        for layer, cache in zip(layers, caches, strict=False):
            hidden = layer(hidden, meta, cache, step)
        finished: torch.Tensor = layers[-1].communicator.finish(hidden, None, step)
        return finished[: meta.num_tokens]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits ``[R, vocab]`` for rows of :meth:`forward`'s result."""
        logits: torch.Tensor = self.lm_head(self.model.norm(hidden_states))
        return gather_logits(logits, self.attention_group)[..., : self.config.vocab_size]

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
        count = self.config.num_nextn_predict_layers
        if not 0 <= index < count:
            raise ArgumentError("DeepseekForCausalLM.mtp", "index", index, f"0 <= index < {count} MTP layers")
        layer = self.model.layers[self.config.num_hidden_layers + index]
        step = step if step is not None else self._single_step(meta)
        embedded = self._embed(layer.embed_tokens, next_ids, step)
        previous = pad(hidden_states, (0, 0, 0, embedded.shape[0] - hidden_states.shape[0]))
        both = torch.cat([layer.enorm(embedded), layer.hnorm(self.model.norm(previous))], -1)
        hidden = layer(Hidden.start(layer.eh_proj(both)), meta, cache, step)
        final = layer.communicator.finish(hidden, layer.shared_head.norm, step)[: meta.num_tokens]
        logits: torch.Tensor = layer.shared_head.head(final)
        return gather_logits(logits, self.attention_group)[..., : self.config.vocab_size]

    def _single_step(self, meta: AttentionMeta) -> StepTokens:
        if self.parallel.attn_dp.size > 1:
            raise ArgumentError(
                "DeepseekForCausalLM", "step", None, "token counts of all attention groups (attn_dp > 1)"
            )
        return StepTokens.plan([meta.num_tokens], attn_tp=self.parallel.attn_tp.size, extend=not meta.batch.is_decode)

    def _embed(self, embedding: nn.Module, input_ids: torch.Tensor, step: StepTokens) -> torch.Tensor:
        padded = pad(input_ids, (0, step.rows[self.parallel.attn_dp.rank] - input_ids.shape[0]))
        return reduce_embedding(embedding(padded), self.attention_group)


def _embedding(build: Build) -> VocabEmbedding:
    config, shard = build.config, build.parallel.column("attn_tp")
    return VocabEmbedding(config.vocab_size, config.hidden_size, shard=shard, device=build.device, dtype=build.dtype)


def _lm_head(build: Build, tied_to: VocabEmbedding | None = None) -> LMHead:
    config, shard = build.config, build.parallel.column("attn_tp")
    return LMHead(
        config.hidden_size, config.vocab_size, shard=shard, tied_to=tied_to, device=build.device, dtype=build.dtype
    )
