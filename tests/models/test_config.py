"""``config.json`` of every family: the defaults are transformers', and whatever else it holds is read or refused."""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import json
import math
import random
import re
import sys
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import fastlayers as fl
from fastlayers.errors import ArgumentError, CheckpointError, FastlayersError
from fastlayers.rotary.scaling import RopeScaling
from fastlayers_models import AutoModel
from fastlayers_models.auto import FAMILIES, family_of
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.settings import REQUIRED

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import SHIPPED, rewrite, tensors_of, write
from family_tools import BASE, LLAMA3, MOE, YARN, save_random

# model_type -> its class in transformers, and what makes a tiny one of it.
DEEPSEEK = {
    "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24,
    "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "num_hidden_layers": 2, "n_group": 4, "topk_group": 2, "rope_parameters": YARN,
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2Config", DEEPSEEK),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK | {"num_mtp_layers": 0}),
    "gpt_oss": (
        "GptOssConfig", {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16},
    ),
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3, "attention_bias": True}),
    "llama4": (
        "Llama4TextConfig",
        {"intermediate_size_mlp": 80, "num_local_experts": 4, "attention_chunk_size": 64, "head_dim": 16},
    ),
    "llama4_text": (
        "Llama4TextConfig",
        {"intermediate_size_mlp": 80, "num_local_experts": 4, "attention_chunk_size": 64, "head_dim": 16},
    ),
    "qwen2": ("Qwen2Config", WINDOW),
    "qwen2_5_vl_text": (
        "Qwen2_5_VLTextConfig", {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
    ),
    "qwen2_5_vl": ("Qwen2_5_VLTextConfig", {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}),
    "qwen2_moe": ("Qwen2MoeConfig", MOE | WINDOW | {"shared_expert_intermediate_size": 48}),
    "qwen3": ("Qwen3Config", WINDOW | {"head_dim": 16, "attention_bias": True}),
    "qwen3_moe": ("Qwen3MoeConfig", MOE | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]}),
}  # fmt: skip
# Read from files, but not settings of transformers' classes: its code computes with these values.
FIXED = {"gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}}
WRONG = (
    None, True, "false", "", "x", -1, 0, 1.5, 2**40, 10**400, math.nan, math.inf, -math.inf, [], [1], ["x"], [[]],
    {}, {"a": 1}, {"rope_type": []},
)  # fmt: skip


def config_of(kind: str) -> dict[str, Any]:
    """Return the whole ``config.json`` of a tiny model, as transformers writes it."""
    name, changes = CLASSES[kind]
    made = getattr(transformers, name)(**BASE | changes)
    if kind == "llama4":  # the language model's settings are within
        made = transformers.Llama4Config(text_config=made)
        found = json.loads(made.to_json_string(use_diff=False))
        return {key: found[key] for key in ("model_type", "text_config", "image_token_index")}
    return json.loads(made.to_json_string(use_diff=False)) | {"model_type": kind}


def read(kind: str, config: Mapping[str, Any]) -> Any:
    """Return our configuration, or the error."""
    try:
        return family_of({"model_type": kind}).config_class.from_hf(config)
    except FastlayersError as error:
        return error


def through_transformers(kind: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the file that transformers writes after reading this one; ``None`` where it cannot read it."""
    given = {k: v for k, v in copy.deepcopy(config).items() if k != "model_type"}
    try:
        made = getattr(transformers, "Llama4Config" if kind == "llama4" else CLASSES[kind][0])(**given)
        return json.loads(made.to_json_string(use_diff=False)) | {"model_type": kind}
    except Exception:  # of any kind: what transformers raises is not what is tested
        return None


def changes_of(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (what was done, the file): each key removed, or holding something else, also within objects."""

    def variations(value: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        for key, inner in value.items():
            yield f"without {key}", {k: v for k, v in value.items() if k != key}
            for wrong in WRONG:
                yield f"{key}={wrong!r:.40}", value | {key: wrong}
            if isinstance(inner, dict):
                for what, changed in variations(inner):
                    yield f"{key}.{what}", value | {key: changed}

    yield from variations(config)


def test_every_family_is_tried() -> None:
    assert CLASSES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("kind", CLASSES)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    settings = family_of({"model_type": kind}).config_class.settings(kind)
    silent = getattr(transformers, CLASSES[kind][0])
    outer = transformers.Qwen2_5_VLConfig if kind.startswith("qwen2_5_vl") else silent
    fields, compared = outer.__dataclass_fields__ | silent.__dataclass_fields__, 0
    for name, setting in settings.items():
        if setting.default is REQUIRED:
            continue
        found = next((fields[key].default for key in (name, *setting.also) if key in fields), None)
        wanted = FIXED.get(kind, {}).get(name, found)
        if name == "eos_token_id":
            wanted = () if wanted is None else (wanted,)
        if name == "mlp_only_layers":
            wanted = wanted or ()
        assert setting.default == wanted, (name, setting.default, wanted)
        compared += 1
    assert compared >= 8


# What transformers' models compute with that no table of ours has, each for a reason.
UNREAD = {
    "_attn_implementation": "a choice of the caller",
    "attention_dropout": "in training only",
    "initializer_range": "of weights that are not loaded",
    "pad_token_id": "of weights that are not loaded",
    "output_router_logits": "in training only",
    "router_aux_loss_coef": "in training only",
    "rope_parameters": "read_rope",
}
UNREAD_BY = {
    "deepseek_v2": {
        "head_dim": "the configuration class overwrites it with qk_rope_head_dim",
        "num_key_value_heads": "every head has keys of its own, or transformers fails",
    },
    "deepseek_v3": {"num_key_value_heads": "every head has keys of its own, or transformers fails"},
}


def computed_with(kind: str) -> set[str]:
    """Return the settings that transformers' model of this family reads, by its source; not those of an encoder."""
    module = inspect.getmodule(getattr(transformers, CLASSES[kind][0].removesuffix("Config") + "Model"))
    tree, found = ast.parse(inspect.getsource(module)), set()
    # The language model alone is ours.
    others = "Vision|VLModel" + "|MultiModal|ConditionalGeneration|Unfold" * kind.startswith("llama4")
    parts = [node for node in tree.body if not (isinstance(node, ast.ClassDef) and re.search(others, node.name))]
    for node in (inner for part in parts for inner in ast.walk(part)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("config"):
            found.add(node.attr)
        elif (
            isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and "config" in ast.unparse(node.args[0])
        ):
            found.add(ast.literal_eval(node.args[1]))
    return found


@pytest.mark.parametrize("kind", CLASSES)
def test_no_setting_that_transformers_computes_with_is_ignored(kind: str) -> None:
    settings = family_of({"model_type": kind}).config_class.settings(kind)
    read_here = settings.keys() | {name for setting in settings.values() for name in setting.also}
    wanted = computed_with(kind)
    assert len(wanted) > 10
    multimodal = {"text_config", "vision_config"} if kind.startswith(("qwen2_5_vl", "llama4")) else set()
    images = {name for name in wanted if multimodal and re.search("image|video|vision|tokens_per_second|merge", name)}
    assert wanted - read_here - multimodal - images == (wanted & UNREAD.keys()) | UNREAD_BY.get(kind, {}).keys()


@pytest.mark.parametrize("kind", CLASSES)
def test_attention_to_later_tokens_is_refused(kind: str) -> None:
    config = config_of(kind)
    whole = read(kind, config)
    assert read(kind, config | {"is_causal": True}) == whole
    for value in (False, None, 0, "true"):
        assert "is_causal is " in str(read(kind, config | {"is_causal": value}))


def test_the_width_that_deepseek_v3_rotates_is_that_of_the_rotated_part(folders: dict[str, Path]) -> None:
    config, folder = config_of("deepseek_v3"), folders["deepseek_v3"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    width = config["qk_rope_head_dim"]
    assert config["head_dim"] == width  # as transformers writes it
    whole = read("deepseek_v3", config)
    assert whole == read("deepseek_v3", {k: v for k, v in config.items() if k != "head_dim"})
    for value in (width - 1, width + 1, 2 * width, 1):
        words = rf"head_dim is {value}; accepted: qk_rope_head_dim, {width}, or no such key"
        with pytest.raises(ArgumentError, match=words):
            raise load(folder, config | {"head_dim": value})
    # transformers takes it for the frequencies: it fails, or computes something else.
    assert logits_of_stock(folder, config | {"head_dim": 2 * width}) is None
    right, wrong = (logits_of_stock(folder, config | {"head_dim": value}) for value in (width, width - 1))
    assert right is not None and wrong is not None and not torch.allclose(right, wrong)
    # Null stands for what each head has of the hidden size.
    assert width == config["hidden_size"] // config["num_attention_heads"]
    assert read("deepseek_v3", config | {"head_dim": None}) == whole
    assert "head_dim is None" in str(read("deepseek_v3", config | {"head_dim": None, "hidden_size": 128}))
    v2 = config_of("deepseek_v2")
    assert read("deepseek_v2", v2 | {"head_dim": 5}) == read("deepseek_v2", v2)


def logits_of_stock(folder: Path, config: dict[str, Any]) -> torch.Tensor | None:
    """Return what transformers' model of a directory with this ``config.json`` says; ``None`` where it fails."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            return model(torch.arange(1, 9)[None]).logits
    except (RuntimeError, ValueError):
        return None


# Transformers takes longest to read what has images, too; each key is changed in 20 ways.
@pytest.mark.parametrize(
    ("kind", "every"),
    [*((kind, 2 if kind == "llama4" else 1) for kind in CLASSES), pytest.param("llama4", 1, marks=pytest.mark.slow)],
)
def test_every_key_removed_or_mutated_reads_as_in_transformers_or_is_refused(kind: str, every: int) -> None:
    whole = config_of(kind)
    expected = read(kind, whole)
    assert not isinstance(expected, Exception), expected
    settings = family_of({"model_type": kind}).config_class.settings(kind)
    accepted = refused = compared = 0
    for what, config in itertools.islice(changes_of(whole), None, None, every):
        found = read(kind, config)
        if isinstance(found, Exception):
            refused += 1
            key = what.removeprefix("without ").partition("=")[0].rpartition(".")[2].removeprefix("without ")
            assert len(str(found)) < 1000 and (key in str(found) or key not in settings), (what, found)
            continue
        accepted += 1
        theirs = through_transformers(kind, config)
        if theirs is not None:
            compared += 1
            assert found == read(kind, theirs), (what, found, read(kind, theirs))
    assert accepted > 100 and refused > 100 and compared > 50, (accepted, refused, compared)


@pytest.mark.parametrize(
    ("kind", "key"),
    [("deepseek_v3", "norm_topk_prob"), ("deepseek_v3", "rope_interleave"), ("llama", "attention_bias")],
)
def test_a_flag_that_is_null_is_false(kind: str, key: str) -> None:
    config = family_of({"model_type": kind}).config_class.from_hf(config_of(kind) | {key: None})
    assert getattr(config, key) is False


@pytest.mark.parametrize(("kind", "key"), [("deepseek_v2", "topk_method"), ("qwen2", "layer_types")])
def test_a_long_value_is_shown_in_part(kind: str, key: str) -> None:
    for value in ("a" * 10_000, ["a" * 10_000]):
        message = str(read(kind, config_of(kind) | {key: value}))
        assert key in message and len(message) < 1000
    rope = {"rope_type": "a" * 10_000, "factor": 2.0}
    assert len(str(read(kind, config_of(kind) | {"rope_parameters": rope}))) < 1000


def test_yarn_over_a_base_of_one_is_refused() -> None:
    scaling = RopeScaling("yarn", factor=4.0, original_max_position=64)
    with pytest.raises(ArgumentError, match=r"base is 1\.0; accepted: another number than 1 with yarn"):
        fl.RotaryEmbedding(16, max_position=64, base=1.0, scaling=scaling)


# ---- whole directories -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each family; that of Qwen2.5-VL's text has the tensors of Qwen2."""
    made = {}
    for kind in CLASSES:
        name, changes = CLASSES["qwen2" if kind.startswith("qwen2_5_vl") else kind]
        made[kind] = save_random(getattr(transformers, name)(**BASE | changes), tmp_path_factory.mktemp(kind))
    within = {f"language_model.{name}": value for name, value in tensors_of(made["llama4"]).items()}
    write(made["llama4"], config_of("llama4"), within)
    return made


def load(folder: Path, config: Any) -> Any:
    """Return the model of a directory with this ``config.json``, or our error."""
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    try:
        return AutoModel.from_pretrained(folder)
    except FastlayersError as error:
        return error


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", CLASSES)
def test_any_configuration_is_loaded_or_refused_in_our_words(kind: str, count: int, folders: dict[str, Path]) -> None:
    whole = config_of(kind)
    made = load(folders[kind], whole)
    assert not isinstance(made, Exception), made
    drawn = random.Random(kind).sample(list(changes_of(whole)), count)
    found = [load(folders[kind], config) for _, config in drawn]  # whatever else is raised fails here
    assert 5 < sum(isinstance(each, Exception) for each in found) < count


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
PER_TENSOR = FP8 | {"weight_block_size": None, "activation_scheme": "dynamic"}
WEIGHTS = {"type": "float", "num_bits": 8, "strategy": "tensor"}
GROUPS = {"group_0": {"weights": WEIGHTS, "input_activations": WEIGHTS | {"dynamic": True, "strategy": "token"}}}
FORMATS = (
    FP8, PER_TENSOR, {"quant_method": "int8", "modules_to_not_convert": ["re:a"]}, {"quant_method": "mxfp4"},
    {"quant_method": "compressed-tensors", "config_groups": GROUPS, "ignore": ["lm_head"]},
)  # fmt: skip


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format["quant_method"])
def test_number_formats_are_read_or_refused(format: dict[str, Any], folders: dict[str, Path]) -> None:
    whole = config_of("llama")
    assert not isinstance(read("llama", whole | {"quantization_config": format}), Exception)
    bad = 0
    for _, changed in [*changes_of(format), ("", FP8 | {"modules_to_not_convert": ["re:("]})]:
        bad += isinstance(read("llama", whole | {"quantization_config": changed}), Exception)
    assert bad > 15
    for value in ("fp8", ["fp8"], 8, True, [[]]):
        message = str(read("llama", whole | {"quantization_config": value}))
        assert "quantization_config" in message, message
    found = load(folders["llama"], whole | {"quantization_config": format})
    # Formats of experts, or of no module here, say nothing about this file.
    assert isinstance(found, CheckpointError) == (format["quant_method"] not in ("int8", "mxfp4")), found


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [("activation_scheme", "static", "'dynamic', or no such key"), ("fmt", "e5m2", "'e4m3', or no such key")],
)  # fmt: skip
def test_blocks_whose_inputs_or_codes_are_said_to_be_others_are_refused(key: str, value: str, accepted: str) -> None:
    said = {"quantization_config": FP8 | {"activation_scheme": "dynamic", "fmt": "e4m3"}}
    assert not isinstance(read("llama", config_of("llama") | said), Exception)
    said["quantization_config"][key] = value
    message = str(read("llama", config_of("llama") | said))
    assert f"quantization_config.{key} is {value!r}; accepted: {accepted}" in message


NESTED = "[" * 200 + "]" * 200
UNREADABLE = {
    "nested": '{"model_type": "llama", "rope_scaling": ' + NESTED + "}",
    "nested beyond the interpreter": "[" * 100_000,
    "nested in what nobody reads": '{"model_type": "llama", "x": ' + NESTED + "}",
    "number": '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}",
    "bytes": "\udcff",
    "null": "null",
}


@pytest.mark.parametrize("ends", [None, 7, [7, 9], [9, 3, 7]], ids=str)
def test_texts_end_as_generation_config_says(ends: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write(tmp_path, config_of("llama") | {"eos_token_id": [4]}, tensors_of(folders["llama"]))
    said = {"do_sample": False} | ({} if ends is None else {"eos_token_id": ends})
    (folder / "generation_config.json").write_text(json.dumps(said))
    found = AutoModel.from_pretrained(folder).config.eos_token_ids
    stock = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    assert list(found) == ([4] if stock is None else [stock] if isinstance(stock, int) else stock)


@pytest.mark.parametrize("wrong", ["</s>", [1.5], True], ids=str)
def test_ends_that_are_no_ids_are_named_with_their_file(wrong: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write(tmp_path, config_of("llama"), tensors_of(folders["llama"]))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(ArgumentError, match=r"generation_config\.json: eos_token_id is .*; accepted: "):
        AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_is_no_configuration_names_the_file(case: str, folders: dict[str, Path]) -> None:
    folder = folders["llama"]
    (folder / "config.json").write_bytes(UNREADABLE[case].encode(errors="surrogateescape"))
    with pytest.raises(FastlayersError, match=r"config\.json"):
        AutoModel.from_pretrained(folder)


HUGE = {
    "llama": {"vocab_size": 10**9, "hidden_size": 10**9, "intermediate_size": 10**9, "num_hidden_layers": 9_999},
    "qwen3_moe": {"num_experts": 10**6, "moe_intermediate_size": 10**9, "num_hidden_layers": 9_999},
    "gpt_oss": {"num_local_experts": 10**6, "intermediate_size": 10**6 * 32},
    "deepseek_v3": {
        "kv_lora_rank": 10**9, "q_lora_rank": 10**9, "n_routed_experts": 10**6, "n_shared_experts": 10**6,
        "num_hidden_layers": 9_999, "qk_nope_head_dim": 10**8,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", HUGE)
def test_sizes_are_compared_with_the_headers_before_anything_is_built(kind: str, folders: dict[str, Path]) -> None:
    config = config_of(kind)
    load(folders[kind], config)  # what is imported once
    for name, value in HUGE[kind].items():
        changes = {name: value} | ({"num_local_experts": value} if name == "num_experts" else {})
        tracemalloc.start()
        started = time.process_time()
        found = load(folders[kind], config | changes)
        seconds, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert isinstance(found, CheckpointError) and name in str(found), (name, found)
        assert seconds < 1.0 and peak < 16 * 2**20, (name, seconds, peak)
    for value in (100_000, 2**31, 10**30):
        assert "num_hidden_layers is" in str(load(folders[kind], config | {"num_hidden_layers": value}))
    assert "max_position_embeddings is" in str(load(folders[kind], config | {"max_position_embeddings": 2**40}))


def test_tensors_without_a_place_are_an_error_whatever_the_configuration_says(tmp_path: Path) -> None:
    assert Checkpoint(SHIPPED).config["n_shared_experts"] == 1
    for name, value in (("none", 0), ("null", None)):
        folder = rewrite(SHIPPED, tmp_path / name, config=lambda c, v=value: c.update(n_shared_experts=v))
        with pytest.raises(CheckpointError, match=r"unexpected tensors: .*shared_experts"):
            AutoModel.from_pretrained(folder)
    # One that the file is silent about is there, as in transformers.
    AutoModel.from_pretrained(rewrite(SHIPPED, tmp_path / "silent", config=lambda c: c.pop("n_shared_experts")))

    def tied(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = True

    def same(tensors: Any) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def biased(tensors: Any) -> None:
        same(tensors)
        tensors["lm_head.bias"] = tensors["model.embed_tokens.weight"][:, 0].clone()

    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true .* lm_head\.weight is not"):
        AutoModel.from_pretrained(rewrite(SHIPPED, tmp_path / "head", config=tied))
    with pytest.raises(CheckpointError, match=r"unexpected tensors: lm_head\.bias"):
        AutoModel.from_pretrained(rewrite(SHIPPED, tmp_path / "bias", biased, tied))
    AutoModel.from_pretrained(rewrite(SHIPPED, tmp_path / "same", same, tied))


def test_silent_files_take_the_defaults_of_transformers() -> None:
    v3 = {k: v for k, v in config_of("deepseek_v3").items() if k not in ("n_group", "topk_group", "rope_parameters")}
    for name in ("n_shared_experts", "routed_scaling_factor"):
        del v3[name]
    found = read("deepseek_v3", v3)
    assert (found.n_shared_experts, found.routed_scaling_factor, found.n_group, found.topk_group) == (1, 2.5, 8, 4)
    rope = {"factor": 4.0, "original_max_position_embeddings": 64}
    assert read("gpt_oss", config_of("gpt_oss") | {"rope_parameters": rope}).rope["rope_parameters"]["rope_type"] == (
        "default"
    )
    for value in (6.0, 7.5, "7"):
        assert "swiglu_limit is" in str(read("gpt_oss", config_of("gpt_oss") | {"swiglu_limit": value}))
    assert "attention_bias is 'false'; accepted: True or False" in str(
        read("llama", config_of("llama") | {"attention_bias": "false"})
    )


def test_the_command_line_shows_no_traceback(folders: dict[str, Path]) -> None:
    from fastlayers_server.cli import app

    for change in ({"rms_norm_eps": math.nan}, {"rope_parameters": [1]}, {"num_hidden_layers": 10**9}):
        (folders["llama"] / "config.json").write_text(json.dumps(config_of("llama") | change))
        for command in (["explain", str(folders["llama"])], ["convert", str(folders["llama"]), "/dev/null/x"]):
            error = CliRunner().invoke(app, command).exception
            assert isinstance(error, FastlayersError | SystemExit | OSError), (change, command, error)
