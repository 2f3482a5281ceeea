"""The trial of the router's and the rotary embedding's launches, on a CPU before a GPU's time goes into it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
ROOTS = [str(ROOT / name) for name in ("src", "models", "server", "benchmarks")]


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the program as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "trials"))
    return import_module("small_ops_again")


def rows_of(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the program on the CPU and return its rows without the description of the run."""
    out = tmp_path / "rows.jsonl"
    program = str(ROOT / "benchmarks" / "trials" / "small_ops_again.py")
    command = [sys.executable, program, "--small", "--device", "cpu", *arguments, "--out", str(out)]
    roots = os.pathsep.join(ROOTS)
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": roots}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in out.read_text().splitlines()][1:]


@pytest.mark.slow
def test_every_line_of_it_runs(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--seconds", "600")
    assert {row["op"] for row in rows} == {"router", "rotary", "norm, rotary, norm, rotary"}
    assert all(row["same"] is True and row["us"] > 0 for row in rows)
    named = {(row["op"], row["variant"]) for row in rows}
    assert {("router", name) for name in ("before", "now", "32x8", "4x4", "2x2")} < named
    assert {("rotary", name) for name in ("before", "now", "8x1", "32x8", "apart")} < named


def test_without_time_each_point_is_named(tmp_path: Path, trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    options = ["--small", "--device", "cpu", "--seconds", "0", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["small_ops_again.py", *options])
    trial.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()][1:]
    assert rows and all(row["left_out"] == "no time is left" for row in rows)
    assert [row["op"] for row in rows[:2]] == ["router", "rotary"]
    timed = [what for _, what in trial.points(small=False)]
    tokens = {(what["op"], what["model"], what["tokens"]) for what in timed}
    table = {
        (item.layer, item.model, count)
        for item in trial.small_ops() if item.layer in ("router", "rotary") for count in item.tokens
    }  # fmt: skip
    assert len(table) == 20 and table < tokens


def test_other_launches_are_undone_and_other_bits_are_told(trial: Any) -> None:
    kept = trial.router_triton._rows_and_warps, trial.rotary_triton._program, trial.rotary_triton.dependent_launch
    with trial.routing((8, 2)), trial.turning((32, 8), apart=True):
        assert trial.router_triton._rows_and_warps(4096, 8, 32, 256, 8, 1, True) == (8, 2)
        assert trial.rotary_triton._program(1, 256) == (32, 8, True)
        assert trial.rotary_triton.dependent_launch(torch.device("cuda")) == {"PDL": False}
    with trial.turning_as_before():
        assert [trial.rotary_triton._program(count, 64) for count in (16, 17)] == [(8, 2, False), (32, 2, False)]
    assert kept == (
        trial.router_triton._rows_and_warps, trial.rotary_triton._program, trial.rotary_triton.dependent_launch
    )  # fmt: skip


def test_other_bits_are_told(trial: Any) -> None:
    rows: list[dict[str, Any]] = []
    kept = SimpleNamespace(put=rows.append)
    one = trial.Trial(kept, "cpu")
    values = iter((1.0, 1.0, 2.0))
    variants = dict.fromkeys(("before", "now"), lambda: trial.routing(None))
    one({"op": "x"}, lambda: None, lambda: {"y": torch.tensor([next(values)])}, variants)
    assert [row["same"] for row in rows] == [True, True] and not one.bad
    values = iter((1.0, 2.0))
    one({"op": "x"}, lambda: None, lambda: {"y": torch.tensor([next(values)])}, variants, {"peer": lambda: None})
    assert [row.get("same") for row in rows[2:]] == [True, False, None] and len(one.bad) == 1
    on_gpu = trial.Trial(kept, "cpu")
    on_gpu.device = "cuda"
    near = {"y": torch.tensor([1.0])}, {"y": torch.tensor([1.0 + 1e-7])}
    assert one.same(*near) and not on_gpu.same(*near)
