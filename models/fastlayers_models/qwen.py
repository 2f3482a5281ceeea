"""Qwen2, Qwen2.5, Qwen2-MoE, Qwen3, Qwen3-MoE, and the language model of Qwen2.5-VL, from fastlayers layers.

    tokens ─► embed ─► [ norm ─► attention ─► norm ─► SwiGLU or MoE ] × layers ─► norm ─► lm_head ─► logits

    model_type    biases             q/k norm    experts                             windows (use_sliding_window)
    qwen2         q, k, v            no          no                                  layer_types or max_window_layers
    qwen2_moe     q, k, v (option)   no          softmax top-k, gated shared one     layer_types or every other layer
    qwen3         all four (option)  yes         no                                  layer_types or max_window_layers
    qwen3_moe     all four (option)  yes         softmax top-k                       all layers
    qwen2_5_vl    q, k, v            no          no                                  as qwen2; MRoPE

Layers in ``mlp_only_layers``, and those that ``decoder_sparse_step`` leaves out, are dense. Of Qwen2.5-VL this is the
language model; with images, see :mod:`.qwen_vl`, the three position axes come in as ``meta.rope_positions``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import fastlayers as fl
from fastlayers.errors import ArgumentError, check_positive
from fastlayers_models.blocks import CausalLM, Decoder, DecoderLayer, ModelContext, SwiGLU
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.config import GQA_DECODER, GQADecoderConfig, Size, check_experts, layer_windows
from fastlayers_models.experts import OwnRows, PlacedRows, exchanged_experts, placement_of, quant_of_experts, route
from fastlayers_models.settings import COUNT, FLAG, MOST_POSITIONS, SIZE, Setting, read_settings, shown

VL_TYPES = ("qwen2_5_vl", "qwen2_5_vl_text")
VL_SECTION, VL_THETA = (16, 24, 24), 1000000.0
NESTED = "model.language_model"
# Of the windows: those that all families have, and those that say which layers slide.
_WINDOW: dict[str, Setting] = {"use_sliding_window": FLAG, "sliding_window": Setting("int > 0 | None", 4096)}
_SLIDING: dict[str, Setting] = {
    "max_window_layers": Setting("int >= 0", 28),
    "layer_types": Setting("tuple[str, ...] | None", None),
}
_QWEN: dict[str, Setting] = (
    GQA_DECODER
    | _WINDOW
    | {
        "num_key_value_heads": Setting("int > 0 | None", 32),
        "max_position_embeddings": Setting("int > 0", 32768, most=MOST_POSITIONS),
        "bos_token_id": Setting("int | None", None),
        "eos_token_id": Setting("ids", ()),
    }
)
_MOE: dict[str, Setting] = {
    "num_experts": Setting("int > 0", also=("num_local_experts",)),
    "num_experts_per_tok": SIZE,
    "moe_intermediate_size": SIZE,
    "norm_topk_prob": FLAG,
    "mlp_only_layers": Setting("tuple[int, ...]", ()),
    "decoder_sparse_step": Setting("int > 0", 1),
}
_VL: dict[str, Setting] = _QWEN | {
    "layer_types": Setting("tuple[str, ...] | None", None),
    "num_key_value_heads": Setting("int > 0 | None", 8),
    "rms_norm_eps": Setting("float >= 0", 1e-5),
    "max_window_layers": Setting("int >= 0", 80),
    "bos_token_id": Setting("int | None", 151643),
    "eos_token_id": Setting("ids", (151645,)),
}
SETTINGS: dict[str, dict[str, Setting]] = {
    "qwen2": _QWEN | _SLIDING,
    "qwen2_moe": _QWEN
    | _SLIDING
    | _MOE
    | {
        "sliding_window": Setting("int >= 0 | None", 4096),  # transformers writes 0 where no layer slides
        "num_key_value_heads": Setting("int > 0 | None", 16),
        "shared_expert_intermediate_size": COUNT,
        "qkv_bias": Setting("bool", True),
    },
    "qwen3": _QWEN | _SLIDING | {"head_dim": Setting("int > 0", 128), "attention_bias": FLAG},
    "qwen3_moe": _QWEN | _MOE | {"num_key_value_heads": Setting("int > 0 | None", 4), "attention_bias": FLAG},
    "qwen2_5_vl": _VL,
    "qwen2_5_vl_text": _VL,
}


@dataclass(frozen=True, kw_only=True)
class QwenConfig(GQADecoderConfig):
    """What Qwen models vary; names are those of ``config.json``, where they are there.

    Parameters
    ----------
    qkv_bias, o_bias, qk_norm : bool
        Of the attention.
    num_experts : int
        0: all layers are dense.
    shared_expert_intermediate_size : int
        0: no shared expert.
    prefix : str
        Checkpoint name of the decoder: ``"model"``, or ``"model.language_model"`` beside a vision tower.
    """

    known = SETTINGS

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = False
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    prefix: str = "model"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts:
            check_positive(
                "QwenConfig", num_experts=self.num_experts, num_experts_per_tok=self.num_experts_per_tok,
                moe_intermediate_size=self.moe_intermediate_size, decoder_sparse_step=self.decoder_sparse_step,
            )  # fmt: skip
            check_experts("QwenConfig", self.num_experts_per_tok, "num_experts", self.num_experts)

    def is_moe(self, layer: int) -> bool:
        """Whether layer number ``layer`` has experts."""
        sparse = layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
        return self.num_experts > 0 and sparse

    @property
    def routed_experts(self) -> tuple[int, int]:
        """How many there are, and of one token."""
        return self.num_experts, self.num_experts_per_tok

    @classmethod
    def fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the constructor's arguments from a ``config.json`` of a known ``model_type``."""
        kind = config["model_type"]
        values = super().fields_of(_text_config(config) if kind in VL_TYPES else config)
        third = kind in ("qwen3", "qwen3_moe")
        bias, qkv_bias = values.pop("attention_bias", False), values.pop("qkv_bias", True)
        return {key: value for key, value in values.items() if key not in _WINDOW | _SLIDING} | {
            "windows": _windows(kind, values),
            "qkv_bias": bias if third else qkv_bias,
            "o_bias": bias if third else False,
            "qk_norm": third,
        }

    def sizes(self) -> Iterator[Size]:
        """Yield tensors by which a checkpoint shows how large it is; see :class:`Size`."""
        yield from super().sizes()
        layers, hidden = range(self.num_hidden_layers), self.hidden_size
        dense, sparse = (next((i for i in layers if self.is_moe(i) == moe), None) for moe in (False, True))
        if dense is not None:
            name = f"{self.prefix}.layers.{dense}.mlp.gate_proj.weight"
            yield Size(name, (self.intermediate_size, hidden), "intermediate_size")
        if sparse is not None:
            mlp, shared = f"{self.prefix}.layers.{sparse}.mlp", self.shared_expert_intermediate_size
            yield Size(f"{mlp}.gate.weight", (self.num_experts, hidden), "num_experts")
            shape = (self.moe_intermediate_size, hidden)
            yield Size(f"{mlp}.experts.0.gate_proj.weight", shape, "moe_intermediate_size")
            if shared:
                name = "shared_expert_intermediate_size"
                yield Size(f"{mlp}.shared_expert.gate_proj.weight", (shared, hidden), name)


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Qwen2.5-VL's settings as one flat mapping: published files are flat, newer ones have ``text_config``."""
    text = config.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise ArgumentError("QwenConfig", "text_config", shown(text), "an object of names and values, or none")
    flat = dict(config if text is None else text)
    outer = {"model_type": config["model_type"], "quantization_config": config.get("quantization_config")}
    # It may stand in either place.
    tied = [read_settings("QwenConfig", each, {"tie_word_embeddings": FLAG}) for each in (config, flat)]
    flat |= outer | {"tie_word_embeddings": any(each["tie_word_embeddings"] for each in tied)}
    # What the code that Qwen2.5-VL was published with assumes where its config.json does not say.
    if flat.get("rope_theta") is None:
        flat["rope_theta"] = VL_THETA
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(flat.get(key), Mapping) and flat[key]:
            flat[key] = {"mrope_section": VL_SECTION} | dict(flat[key])
            return flat
    return flat | {"rope_parameters": {"mrope_section": VL_SECTION}}


def _windows(kind: str, values: Mapping[str, Any]) -> tuple[int | None, ...]:
    count, window, types = values["num_hidden_layers"], values["sliding_window"], values.get("layer_types")
    if not values["use_sliding_window"] or window is None:
        return (None,) * count
    if types is None:
        first = values.get("max_window_layers", count)
        if kind == "qwen3_moe":
            sliding = [True] * count
        elif kind == "qwen2_moe":
            sliding = [i % 2 == 0 and i < first for i in range(count)]
        else:
            sliding = [i >= first for i in range(count)]
        types = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    return layer_windows("QwenConfig", types, window, values["max_position_embeddings"])


class QwenMoE(nn.Module):
    """Router, routed experts and, with Qwen2-MoE, a shared expert behind a sigmoid gate; partial sums over ``tp``.

    Where tokens are exchanged own rows, whole; the shared expert is then whole on each rank, too.
    """

    def __init__(self, context: ModelContext, name: str) -> None:
        super().__init__()
        self.token_moves = context.token_moves
        config, parallel = context.config, context.parallel
        self.gate = fl.TopKRouter(
            config.hidden_size,
            config.num_experts,
            config.num_experts_per_tok,
            scoring="softmax",
            renormalize=config.norm_topk_prob,
            logits_dtype=None,
            device=context.device,
            dtype=context.dtype,
        )
        self.experts = fl.FusedMoE(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            config.num_experts_per_tok,
            quant=quant_of_experts(config.quant, f"{name}.experts", config.num_experts),
            ep=parallel.ep,
            tp=parallel.moe_tp,
            placement=placement_of(context, config.num_experts),
            device=context.device,
            dtype=context.dtype,
        )
        shared, whole = config.shared_expert_intermediate_size, self.token_moves is not None
        self.shared_expert = SwiGLU(context, f"{name}.shared_expert", shared, whole=whole) if shared else None
        self.shared_expert_gate = (
            context.linear(f"{name}.shared_expert_gate", config.hidden_size, 1) if shared else None
        )

    def forward(self, x: torch.Tensor, valid: torch.Tensor | PlacedRows | OwnRows | None = None) -> torch.Tensor:
        """Return ``[T, D]``; rows that ``valid`` excludes cost no expert work."""
        held: Any = self._modules
        experts = held["experts"]
        if self.token_moves is None:
            routed = experts(x, *route(held["gate"], x, valid, experts.placement))
        else:
            routed = exchanged_experts(held["gate"], experts, self.token_moves, x, valid)
        if self.shared_expert is None or self.shared_expert_gate is None:
            return routed
        return routed + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


class QwenLayer(DecoderLayer):
    """One decoder layer: grouped-query attention, then an MLP or experts."""

    def __init__(self, context: ModelContext, index: int, *, is_last: bool = False) -> None:
        config = context.config
        name = f"{config.prefix}.layers.{index}"
        attention = context.attention(
            f"{name}.self_attn",
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm=config.rms_norm_eps if config.qk_norm else None,
            window=config.windows[index],
        )
        if config.is_moe(index):
            super().__init__(context, attention, QwenMoE(context, f"{name}.mlp"), mlp_kind="moe", is_last=is_last)
        else:
            mlp = SwiGLU(context, f"{name}.mlp", config.intermediate_size)
            super().__init__(context, attention, mlp, is_last=is_last)


class LanguageModel(nn.Module):
    """Holds the decoder where checkpoints with a vision tower have it: ``model.language_model``."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.language_model = decoder


class QwenForCausalLM(CausalLM):
    """Qwen for generation over a paged cache; parameters as of :class:`CausalLM`.

    Notes
    -----
    Qwen2.5-VL with images: ``model(ids, dataclasses.replace(meta, rope_positions=positions), caches)``, with
    ``positions`` int64 ``[3, T]`` (time, height, width). The tower is :class:`~fastlayers_models.QwenVLForCausalLM`'s.
    """

    config_class, layer_class = QwenConfig, QwenLayer

    def make_model(self, context: ModelContext) -> nn.Module:
        """Return the decoder, or what holds it in checkpoints with a vision tower."""
        decoder = Decoder(context, QwenLayer)
        return LanguageModel(decoder) if context.config.prefix == NESTED else decoder

    @property
    def decoder(self) -> Any:
        """The module with ``embed_tokens``, ``layers`` and ``norm``."""
        return self.get_submodule(self.config.prefix)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> QwenConfig:
        """Return the configuration of a checkpoint, with the prefix that its tensors have."""
        config = QwenConfig.from_hf(checkpoint.config)
        nested = any(name.startswith(f"{NESTED}.") for name in checkpoint.names())
        return replace(config, prefix=NESTED) if nested else config

    @property
    def ignored_tensors(self) -> Sequence[str]:
        """Patterns of tensors with no place here: derived buffers, a tied head, other ranks' experts, a tower's."""
        patterns = list(super().ignored_tensors)
        if self.config.num_experts:
            patterns += self.other_experts(self.config.num_experts)
        return [*patterns, r"^(?:model\.)?visual\."] if self.config.model_type == "qwen2_5_vl_text" else patterns
