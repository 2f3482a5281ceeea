"""Real models by name: their ``config.json`` as published, and the layer configurations they construct on a rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlayers.errors import UnknownModelError

if TYPE_CHECKING:
    import torch

_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "moe_layer_freq": 1,
    "first_k_dense_replace": 3, "norm_topk_prob": True, "scoring_func": "sigmoid", "hidden_act": "silu",
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "attention_bias": False, "num_nextn_predict_layers": 1, "bos_token_id": 0, "eos_token_id": 1,
    "quantization_config": _FP8,
}  # fmt: skip

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936, "num_attention_heads": 32, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None,
    "attention_bias": False, "use_sliding_window": False, "sliding_window": None, "tie_word_embeddings": False,
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
QWEN3_8B: dict[str, Any] = _QWEN3 | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "max_window_layers": 36,
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_window_layers": 48,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
    "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "hidden_act": "silu", "swiglu_limit": 7.0,
    "max_position_embeddings": 131072, "initial_context_length": 4096, "rms_norm_eps": 1e-5, "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "attention_bias": True, "tie_word_embeddings": False, "eos_token_id": 200002, "pad_token_id": 199999,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
}  # fmt: skip

KNOWN: Mapping[str, Mapping[str, Any]] = {
    "deepseek-ai/DeepSeek-V3": DEEPSEEK_V3,
    "Qwen/Qwen3-8B": QWEN3_8B,
    "Qwen/Qwen3-8B-FP8": QWEN3_8B | {"quantization_config": _FP8},
    "Qwen/Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen/Qwen3-30B-A3B-FP8": QWEN3_30B_A3B | {"quantization_config": _FP8},
    "openai/gpt-oss-20b": GPT_OSS_20B,
}
# What a command's help says of such a name.
HELP = "'tiny', the model that ships; a known model, a config.json, its directory, or a name on the Hugging Face hub."


def config_of(name: str) -> Mapping[str, Any]:
    """Return a parsed ``config.json``: of a known model (with or without its owner), a file, a directory, or the hub.

    'tiny' is the checkpoint that ships, as in the commands that need weights.

    Raises
    ------
    UnknownModelError
        None of these, or a file that is not a JSON object.
    """
    from fastlayers_models.find import HUB_NAME, TINY, assets

    for known, config in KNOWN.items():
        if name.lower() in (known.lower(), known.partition("/")[2].lower()):
            return config
    try:
        path = assets() / TINY if name in ("tiny", TINY) else Path(name).expanduser()
    except RuntimeError as error:
        raise UnknownModelError(f"model {name!r} is unknown: {error}") from error
    if path.is_file() or (path / "config.json").is_file():
        return _parsed(path if path.is_file() else path / "config.json")
    if name.count("/") == 1 and HUB_NAME.fullmatch(name) and not path.exists():
        return _from_hub(name)
    known = f"{', '.join(KNOWN)}; 'tiny', the one that ships"
    accepted = f"{known}; a config.json or its directory; a name on the Hugging Face hub"
    raise UnknownModelError(f"model {name!r} is unknown; accepted: {accepted}")


def _from_hub(name: str) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(name, "config.json")
    except Exception as error:  # whatever the hub's client raises: the reason is kept
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise UnknownModelError(
            f"model {name!r}: neither known nor on the hub ({why}); known: {', '.join(KNOWN)}"
        ) from (error)
    return _parsed(Path(path))


def _parsed(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # not JSON, or not even text
        raise UnknownModelError(f"{path} is not JSON: {error}; expected a model's config.json") from error
    if not isinstance(found, dict):
        raise UnknownModelError(f"{path} holds no JSON object; expected a model's config.json")
    return found


@dataclass(frozen=True)
class LayerShape:
    """One layer configuration of a model, and how many modules have it."""

    layer: str
    cfg: Any
    count: int


def shapes_of(
    config: Mapping[str, Any],
    tp: int = 1,
    *,
    ep: int = 1,
    dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
) -> list[LayerShape]:
    """Return the layer configurations that a model constructs on one rank of ``tp``, the most frequent first.

    The model is constructed on the meta device: what it would run is asked of itself. ``dtype``: default bf16.
    """
    from fastlayers.tuning.probe import choices_of

    model = meta_model(config, tp, ep=ep, dtype=dtype, kv_dtype=kv_dtype)
    found: dict[tuple[str, Any], int] = {}
    for module in model.modules():
        for choice in choices_of(module):
            found[choice.layer, choice.cfg] = found.get((choice.layer, choice.cfg), 0) + 1
    rows = [LayerShape(layer, cfg, count) for (layer, cfg), count in found.items()]
    return sorted(rows, key=lambda row: -row.count)


def meta_model(
    config: Mapping[str, Any],
    tp: int = 1,
    *,
    ep: int = 1,
    dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Any:
    """Return the model of a ``config.json`` on the meta device, as rank 0 of ``tp`` ranks constructs it in bf16."""
    import torch

    from fastlayers.comm.parallel import ParallelSpec
    from fastlayers_models.auto import family_of

    family: Any = family_of(config)
    parallel, dtype = ParallelSpec.grid(tp, 0, ep=ep), dtype or torch.bfloat16
    return family(
        family.config_class.from_hf(config),
        parallel=parallel,
        device="meta",
        dtype=dtype or torch.bfloat16,
        kv_dtype=kv_dtype,
    )
