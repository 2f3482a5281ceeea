"""Model configurations as frozen dataclasses, read from Hugging Face's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastlayers.errors import ArgumentError, UnknownModelError, check_choice, check_positive
from fastlayers.quant.spec import NONE, QuantSpec

DEEPSEEK_TYPES = ("deepseek_v2", "deepseek_v3")


@dataclass(frozen=True)
class DeepseekConfig:
    """What DeepSeek-V2, V2-Lite, V3 and R1 vary; names are those of ``config.json``."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 0
    n_group: int = 1
    topk_group: int = 1
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    rope_interleave: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quant: QuantSpec = NONE
    rope: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name = "DeepseekConfig"
        check_choice(name, "model_type", self.model_type, DEEPSEEK_TYPES)
        check_choice(name, "topk_method", self.topk_method, ("greedy", "group_limited_greedy", "noaux_tc"))
        check_positive(
            name, vocab_size=self.vocab_size, hidden_size=self.hidden_size, num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads, kv_lora_rank=self.kv_lora_rank,
            num_experts_per_tok=self.num_experts_per_tok, n_routed_experts=self.n_routed_experts, n_group=self.n_group,
        )  # fmt: skip
        if self.n_routed_experts % self.n_group:
            raise ArgumentError(
                name, "n_routed_experts", self.n_routed_experts, f"a multiple of n_group {self.n_group}"
            )

    def is_moe(self, layer: int) -> bool:
        """Whether layer number ``layer`` has experts (the MTP layer has)."""
        return layer >= self.first_k_dense_replace

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> DeepseekConfig:
        """Read a parsed ``config.json``.

        Raises
        ------
        UnknownModelError
            Another ``model_type``.
        ArgumentError
            A value that the model cannot be built from.
        """
        model_type = config.get("model_type")
        if model_type not in DEEPSEEK_TYPES:
            raise UnknownModelError(f"model_type {model_type!r} is unknown; known: {', '.join(DEEPSEEK_TYPES)}")
        if config.get("hidden_act", "silu") != "silu":
            raise ArgumentError("DeepseekConfig", "hidden_act", repr(config["hidden_act"]), "'silu'")
        v3 = model_type == "deepseek_v3"
        eos = config.get("eos_token_id")
        required = {name: _required(config, name) for name in _REQUIRED}
        return DeepseekConfig(
            model_type=model_type,
            **required,
            q_lora_rank=config.get("q_lora_rank"),
            n_shared_experts=config.get("n_shared_experts") or 0,
            n_group=config.get("n_group") or 1,
            topk_group=config.get("topk_group") or 1,
            topk_method="noaux_tc" if v3 else config.get("topk_method") or "greedy",
            # V2's reference and Hugging Face's code never renormalise, whatever the file says.
            norm_topk_prob=bool(config.get("norm_topk_prob", True)) if v3 else False,
            routed_scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
            first_k_dense_replace=config.get("first_k_dense_replace") or 0,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=int(config.get("max_position_embeddings", 4096)),
            rope_interleave=bool(config.get("rope_interleave", True)) if v3 else True,
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            num_nextn_predict_layers=int(config.get("num_nextn_predict_layers") or 0) if v3 else 0,
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            quant=QuantSpec.from_config(config.get("quantization_config")),
            rope=dict(config),
        )


_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "n_routed_experts", "num_experts_per_tok",
)  # fmt: skip


def _required(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError("DeepseekConfig", name, repr(value), "an integer")
    return value
