"""Llama 2 and 3 (and what shares their architecture, such as SmolLM2) from fastlayers layers.

    tokens ─► embed ─► [ norm ─► attention ─► norm ─► SwiGLU ] × layers ─► norm ─► lm_head ─► logits

Llama 3 stretches its rotary embedding (``rope_type`` ``"llama3"``); small models tie the head to the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastlayers_models.blocks import CausalLM, DecoderLayer, ModelContext, SwiGLU
from fastlayers_models.config import GQA_DECODER, GQADecoderConfig, Size
from fastlayers_models.settings import FLAG

SETTINGS = {"llama": GQA_DECODER | {"attention_bias": FLAG, "mlp_bias": FLAG}}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(GQADecoderConfig):
    """What Llama models vary; names are those of ``config.json``."""

    known = SETTINGS

    attention_bias: bool = False
    mlp_bias: bool = False

    def sizes(self) -> Iterator[Size]:
        """Yield tensors by which a checkpoint shows how large it is; see :class:`Size`."""
        yield from super().sizes()
        shape = (self.intermediate_size, self.hidden_size)
        yield Size("model.layers.0.mlp.gate_proj.weight", shape, "intermediate_size")


class LlamaLayer(DecoderLayer):
    """One decoder layer: grouped-query attention, then a dense MLP."""

    def __init__(self, context: ModelContext, index: int, *, is_last: bool = False) -> None:
        config, name = context.config, f"model.layers.{index}"
        bias = config.attention_bias
        attention = context.attention(f"{name}.self_attn", qkv_bias=bias, o_bias=bias, window=config.windows[index])
        mlp = SwiGLU(context, f"{name}.mlp", config.intermediate_size, bias=config.mlp_bias)
        super().__init__(context, attention, mlp, is_last=is_last)


class LlamaForCausalLM(CausalLM):
    """Llama for generation over a paged cache; parameters as of :class:`CausalLM`."""

    config_class, layer_class = LlamaConfig, LlamaLayer
