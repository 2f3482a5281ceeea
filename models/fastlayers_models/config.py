"""Model configurations as frozen dataclasses, read from Hugging Face's ``config.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

from fastlayers.errors import ArgumentError, UnknownModelError, check_choice, check_positive
from fastlayers.quant.spec import NONE, QuantSpec
from fastlayers_models.settings import (
    FLAG,
    MOST_LAYERS,
    MOST_POSITIONS,
    SIZE,
    Setting,
    longest_position,
    read_quantization,
    read_rope,
    read_settings,
)

LAYERS = Setting("int > 0", most=MOST_LAYERS)
ENDS = Setting("ids", ())


class Size(NamedTuple):
    """The shape that a configuration gives one tensor: compared with the checkpoint's before anything is built.

    ``settings`` are the names in ``config.json`` that the shape comes from.
    """

    tensor: str
    shape: tuple[int, ...]
    settings: str


class DecoderConfig:
    """What every family's configuration does: read ``config.json`` by the table of its ``model_type``.

    Attributes
    ----------
    known : mapping
        What is read of ``config.json``, for each ``model_type`` of the family.
    """

    known: ClassVar[Mapping[str, Mapping[str, Setting]]] = {}

    @classmethod
    def settings(cls, model_type: str) -> Mapping[str, Setting]:
        """Return what :meth:`from_hf` reads of ``config.json``."""
        return cls.known[model_type]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Read a parsed ``config.json``.

        Raises
        ------
        UnknownModelError
            Another ``model_type``.
        ArgumentError
            A value that the model cannot be built from.
        """
        model_type = config.get("model_type")
        if model_type not in tuple(cls.known):  # a list has no hash
            raise UnknownModelError(f"model_type {model_type!r} is unknown; known: {', '.join(cls.known)}")
        return cls(**cls.fields_of(config))

    def ended_by(self, generation: Mapping[str, Any]) -> Self:
        """Return this with the tokens that end a text in ``generation_config.json``, if that names any.

        As transformers takes them; chat models have more there than in ``config.json``.
        """
        ids = read_settings("generation_config.json", generation, {"eos_token_id": ENDS})["eos_token_id"]
        return replace(self, eos_token_ids=ids) if ids else self  # type: ignore[type-var]

    @classmethod
    def fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the constructor's arguments from a ``config.json`` of a known ``model_type``."""
        raise TypeError(f"{cls.__name__} does not say what its fields are")


def check_experts(owner: str, chosen: int, key: str, count: int) -> None:
    """Raise :class:`ArgumentError` where a token chooses more experts than ``key`` says there are."""
    if chosen > count:
        raise ArgumentError(owner, "num_experts_per_tok", chosen, f"at most {key} {count}")


_DEEPSEEK: dict[str, Setting] = {
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "moe_intermediate_size": SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": SIZE,
    "kv_lora_rank": SIZE,
    "q_lora_rank": Setting("int > 0 | None", 1536),
    "qk_nope_head_dim": SIZE,
    "qk_rope_head_dim": SIZE,
    "v_head_dim": SIZE,
    "num_experts_per_tok": SIZE,
    "hidden_act": Setting("str", "silu", choices=("silu",)),
    "rms_norm_eps": Setting("float >= 0", 1e-6),
    "attention_bias": FLAG,
    "tie_word_embeddings": FLAG,
}
_DEEPSEEK_V2: dict[str, Setting] = _DEEPSEEK | {
    "mlp_bias": FLAG,
    "n_routed_experts": Setting("int > 0", also=("num_experts",)),
    "n_shared_experts": Setting("int >= 0 | None", 2),
    "n_group": Setting("int > 0 | None", None),
    "topk_group": Setting("int > 0 | None", None),
    "topk_method": Setting("str", "greedy"),
    "routed_scaling_factor": Setting("float", 1.0),
    "first_k_dense_replace": Setting("int >= 0", 0),
    "max_position_embeddings": Setting("int > 0", 2048, most=MOST_POSITIONS),
    "bos_token_id": Setting("int | None", 1),
    "eos_token_id": Setting("ids", (2,)),
}
_DEEPSEEK_V3: dict[str, Setting] = _DEEPSEEK | {
    "head_dim": Setting("int > 0 | None", None),
    "n_routed_experts": Setting("int > 0", also=("num_local_experts",)),
    "n_shared_experts": Setting("int >= 0 | None", 1),
    "n_group": Setting("int > 0 | None", 8),
    "topk_group": Setting("int > 0 | None", 4),
    "norm_topk_prob": Setting("bool", True),
    "routed_scaling_factor": Setting("float", 2.5),
    "first_k_dense_replace": Setting("int >= 0", 3),
    "max_position_embeddings": Setting("int > 0", 4096, most=MOST_POSITIONS),
    "rope_interleave": Setting("bool", True),
    "num_nextn_predict_layers": Setting("int >= 0", 1, most=MOST_LAYERS, also=("num_mtp_layers",)),
    "bos_token_id": Setting("int | None", 0),
    "eos_token_id": Setting("ids", (1,)),
}
DEEPSEEK = {"deepseek_v2": _DEEPSEEK_V2, "deepseek_v3": _DEEPSEEK_V3}


@dataclass(frozen=True)
class DeepseekConfig(DecoderConfig):
    """What DeepSeek-V2, V2-Lite, V3 and R1 vary; names are those of ``config.json``."""

    known = DEEPSEEK

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
        check_choice(name, "model_type", self.model_type, tuple(self.known))
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

    @property
    def routed_experts(self) -> tuple[int, int]:
        """How many there are, and of one token."""
        return self.n_routed_experts, self.num_experts_per_tok

    def is_moe(self, layer: int) -> bool:
        """Whether layer number ``layer`` has experts (the MTP layer has)."""
        return layer >= self.first_k_dense_replace

    @classmethod
    def fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the constructor's arguments from a ``config.json`` of a known ``model_type``."""
        model_type, name = config["model_type"], cls.__name__
        values = read_settings(name, config, cls.settings(model_type))
        rope = read_rope(name, config, values["max_position_embeddings"])
        values["n_shared_experts"] = values["n_shared_experts"] or 0
        if values["n_group"] is None:
            values |= {"n_group": 1, "topk_group": 1}
        elif values["topk_group"] is None:
            raise ArgumentError(name, "topk_group", None, f"a positive integer, as n_group is {values['n_group']}")
        v3 = model_type == "deepseek_v3"
        if v3:
            _check_rotated_width(name, config, values)
        own = {
            "model_type": model_type,
            "eos_token_ids": values.pop("eos_token_id"),
            "quant": read_quantization(name, config),
            "rope": rope,
            # What the models' code does, whatever the file says: V3 has one method, V2 never renormalises, pairs
            # neighbours and has no layer to draft with.
            **({"topk_method": "noaux_tc"} if v3 else {"norm_topk_prob": False}),
        }
        return {key: value for key, value in values.items() if key not in ("hidden_act", "head_dim")} | own

    def sizes(self) -> Iterator[Size]:
        """Yield tensors by which a checkpoint shows how large it is; see :class:`Size`."""
        hidden, heads, dims = self.hidden_size, self.num_attention_heads, self.qk_nope_head_dim + self.qk_rope_head_dim
        yield Size("model.embed_tokens.weight", (self.vocab_size, hidden), "vocab_size, hidden_size")
        for name, shape, words in (
            ("kv_a_proj_with_mqa", (self.kv_lora_rank + self.qk_rope_head_dim, hidden), "kv_lora_rank"),
            ("kv_b_proj", (heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank), "v_head_dim"),
            ("o_proj", (hidden, heads * self.v_head_dim), "num_attention_heads, v_head_dim"),
            *(
                [("q_proj", (heads * dims, hidden), "num_attention_heads, qk_nope_head_dim")]
                if self.q_lora_rank is None
                else [
                    ("q_a_proj", (self.q_lora_rank, hidden), "q_lora_rank"),
                    ("q_b_proj", (heads * dims, self.q_lora_rank), "num_attention_heads, qk_nope_head_dim"),
                ]
            ),
        ):
            yield Size(f"model.layers.0.self_attn.{name}.weight", shape, words)
        if self.first_k_dense_replace:
            yield Size("model.layers.0.mlp.gate_proj.weight", (self.intermediate_size, hidden), "intermediate_size")
        if self.first_k_dense_replace < self.num_hidden_layers:
            mlp, inner = f"model.layers.{self.first_k_dense_replace}.mlp", self.moe_intermediate_size
            yield Size(f"{mlp}.gate.weight", (self.n_routed_experts, hidden), "n_routed_experts")
            yield Size(f"{mlp}.experts.0.gate_proj.weight", (inner, hidden), "moe_intermediate_size")
            if self.n_shared_experts:
                shape = (self.n_shared_experts * inner, hidden)
                yield Size(f"{mlp}.shared_experts.gate_proj.weight", shape, "n_shared_experts, moe_intermediate_size")


def _check_rotated_width(name: str, config: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise :class:`ArgumentError` where V3's ``head_dim``, by which transformers rotates, is not the rotated part's.

    V2's code overwrites what the file says.
    """
    width, said = values["qk_rope_head_dim"], values["head_dim"]
    if said is None and "head_dim" in config:  # null: what each head has of the hidden size
        said = values["hidden_size"] // values["num_attention_heads"]
    if "head_dim" in config and said != width:
        accepted = f"qk_rope_head_dim, {width}, or no such key"
        raise ArgumentError(name, "head_dim", config["head_dim"], accepted)


@dataclass(frozen=True, kw_only=True)
class GQADecoderConfig(DecoderConfig):
    """What all families with grouped-query attention share; names are those of ``config.json``.

    ``windows`` has one entry a layer: how many tokens a token sees, itself included, or ``None`` for all.

    Attributes
    ----------
    theta, silent_rope
        What transformers assumes of the rotary embedding where ``config.json`` is silent, see
        :func:`fastlayers_models.settings.read_rope`.
    """

    theta: ClassVar[float] = 10000.0
    silent_rope: ClassVar[Mapping[str, Any] | None] = None

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
            accepted = f"one entry for each of {self.num_hidden_layers} layers, as in layer_types"
            raise ArgumentError(name, "windows", self.windows, accepted)
        for window in self.windows:
            if window is not None:
                check_positive(name, sliding_window=window)

    @classmethod
    def fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the constructor's arguments without windows, and the settings that a family added as they are."""
        owner = cls.__name__
        values = read_settings(owner, config, cls.settings(config["model_type"]))
        longest = values["max_position_embeddings"]
        rope = read_rope(owner, config, longest, theta=cls.theta, silent=cls.silent_rope)
        heads, hidden = values["num_attention_heads"], values["hidden_size"]
        del values["hidden_act"]
        return values | {
            "model_type": config["model_type"],
            "num_key_value_heads": values["num_key_value_heads"] or heads,
            "head_dim": values["head_dim"] or hidden // heads,
            "windows": (None,) * values["num_hidden_layers"],
            "max_position_embeddings": longest_position(owner, rope),
            "eos_token_ids": values.pop("eos_token_id"),
            "quant": read_quantization(owner, config),
            "rope": rope,
        }

    def sizes(self) -> Iterator[Size]:
        """Yield tensors by which a checkpoint shows how large it is; see :class:`Size`."""
        prefix, hidden = getattr(self, "prefix", "model"), self.hidden_size
        yield Size(f"{prefix}.embed_tokens.weight", (self.vocab_size, hidden), "vocab_size, hidden_size")
        for name, heads in (("q_proj", self.num_attention_heads), ("k_proj", self.num_key_value_heads)):
            words = f"{'num_attention_heads' if name == 'q_proj' else 'num_key_value_heads'}, head_dim"
            yield Size(f"{prefix}.layers.0.self_attn.{name}.weight", (heads * self.head_dim, hidden), words)


# What all families with grouped-query attention read, with the defaults of Llama.
GQA_DECODER: dict[str, Setting] = {
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": SIZE,
    "num_key_value_heads": Setting("int > 0 | None", None),
    "head_dim": Setting("int > 0 | None", None),
    "hidden_act": Setting("str", "silu", choices=("silu",)),
    "rms_norm_eps": Setting("float >= 0", 1e-6),
    "max_position_embeddings": Setting("int > 0", 2048, most=MOST_POSITIONS),
    "tie_word_embeddings": FLAG,
    "bos_token_id": Setting("int | None", 1),
    "eos_token_id": Setting("ids", (2,)),
}


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
