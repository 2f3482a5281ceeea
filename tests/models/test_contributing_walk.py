"""The family that CONTRIBUTING.md adds step by step works as the text says; the code is taken from the text."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fastlayers as fl
from fastlayers.errors import ArgumentError, CheckpointError, UnknownModelError
from fastlayers.testing.world import Rank, world
from fastlayers.weights import Slot
from fastlayers_models.auto import FAMILIES, AutoModel, family_of
from fastlayers_models.llama import LlamaForCausalLM
from fastlayers_models.loading import in_one_tensor

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import Feeder
from family_tools import (
    BOUND,
    SCHEDULE,
    Variation,
    check_like_hugging_face,
    ours,
    rows_of,
    save_random,
    stock,
)
from tiny_models import relative_rms

GUIDE = Path(fl.__file__).parents[2] / "CONTRIBUTING.md"
MISTRAL = Variation("mistral", "MistralConfig", 3, {"sliding_window": 24, "head_dim": 24})
FAMILY = {"mistral": "mistral:MistralForCausalLM"}


def code_of_the_walk() -> str:
    section = GUIDE.read_text().split("\n## Add a model family\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    return "\n\n".join(blocks)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the family's file, and let Python find it."""
    folder = tmp_path_factory.mktemp("family")
    (folder / "mistral.py").write_text(code_of_the_walk())
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("mistral", None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(MISTRAL.hf_config(), tmp_path_factory.mktemp("mistral"))


def test_the_row_to_register_is_the_one_in_the_text(written: Path) -> None:
    import mistral

    assert mistral.FAMILY == FAMILY and not FAMILY.keys() & FAMILIES.keys()


def test_the_family_equals_hugging_face(written: Path, checkpoint: Path) -> None:
    with pytest.raises(UnknownModelError, match="'mistral' is unknown; known: deepseek_v2"):
        AutoModel.from_pretrained(checkpoint)
    model = ours(checkpoint, families=FAMILIES | FAMILY)
    assert [layer.self_attn.cfg.window for layer in model.model.layers] == [24] * 3
    check_like_hugging_face(stock(checkpoint), model, MISTRAL.batch)


@pytest.fixture
def installed(written: Path) -> Iterator[None]:
    """Have an installed package name the family, and one that is here already."""
    about = written / "mistral_family-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mistral-family\nVersion: 1.0\n")
    rows = "mistral = mistral:MistralForCausalLM\nllama = mistral:MistralForCausalLM\nlost = nowhere:Model\n"
    (about / "entry_points.txt").write_text(f"[fastlayers.families]\n{rows}")
    yield
    shutil.rmtree(about)


def test_a_family_of_an_installed_package_is_found(installed: None, checkpoint: Path) -> None:
    import mistral

    assert isinstance(AutoModel.from_pretrained(checkpoint), mistral.MistralForCausalLM)
    assert family_of({"model_type": "llama"}) is LlamaForCausalLM
    with pytest.raises(ArgumentError, match=r"families.'lost'. is 'nowhere:Model'"):
        family_of({"model_type": "lost"})
    with pytest.raises(UnknownModelError, match=r"known: .*llama, .*mistral, "):
        family_of({"model_type": "gemma"})
    with pytest.raises(UnknownModelError, match="'mistral' is unknown"):
        AutoModel.from_pretrained(checkpoint, families=dict(FAMILIES))


def feed(rank: Rank, written: str, folder: str, families: dict[str, str]) -> Any:
    sys.path.insert(0, written)
    model = ours(folder, families=FAMILIES | families, parallel=rank.spec())
    sys.path.remove(written)
    return Feeder(model, rows_of(4)).run(SCHEDULE)


def test_the_family_runs_on_two_ranks(written: Path, checkpoint: Path) -> None:
    wanted = Feeder(ours(checkpoint, families=FAMILIES | FAMILY), rows_of(4)).run(SCHEDULE)
    for found in world(2).run(feed, str(written), str(checkpoint), FAMILY):
        assert all(relative_rms(found[i], wanted[i]) <= BOUND for i in wanted) and set(found) == set(wanted)


def test_its_configuration_refuses_in_words(written: Path) -> None:
    from mistral import MistralConfig

    good = MISTRAL.hf_config().to_dict()
    assert MistralConfig.from_hf(good | {"sliding_window": None}).windows == (None,) * 3
    with pytest.raises(ArgumentError, match="MistralConfig: sliding_window is 0"):
        MistralConfig.from_hf(good | {"sliding_window": 0})
    with pytest.raises(UnknownModelError, match="known: mistral"):
        MistralConfig.from_hf(good | {"model_type": "llama"})


def test_a_checkpoints_own_name_of_the_mlp_is_one_line(written: Path, checkpoint: Path, tmp_path: Path) -> None:
    import mistral

    class Layer(mistral.MistralLayer):
        MLP = "block_sparse_moe"

    class Model(mistral.MistralForCausalLM):
        layer_class = Layer

    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    tensors = load_file(checkpoint / "model.safetensors")
    save_file(
        {name.replace(".mlp.", ".block_sparse_moe."): t for name, t in tensors.items()}, tmp_path / "model.safetensors"
    )
    renamed, plain = ours(tmp_path, families={"mistral": Model}), ours(checkpoint, families=FAMILIES | FAMILY)
    wanted = Feeder(plain, rows_of(4)).run(SCHEDULE)
    found = Feeder(renamed, rows_of(4)).run(SCHEDULE)
    assert set(found) == set(wanted) and all(torch.equal(found[i], wanted[i]) for i in wanted)


@pytest.fixture(scope="module")
def merged(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same numbers as Phi-3 has them: q, k and v in one tensor, gate and up in one."""
    folder = tmp_path_factory.mktemp("merged")
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    tensors = load_file(checkpoint / "model.safetensors")
    for layer in range(MISTRAL.hf_config().num_hidden_layers):
        for block, whole, parts in (("self_attn", "qkv_proj", "qkv"), ("mlp", "gate_up_proj", ("gate", "up"))):
            name = f"model.layers.{layer}.{block}"
            rows = [tensors.pop(f"{name}.{part}_proj.weight") for part in parts]
            tensors[f"{name}.{whole}.weight"] = torch.cat(rows)
    save_file(tensors, folder / "model.safetensors")
    return folder


PHI3 = {"mistral": "mistral:Phi3ForCausalLM"}


def test_one_tensor_of_several_linears_is_read_as_such(written: Path, checkpoint: Path, merged: Path) -> None:
    wanted = dict(ours(checkpoint, families=FAMILIES | FAMILY).named_parameters())
    found = dict(ours(merged, families=FAMILIES | PHI3).named_parameters())
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(CheckpointError, match=r"missing tensors: model.layers.0.mlp.gate_proj.weight.* unexpected"):
        ours(merged, families=FAMILIES | FAMILY)
    with pytest.raises(CheckpointError, match=r"missing tensors: model.layers.0.mlp.gate_up_proj.weight.* unexpected"):
        ours(checkpoint, families=FAMILIES | PHI3)


def test_a_rank_reads_its_rows_of_each_part(written: Path, checkpoint: Path, merged: Path) -> None:
    wanted = Feeder(ours(checkpoint, families=FAMILIES | FAMILY), rows_of(4)).run(SCHEDULE)
    for found in world(2).run(feed, str(written), str(merged), PHI3):
        assert all(relative_rms(found[i], wanted[i]) <= BOUND for i in wanted) and set(found) == set(wanted)


def test_what_cannot_be_rows_of_one_tensor_keeps_its_name() -> None:
    def slot(*shape: int) -> Slot:
        return Slot(torch.zeros(shape), shape)

    rule = {"ab": ("a", "b")}
    for a, b in ((slot(), slot()), (slot(2, 3), slot(2, 4))):
        assert [name for name, _ in in_one_tensor([("x.a.weight", a), ("x.b.weight", b)], rule)] == [
            "x.a.weight",
            "x.b.weight",
        ]
    scales = [(f"x.{part}.{name}", slot(1)) for part in "ab" for name in ("weight_scale_inv", "input_scale")]
    assert [name for name, _ in in_one_tensor(scales, rule)] == [name for name, _ in scales]
    assert [name for name, _ in in_one_tensor([("a.weight", slot(2, 3))], rule)] == ["a.weight"]
    rows = dict(in_one_tensor([("a.bias", slot(2)), ("b.bias", slot(3))], {"ba": ("b", "a")}))
    assert list(rows) == ["ba.bias"] and (rows["ba.bias"].shape, rows["ba.bias"].index) == ((5,), (slice(0, 3),))
