"""The shipped tables: slim, true to their measurements and their sources; what they say where packages are missing."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fastlayers import tuning
from fastlayers.device import DESCRIBED
from fastlayers.registry import Backend, registry
from fastlayers.tuning.table import DETAILS, MEASUREMENTS, measurements

ROOT = Path(__file__).parents[2]
H200 = DESCRIBED["H200"]
TABLES = sorted(tuning.SHIPPED.glob("*/*.json"))


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tuned_tables", ROOT / "tools" / "tuned_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_slim_and_each_has_its_measurements() -> None:
    assert len(TABLES) > 50
    for path in TABLES:
        table = json.loads(path.read_text())
        assert not table.keys() & set(DETAILS), path
        assert len(path.read_text().splitlines()) <= 60, path
        assert json.loads(measurements(path).read_text())["measured"], path
    known = {path.relative_to(tuning.SHIPPED) for path in TABLES}
    assert {path.relative_to(MEASUREMENTS) for path in MEASUREMENTS.glob("*/*.json")} == known


def test_tables_say_what_was_measured(tool: ModuleType) -> None:
    assert tool.summarise(check=True) == []


def test_tables_name_the_sources_that_made_them(tool: ModuleType) -> None:
    made = {(table["commit"], table["sources"]) for table in (json.loads(p.read_text())["metadata"] for p in TABLES)}
    git = ["git", "-C", str(ROOT), "cat-file", "-e"]
    if any(subprocess.run([*git, commit], capture_output=True).returncode for commit, _ in made):
        pytest.skip("the history that made the tables is not here")
    assert all(tool.sources_of(commit) == sources for commit, sources in made)


def rows_of(layer: str, without: set[str]) -> dict[str, Backend]:
    rows = registry(layer).ranked
    return {row.name: row for row in rows if not without & set(tuning.packages_of(row)) and "cuda" in row.auto_on}


@pytest.mark.parametrize(
    "without", [{"deep_gemm"}, {"flashinfer"}, {"deep_gemm", "flashinfer"}], ids=lambda names: "+".join(sorted(names))
)
def test_without_packages_a_shape_takes_the_best_of_what_is_left(without: set[str]) -> None:
    """No point of the ladder is far from the best of the backends that are left, by the table's own times."""
    worst = []
    for path in (path for path in TABLES if path.parent.name == "fp8_linear"):
        table = tuning.read_whole(path, "fp8_linear", H200)
        able = rows_of("fp8_linear", without)
        rungs, dropped = tuning.ladder_of(table, able)
        assert all(row["backend"] in able for row in rungs) and rungs[-1]["max_tokens"] is None
        assert set(dropped) == {row["backend"] for row in table["ladder"]} - able.keys()
        for tokens in table["tokens"]:
            row = tuning.rung_at(rungs, tokens)
            here = [r for r in table["measured"] if r["tokens"] == tokens and r["backend"] in able]
            own = [r["us"] for r in here if (r["backend"], r.get("config")) == (row["backend"], row.get("config"))]
            worst.append(min(own) / min(r["us"] for r in here))
    assert max(worst) < 1.04


def test_the_evidence_tells_what_the_alternative_is_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers.linear.fp8_block.layer import FP8_LINEAR, FP8LinearConfig

    cfg: Any = FP8LinearConfig(4096, 2048)
    tuned = tuning.ladder_for("fp8_linear", cfg, H200, rows_of("fp8_linear", {"deep_gemm"}))
    assert tuned is not None and FP8_LINEAR.layer == "fp8_linear"
    assert [rung.backend.name for rung in tuned.rungs] == ["triton", "triton", "triton", "flashinfer", "cublas"]
    assert tuned.evidence.endswith("; without its rungs of deep_gemm: it cannot run here")
    assert tuned.rungs[-1].microseconds == 136.31
