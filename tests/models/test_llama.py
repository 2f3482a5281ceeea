"""Llama from our layers against Hugging Face: logits, greedy tokens, bf16 error, ranks, number formats, bad input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.errors import ArgumentError, CheckpointError, UnknownModelError
from fastlayers.linear.fp8_block.layer import FP8BlockLinear
from fastlayers.quant.block_quant import dequantize_block_weight
from fastlayers_models.convert import convert_to_fp8_block, dequantize_checkpoint
from fastlayers_models.llama import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import Feeder, rewrite
from family_tools import (
    BASE,
    LINEAR,
    LLAMA3,
    TP2,
    TP4,
    Variation,
    check_bf16,
    check_like_hugging_face,
    check_ranks,
    ours,
    rows_of,
    save_random,
    stock,
)
from tiny_models import relative_rms

LLAMA2 = Variation("llama2", "LlamaConfig", 2, {"num_key_value_heads": 4, "rms_norm_eps": 1e-5})
LLAMA_3 = Variation(
    "llama3_tied_biases",
    "LlamaConfig",
    5,
    {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
)
LONG = Variation(
    "linear_mqa_wide_heads",
    "LlamaConfig",
    1,
    {"rope_parameters": LINEAR, "num_key_value_heads": 1, "head_dim": 24, "num_hidden_layers": 2},
)
VARIATIONS = (LLAMA2, LLAMA_3, LONG)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {v.name: save_random(v.hf_config(), tmp_path_factory.mktemp(v.name)) for v in VARIATIONS}


@pytest.mark.parametrize("variation", VARIATIONS, ids=str)
def test_logits_and_greedy_tokens_equal_hugging_face(folders: dict[str, Path], variation: Variation) -> None:
    folder = folders[variation.name]
    model = ours(folder)
    assert isinstance(model, LlamaForCausalLM)
    check_like_hugging_face(stock(folder), model, variation.batch)


@pytest.mark.parametrize("variation", [LLAMA2, LLAMA_3], ids=str)
def test_bf16_is_as_near_to_fp32_as_stock(tmp_path: Path, variation: Variation) -> None:
    check_bf16(save_random(variation.hf_config(), tmp_path, torch.bfloat16))


@pytest.mark.parametrize("grid", [TP2, TP4], ids=str)
@pytest.mark.parametrize("variation", [LLAMA_3, LONG], ids=str)
def test_ranks_give_the_logits_of_one_process(folders: dict[str, Path], variation: Variation, grid: Any) -> None:
    check_ranks(folders[variation.name], grid)


def test_fp8_block_checkpoint_equals_its_dequantised_one(tmp_path: Path) -> None:
    # 160 and 96 rows: ragged blocks, and seams of q|k|v and gate|up inside a block.
    changes = {"hidden_size": 160, "intermediate_size": 200, "head_dim": 48, "initializer_range": 0.1}
    source = save_random(Variation("fp8", "LlamaConfig", 2, changes).hf_config(), tmp_path / "bf16", torch.bfloat16)
    convert_to_fp8_block(source, tmp_path / "fp8", include_ragged=True)
    dequantize_checkpoint(tmp_path / "fp8", tmp_path / "back", torch.float32)
    quantised, back = ours(tmp_path / "fp8"), ours(tmp_path / "back")
    assert sum(isinstance(m, FP8BlockLinear) for m in quantised.modules()) == 3 * 7
    steps = [("extend", (20, 30)), *[("decode", (1, 1))] * 4]
    found, wanted = (torch.cat(list(Feeder(m, rows_of(2)).run(steps).values())) for m in (quantised, back))
    layer, whole = quantised.model.layers[1].self_attn, back.model.layers[1].self_attn.qkv_proj
    codes = [(getattr(layer, f"{name}_proj").weight, getattr(layer, f"{name}_proj").weight_scale_inv) for name in "qkv"]
    multiplied = [dequantize_block_weight(code, scale, (128, 128), torch.float32) for code, scale in codes]
    assert torch.equal(torch.cat(multiplied), whole.weight)
    # Weights are the same numbers; e4m3 activations are off by 2.6% at each of the 21 linears.
    assert 0 < relative_rms(found, wanted) < 2 * 0.026 * 21**0.5


def test_fp16_weights_load_into_fp32(tmp_path: Path) -> None:
    folder = save_random(LLAMA2.hf_config(), tmp_path / "fp16", torch.float16)
    sharded = rewrite(folder, tmp_path / "sharded", shards=3)
    found, wanted = (Feeder(ours(f), rows_of(2)).run([("extend", (30, 40))]) for f in (sharded, folder))
    with torch.inference_mode():
        expected = stock(folder)(torch.tensor([rows_of(2)[0][:30]])).logits[0]
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert relative_rms(found[0], expected) <= 1e-5


def test_tensors_that_contradict_the_quantisation_config_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    folder = rewrite(folders["llama2"], tmp_path / "claims", config=lambda c: c.update(fp8))
    with pytest.raises(CheckpointError, match=r"missing tensors: .*weight_scale_inv.*wrong number formats: .*is F32"):
        ours(folder)
    convert_to_fp8_block(folders["llama2"], tmp_path / "fp8", include_ragged=True)
    folder = rewrite(tmp_path / "fp8", tmp_path / "hides", config=lambda c: c.pop("quantization_config"))
    with pytest.raises(
        CheckpointError, match=r"unexpected tensors: .*weight_scale_inv.*wrong number formats: .*F8_E4M3"
    ):
        ours(folder)


def test_bad_configurations_are_named() -> None:
    good = {k: v for k, v in BASE.items() if not k.startswith("init")} | {"model_type": "llama"}
    assert LlamaConfig.from_hf(good).head_dim == 16
    for change, message in (
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; accepted: 'silu'"),
        ({"hidden_size": None}, "hidden_size is None; accepted: an integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; accepted: a divisor of 4"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method is 'hqq'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.bits is None; accepted: 4"),
    ):
        with pytest.raises(ArgumentError, match=message):
            LlamaConfig.from_hf(good | change)
    with pytest.raises(ArgumentError, match="rope_type is 'dynamic'"):
        LlamaForCausalLM(LlamaConfig.from_hf(good | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}))
    with pytest.raises(UnknownModelError, match="model_type 'mamba' is unknown; known: llama"):
        LlamaConfig.from_hf(good | {"model_type": "mamba"})
