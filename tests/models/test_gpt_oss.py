"""GPT-OSS from our layers against Hugging Face: logits, greedy tokens, MXFP4 and bf16 experts, ranks, bad input."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fastlayers as fl
from fastlayers.errors import ArgumentError, CheckpointError, UnknownModelError
from fastlayers.quant.mxfp4.codes import dequantize_mxfp4, quantize_mxfp4
from fastlayers.rotary.scaling import RopeScaling
from fastlayers_models.convert import convert_to_fp8_block
from fastlayers_models.generate import Generator
from fastlayers_models.gpt_oss import GptOssConfig, GptOssForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import Feeder, rewrite
from family_tools import (
    BASE,
    EP2,
    EP2_TP2_DP2,
    TP2,
    TP4,
    Variation,
    check_like_hugging_face,
    check_ranks,
    ours,
    randomize,
    rows_of,
    stock,
    teacher_forced,
)
from tiny_models import relative_rms

# The factor and the ramp of the real models, over a context short enough that the ramp lies inside 8 frequencies.
UNTRUNCATED = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 64,
}  # fmt: skip
OSS: dict[str, Any] = dict(
    head_dim=16, num_local_experts=8, num_experts_per_tok=4, sliding_window=16, rope_parameters=UNTRUNCATED,
    intermediate_size=64, num_hidden_layers=4, rms_norm_eps=1e-5,
)  # fmt: skip


def oss(name: str, batch: int, **changes: Any) -> Variation:
    return Variation(name, "GptOssConfig", batch, OSS | changes)


TINY = oss("tiny", 3)
EIGHT_HEADS = oss("eight_heads_one_key", 1, num_attention_heads=8, num_key_value_heads=1, sliding_window=5)
MHA = oss("mha_many_experts", 5, num_key_value_heads=4, num_local_experts=32, num_hidden_layers=2)
ODD = oss(
    "all_slide_odd_sizes", 2, hidden_size=96, intermediate_size=160, head_dim=24, sliding_window=33,
    layer_types=["sliding_attention"] * 2, num_hidden_layers=2, tie_word_embeddings=True,
)  # fmt: skip
WIDE_WINDOW = oss("window_over_context", 2, sliding_window=100000, attention_bias=False, num_experts_per_tok=1)
VARIATIONS = (TINY, EIGHT_HEADS, MHA, ODD, WIDE_WINDOW)
# Three groups of 32 features: on two ranks, one takes two of them.
THREE_GROUPS = oss("three_groups", 2, intermediate_size=96, num_hidden_layers=2)
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}


def save(config: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save a random model whose sinks, gates and ups are large enough for every clamp and denominator to matter."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = randomize(AutoModelForCausalLM.from_config(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.uniform_(-1.0, 3.0)
            elif name.endswith("experts.gate_up_proj_bias"):
                parameter[:, ::9] *= 30  # beyond the limit of 7, on both sides
    model.to(dtype).save_pretrained(folder)
    return folder


def to_mxfp4(folder: Path, target: Path) -> Path:
    """Return a copy of a checkpoint with experts as GPT-OSS is published."""

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            blocks, scales = quantize_mxfp4(tensors.pop(name).mT)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales

    return rewrite(folder, target, tensors=pack, config=lambda c: c.update(quantization_config=MXFP4))


def stock_of_mxfp4(folder: Path) -> Any:
    """Return stock's model in fp32: without a GPU it dequantises experts, always to bf16, which is exact."""
    return stock(folder).float()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variation], Path]:
    made: dict[str, Path] = {}

    def get(variation: Variation) -> Path:
        if variation.name not in made:
            made[variation.name] = save(variation.hf_config(), tmp_path_factory.mktemp(variation.name))
        return made[variation.name]

    return get


@pytest.fixture(scope="module")
def packed(folders: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variation], Path]:
    made: dict[str, Path] = {}

    def get(variation: Variation) -> Path:
        if variation.name not in made:
            made[variation.name] = to_mxfp4(folders(variation), tmp_path_factory.mktemp("mxfp4") / variation.name)
        return made[variation.name]

    return get


@pytest.mark.parametrize("variation", VARIATIONS, ids=str)
def test_logits_and_greedy_tokens_equal_hugging_face(folders: Any, variation: Variation) -> None:
    folder = folders(variation)
    model = ours(folder)
    assert isinstance(model, GptOssForCausalLM)
    check_like_hugging_face(stock(folder), model, variation.batch)


@pytest.mark.parametrize("variation", [TINY, MHA, THREE_GROUPS], ids=str)
def test_mxfp4_checkpoint_equals_stock_on_dequantised_weights(packed: Any, variation: Variation) -> None:
    folder = packed(variation)
    model = ours(folder)
    check_like_hugging_face(stock_of_mxfp4(folder), model, variation.batch)
    experts = model.model.layers[1].mlp.experts
    tensors = load_file(folder / "model.safetensors")
    for mine, name in (("w13", "gate_up_proj_blocks"), ("w2_scale", "down_proj_scales")):
        # After a run: what the layer holds is what the checkpoint holds.
        assert torch.equal(getattr(experts, mine), tensors[f"model.layers.1.mlp.experts.{name}"])
    held = sum(p.nbytes for p in experts.parameters() if p.dtype == torch.uint8)
    wide = 3 * 64 * model.config.intermediate_size * model.config.num_local_experts
    assert held == wide * 17 // 32 and experts.packed.w13.data_ptr() == experts.w13.data_ptr()


def test_triton_experts_give_the_same_logits(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, steps = [row[:6] for row in rows_of(2)], [("extend", (4, 6)), ("decode", (1, 0))]
    wanted = Feeder(ours(packed(THREE_GROUPS)), rows).run(steps)
    monkeypatch.setenv("FASTLAYERS_BACKEND", "fused_moe=triton")
    model = ours(packed(THREE_GROUPS))
    assert model.model.layers[0].mlp.experts.choice.name == "triton"
    for row, found in Feeder(model, rows).run(steps).items():
        assert relative_rms(found, wanted[row]) <= 1e-5


def test_left_padded_hugging_face_batch_equals_ours(folders: Any) -> None:
    rows = rows_of(3)
    width = max(map(len, rows))
    ids = torch.tensor([[2] * (width - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
    reference = stock(folders(TINY))
    with torch.inference_mode():
        out = reference.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=16, min_new_tokens=16, eos_token_id=None,
            pad_token_id=2,
        )  # fmt: skip
    assert Generator(ours(folders(TINY))).generate(rows, max_new_tokens=16, eos_ids=()) == out[:, width:].tolist()


def test_prefill_in_chunks_smaller_than_the_window(folders: Any) -> None:
    model, rows = ours(folders(TINY)), rows_of(3)
    whole = Generator(model).generate(rows, max_new_tokens=12, eos_ids=())
    assert Generator(model, prefill_tokens=7, max_batch=2).generate(rows, max_new_tokens=12, eos_ids=()) == whole


def test_window_counts_the_token_itself() -> None:
    # One layer: a token sees itself and the WINDOW - 1 before it.
    window, config = 16, oss("one_layer", 1, num_hidden_layers=1, sliding_window=16).hf_config()
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig.from_hf(config.to_dict()), dtype=torch.float32, page_size=16)
    for parameter in model.parameters():
        parameter.normal_(std=0.2)
    row = rows_of(1)[0]
    wanted = Feeder(model, [row]).run([("extend", (60,))])[0][-1]
    for distance, seen in ((window, False), (window - 1, True)):
        other = [*row[: 59 - distance], (row[59 - distance] + 1) % 160, *row[60 - distance :]]
        found = Feeder(model, [other[:60]]).run([("extend", (60,))])[0][-1]
        assert bool((found != wanted).any()) == seen


def test_bf16_is_as_near_to_fp32_as_stock(tmp_path: Path) -> None:
    # All experts are chosen: otherwise the error is that of the tokens whose router had two logits too close to call.
    all_experts = oss("all_experts", 3, num_local_experts=4, rms_norm_eps=1e-5)
    folder = save(all_experts.hf_config(), tmp_path, torch.bfloat16)
    rows = rows_of(3)
    found = torch.cat(teacher_forced(ours(folder, torch.bfloat16), rows, [len(row) - 8 for row in rows]))
    with torch.inference_mode():
        exact, rounded = (
            torch.cat([model(torch.tensor([row])).logits[0].float() for row in rows])
            for model in (stock(folder), stock(folder, torch.bfloat16))
        )
    assert 0 < relative_rms(found.float(), exact) <= 1.25 * relative_rms(rounded, exact)


@pytest.mark.parametrize("grid", [TP2, TP4, EP2, EP2_TP2_DP2], ids=str)
def test_ranks_give_the_logits_of_one_process(folders: Any, grid: Any) -> None:
    check_ranks(folders(ODD), grid)


@pytest.mark.parametrize("grid", [TP2, TP4, EP2], ids=str)
def test_mxfp4_ranks_give_the_logits_of_one_process(packed: Any, grid: Any) -> None:
    # 5 groups of 32 features: 3 and 2, or 2, 1, 1 and 1.
    check_ranks(packed(ODD), grid)


def test_fp8_block_keeps_packed_experts(folders: Any, tmp_path: Path) -> None:
    convert_to_fp8_block(folders(TINY), tmp_path / "fp8", include_ragged=True)
    model = ours(tmp_path / "fp8")
    layer = model.model.layers[0]
    assert isinstance(layer.self_attn.o_proj, fl.FP8BlockLinear) and layer.mlp.experts.cfg.quant == "none"
    wanted, found = (Feeder(m, rows_of(1)).run([("extend", (40,))])[0] for m in (ours(folders(TINY)), model))
    assert 0 < relative_rms(found, wanted) < 0.5


def test_packed_weights_are_those_of_the_checkpoint(packed: Any) -> None:
    tensors = load_file(packed(TINY) / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    theirs = stock_of_mxfp4(packed(TINY)).model.layers[0].mlp.experts.gate_up_proj
    mine = dequantize_mxfp4(tensors[f"{name}_blocks"], tensors[f"{name}_scales"], torch.float32)
    assert torch.equal(mine, theirs.mT)


def test_wrong_sinks_are_named(folders: Any, tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.sinks"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:3]

    with pytest.raises(CheckpointError, match=rf"wrong shapes: {name} has shape \(3,\), the model wants \(4,\)"):
        ours(rewrite(folders(TINY), tmp_path / "sinks", tensors=change))


def test_checkpoints_that_contradict_their_quantisation_config_are_named(
    folders: Any, packed: Any, tmp_path: Path
) -> None:
    claims = rewrite(folders(TINY), tmp_path / "claims", config=lambda c: c.update(quantization_config=MXFP4))
    with pytest.raises(CheckpointError, match=r"missing tensors: .*down_proj_blocks.*unexpected tensors: .*down_proj"):
        ours(claims)
    hides = rewrite(packed(TINY), tmp_path / "hides", config=lambda c: c.pop("quantization_config"))
    with pytest.raises(CheckpointError, match=r"missing tensors: .*down_proj.*unexpected tensors: .*down_proj_blocks"):
        ours(hides)

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("_scales")]:
            tensors[name] = tensors[name].float()

    with pytest.raises(CheckpointError, match=r"wrong number formats: .*_scales is F32, the model holds uint8"):
        ours(rewrite(packed(TINY), tmp_path / "scales", tensors=widen))


def test_bad_configurations_are_named() -> None:
    good = {k: v for k, v in BASE.items() if not k.startswith("init")} | OSS | {"model_type": "gpt_oss"}
    assert GptOssConfig.from_hf(good).windows == (16, None, 16, None)
    for change, message in (
        ({"hidden_size": 80, "quantization_config": MXFP4}, "hidden_size is 80; accepted: a multiple of 32"),
        (
            {"intermediate_size": 48, "quantization_config": MXFP4},
            "intermediate_size is 48; accepted: a multiple of 32",
        ),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; accepted: at most num_local_experts 8"),
        ({"num_local_experts": None}, "num_local_experts is None; accepted: an integer"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"layer_types": ["full_attention"]}, "windows is .*; accepted: one entry for each of 4 layers"),
        ({"layer_types": ["linear_attention"] * 4}, r"layer_types\[0\] is 'linear_attention'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method is 'hqq'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.bits is None; accepted: 4"),
    ):
        with pytest.raises(ArgumentError, match=message):
            GptOssConfig.from_hf(good | change)
    with pytest.raises(UnknownModelError, match="model_type 'mamba' is unknown; known: gpt_oss"):
        GptOssConfig.from_hf(good | {"model_type": "mamba"})


def test_published_configuration() -> None:
    """The settings of gpt-oss-20b as published: older names, and what it leaves to the code."""
    published = {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": 32, "experts_per_token": 4, "num_experts_per_tok": 4, "sliding_window": 128,
        "rope_theta": 150000, "initial_context_length": 4096, "max_position_embeddings": 131072, "hidden_act": "silu",
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 4096},
        "quantization_config": MXFP4 | {"modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
    }  # fmt: skip
    config = GptOssConfig.from_hf(published)
    assert config.windows == (128, None) * 12 and config.rms_norm_eps == 1e-5 and config.swiglu_limit == 7.0
    formats = {
        name: config.quant.for_module(f"model.layers.7.{name}").format for name in ("self_attn.q_proj", "mlp.experts")
    }
    assert formats == {"self_attn.q_proj": "none", "mlp.experts": "mxfp4"}
    scaling = RopeScaling.from_config(config.rope)
    assert not scaling.truncate and scaling.factor == 32.0 and scaling.original_max_position == 4096
    assert round(scaling.table_factor, 5) == 1.34657
    bare = {k: v for k, v in published.items() if k not in ("rope_scaling", "rope_theta", "sliding_window", "head_dim")}
    other = GptOssConfig.from_hf(bare)
    assert RopeScaling.from_config(other.rope) == scaling and other.windows == config.windows and other.head_dim == 64
    assert fl.RotaryEmbedding.from_config(other.rope, head_dim=64, max_position=8).base == 150000.0
