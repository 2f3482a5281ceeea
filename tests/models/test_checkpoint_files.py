"""Which files a checkpoint directory is read from: those that transformers reads, or none; what ``convert`` makes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fastlayers.checkpoint_files import INDEX, SINGLE
from fastlayers.errors import ArgumentError, CheckpointError, FastlayersError
from fastlayers_models import AutoModel
from fastlayers_models.checkpoint import Checkpoint
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


# ---- what transformers would read, and we do not ----------------------------------------------------------------

PICKLE = "pytorch_model.bin"
STRAY = "consolidated.safetensors"


def says(folder: Path, **keys: Any) -> Path:
    """Add keys to ``config.json``."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


def test_pickled_weights_that_transformers_would_read_are_refused(source: Path, tmp_path: Path) -> None:
    tensors = tensors_of(source)
    for name in (PICKLE, PICKLE + ".index.json"):
        folder = fill(tmp_path / name, source, {STRAY: changed(tensors, 1.0)})
        (folder / name).write_bytes(b"pickled")
        with pytest.raises(CheckpointError, match=rf"would read {name}, pickled; accepted: model\.safetensors or"):
            Checkpoint(folder)
        fill(tmp_path / "safe", source, {SINGLE: tensors})
        (folder / SINGLE).write_bytes((tmp_path / "safe" / SINGLE).read_bytes())
        assert Checkpoint(folder).read("model.norm.weight").equal(tensors["model.norm.weight"])
        (tmp_path / "safe").rename(tmp_path / f"safe beside {name}")


def test_files_that_the_configuration_names_are_read(source: Path, tmp_path: Path) -> None:
    good, old = tensors_of(source), changed(tensors_of(source), 1.0)
    folder = says(
        fill(tmp_path / "one", source, {SINGLE: old, "a/b.safetensors": good}), transformers_weights="a/b.safetensors"
    )
    assert same_as_stock(folder)
    assert Checkpoint(folder).read("model.norm.weight").equal(good["model.norm.weight"])
    # What is written has the usual names, and its configuration names no other.
    convert_checkpoint(folder, tmp_path / "fp8", "fp8-block")
    assert "transformers_weights" not in json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert same_as_stock(tmp_path / "fp8")

    # The shards of an index below the directory are named from the directory on, not from the index.
    parts = dict(zip(("c.safetensors", "a/d.safetensors"), halves(good), strict=True))
    folder = says(
        fill(tmp_path / "index", source, {SINGLE: old, **parts}), transformers_weights="a/x.safetensors.index.json"
    )
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "a" / "x.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert same_as_stock(folder) and set(Checkpoint(folder).file_of.values()) == {folder / name for name in parts}


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("none.safetensors", r"names 'none\.safetensors', which is not there"),
        ("none.safetensors.index.json", "which is not there"),
        ("../one.safetensors", r"names '\.\./one\.safetensors'; accepted: names of files below the directory"),
        ("/one.safetensors", "accepted: names of files below the directory"),
        ("a\0b.safetensors", "which is not there"),
        ("a" * 300 + ".safetensors", "File name too long"),
        (PICKLE, r"is 'pytorch_model\.bin'; accepted: a safetensors file, or the index of several"),
        ("", "is ''; accepted: a safetensors file"),
        (3, "is 3; accepted: a safetensors file"),
        (["a.safetensors"], "accepted: a safetensors file"),
        ({}, "accepted: a safetensors file"),
        (True, "is True; accepted: a safetensors file"),
    ],
)
def test_names_in_the_configuration_that_are_not_read_are_refused(
    named: object, message: str, source: Path, tmp_path: Path
) -> None:
    tensors = tensors_of(source)
    save_file(tensors, tmp_path / "one.safetensors")
    folder = says(fill(tmp_path / "made", source, {SINGLE: tensors}), transformers_weights=named)
    with pytest.raises(CheckpointError, match=rf"transformers_weights in config\.json {message}|{message}"):
        Checkpoint(folder)
    says(folder, transformers_weights=None)
    assert same_as_stock(folder)
    with pytest.raises(CheckpointError, match="transformers_weights in text_config"):
        Checkpoint(says(folder, text_config={"transformers_weights": SINGLE}))


def test_an_adapter_beside_the_weights_is_refused(source: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "made", source, {SINGLE: tensors_of(source)})
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"adapter_config\.json beside config\.json: an adapter; accepted: .*merged"
    ):
        AutoModel.from_pretrained(folder)


PATHS = ("a\0b", "a" * 300, "a/" * 2500, "\ud800", 5, None, b"x", ["x"], 1.5, Path("a\0b"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path!a:.20}")
def test_what_no_file_can_be_called_is_refused_in_words(path: Any, tmp_path: Path) -> None:
    readers = {
        "AutoModel": AutoModel.from_pretrained,
        "Checkpoint": Checkpoint,
        "convert": lambda given: convert_checkpoint(SHIPPED, given, "int8"),
    }
    for owner, use in readers.items():
        with pytest.raises(FastlayersError, match=f"{owner}: (path|target) is|no such directory") as caught:
            use(path)
        assert len(str(caught.value)) < 500
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=r"convert: target is .*which cannot be made"):
        convert_checkpoint(SHIPPED, tmp_path / "file" / "below", "int8")


def test_what_is_no_file_is_not_opened(source: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "model", source, {}, None)
    os.mkfifo(folder / SINGLE)  # to open it would wait for a writer
    (folder / "other.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors files"):
        AutoModel.from_pretrained(folder)
    target = tmp_path / os.fsdecode(b"\xff")
    with pytest.raises(ArgumentError, match=r"target is .*udcff.*; accepted: a name that its README can tell"):
        convert_checkpoint(SHIPPED, target, "int8")
    assert not target.exists()


# ---- any directory ---------------------------------------------------------------------------------------------

FILES = (SINGLE, *SHARDS, "a/model.safetensors", "b/model.safetensors", "old_model.safetensors", "../up.safetensors")
OTHERS = (PICKLE, PICKLE + ".index.json", "adapter_config.json", INDEX + ".bak")
OTHER_INDEX = "a/other.safetensors.index.json"


@st.composite
def directories(draw: st.DrawFn) -> dict[str, Any]:
    """Draw which of 12 tensors each file holds, which file an index names for each, and what else there is.

    The key ``index`` holds an index by its name, ``others`` files that hold no tensors of ours, and ``named`` what
    ``config.json`` names.
    """
    every = frozenset(range(12))
    part = st.one_of(st.just(every), st.sampled_from([every - {0}, every & {0, 1, 2}, every - {0, 1, 2}, frozenset()]))
    files = {name: set(draw(part)) for name in draw(st.lists(st.sampled_from(FILES), unique=True, max_size=3))}
    drawn: dict[str, Any] = {"files": files, "index": {}, "others": [], "named": None}
    if draw(st.integers(0, 3)) == 0:
        drawn["others"] = draw(st.lists(st.sampled_from(OTHERS), unique=True, max_size=2))
    for place in (INDEX, OTHER_INDEX):
        if not draw(st.booleans()):
            continue
        where = st.sampled_from(sorted(files) or [SINGLE])
        weight_map = {number: draw(where) for number in every}
        if draw(st.booleans()):  # most often an index is right
            weight_map |= {number: name for name, held in files.items() for number in held}
        drawn["index"][place] = weight_map
    if draw(st.integers(0, 2)) == 0:
        drawn["named"] = draw(st.sampled_from([*files, OTHER_INDEX, INDEX, SINGLE, PICKLE, "./" + SINGLE, "", 1]))
    return drawn


def make(folder: Path, source: Path, drawn: dict[str, Any]) -> Path:
    """Make a directory as it was drawn; every file has values of its own, so that it shows which was read."""
    tensors = tensors_of(source)
    names = sorted(tensors)
    held = {
        file: {names[i]: tensors[names[i]] + k for i in sorted(numbers) if i < len(names)}
        for k, (file, numbers) in enumerate(drawn["files"].items())
    }
    fill(folder, source, held)
    for place, weight_map in drawn["index"].items():
        (folder / place).parent.mkdir(exist_ok=True)
        weight_map = {names[i]: f for i, f in weight_map.items() if i < len(names)}
        (folder / place).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for other in drawn["others"]:
        (folder / other).write_text(json.dumps({"metadata": {}, "weight_map": {"x": "y.bin"}}))
    return folder if drawn["named"] is None else says(folder, transformers_weights=drawn["named"])


def chosen_by_transformers(folder: Path) -> set[Path] | None:
    """Return the files that transformers takes, as it says itself; ``None`` where it takes none."""
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    named = json.loads((folder / "config.json").read_text()).get("transformers_weights")
    options = (None, None, None, None, False)  # no variant, GGUF file, choice of format, user agent or remote code
    try:
        files, _ = _get_resolved_checkpoint_files(folder, *options, transformers_explicit_filename=named)
    except Exception:  # of any kind: what transformers raises is not what is tested
        return None
    return {Path(file).resolve() for file in files}


def draws(count: int) -> settings:
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def check_files(source: Path, folder: Path, drawn: dict[str, Any]) -> None:
    folder = make(folder, source, drawn)
    theirs = chosen_by_transformers(folder)
    try:
        checkpoint = Checkpoint(folder)
    except CheckpointError:
        return
    ours = {file.resolve() for file in checkpoint.file_of.values()}
    assert "adapter_config.json" not in drawn["others"]
    if theirs is None:  # without a file that transformers looks for, those at the top, if they belong together
        assert drawn["named"] is None and SINGLE not in drawn["files"] and INDEX not in drawn["index"]
        assert ours <= {file.resolve() for file in folder.glob("*.safetensors")}
    else:
        # A file without a tensor of its own is among theirs alone.
        assert ours <= theirs and all(len(load_file(file)) == 0 for file in theirs - ours)


@given(directories())
@draws(100)
def test_the_files_of_any_directory_are_those_that_transformers_takes(
    source: Path, tmp_path_factory: pytest.TempPathFactory, drawn: dict[str, Any]
) -> None:
    check_files(source, tmp_path_factory.mktemp("any") / "made", drawn)


@pytest.mark.slow
@given(directories())
@draws(1000)
def test_the_files_of_many_directories_are_those_that_transformers_takes(
    source: Path, tmp_path_factory: pytest.TempPathFactory, drawn: dict[str, Any]
) -> None:
    check_files(source, tmp_path_factory.mktemp("any") / "made", drawn)


def check_reading(source: Path, folder: Path, drawn: dict[str, Any]) -> None:
    folder = make(folder, source, drawn)
    taken = same_as_stock(folder) if chosen_by_transformers(folder) is not None else None
    try:
        done = convert_checkpoint(folder, folder.parent / "int8", "int8")
    except FastlayersError:
        assert not taken
        return
    assert Checkpoint(folder.parent / "int8").names() >= Checkpoint(folder).names() and done.shards >= 1


@given(directories())
@draws(30)
def test_any_directory_is_read_as_transformers_reads_it_or_refused(
    source: Path, tmp_path_factory: pytest.TempPathFactory, drawn: dict[str, Any]
) -> None:
    check_reading(source, tmp_path_factory.mktemp("any") / "made", drawn)


@pytest.mark.slow
@given(directories())
@draws(300)
def test_many_directories_are_read_as_transformers_reads_them_or_refused(
    source: Path, tmp_path_factory: pytest.TempPathFactory, drawn: dict[str, Any]
) -> None:
    check_reading(source, tmp_path_factory.mktemp("any") / "made", drawn)
