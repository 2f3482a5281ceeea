"""Which files a checkpoint directory is read from: those that transformers reads, or none; what ``convert`` makes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fastlayers.errors import CheckpointError, FastlayersError
from fastlayers_models import AutoModel
from fastlayers_models.checkpoint import INDEX, SINGLE, Checkpoint
from fastlayers_models.convert import convert_checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import SHIPPED, tensors_of
from family_tools import Variation, save_random, stock

TINY = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "head_dim": 8, "vocab_size": 40}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer, with 12 tensors."""
    return save_random(Variation("tiny", "LlamaConfig", 1, TINY).hf_config(), tmp_path_factory.mktemp("llama"))


def fill(folder: Path, source: Path, files: dict[str, Tensors], weight_map: dict[str, str] | None = None) -> Path:
    """Make a directory of these files, with an index if there is a ``weight_map``."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    for name, tensors in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if weight_map is not None:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def changed(tensors: Tensors, by: float) -> Tensors:
    return {name: value + by for name, value in tensors.items()}


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    return tuple({n: tensors[n] for n in sorted(tensors)[k::2]} for k in (0, 1))  # type: ignore[return-value]


def same_as_stock(folder: Path) -> bool:
    """Whether our loader takes the directory; if so, each tensor is the one that transformers loads."""
    try:
        AutoModel.from_pretrained(folder, dtype=torch.float32)
    except CheckpointError:
        return False
    checkpoint, wanted = Checkpoint(folder), stock(folder).state_dict()
    assert checkpoint.names() == wanted.keys()
    assert all(torch.equal(checkpoint.read(name), wanted[name]) for name in checkpoint.names())
    return True


def test_a_file_of_the_usual_name_is_taken_whatever_lies_beside_it(source: Path, tmp_path: Path) -> None:
    good, old = tensors_of(source), changed(tensors_of(source), 1.0)
    beside = {
        "another": ({SINGLE: good, "old_model.safetensors": old}, None),
        "index": ({SINGLE: good, "old.safetensors": old}, dict.fromkeys(old, "old.safetensors")),
        "shards": (
            {SINGLE: good, **dict(zip(SHARDS, halves(old), strict=True))},
            {n: f for f, part in zip(SHARDS, halves(old), strict=True) for n in part},
        ),
        "more": ({SINGLE: good, "more.safetensors": {"model.surprise": torch.ones(1)}}, None),
    }
    for name, (files, weight_map) in beside.items():
        folder = fill(tmp_path / name, source, files, weight_map)
        assert Checkpoint(folder).read("model.norm.weight").equal(good["model.norm.weight"]), name
        assert same_as_stock(folder), name


REFUSED: dict[str, tuple[Callable[[Tensors], tuple[dict[str, Tensors], dict[str, str] | None]], str]] = {
    "two of the same tensors": (
        lambda t: ({"a.safetensors": t, "b.safetensors": changed(t, 1.0)}, None),
        r"lm_head\.weight is in a\.safetensors, b\.safetensors: one would be lost",
    ),
    "two shards of the same tensors": (
        lambda t: ({SHARDS[0]: t, SHARDS[1]: t}, dict.fromkeys(t, SHARDS[0]) | {"model.norm.weight": SHARDS[1]}),
        "one would be lost",
    ),
    "two sets of shards": (
        lambda t: ({SHARDS[0]: halves(t)[0], "old-00001-of-00001.safetensors": t}, None), "are not shards of one set",
    ),
    "shards and another file": (
        lambda t: ({**dict(zip(SHARDS, halves(t), strict=True)), "more.safetensors": {"x": torch.ones(1)}}, None),
        "are not shards of one set",
    ),
    "the same shard twice": (
        lambda t: ({SHARDS[0]: t, "model-00003-of-00002.safetensors": {"x": torch.ones(1)}}, None), "2 of 2 shards",
    ),
    "no tensors": (lambda t: ({SINGLE: {}}, None), "no tensors in its"),
    "no file at all": (lambda t: ({}, dict.fromkeys(t, "")), r"names the shard ''; accepted: names of files below"),
    "the directory itself": (lambda t: ({}, dict.fromkeys(t, ".")), r"names the shard '\.'; accepted"),
    "a number": (lambda t: ({}, dict.fromkeys(t, 3)), "not a safetensors index"),  # type: ignore[dict-item]
    "a list": (lambda t: ({}, {name: ["a"] for name in t}), "not a safetensors index"),  # type: ignore[dict-item]
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_transformers_would_not_read_or_read_otherwise_is_refused(case: str, source: Path, tmp_path: Path) -> None:
    made, message = REFUSED[case]
    folder = fill(tmp_path / "made", source, *made(tensors_of(source)))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder)


@pytest.mark.parametrize("place", ["absolute", "../outside.safetensors", "a/../../outside.safetensors"])
def test_an_index_does_not_lead_out_of_its_directory(place: str, source: Path, tmp_path: Path) -> None:
    tensors = tensors_of(source)
    save_file(tensors, tmp_path / "outside.safetensors", metadata={"format": "pt"})
    place = str(tmp_path / "outside.safetensors") if place == "absolute" else place
    folder = fill(tmp_path / "made", source, {"a/x.safetensors": tensors}, dict.fromkeys(tensors, place))
    with pytest.raises(CheckpointError, match=r"index\.json: names the shard '.*outside.*'; accepted: names of files"):
        Checkpoint(folder)


def test_links_to_a_store_of_files_are_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, file in enumerate(("config.json", SINGLE)):
        (tmp_path / "blobs" / str(number)).write_bytes((source / file).read_bytes())
        (tmp_path / "snapshot" / file).symlink_to(Path("..") / "blobs" / str(number))
    assert same_as_stock(tmp_path / "snapshot")


def test_shards_of_the_same_name_are_converted_apart(tmp_path: Path) -> None:
    tensors = tensors_of(SHIPPED)
    files = dict(zip(("a/model.safetensors", "b/model.safetensors"), halves(tensors), strict=True))
    folder = fill(tmp_path / "made", SHIPPED, files, {n: f for f, part in files.items() for n in part})
    done = convert_checkpoint(folder, tmp_path / "int8", "int8")
    whole = convert_checkpoint(SHIPPED, tmp_path / "whole", "int8")
    assert done.shards == 2 and done.quantised == whole.quantised > 40
    found, wanted = Checkpoint(tmp_path / "int8"), Checkpoint(tmp_path / "whole")
    assert {f.relative_to(tmp_path / "int8").as_posix() for f in found.file_of.values()} == set(files)
    assert found.names() == wanted.names() >= tensors.keys()
    assert all(found.read(name).equal(wanted.read(name)) for name in wanted.names())


def test_one_file_of_another_name_is_converted_to_what_transformers_finds(source: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "made", source, {"weights.safetensors": tensors_of(source)})
    convert_checkpoint(folder, tmp_path / "fp8", "fp8-block")
    assert json.loads((tmp_path / "fp8" / INDEX).read_text())["weight_map"].keys() == tensors_of(source).keys()


# ---- any directory ---------------------------------------------------------------------------------------------

FILES = (SINGLE, *SHARDS, "a/model.safetensors", "b/model.safetensors", "old_model.safetensors", "../up.safetensors")


@st.composite
def directories(draw: st.DrawFn) -> tuple[dict[str, set[int]], dict[int, str] | None]:
    """Draw which of 12 tensors each file holds, and which file an index names for each, if there is an index."""
    every = frozenset(range(12))
    part = st.one_of(st.just(every), st.sampled_from([every - {0}, every & {0, 1, 2}, every - {0, 1, 2}, frozenset()]))
    files = {name: set(draw(part)) for name in draw(st.lists(st.sampled_from(FILES), unique=True, max_size=3))}
    if not draw(st.booleans()):
        return files, None
    where = st.sampled_from(sorted(files) or [SINGLE])
    weight_map = {number: draw(where) for number in every}
    if draw(st.booleans()):  # most often an index is right
        weight_map |= {number: name for name, held in files.items() for number in held}
    return files, weight_map


@given(directories())
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_directory_is_read_as_transformers_reads_it_or_refused(
    source: Path, tmp_path_factory: pytest.TempPathFactory, drawn: Any
) -> None:
    files, weight_map = drawn
    tensors = tensors_of(source)
    names, folder = sorted(tensors), tmp_path_factory.mktemp("any") / "made"
    # Every file has values of its own, so that it shows which was read.
    held = {
        file: {names[i]: tensors[names[i]] + k for i in sorted(numbers) if i < len(names)}
        for k, (file, numbers) in enumerate(files.items())
    }
    index = None if weight_map is None else {names[i]: f for i, f in weight_map.items() if i < len(names)}
    fill(folder, source, held, index)
    taken = same_as_stock(folder) if SINGLE in files or index is not None else None
    try:
        done = convert_checkpoint(folder, folder.parent / "int8", "int8")
    except FastlayersError:
        assert not taken
        return
    assert Checkpoint(folder.parent / "int8").names() >= Checkpoint(folder).names() and done.shards >= 1
