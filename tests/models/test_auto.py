"""AutoModel: which class a checkpoint gets, names on the hub, and errors that say what was given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import fastlayers_models
from fastlayers import env
from fastlayers.errors import ArgumentError, CheckpointError, UnknownModelError
from fastlayers_models.auto import FAMILIES, AutoModel, family_of, find
from fastlayers_models.blocks import CausalLM
from fastlayers_models.llama import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import SHIPPED, rewrite
from family_tools import Variation, save_random

ACCEPTED = r"accepted: a directory with config\.json and \*\.safetensors, or the name of such a model"
TINY = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(Variation("tiny", "LlamaConfig", 1, TINY).hf_config(), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_is_there(kind: str) -> None:
    family = family_of({"model_type": kind})
    assert issubclass(family, CausalLM) and family.config_class
    assert FAMILIES[kind] == f"{family.__module__}:{family.__name__}"
    assert getattr(fastlayers_models, family.__name__) is family


def test_options_reach_the_model(llama: Path) -> None:
    model = AutoModel.from_pretrained(
        str(llama), dtype=torch.float16, device="cpu", page_size=32, kv_dtype=torch.float32
    )
    assert type(model).__name__ == "LlamaForCausalLM" and not model.training
    assert model.lm_head.weight.dtype == torch.float16 and model.device == torch.device("cpu")
    assert model.page_size == 32 and model.kv_dtype == torch.float32
    assert AutoModel.from_pretrained(llama).lm_head.weight.dtype == torch.bfloat16
    assert type(AutoModel.from_pretrained(SHIPPED, load_mtp=False)).__name__ == "DeepseekForCausalLM"


def test_a_family_of_ones_own_is_a_name_or_the_class(llama: Path) -> None:
    for own in ("fastlayers_models.llama:LlamaForCausalLM", LlamaForCausalLM):
        assert type(AutoModel.from_pretrained(llama, families={"llama": own})) is LlamaForCausalLM


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere_at_all:Model", r"'nowhere_at_all:Model' \(No module named 'nowhere_at_all'\)"),
        ("fastlayers_models.llama", r"'fastlayers_models.llama' \(.*no attribute ''\)"),
        ("fastlayers_models.llama:Nope", r"'fastlayers_models.llama:Nope' \(.*no attribute 'Nope'\)"),
        ("fastlayers_models.llama:LlamaConfig", "'fastlayers_models.llama:LlamaConfig'"),
        ("", r"'' \(Empty module name\)"),
        (3, "3"),
    ],
)
def test_what_leads_to_no_family_is_named(llama: Path, given: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=rf"AutoModel: families\['llama'\] is {said}; accepted: 'module:class'"):
        AutoModel.from_pretrained(llama, families={"llama": given})


@pytest.mark.parametrize("kind", ["mamba", None, ["llama"]])
def test_unknown_architectures_list_the_known_ones(llama: Path, tmp_path: Path, kind: Any) -> None:
    folder = rewrite(llama, tmp_path / "other", config=lambda c: c.update(model_type=kind))
    with pytest.raises(UnknownModelError) as error:
        AutoModel.from_pretrained(folder)
    assert f"{folder}: model_type {kind!r} is unknown; known: {', '.join(sorted(FAMILIES))}" == str(error.value)


def test_a_language_model_inside_an_unknown_one_is_said_to_run_alone(llama: Path, tmp_path: Path) -> None:
    """As LLaVA has one; what the error advises gives a checkpoint that is read."""

    def inside(config: dict[str, Any]) -> None:
        text = dict(config)
        config.clear()
        config.update(model_type="llava", text_config=text)

    folder = rewrite(llama, tmp_path / "whole", config=inside)
    with pytest.raises(UnknownModelError, match=r"'llava' is unknown; .* Its text_config says 'llama': "):
        AutoModel.from_pretrained(folder)
    assert AutoModel.from_pretrained(llama, page_size=16).config.model_type == "llama"


def make(folder: Path, **files: Any) -> Path:
    folder.mkdir()
    for name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


def test_what_is_not_a_model_directory_is_named(llama: Path, tmp_path: Path) -> None:
    gguf = b"GGUF\x03\x00\x00\x00"
    odd = make(tmp_path / "odd", model__gguf=gguf, blob=gguf, empty=b"")
    adapter = make(tmp_path / "adapter", adapter_config__json={"base_model_name_or_path": "org/base"})
    merge = r"\(adapter_config\.json\), which must be merged into its base model first"
    cases = {
        odd / "model.gguf": "a GGUF file",
        odd / "blob": "a GGUF file",
        odd / "empty": "a file",
        odd: r"a directory of GGUF files without config\.json",
        Path("nowhere.GGUF"): "a GGUF file",
        adapter: f"an adapter of org/base {merge}",
        make(tmp_path / "broken", adapter_config__json=b"{"): f"an adapter {merge}",
        make(tmp_path / "list", adapter_config__json=[1]): f"an adapter {merge}",
        make(tmp_path / "half", conversion_state__json={}): "an unfinished conversion",
        make(tmp_path / "bare"): r"a directory without config\.json",
        llama / "config.json": "a file",
        llama / "model.safetensors": "a file",
        tmp_path / "nowhere": "no such directory, and not a name on the hub",
    }
    for path, message in cases.items():
        with pytest.raises(CheckpointError, match=f"{path.name}: {message}.*; {ACCEPTED}"):
            AutoModel.from_pretrained(path)
    with pytest.raises(CheckpointError, match="~nosuchuser/x: Could not determine home directory"):
        AutoModel.from_pretrained("~nosuchuser/x")
    for name in ("./llama", "~/no/such", "a/b/c", "-x"):
        with pytest.raises(CheckpointError, match="no such directory, and not a name on the hub"):
            AutoModel.from_pretrained(name)
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        AutoModel.from_pretrained(make(tmp_path / "weightless", config__json={"model_type": "llama"}))


def test_hub_names_are_downloaded_without_other_formats(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def snapshot_download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        files = ["config.json", "a.safetensors", "pytorch_model.bin", "x.gguf", "original/a.safetensors", "model.py"]
        options = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        asked.append((name, list(huggingface_hub.utils.filter_repo_objects(files, **options))))
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find("org/tiny-llama.v1") == llama and find("tiny") == llama
    assert asked == [(name, ["config.json", "a.safetensors"]) for name in ("org/tiny-llama.v1", "tiny")]


def test_other_files_of_a_hub_name_are_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub may have pickled weights, which transformers would read and which are not downloaded."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"org/x: the hub has neither model\.safetensors nor model\.safetensors\.in"
    ):
        find("org/x")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "transformers_weights": "consolidated.safetensors"}')
    assert find("org/x") == tmp_path


def test_a_hub_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    message = (
        rf"org/none: no such directory here, and the hub did not give a model.*LocalEntryNotFoundError.*{ACCEPTED}"
    )
    with pytest.raises(CheckpointError, match=message):
        AutoModel.from_pretrained("org/none")


def test_a_bad_option_is_named(llama: Path) -> None:
    with pytest.raises(ArgumentError, match="page_size"):
        AutoModel.from_pretrained(llama, page_size=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, r"dtype is 'float8'; accepted: torch\.bfloat16, .*'auto'"),
        ({"dtype": torch.int8}, r"dtype is torch\.int8; accepted"),
        ({"dtype": torch.float64}, r"dtype is torch\.float64; accepted"),
        ({"device": "meta"}, r"device is 'meta'; accepted: a device with memory"),
        ({"device": "banana"}, r"device is 'banana'; accepted: a torch device"),
        ({"device": "cuda:99"}, r"device is 'cuda:99'; accepted: 'cpu', or one of \d+ CUDA devices here"),
        ({"device": "cpu:7"}, r"device is 'cpu:7'; accepted: 'cpu', which has no number"),
        ({"device": 2**70}, r"device is 1180591620717411303424; accepted: a torch device"),
        (
            {"banana": 1},
            r"LlamaForCausalLM\.from_pretrained: option is 'banana'; accepted: one of 'backend'.*'page_size'",
        ),
    ],
)
def test_arguments_are_checked_before_anything_is_built(llama: Path, options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        AutoModel.from_pretrained(llama, **options)


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        ({"gqaa": "torch"}, r"\{'gqaa': 'torch'\}, in which 'gqaa' is no layer \(accepted: linear, .*gqa.*\)"),
        ({3: "torch"}, r"\{3: 'torch'\}, in which 3 is no layer \(accepted: linear, .*\)"),
        ({"gqa": "torhc"}, r"\{'gqa': 'torhc'\}, in which gqa has no backend 'torhc' \(accepted: auto, .*torch.*\)"),
        ({"gqa": "torhc:8|torch"}, r"\{'gqa': 'torhc:8\|torch'\}, in which gqa has no backend 'torhc' \(.*torch.*\)"),
        ({"mla": "auto", "linear": 3}, r"\{'mla': 'auto', 'linear': 3\}, in which linear has no backend 3 \(.*\)"),
        ({"gqa": "torch"}, r"\{'gqa': 'torch'\}"),
        (5, "5"),
        (None, "None"),
    ],
)
def test_a_backend_is_one_name_for_attention(llama: Path, backend: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^CausalLM: backend is {told}; accepted: 'auto', a name, or a ladder"):
        AutoModel.from_pretrained(llama, backend=backend)


def test_backends_by_layer_are_told_as_the_environment_takes_them(llama: Path) -> None:
    told = r"for attention; FASTLAYERS_BACKEND=gqa=triton:8\|torch,linear=torch names others$"
    with pytest.raises(ArgumentError, match=told):
        AutoModel.from_pretrained(llama, backend={"gqa": "triton:8|torch", "linear": "torch"})
    assert env.backend_overrides({env.BACKEND: "gqa=triton:8|torch,linear=torch"})["linear"] == "torch"


def test_a_cast_that_is_refused_changes_nothing(llama: Path) -> None:
    model = AutoModel.from_pretrained(llama)
    before = {name: (value.dtype, value.data_ptr()) for name, value in model.state_dict().items()}
    for cast in (model.half, model.float, lambda: model.to(torch.float16)):
        with pytest.raises(ArgumentError, match=r"accepted: torch\.bfloat16, as constructed"):
            cast()
        assert {name: (value.dtype, value.data_ptr()) for name, value in model.state_dict().items()} == before


def test_a_dtype_may_be_a_name(llama: Path, tmp_path: Path) -> None:
    assert AutoModel.from_pretrained(llama, dtype="float16").lm_head.weight.dtype == torch.float16
    for said, wanted in (("float32", torch.float32), (None, torch.bfloat16), ("int4", torch.bfloat16)):
        folder = rewrite(llama, tmp_path / str(said), config=lambda c, d=said: c.update(dtype=d, torch_dtype=d))
        assert AutoModel.from_pretrained(folder, dtype="auto").lm_head.weight.dtype == wanted


@pytest.mark.parametrize("path", [None, 7])
def test_a_path_is_a_string_or_a_path(path: Any) -> None:
    with pytest.raises(ArgumentError, match=f"AutoModel: path is {path}; accepted: a directory with config"):
        AutoModel.from_pretrained(path)


def test_importing_the_package_loads_no_family() -> None:
    code = (
        "import fastlayers_models, sys; assert 'torch' not in sys.modules; assert 'AutoModel' in dir(fastlayers_models)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        fastlayers_models.Nothing  # noqa: B018
