"""``fastlayers eval`` of checkpoints that are quantised: which rows there are, and what they are compared with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fastlayers.errors import ArgumentError, CheckpointError, UnknownNameError
from fastlayers_models.convert import convert_checkpoint
from fastlayers_models.find import TINY, assets
from fastlayers_server import evaluate
from fastlayers_server.cli import app
from fastlayers_server.hugging_face import misread
from fastlayers_server.variants import VARIANTS

FEW = ("--limit", "4", "--stories", "2", "--hard", "0", "--device", "cpu")
RAGGED = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight [576, 128] smaller: transformers takes all for alike"
WHY = {"ragged": f"in FP8 blocks, the last of {RAGGED}", "int8": "int8, which transformers does not know"}
STOCK = ("hf", "hf-fp32", "patched", "patched-fp32")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the shipped checkpoint in formats that stock transformers does not read."""
    folder = tmp_path_factory.mktemp("made")
    for name, format in (("ragged", "fp8-block"), ("int8", "int8")):
        convert_checkpoint(assets() / TINY, folder / name, format, include_ragged=name == "ragged")
    return {name: folder / name for name in ("ragged", "int8")}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_rows_of_what_transformers_does_not_read_are_left_out_and_ours_run(made: dict[str, Path]) -> None:
    seen = run("eval", str(made["ragged"]), "--variants", "all", "--json", *FEW)
    scores, shown = json.loads(seen.stdout), " ".join(seen.stderr.split())
    assert seen.exit_code == 0 and "error" not in shown
    for name in STOCK:
        words = f"{name}: not run, made from a checkpoint that transformers reads, and this one is {WHY['ragged']}"
        assert name not in scores and words in shown
    ours = {
        "fastlayers": "hf-dequantised", "fastlayers-fp32": "hf-dequantised-fp32", "fp8-kv": "fastlayers",
        "fp8-kv-fp32": "fastlayers-fp32",
    }  # fmt: skip
    assert list(scores) == ["hf-dequantised", "hf-dequantised-fp32", *ours]
    assert {name: scores[name]["baseline"] for name in ours} == ours
    assert all(scores[name]["flips"] == 0 and scores[name]["within"] is True for name in ours)
    # Stock transformers in fp32 on the checkpoint multiplied out is what the bounds are measured from.
    assert scores["hf-dequantised-fp32"]["kl_mean"] == 0 < scores["hf-dequantised"]["kl_mean"] < 1e-3
    assert scores["hf-dequantised"]["within"] is None


@pytest.mark.parametrize("kind", WHY)
def test_unless_rows_are_named_those_of_transformers_have_a_stand_in(kind: str, made: dict[str, Path]) -> None:
    seen = run("eval", str(made[kind]), "--json", "--no-divergence", *FEW)
    scores, shown = json.loads(seen.stdout), " ".join(seen.stderr.split())
    assert seen.exit_code == 0 and list(scores) == ["hf-dequantised", "fastlayers"]
    assert scores["fastlayers"]["baseline"] == "hf-dequantised" and scores["fastlayers"]["flips"] == 0
    assert all(f"{name}: not run, made from a checkpoint" in shown for name in ("hf", "patched")) and WHY[kind] in shown


def test_a_stand_in_is_the_baseline_where_transformers_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for AWQ without the package that transformers reads it with."""

    def fail(path: Path, device: Any) -> Any:
        raise CheckpointError("needs a package")

    monkeypatch.setitem(VARIANTS, "hf", dataclasses.replace(VARIANTS["hf"], build=fail))
    convert_checkpoint(assets() / TINY, tmp_path / "fp8", "fp8-block")
    for asked, baseline in (("hf,hf-dequantised,fastlayers", "hf-dequantised"), ("hf,fastlayers", "hf")):
        seen = run("eval", str(tmp_path / "fp8"), "--variants", asked, "--json", "--no-divergence", *FEW)
        row = json.loads(seen.stdout)["fastlayers"]
        assert seen.exit_code == 1 and "error: hf: CheckpointError: needs a package" in seen.stderr
        assert row["baseline"] == baseline and row["flips"] == (0 if baseline == "hf-dequantised" else None)


@pytest.mark.parametrize("kind", WHY)
@pytest.mark.parametrize("name", STOCK)
def test_a_row_that_is_named_is_refused_before_anything_is_computed(
    kind: str, name: str, made: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "evaluate", None)
    seen = run("eval", str(made[kind]), "--variants", f"fastlayers,{name}", *FEW).exception
    words = f"eval: --variants is {name!r}, made from a checkpoint that transformers reads, and this one is {WHY[kind]}"
    assert isinstance(seen, ArgumentError) and words in str(seen) and str(seen).endswith("or their names")


def test_no_name_is_no_variant() -> None:
    assert isinstance(run("eval", "tiny", "--variants", "", *FEW).exception, UnknownNameError)


def test_only_blocks_of_unequal_sizes_are_misread(tmp_path: Path) -> None:
    """Of one block transformers sees the size, of many equal ones, too; a plain checkpoint keeps its baselines."""
    from safetensors.torch import save_file

    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for (rows, columns), wrong in (((64, 96), False), ((256, 128), False), ((192, 64), True), ((64, 129), True)):
        grid = -(-rows // 128), -(-columns // 128)
        codes = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
        save_file({"a.weight": codes, "a.weight_scale_inv": torch.ones(grid)}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        assert (misread(tmp_path) is not None) is wrong, (rows, columns)
    cpu = torch.device("cpu")
    assert misread(assets() / TINY) is None and VARIANTS["fastlayers"].against(assets() / TINY, cpu) == "hf"
