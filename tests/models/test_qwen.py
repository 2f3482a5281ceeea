"""Qwen from our layers against Hugging Face: logits, greedy tokens, bf16 error, MRoPE, ranks, formats, bad input."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.errors import ArgumentError, CheckpointError, UnknownModelError
from fastlayers_models.convert import convert_to_fp8_block, dequantize_checkpoint
from fastlayers_models.qwen import QwenConfig, QwenForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import Feeder, rewrite
from family_tools import (
    BASE,
    BOUND,
    DP2,
    EP2,
    EP2_TP2_DP2,
    LINEAR,
    MOE,
    TP2,
    TP4,
    YARN,
    Variation,
    check_bf16,
    check_like_hugging_face,
    check_ranks,
    ours,
    randomize,
    rows_of,
    save_random,
    stock,
)
from tiny_models import relative_rms

WINDOW = {"use_sliding_window": True, "sliding_window": 24}
EVERY_OTHER = ["sliding_attention", "full_attention", "sliding_attention"]
QWEN2 = Variation("qwen2", "Qwen2Config", 3)
QWEN2_WINDOW = Variation(
    "qwen2_tied_yarn_window",
    "Qwen2Config",
    1,
    WINDOW | {"max_window_layers": 1, "tie_word_embeddings": True, "rope_parameters": YARN, "num_key_value_heads": 4},
)
QWEN2_MOE = Variation(
    "qwen2_moe", "Qwen2MoeConfig", 2, MOE | {"shared_expert_intermediate_size": 48, "num_key_value_heads": 4}
)
QWEN2_MOE_SPARSE = Variation(
    "qwen2_moe_norm_window_no_bias",
    "Qwen2MoeConfig",
    2,
    MOE
    | WINDOW
    | {"shared_expert_intermediate_size": 40, "norm_topk_prob": True, "qkv_bias": False, "decoder_sparse_step": 2},
)
QWEN3 = Variation("qwen3_wide_heads_mqa", "Qwen3Config", 5, {"head_dim": 32, "num_key_value_heads": 1})
QWEN3_WINDOW = Variation(
    "qwen3_biases_window_tied",
    "Qwen3Config",
    2,
    WINDOW | {"head_dim": 24, "attention_bias": True, "layer_types": EVERY_OTHER, "tie_word_embeddings": True},
)
QWEN3_MOE = Variation(
    "qwen3_moe_norm_mlp_only",
    "Qwen3MoeConfig",
    2,
    MOE | {"head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1], "rope_parameters": LINEAR},
)
QWEN3_MOE_WINDOW = Variation(
    "qwen3_moe_window_biases",
    "Qwen3MoeConfig",
    4,
    MOE | WINDOW | {"num_experts_per_tok": 6, "attention_bias": True, "tie_word_embeddings": True},
)
VARIATIONS = (
    QWEN2, QWEN2_WINDOW, QWEN2_MOE, QWEN2_MOE_SPARSE, QWEN3, QWEN3_WINDOW, QWEN3_MOE, QWEN3_MOE_WINDOW,
)  # fmt: skip
SECTION = [2, 3, 3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {v.name: save_random(v.hf_config(), tmp_path_factory.mktemp(v.name)) for v in VARIATIONS}


@pytest.mark.parametrize("variation", VARIATIONS, ids=str)
def test_logits_and_greedy_tokens_equal_hugging_face(folders: dict[str, Path], variation: Variation) -> None:
    folder = folders[variation.name]
    model = ours(folder)
    assert isinstance(model, QwenForCausalLM)
    check_like_hugging_face(stock(folder), model, variation.batch)


@pytest.mark.parametrize("variation", [QWEN2, QWEN2_WINDOW, QWEN3, QWEN3_WINDOW], ids=str)
def test_bf16_is_as_near_to_fp32_as_stock(tmp_path: Path, variation: Variation) -> None:
    check_bf16(save_random(variation.hf_config(), tmp_path, torch.bfloat16))


@pytest.mark.parametrize(
    ("variation", "grid"),
    [
        (QWEN2, TP2), (QWEN2, TP4), (QWEN2, DP2), (QWEN2_MOE, TP2), (QWEN2_MOE, TP4), (QWEN2_MOE, EP2),
        (QWEN2_MOE, EP2_TP2_DP2), (QWEN3, TP2), (QWEN3, TP4), (QWEN3_MOE, TP2), (QWEN3_MOE, TP4), (QWEN3_MOE, EP2),
        (QWEN3_MOE_WINDOW, EP2_TP2_DP2),
    ],
    ids=str,
)  # fmt: skip
def test_ranks_give_the_logits_of_one_process(folders: dict[str, Path], variation: Variation, grid: Any) -> None:
    check_ranks(folders[variation.name], grid)


def test_what_the_variations_vary_reaches_the_model(folders: dict[str, Path]) -> None:
    def layers(variation: Variation) -> list[Any]:
        return list(ours(folders[variation.name]).model.layers)

    assert [layer.self_attn.cfg.window for layer in layers(QWEN2_WINDOW)] == [None, 24, 24]
    assert [layer.self_attn.cfg.window for layer in layers(QWEN2_MOE_SPARSE)] == [24, None, 24]
    assert [layer.self_attn.cfg.window for layer in layers(QWEN3_WINDOW)] == [24, None, 24]
    assert [layer.self_attn.cfg.window for layer in layers(QWEN3_MOE_WINDOW)] == [24] * 3
    assert [hasattr(layer.mlp, "experts") for layer in layers(QWEN3_MOE)] == [True, False, True]
    assert [hasattr(layer.mlp, "experts") for layer in layers(QWEN2_MOE_SPARSE)] == [False, True, False]
    tied = ours(folders[QWEN3_WINDOW.name])
    assert tied.lm_head.weight.data_ptr() == tied.model.embed_tokens.weight.data_ptr()


def test_padding_rows_cost_no_expert_work(folders: dict[str, Path]) -> None:
    block, seen = ours(folders[QWEN2_MOE.name]).model.layers[0].mlp, []
    block.experts.register_forward_pre_hook(lambda _, args: seen.append(args[2]))
    x, valid = torch.randn(5, 64), torch.tensor([True, False, True, False, False])
    masked, whole = block(x, valid), block(x)
    assert torch.equal((seen[0] == -1).all(-1), ~valid) and not (seen[1] == -1).any()
    assert relative_rms(masked[valid], whole[valid]) <= 1e-6


# ---- Qwen2.5-VL ------------------------------------------------------------------------------------------------


def vl_model(folder: Path) -> Any:
    """Save a tiny random Qwen2.5-VL and return it."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTION}}
    vision = dict(
        depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, fullatt_block_indexes=[0]
    )
    ids = dict(image_token_id=150, video_token_id=151, vision_start_token_id=152, vision_end_token_id=153)
    torch.manual_seed(0)
    model = randomize(
        Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))
    )
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module")
def vl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("vl")
    return vl_model(folder), folder


def test_vl_text_alone_equals_hugging_face(vl: tuple[Any, Path]) -> None:
    reference, folder = vl
    model = ours(folder)
    assert isinstance(model, QwenForCausalLM) and model.decoder.layers[0].self_attn.mrope
    check_like_hugging_face(reference, model, 2)


def published(tensors: dict[str, torch.Tensor]) -> None:
    """Rename in place to the names of the published checkpoints: ``model.layers...`` beside ``visual...``."""
    for name in list(tensors):
        short = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        tensors[short] = tensors.pop(name)


def nested(tensors: dict[str, torch.Tensor]) -> None:
    """Rename in place to the names of the module tree: ``model.language_model...``, ``model.visual...``."""
    published(tensors)
    for name in list(tensors):
        if name.startswith("model."):
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        elif name.startswith("visual."):
            tensors[f"model.{name}"] = tensors.pop(name)


def flat(config: dict[str, Any]) -> None:
    """Turn a configuration in place into the form of the published ones: flat, with ``rope_scaling``."""
    text = config.pop("text_config")
    text.pop("model_type")
    config.update({k: v for k, v in text.items() if k not in config})
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {"type": "mrope", "mrope_section": SECTION}


@pytest.mark.parametrize("names", [published, nested], ids=["published", "nested"])
def test_vl_checkpoints_of_both_layouts_are_read(vl: tuple[Any, Path], tmp_path: Path, names: Any) -> None:
    steps = [("extend", (20, 30)), ("decode", (1, 1))]
    wanted = Feeder(ours(vl[1]), rows_of(2)).run(steps)
    folder = rewrite(vl[1], tmp_path / "renamed", names, flat if names is published else lambda c: None)
    model = ours(folder)
    assert model.config.prefix == ("model" if names is published else "model.language_model")
    found = Feeder(model, rows_of(2)).run(steps)
    assert all(torch.equal(found[i], wanted[i]) for i in (0, 1))


def with_image(length: int, start: int, height: int, width: int) -> torch.Tensor:
    """Return ``[3, length]`` positions: text, an image of height × width tokens, text after its largest position."""
    image = torch.stack(
        [
            torch.zeros(height * width, dtype=torch.int64),
            torch.arange(height).repeat_interleave(width),
            torch.arange(width).repeat(height),
        ]
    )
    rest = length - start - height * width
    parts = [
        torch.arange(start).expand(3, -1),
        start + image,
        start + max(height, width) + torch.arange(rest).expand(3, -1),
    ]
    return torch.cat(parts, 1)


def test_vl_three_axis_positions_equal_hugging_face(vl: tuple[Any, Path]) -> None:
    reference, folder = vl
    model, row = ours(folder), rows_of(1)[0]
    positions = with_image(len(row), 7, 4, 6)
    assert not torch.equal(positions[1], positions[2]) and int(positions.max()) < len(row) - 10
    caches = fl.kv_cache_spec(model, page_size=16).allocate(6)
    state = AttentionState(1, len(row), 5, 16)
    logits, done = [], 0
    with torch.inference_mode():
        wanted = reference(torch.tensor([row]), position_ids=positions[:, None]).logits[0]
        plain = reference(torch.tensor([row])).logits[0]
        for count in (40, *[1] * (len(row) - 40)):
            meta = state.plan(AttentionBatch((count,), (done,), [[1, 2, 3, 4, 5]]))
            meta = replace(meta, rope_positions=positions[:, done : done + count])
            ids = torch.tensor(row[done : done + count])
            logits.append(model.compute_logits(model(ids, meta, caches)))
            done += count
    found = torch.cat(logits)
    assert relative_rms(found, wanted) <= BOUND
    assert relative_rms(plain, wanted) > 0.05


def test_three_axis_positions_are_refused_where_they_mean_nothing(
    vl: tuple[Any, Path], folders: dict[str, Path]
) -> None:
    meta = AttentionState(1, 8, 1, 16).plan(AttentionBatch((4,), (0,), [[1]]))
    meta = replace(meta, rope_positions=torch.zeros(3, 4, dtype=torch.int64))
    model = ours(folders["qwen2"])
    with pytest.raises(ArgumentError, match=r"Attention: meta\.rope_positions is set"):
        model(torch.arange(4), meta, fl.kv_cache_spec(model, page_size=16).allocate(2))
    model = ours(vl[1])
    with pytest.raises(ArgumentError, match="RotaryEmbedding: positions"):
        wrong = replace(meta, rope_positions=torch.zeros(2, 4, dtype=torch.int64))
        model(torch.arange(4), wrong, fl.kv_cache_spec(model, page_size=16).allocate(2))


def test_vl_on_two_ranks(vl: tuple[Any, Path]) -> None:
    check_ranks(vl[1], TP2)


# ---- formats and bad input -------------------------------------------------------------------------------------


def test_fp8_block_experts_and_shared_expert(tmp_path: Path) -> None:
    # Two ranks split whole blocks; all experts are chosen, so that no rounding flips a route.
    changes = MOE | {
        "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 4,
        "shared_expert_intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8,
        "initializer_range": 0.05, "num_hidden_layers": 2,
    }  # fmt: skip
    source = save_random(Variation("fp8", "Qwen2MoeConfig", 2, changes).hf_config(), tmp_path / "bf16", torch.bfloat16)
    convert_to_fp8_block(source, tmp_path / "fp8", include_ragged=True)
    dequantize_checkpoint(tmp_path / "fp8", tmp_path / "back", torch.float32)
    steps = [("extend", (20, 30)), *[("decode", (1, 1))] * 4]
    quantised = ours(tmp_path / "fp8")
    assert quantised.model.layers[0].mlp.experts.w13.dtype == torch.float8_e4m3fn
    found, wanted = (
        torch.cat(list(Feeder(m, rows_of(2)).run(steps).values())) for m in (quantised, ours(tmp_path / "back"))
    )
    # Weights are the same numbers; e4m3 activations are off by 2.6% at each of 7 inputs in 2 layers.
    assert 0 < relative_rms(found, wanted) < 2 * 0.026 * 14**0.5


def read(variation: Variation, **changes: Any) -> QwenConfig:
    return QwenConfig.from_hf(json.loads(variation.hf_config().to_json_string(use_diff=False)) | changes)


def test_published_configurations_without_newer_keys_are_read() -> None:
    old = {"layer_types": None, "rope_parameters": None, "rope_theta": 1000000.0}
    config = read(QWEN2_WINDOW, **old)
    assert config.windows == (None, 24, 24) and config.qkv_bias and not config.o_bias
    assert read(QWEN2_MOE_SPARSE, layer_types=None).windows == (24, None, 24)
    assert read(QWEN2_WINDOW, use_sliding_window=False).windows == (None,) * 3
    assert read(QWEN3, head_dim=None).head_dim == 128 and read(QWEN2, head_dim=None).head_dim == 16
    stretched = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}
    assert read(QWEN2, rope_parameters=None, **stretched).max_position_embeddings == 1024
    assert read(QWEN3_MOE).num_experts == 8 and read(QWEN3_MOE).norm_topk_prob


def test_a_window_over_the_whole_context_is_none_and_a_bad_one_is_named() -> None:
    assert read(QWEN2_WINDOW, sliding_window=4096).windows == (None,) * 3
    for window in (0, -1, "24"):
        with pytest.raises(ArgumentError, match=r"sliding_window is .*accepted: a positive integer"):
            read(QWEN2_WINDOW, sliding_window=window)
    with pytest.raises(ArgumentError, match=r"layer_types\[1\] is 'chunked_attention'"):
        read(QWEN3_WINDOW, layer_types=["full_attention", "chunked_attention", "full_attention"])
    with pytest.raises(ArgumentError, match=r"windows is .*one entry for each of 3 layers"):
        read(QWEN3_WINDOW, layer_types=["sliding_attention"])


def test_bad_configurations_are_named() -> None:
    for variation, change, message in (
        (QWEN3_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; accepted: at most num_experts 8"),
        (QWEN3_MOE, {"moe_intermediate_size": None}, "moe_intermediate_size is None"),
        (QWEN2_MOE, {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is None"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN2, {"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        (QWEN2, {"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            read(variation, **change)
    with pytest.raises(UnknownModelError, match="model_type 'qwen' is unknown; known: qwen2, qwen2_moe"):
        read(QWEN2, model_type="qwen")


def test_missing_biases_and_norms_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    for variation, tensor in (
        (QWEN2, "q_proj.bias"),
        (QWEN3, "k_norm.weight"),
        (QWEN2_MOE, "mlp.shared_expert_gate.weight"),
    ):
        folder = tmp_path / variation.name

        def drop(tensors: dict[str, torch.Tensor], tensor: str = tensor) -> None:
            for name in [n for n in tensors if n.endswith(tensor) and "layers.1." in n]:
                del tensors[name]

        with pytest.raises(CheckpointError, match=rf"missing tensors: model\.layers\.1\.\S*{tensor}"):
            ours(rewrite(folders[variation.name], folder, drop))
