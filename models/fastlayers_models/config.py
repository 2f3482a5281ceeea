"""Model configurations as frozen dataclasses, read from Hugging Face's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastlayers.errors import ArgumentError, UnknownModelError, check_choice, check_positive
from fastlayers.quant.spec import NONE, QuantSpec
from fastlayers.rotary.scaling import rope_parameters

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
        required = {name: required_int("DeepseekConfig", config, name) for name in _REQUIRED}
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
            eos_token_ids=token_ids(config.get("eos_token_id")),
            quant=QuantSpec.from_config(config.get("quantization_config")),
            rope=dict(config),
        )


_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "n_routed_experts", "num_experts_per_tok",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GQADecoderConfig:
    """What all families with grouped-query attention share; names are those of ``config.json``.

    ``windows`` has one entry a layer: how many tokens a token sees, itself included, or ``None`` for all.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quant: QuantSpec = NONE
    rope: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name, heads = type(self).__name__, self.num_attention_heads
        check_positive(
            name, vocab_size=self.vocab_size, hidden_size=self.hidden_size, num_hidden_layers=self.num_hidden_layers,
            intermediate_size=self.intermediate_size, num_attention_heads=heads, head_dim=self.head_dim,
            num_key_value_heads=self.num_key_value_heads, max_position_embeddings=self.max_position_embeddings,
        )  # fmt: skip
        if heads % self.num_key_value_heads:
            raise ArgumentError(name, "num_key_value_heads", self.num_key_value_heads, f"a divisor of {heads} heads")
        if len(self.windows) != self.num_hidden_layers:
            raise ArgumentError(name, "windows", self.windows, f"one entry for each of {self.num_hidden_layers} layers")
        for window in self.windows:
            if window is not None:
                check_positive(name, sliding_window=window)


def gqa_decoder_values(
    owner: str, config: Mapping[str, Any], *, head_dim: int | None = None, hidden_act: str = "silu"
) -> dict[str, Any]:
    """Return the fields of :class:`GQADecoderConfig` but ``windows`` from a parsed ``config.json``.

    ``head_dim`` is what the family assumes where the file does not say; default: ``hidden_size / heads``.
    """
    if config.get("hidden_act", hidden_act) != hidden_act:
        raise ArgumentError(owner, "hidden_act", repr(config["hidden_act"]), repr(hidden_act))
    values: dict[str, Any] = {name: required_int(owner, config, name) for name in _GQA_REQUIRED}
    check_positive(owner, num_attention_heads=values["num_attention_heads"])
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    return values | {
        "model_type": config["model_type"],
        "num_key_value_heads": optional_int(owner, config, "num_key_value_heads", heads),
        "head_dim": optional_int(owner, config, "head_dim", head_dim or hidden // heads),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "max_position_embeddings": longest_position(owner, config),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_ids": token_ids(config.get("eos_token_id")),
        "quant": QuantSpec.from_config(config.get("quantization_config")),
        "rope": dict(config),
    }


_GQA_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def longest_position(owner: str, config: Mapping[str, Any]) -> int:
    """Return how many positions a model may use: with YaRN, what it stretches the original context to."""
    longest, rope = optional_int(owner, config, "max_position_embeddings", 4096), rope_parameters(config)
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    if (rope.get("rope_type") or rope.get("type")) != "yarn" or not original:
        return longest
    return max(longest, int(original * (rope.get("factor") or 1.0)))


def layer_windows(owner: str, layer_types: Sequence[str], window: Any, longest: int) -> tuple[int | None, ...]:
    """Return each layer's window: ``window`` for ``"sliding_attention"``, none for ``"full_attention"``.

    A window that reaches over the whole context of ``longest`` tokens is none.

    Raises
    ------
    ArgumentError
        Another layer type, or a layer slides and ``window`` is not a positive integer.
    """
    for index, kind in enumerate(layer_types):
        check_choice(owner, f"layer_types[{index}]", kind, ("full_attention", "sliding_attention"))
    if "sliding_attention" not in layer_types:
        return (None,) * len(layer_types)
    check_positive(owner, sliding_window=window)
    return tuple(window if kind == "sliding_attention" and window < longest else None for kind in layer_types)


def required_int(owner: str, config: Mapping[str, Any], name: str) -> int:
    """Return an integer of a parsed ``config.json``, or raise :class:`ArgumentError` naming it."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(owner, name, repr(value), "an integer")
    return value


def optional_int(owner: str, config: Mapping[str, Any], name: str, default: int) -> int:
    """Return an integer of a parsed ``config.json``; ``default`` where it is absent or null."""
    return default if config.get(name) is None else required_int(owner, config, name)


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return ``eos_token_id`` as a tuple, be it absent, one id or several."""
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)
