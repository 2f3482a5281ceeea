"""The trial of e4m3 latents with many heads: what of it needs no GPU."""

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


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "trials"))
    return import_module("mla_fp8_heads")


def test_the_twin_gives_what_one_softmax_gives(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    program = ROOT / "benchmarks" / "trials" / "mla_fp8_heads.py"
    command = [sys.executable, str(program), "--small", "--out", str(out), "--variants", "64x2", "32x4"]
    paths = os.pathsep.join(str(ROOT / name) for name in ("src", "models", "server"))
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 6 and all(row["right"] for row in rows), rows
    assert {row["splits"] for row in rows} == {1, 2}


def test_a_scale_that_is_left_out_is_noticed(trial: Any) -> None:
    shapes = (((9,), 64, 16, 0),)

    def without(*given: Any) -> None:
        trial.through_torch(*given[:6], 1.0, *given[7:])

    (row,) = trial.check("64x2", without, shapes, torch.device("cpu"), (0.5,))
    assert not row["right"]


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("lengths", [(4096,) * 128, (4096,), (20865, 1, 300, 4000) * 16, (64,), (65, 1)])
def test_parts_hold_each_row_once_and_are_few(trial: Any, lengths: tuple[int, ...], heads: int) -> None:
    parts = trial.plan(lengths, heads)
    for request, length in enumerate(lengths):
        own = sorted(part[1:] for part in parts if part[0] == request)
        assert [low for low, _, _ in own] == [0, *(high for _, high, _ in own[:-1])] and own[-1][1] == length
        assert [number for *_, number in own] == list(range(len(own))) and len(own) <= trial.MOST_PARTS
    even = sum(lengths) * heads // 64 / trial.PLACES
    whole = trial.makespan([length for length in lengths for _ in range(heads // 64)], trial.PLACES)
    cut = trial.makespan([high - low for _, low, high, _ in parts for _ in range(heads // 64)], trial.PLACES)
    assert even <= cut <= whole


def test_equal_requests_of_two_full_rounds_are_not_cut(trial: Any) -> None:
    assert len(trial.plan((4096,) * 128, 128)) == 128
    # A quarter of the places taken: four parts each.
    assert len(trial.plan((4096,) * 16, 128)) == 64
