"""The trial of the experts' second product over strips, on a CPU before a GPU's time goes into it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "trials" / "fp8_second_product.py"


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the program as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "trials"))
    return import_module("fp8_second_product")


def ended(out: Path, *arguments: str, interpreted: str = "1") -> list[dict[str, Any]]:
    """Run the program and return what it printed."""
    roots = os.pathsep.join(str(ROOT / name) for name in ("src", "models", "server", "benchmarks"))
    env = os.environ | {"PYTHONPATH": roots, "TRITON_INTERPRET": interpreted}
    command = [sys.executable, str(PROGRAM), *arguments, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_every_variant_has_the_bits_of_today(tmp_path: Path, trial: Any) -> None:
    _, *rows = ended(tmp_path / "rows.jsonl", "--check", "--seconds", "600")
    assert len(rows) == 2 * len(trial.OF_FEW) + len(trial.OF_MANY) + len(trial.SUMMED)
    assert all(row["same"] is True for row in rows)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 1 + len(rows)


@pytest.mark.slow
def test_variants_of_few_pairs_spill_nothing(tmp_path: Path, trial: Any) -> None:
    rows = ended(tmp_path / "rows.jsonl", "--compile", interpreted="0")
    found = {row["variant"]: row for row in rows}
    assert found.keys() >= {how.name for how in (trial.FEW, trial.MANY, *trial.OF_FEW, *trial.OF_MANY, *trial.SUMMED)}
    assert all(row["spills"] == 0 for row in rows if "128x64" not in row["variant"])
    best = found[trial.OF_FEW[0].name]
    assert best["programs"] == 3 and best["under_way_kb"] == 144.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted where there is no GPU")
def test_a_strip_and_slabs_have_the_bits_of_today(trial: Any) -> None:
    torch.manual_seed(1)
    sizes = trial.Sizes(2, 1, 512, 1, (3,), 9, 1)
    weights = trial.Weights(sizes, "cpu")
    few, many = trial.Point(weights, 3), trial.Point(weights, 9)
    for point, today, how in ((few, trial.FEW, trial.Variant(16, 64, 4, 4, 3, 1)),
                              (many, trial.MANY, trial.Variant(64, 64, 2, 4, 2, 8, slab=256))):  # fmt: skip
        of, written = (point.summed, point.y) if how.slab else (point.product, point.rows)
        of(today)(0)
        wanted = written.clone()
        written.fill_(float("nan"))
        of(how)(0)
        assert wanted.isfinite().all() and torch.equal(written, wanted)


def test_without_time_each_point_is_named(tmp_path: Path, trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["fp8_second_product.py", "--check", "--seconds", "0", "--out", str(out)])
    trial.main()
    _, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [3, 20, 40, 40, 40]
    assert all(row["left_out"] == "no time is left" for row in rows)


def test_variants_cover_all_columns(trial: Any) -> None:
    for how in (*trial.OF_FEW, *trial.OF_MANY, *trial.SUMMED):
        width = how.slab or trial.Sizes().hidden
        assert width % (how.n * max(1, how.tiles)) == 0 and trial.Sizes().hidden % width == 0, how.name
