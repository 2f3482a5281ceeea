"""Llama 4, the language model, from fastlayers layers; of whole checkpoints (``llama4``) the text part.

    tokens ─► embed ─► [ norm ─► attention ─► norm ─► SwiGLU or MoE ] × layers ─► norm ─► lm_head ─► logits

    layers              attends to               positions     queries and keys          queries
    most                their chunk (layer_types)  rotated       normed, without weights
    no_rope_layers 0    everything               none                                    times 1 + s·log(1 + ⌊(p+1)/f⌋)

The norm has no weights and a rotation changes no length, so it comes first here, as in other families. Each chosen
expert sees its input times the sigmoid of its score, and its output is added as it is, to the shared expert's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fastlayers as fl
from fastlayers.attention.chunked import check_chunk, chunked
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.meta import AttentionMeta
from fastlayers.errors import ArgumentError, check_choice, check_positive
from fastlayers.moe.fused_moe.gpt_oss_slots import StackedExpertNames
from fastlayers_models.blocks import CausalLM, DecoderLayer, ModelContext, SwiGLU
from fastlayers_models.config import GQA_DECODER, GQADecoderConfig, Size, check_experts
from fastlayers_models.experts import route
from fastlayers_models.settings import FLAG, MOST_POSITIONS, Setting, read_settings, shown

THETA = 500000.0
_LLAMA4: dict[str, Setting] = GQA_DECODER | {
    "vocab_size": Setting("int > 0", 202048),
    "hidden_size": Setting("int > 0", 5120),
    "intermediate_size": Setting("int > 0", 8192),
    "intermediate_size_mlp": Setting("int > 0", 16384),
    "num_hidden_layers": Setting("int > 0", 48, most=GQA_DECODER["num_hidden_layers"].most),
    "num_attention_heads": Setting("int > 0", 40),
    "num_key_value_heads": Setting("int > 0 | None", 8),
    "head_dim": Setting("int > 0 | None", 128),
    "max_position_embeddings": Setting("int > 0", 131072, most=MOST_POSITIONS),
    "rms_norm_eps": Setting("float >= 0", 1e-5),
    "num_experts_per_tok": Setting("int > 0", 1),
    "num_local_experts": Setting("int > 0", 16),
    "moe_layers": Setting("tuple[int, ...] | None", None),
    "interleave_moe_layer_step": Setting("int > 0", 1),
    "use_qk_norm": Setting("bool", True),
    "no_rope_layers": Setting("tuple[int, ...] | None", None),
    "no_rope_layer_interval": Setting("int > 0", 4),
    "attention_chunk_size": Setting("int > 0 | None", 8192),
    "layer_types": Setting("tuple[str, ...] | None", None),
    "attn_temperature_tuning": Setting("bool", True),
    "floor_scale": Setting("int > 0", 8192),
    "attn_scale": Setting("float", 0.1),
    "attention_bias": FLAG,
}
# As published: with a vision part, the language model's settings in text_config and its tensors below WITHIN.
WHOLE, WITHIN = "llama4", "language_model"
SETTINGS = {WHOLE: _LLAMA4, "llama4_text": _LLAMA4}
_OUTER = {"image_token_index": Setting("int >= 0", 200092, also=("image_token_id",))}


@dataclass(frozen=True, kw_only=True)
class Llama4Config(GQADecoderConfig):
    """What Llama 4 varies; names are those of ``config.json``, where they are there.

    Parameters
    ----------
    chunks : tuple
        Of each layer: the tokens of a chunk, or ``None``: it attends to everything.
    rotates : tuple of bool
        Of each layer: whether queries and keys are rotated (and normed, with ``use_qk_norm``).
    moe_layers : tuple of int
        Which layers have experts.
    within : str
        Below which name a checkpoint has the model's tensors; ``""``: they are all it has.
    image_token_id : int or None
        Stands in prompts where images are, of which this model knows nothing.
    """

    known = SETTINGS
    theta = THETA

    chunks: tuple[int | None, ...]
    rotates: tuple[bool, ...]
    moe_layers: tuple[int, ...]
    intermediate_size_mlp: int
    num_local_experts: int
    num_experts_per_tok: int = 1
    use_qk_norm: bool = True
    attn_temperature_tuning: bool = True
    floor_scale: int = 8192
    attn_scale: float = 0.1
    attention_bias: bool = False
    within: str = ""
    image_token_id: int | None = None

    @property
    def prefix(self) -> str:
        """The decoder's name in the checkpoint."""
        return f"{self.within}.model" if self.within else "model"

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "Llama4Config"
        check_positive(name, num_local_experts=self.num_local_experts, floor_scale=self.floor_scale)
        check_experts(name, self.num_experts_per_tok, "num_local_experts", self.num_local_experts)
        for given, key in ((self.chunks, "layer_types"), (self.rotates, "no_rope_layers")):
            if len(given) != self.num_hidden_layers:
                accepted = f"one for each of num_hidden_layers {self.num_hidden_layers}"
                raise ArgumentError(name, key, f"{len(given)} entries", accepted)

    @classmethod
    def fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the constructor's arguments from a ``config.json`` of a known ``model_type``."""
        name, outer = cls.__name__, {}
        if config["model_type"] == WHOLE:
            outer = {"within": WITHIN, "image_token_id": read_settings(name, config, _OUTER)["image_token_index"]}
            config = _text_config(config)
        values = super().fields_of(config) | outer
        count = values["num_hidden_layers"]
        every, step = values.pop("no_rope_layer_interval"), values.pop("interleave_moe_layer_step")
        # Longer lists than there are layers are read so far.
        ones = values.pop("no_rope_layers") or tuple(int((i + 1) % every != 0) for i in range(count))
        types = values.pop("layer_types") or tuple(("full_attention", "chunked_attention")[bool(one)] for one in ones)
        for index, kind in enumerate(types):
            check_choice(name, f"layer_types[{index}]", kind, ("full_attention", "chunked_attention"))
        size = values.pop("attention_chunk_size")
        if size is None and "chunked_attention" in types[:count]:
            raise ArgumentError(name, "attention_chunk_size", None, "a positive integer, as layers attend in chunks")
        within = size is None or size >= values["max_position_embeddings"]
        chosen = values.pop("moe_layers")
        return values | {
            "chunks": tuple(None if within or kind == "full_attention" else size for kind in types[:count]),
            "rotates": tuple(bool(one) for one in ones[:count]),
            "moe_layers": tuple(range(step - 1, count, step)) if chosen is None else chosen,
        }

    def sizes(self) -> Iterator[Size]:
        """Yield tensors by which a checkpoint shows how large it is; see :class:`Size`."""
        yield from super().sizes()
        hidden, inner, experts = self.hidden_size, self.intermediate_size, self.num_local_experts
        # The first layer of each kind.
        for index in self.moe_layers[:1]:
            name, words = (
                f"{self.prefix}.layers.{index}.feed_forward.experts.gate_up_proj",
                "num_local_experts, intermediate_size",
            )
            yield Size(name, (experts, hidden, 2 * inner), words)
        for index in [index for index in range(self.num_hidden_layers) if index not in self.moe_layers][:1]:
            name = f"{self.prefix}.layers.{index}.feed_forward.gate_proj.weight"
            yield Size(name, (self.intermediate_size_mlp, hidden), "intermediate_size_mlp")


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's settings of a whole ``config.json``, with its tensors' number format."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ArgumentError("Llama4Config", "text_config", shown(text), "an object of names and values")
    return dict(text) | {"model_type": WHOLE, "quantization_config": config.get("quantization_config")}


class Llama4Context(ModelContext):
    """As for all families, with rotations of neighbouring dimensions, and one that rotates nothing."""

    still: fl.RotaryEmbedding

    def make_rotary(self) -> fl.RotaryEmbedding:
        """Return the rotary embedding that layers share; :attr:`still` is for those that know no positions."""
        self.still = self._rotary()
        self.still.cos.fill_(1.0)
        self.still.sin.zero_()
        return self._rotary()

    def _rotary(self) -> fl.RotaryEmbedding:
        config = self.config
        rope = dict(config.rope)
        if config.use_qk_norm:
            # Hugging Face norms behind the rotation, which takes a factor of its tables away; ours comes before.
            rope["rope_parameters"] = rope["rope_parameters"] | {"attention_factor": 1.0}
        return fl.RotaryEmbedding.from_config(
            rope, head_dim=config.head_dim, max_position=config.max_position_embeddings, interleaved_in=True,
            interleaved_out=True, device=self.device,
        )  # fmt: skip


class WeightlessNorm(nn.Module):
    """What the attention layer takes for a norm's weight where the checkpoint has none."""

    weight: torch.Tensor

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(size, device=device, dtype=dtype), persistent=False)


class Llama4Attention(fl.Attention):
    """Attention in chunks with norms that have no weights, or to everything with a temperature by position."""

    side_by_side = False

    def __init__(self, context: Llama4Context, name: str, index: int) -> None:
        config = context.config
        turns = config.rotates[index]
        normed = turns and config.use_qk_norm
        super().__init__(
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
            rotary=context.rotary if turns else context.still, qkv_bias=config.attention_bias,
            o_bias=config.attention_bias, qk_norm=config.rms_norm_eps if normed else None,
            quant=config.quant, prefix=name, axis=context.parallel.attn_tp, page_size=context.page_size,
            kv_dtype=context.kv_dtype, device=context.device, dtype=context.dtype, backend=context.backend,
        )  # fmt: skip
        self.chunk = config.chunks[index]
        if self.chunk is not None:
            check_chunk(self.chunk, context.page_size)
        if normed:
            self.q_norm = self.k_norm = WeightlessNorm(config.head_dim, context.device, context.dtype)
        self.tuned = not turns and config.attn_temperature_tuning
        self.floor_scale, self.attn_scale = config.floor_scale, config.attn_scale

    def rotate_and_write(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMeta, cache: LayerCache
    ) -> torch.Tensor:
        """Return q as the core takes it; write k and v into ``cache``."""
        if self.tuned:
            far = torch.floor((meta.positions.float() + 1.0) / self.floor_scale)
            q = (q * (torch.log1p(far) * self.attn_scale + 1.0)[:, None, None]).to(q.dtype)
        return super().rotate_and_write(q, k, v, meta, cache)

    def core(self, meta: AttentionMeta, tokens: int) -> Any:
        """Return the core for a step, which reads the metadata of the step in chunks."""
        if self.chunk is None:
            return super().core(meta, tokens)
        own = chunked(meta, self.chunk)
        core = super().core(own, tokens)
        return lambda q, keys, values, _, sinks: core(q, keys, values, own, sinks)


class Llama4MoE(nn.Module):
    """Router, routed experts of scaled inputs, and a shared expert; partial sums over ``tp``."""

    def __init__(self, context: ModelContext, name: str) -> None:
        super().__init__()
        config, parallel = context.config, context.parallel
        self.router = fl.TopKRouter(
            config.hidden_size, config.num_local_experts, config.num_experts_per_tok, scoring="sigmoid",
            renormalize=False, logits_dtype=None, device=context.device, dtype=context.dtype,
        )  # fmt: skip
        # One expert at a time: each sees an input of its own.
        self.experts = fl.FusedMoE(
            config.hidden_size, config.intermediate_size, config.num_local_experts, 1,
            quant=config.quant.for_module(f"{name}.experts"), ep=parallel.ep, tp=parallel.moe_tp,
            names=StackedExpertNames(), device=context.device, dtype=context.dtype,
        )  # fmt: skip
        self.shared_expert = SwiGLU(context, f"{name}.shared_expert", config.intermediate_size)

    def forward(self, x: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``[T, D]``; rows that ``valid`` excludes cost no expert work."""
        scores, ids = route(self.router, x, valid)
        one = torch.ones_like(scores[:, :1])
        out: torch.Tensor = self.shared_expert(x)
        for choice in range(scores.shape[1]):
            own = slice(choice, choice + 1)
            out = out + self.experts(x * scores[:, own].to(x.dtype), one, ids[:, own].contiguous())
        return out


class Llama4Layer(DecoderLayer):
    """One decoder layer: attention, then experts or a dense MLP, under the checkpoint's name for both."""

    MLP = "feed_forward"

    def __init__(self, context: Llama4Context, index: int, *, is_last: bool = False) -> None:
        config = context.config
        name = f"{config.prefix}.layers.{index}"
        attention = Llama4Attention(context, f"{name}.self_attn", index)
        sparse, inner = index in config.moe_layers, f"{name}.feed_forward"
        mlp = Llama4MoE(context, inner) if sparse else SwiGLU(context, inner, config.intermediate_size_mlp)
        super().__init__(context, attention, mlp, mlp_kind="moe" if sparse else "dense", is_last=is_last)


class Llama4ForCausalLM(CausalLM):
    """Llama 4's language model for generation over a paged cache; parameters as of :class:`CausalLM`.

    ``page_size`` divides the attention's chunk. A checkpoint's vision part is not read, and images are refused.
    """

    config_class, layer_class, context_class = Llama4Config, Llama4Layer, Llama4Context

    @property
    def checkpoint_name(self) -> str:
        """What checkpoints have this model's tensors below."""
        within: str = self.config.within
        return within

    @property
    def ignored_tensors(self) -> Sequence[str]:
        """Patterns of tensors with no place here: derived buffers, a tied head, the vision part's."""
        if not self.config.within:
            return super().ignored_tensors
        patterns = [pattern.replace("^", rf"^{self.config.within}\.", 1) for pattern in super().ignored_tensors]
        return [*patterns, r"^(?:vision_model|multi_modal_projector)\."]
