"""GPT-OSS from fastlayers layers.

    tokens ─► embed ─► [ norm ─► attention with sinks ─► norm ─► experts ] × layers ─► norm ─► lm_head ─► logits

Layers alternate between a sliding window (which counts the token itself) and full attention. Every projection has a
bias. The router takes the top k of the logits first and the softmax over those; gate and up rows of the experts are
interleaved and clamped. Experts are MXFP4, and stay packed, or in the model's dtype: ``config.quant`` says which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fastlayers as fl
from fastlayers.errors import check_positive
from fastlayers.quant.mxfp4.codes import groups_of
from fastlayers_models.blocks import CausalLM, DecoderLayer, ModelContext
from fastlayers_models.config import GQA_DECODER, GQADecoderConfig, Size, check_experts, layer_windows
from fastlayers_models.experts import OwnRows, exchanged_experts, route
from fastlayers_models.settings import MOST_POSITIONS, Setting

# What transformers assumes where config.json does not say; the ramp of this YaRN is not rounded to whole dimensions.
THETA = 150000.0
ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
# transformers computes with these two, whatever config.json says.
ALPHA, LIMIT = 1.702, 7.0
_GPT_OSS: dict[str, Setting] = GQA_DECODER | {
    "num_key_value_heads": Setting("int > 0 | None", 8),
    "head_dim": Setting("int > 0 | None", 64),
    "rms_norm_eps": Setting("float >= 0", 1e-5),
    "max_position_embeddings": Setting("int > 0", 131072, most=MOST_POSITIONS),
    "bos_token_id": Setting("int | None", None),
    "eos_token_id": Setting("ids", ()),
    "num_local_experts": Setting("int > 0", also=("num_experts",)),
    "num_experts_per_tok": Setting("int > 0", 4),
    "sliding_window": Setting("int > 0 | None", 128),
    "layer_types": Setting("tuple[str, ...] | None", None),
    "attention_bias": Setting("bool", True),
    "swiglu_alpha": Setting("float", ALPHA, choices=(ALPHA,)),
    "swiglu_limit": Setting("float", LIMIT, choices=(LIMIT,)),
}
SETTINGS = {"gpt_oss": _GPT_OSS}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(GQADecoderConfig):
    """What GPT-OSS models vary; names are those of ``config.json``."""

    known = SETTINGS
    theta, silent_rope = THETA, ROPE

    num_local_experts: int
    num_experts_per_tok: int
    attention_bias: bool = True
    swiglu_alpha: float = ALPHA
    swiglu_limit: float = LIMIT

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "GptOssConfig"
        check_positive(name, num_local_experts=self.num_local_experts, num_experts_per_tok=self.num_experts_per_tok)
        check_experts(name, self.num_experts_per_tok, "num_local_experts", self.num_local_experts)
        if self.quant.format == "mxfp4":
            groups_of(self.hidden_size, "hidden_size", name)
            groups_of(self.intermediate_size, "intermediate_size", name)

    @property
    def routed_experts(self) -> tuple[int, int]:
        """How many there are, and of one token."""
        return self.num_local_experts, self.num_experts_per_tok

    @classmethod
    def fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the constructor's arguments from a ``config.json`` of a known ``model_type``."""
        values = super().fields_of(config)
        count, types, window = values["num_hidden_layers"], values.pop("layer_types"), values.pop("sliding_window")
        types = types or [("full_attention", "sliding_attention")[i % 2 == 0] for i in range(count)]
        return values | {"windows": layer_windows(cls.__name__, types, window, values["max_position_embeddings"])}

    def sizes(self) -> Iterator[Size]:
        """Yield tensors by which a checkpoint shows how large it is; see :class:`Size`."""
        yield from super().sizes()
        # Not the experts' matrices: their shapes depend on the number format.
        mlp, count = "model.layers.0.mlp", self.num_local_experts
        yield Size(f"{mlp}.router.weight", (count, self.hidden_size), "num_local_experts")
        yield Size(f"{mlp}.experts.gate_up_proj_bias", (count, 2 * self.intermediate_size), "intermediate_size")


class GptOssContext(ModelContext):
    """As for all families, but norms scale in fp32 and round once."""

    rounding = "scale_then_cast"


class GptOssMoE(nn.Module):
    """Router and experts; partial sums over ``tp``, or own rows whole where tokens are exchanged."""

    def __init__(self, context: ModelContext, name: str) -> None:
        super().__init__()
        self.token_moves = context.token_moves
        config, parallel = context.config, context.parallel
        self.router = fl.TopKRouter(
            config.hidden_size,
            config.num_local_experts,
            config.num_experts_per_tok,
            scoring="softmax_after_topk",
            renormalize=False,
            logits_dtype=None,
            bias=True,
            device=context.device,
            dtype=context.dtype,
        )
        self.experts = fl.FusedMoE(
            config.hidden_size,
            config.intermediate_size,
            config.num_local_experts,
            config.num_experts_per_tok,
            quant=config.quant.for_module(f"{name}.experts"),
            activation="swiglu_oai",
            alpha=config.swiglu_alpha,
            limit=config.swiglu_limit,
            bias=True,
            interleaved=True,
            ep=parallel.ep,
            tp=parallel.moe_tp,
            device=context.device,
            dtype=context.dtype,
        )

    def forward(self, x: torch.Tensor, valid: torch.Tensor | OwnRows | None = None) -> torch.Tensor:
        """Return ``[T, D]``; rows that ``valid`` excludes cost no expert work."""
        held: Any = self._modules
        experts = held["experts"]
        if self.token_moves is not None:
            return exchanged_experts(held["router"], experts, self.token_moves, x, valid)
        found: torch.Tensor = experts(x, *route(held["router"], x, valid, experts.placement))
        return found


class GptOssLayer(DecoderLayer):
    """One decoder layer: attention with sinks, then experts."""

    def __init__(self, context: ModelContext, index: int, *, is_last: bool = False) -> None:
        config, name = context.config, f"model.layers.{index}"
        bias, window = config.attention_bias, config.windows[index]
        attention = context.attention(f"{name}.self_attn", qkv_bias=bias, o_bias=bias, window=window, sinks=True)
        super().__init__(context, attention, GptOssMoE(context, f"{name}.mlp"), mlp_kind="moe", is_last=is_last)


class GptOssForCausalLM(CausalLM):
    """GPT-OSS for generation over a paged cache; parameters as of :class:`CausalLM`.

    With MXFP4, the ranks that split an expert get whole groups of 32 features, some one group more.
    """

    config_class, layer_class, context_class = GptOssConfig, GptOssLayer, GptOssContext
