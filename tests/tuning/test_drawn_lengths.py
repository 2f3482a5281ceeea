"""Ladders of times of equal lengths and of drawn ones: both count alike where both were measured, nowhere else."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from fastlayers.tuning import rung_at
from fastlayers.tuning.samples import Option, Sample
from fastlayers.tuning.table import SHIPPED

ROOT = Path(__file__).parents[2]
RULE, TILE, THEIRS = Option("triton"), Option("triton", (("num_warps", 1),)), Option("xqa")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return import_module("drawn_lengths")


def test_both_count_alike_where_both_were_timed(tool: Any) -> None:
    samples = [Sample(16, RULE, 104.0, 0.1), Sample(16, TILE, 100.0, 0.1), Sample(16, THEIRS, 200.0, 0.1)]
    samples += [Sample(16, Option("other"), 90.0, 0.1), Sample(64, TILE, 400.0, 0.1), Sample(64, RULE, 410.0, 0.1)]
    found = tool.with_drawn(samples, {16: {RULE: 50.0, TILE: 72.0, THEIRS: 100.0}, 32: {RULE: 1.0}})
    assert {(s.tokens, s.option): round(s.us, 1) for s in found} == {
        (16, RULE): 102.0, (16, TILE): 120.0, (16, THEIRS): 200.0, (64, TILE): 400.0, (64, RULE): 410.0,
    }  # fmt: skip
    assert tool.with_drawn(samples, {}) == samples and tool.with_drawn(samples[4:], {16: {RULE: 1.0}}) == samples[4:]


def test_rows_are_found_by_shape_and_device(tool: Any, tmp_path: Path) -> None:
    path = next(SHIPPED.glob("gqa/H=32,Hkv=8,D=128,page=64,bfloat16_bfloat16,decode,ctx=16384,device_name=H200.json"))
    table = json.loads(path.read_text())
    row = {
        "layer": "gqa",
        "cfg": table["cfg"],
        "tokens": 16,
        "backend": "triton",
        "config": {"num_warps": 1},
        "us": 5.0,
    }
    other = table["cfg"].replace("num_heads=32", "num_heads=64")
    lines = [
        {"run": {"device": "H100 (sm_90)"}}, row | {"ragged": True, "us": 9.0}, {"run": {"device": "H200 (sm_90)"}},
        row, row | {"ragged": True}, row | {"ragged": True, "tokens": 64, "cfg": other}, {"peer": True},
        row | {"ragged": True, "config": {}, "us": 4.0}, row | {"ragged": True, "backend": "torch", "failed": "x"},
    ]  # fmt: skip
    del lines[-1]["us"]
    (tmp_path / "performance").mkdir()
    (tmp_path / "performance/gqa.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert tool.drawn_of("gqa", table["key"], "H200", tmp_path) == {16: {TILE: 5.0, RULE: 4.0}}
    (tmp_path / "drawn_h200.jsonl").write_text(
        "\n".join(map(json.dumps, (lines[2], row | {"ragged": True, "us": 3.0})))
    )
    assert tool.drawn_of("gqa", table["key"], "H200", tmp_path) == {16: {TILE: 3.0, RULE: 4.0}}
    assert tool.drawn_of("gqa", "H=1", "H200", tmp_path) == tool.drawn_of("mla", table["key"], "H200", tmp_path) == {}


def test_no_shipped_ladder_takes_what_loses_by_far_with_drawn_lengths(tool: Any) -> None:
    """GPT-OSS's step of 64 requests, whose configuration for equal lengths took 1.57 times its backend's own rule."""
    asked = 0
    for path in sorted(SHIPPED.glob("*/*,decode,*device_name=H200.json")):
        table = json.loads(path.read_text())
        for tokens, took in tool.drawn_of(path.parent.name, table["key"], "H200").items():
            rung = rung_at(table["ladder"], tokens)
            if (option := Option.of(rung)) in took and rung["max_tokens"] != 1:
                asked += 1
                assert took[option] <= 1.12 * min(took.values()), (path.stem, tokens, str(option))
    assert asked >= 8
