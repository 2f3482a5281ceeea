"""Ladders of times of calls alone and of whole steps: what steps say counts where they were timed, nowhere else."""

from __future__ import annotations

import json
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from fastlayers.registry import registry
from fastlayers.tuning.rungs import as_rows, choose_ladder
from fastlayers.tuning.samples import Option, Sample
from fastlayers.tuning.staleness import kernel_hash
from fastlayers.tuning.table import SHIPPED

ROOT = Path(__file__).parents[2]
TORCH, TRITON, TILE, OTHER = Option("torch"), Option("triton"), Option("triton", (("BLOCK_N", 64),)), Option("other")
NAMES = ("torch", "triton", "other")
# Alone, triton's own rule is the best up to 32 rows by 4 %, cuBLAS from 64 on.
ALONE = [
    *(Sample(rows, TRITON, us, 0.0) for rows, us in ((4, 11.0), (16, 11.5), (32, 12.5), (64, 14.0))),
    *(Sample(rows, TORCH, us, 0.0) for rows, us in ((4, 11.5), (16, 12.0), (32, 13.0), (64, 11.0))),
    *(Sample(rows, TILE, us, 0.0) for rows, us in ((16, 11.6), (32, 12.6), (64, 13.0))),
]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return import_module("step_ladders")


def ladder(samples: list[Sample]) -> list[tuple[int | None, str, Any]]:
    """Return the rungs of these times: up to how many rows, by whom, with which configuration."""
    rows = as_rows(choose_ladder(samples, dict.fromkeys(NAMES, ""), NAMES))
    return [(row["max_tokens"], row["backend"], row.get("config")) for row in rows]


def test_a_step_decides_where_it_was_timed(tool: Any) -> None:
    assert ladder(ALONE) == [(32, "triton", None), (None, "torch", None)]
    found = tool.in_steps(ALONE, {32: {TORCH: 0.0, TRITON: 5.0}}, NAMES)
    assert ladder(found) == [(16, "triton", None), (None, "torch", None)]
    # What is chosen counts as its call alone, the other as that and what it took more.
    assert {(s.option, s.us) for s in found if s.tokens == 32} == {(TORCH, 13.0), (TRITON, 18.0)}
    assert [s for s in found if s.tokens != 32] == [s for s in ALONE if s.tokens != 32]


def test_at_a_count_that_was_not_timed_alone_steps_make_a_rung_of_their_own(tool: Any) -> None:
    found = tool.in_steps(ALONE, {8: {TORCH: 0.0, TRITON: 1.0}}, NAMES)
    assert ladder(found) == [(4, "triton", None), (8, "torch", None), (32, "triton", None), (None, "torch", None)]
    (own,) = [s.us for s in found if s.tokens == 8 and s.option == TORCH]
    assert own == pytest.approx((11.5 * 12.0) ** 0.5)  # half way between 4 and 16, by factors


def test_backends_that_steps_did_not_time_keep_their_times(tool: Any) -> None:
    steps = {32: {TORCH: 0.0, TRITON: 5.0}}
    found = tool.in_steps([*ALONE, Sample(32, OTHER, 9.0, 0.0)], steps, NAMES)
    assert Sample(32, OTHER, 9.0, 0.0) in found and len(found) == len(ALONE)
    # Without the backend that steps chose, what is left is compared with each other; without any, nothing is changed.
    left = tool.in_steps(ALONE, {32: {TORCH: 0.0, TILE: 2.0, TRITON: 5.0}}, ("triton",))
    assert {s.option: s.us for s in left if s.tokens == 32} == {TILE: 12.6, TRITON: pytest.approx(15.6)}
    kept = [s for s in ALONE if s.option == TORCH]
    assert tool.in_steps(ALONE, {32: {TRITON: 0.0}}, ("torch",)) == kept


def test_what_steps_gave_up_on_the_way_does_not_count_there(tool: Any) -> None:
    """Alone cuBLAS is the best at 64 rows; steps were offered it, and soon left it for tiles."""
    steps = {64: {TRITON: 0.0, TILE: 0.1}}
    assert ladder(tool.in_steps(ALONE, steps, NAMES)) == [(32, "triton", None), (None, "torch", None)]
    found = tool.in_steps(ALONE, steps, NAMES, ("torch", "triton"))
    assert ladder(found) == [(None, "triton", None)]
    # Where triton is missing, it is all there is.
    assert tool.in_steps(ALONE, steps, ("torch",), ("torch", "triton")) == [s for s in ALONE if s.option == TORCH]


def test_what_a_cut_search_left_as_faster_is_as_good_as_what_it_chose(tool: Any) -> None:
    """It was exchanged alone, and what is chosen elsewhere was timed with what was chosen here."""
    found = tool.in_steps(ALONE, {32: {TORCH: -20.0, TRITON: 0.0}}, NAMES)
    us = {s.option: s.us for s in found if s.tokens == 32}
    assert us[TRITON] == next(s.us for s in ALONE if s.tokens == 32 and s.option == TRITON)
    assert us[TRITON] < us[TORCH] < 1.001 * us[TRITON]
    # Where what was chosen is missing, the fastest of the others counts as its call alone.
    found = tool.in_steps(ALONE, {32: {TORCH: 0.0, TRITON: -20.0, TILE: 5.0}}, ("triton",))
    us = {s.option: s.us for s in found if s.tokens == 32}
    assert us[TILE] == us[TRITON] + 25.0


def result_of(path: Path, kernels: dict[str, str] | None) -> Path:
    """Write a result with rows of 32 and 8 tokens of one shape, the first of today's kernels, the other of these."""
    told = {"layer": "linear", "key": "N=1,K=2", "options": [{"backend": "triton", "us_more": 0.5, "config": {"A": 1}}]}
    today = {"kernels": {"triton": kernel_hash(registry("linear").named("triton").target)}}
    then = today if kernels is None else {"kernels": kernels}
    rows = [
        {"commit": "abc", "sources": "123", "device": "H200 (sm_90)"},
        {"model": "m", "rows": 32, "round": 0, "base_us": 1.0},
        {"model": "m", "rows": 32} | told | today, {"model": "m", "rows": 8} | told | then,
        {"model": "m", "rows": 8, "chosen_us": 1.0},
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_what_leaves_splits_takes_alone_what_adds_them_takes(tool: Any) -> None:
    """A call alone has no norm behind it; steps say by how much leaving is better, or worse."""
    tile, left = (("BLOCK_N", 64), ("SPLITS", 2)), (("BLOCK_N", 64), ("LEAVE", 1), ("SPLITS", 2))
    samples = [Sample(32, Option("triton", tile), 12.0, 0.0), Sample(32, Option("torch"), 10.0, 0.0)]
    assert tool.alone(samples, Option("triton", left), 32) == 12.0
    found = tool.in_steps(samples, {32: {Option("triton", left): 0.0, Option("torch"): 1.5}}, ("triton", "torch"))
    assert {(s.option, s.us) for s in found} == {(Option("triton", left), 12.0), (Option("torch"), 13.5)}


def test_rows_of_a_result_are_those_of_the_shape_and_name_their_sources(tool: Any, tmp_path: Path) -> None:
    result = result_of(tmp_path / "steps.jsonl", None)
    steps, note, left = tool.steps_of("linear", "N=1,K=2", "H200", result)
    assert steps == {count: {Option("triton", (("A", 1),)): 0.5} for count in (8, 32)} and left == []
    assert note == {"rows": [8, 32], "model": "m", "commit": "abc", "sources": "123"}
    none = ({}, {}, [])
    assert tool.steps_of("gqa", "N=1,K=2", "H200", result) == none
    assert tool.steps_of("linear", "N=1,K=2", "H100", result) == none  # steps of another device
    assert tool.steps_of("linear", "N=1,K=2", "H200", tmp_path / "none") == none


@pytest.mark.parametrize("kernels", [{"triton": "000000000000"}, {"torch": "e3b0c44298fc"}, {}])
def test_rows_of_other_kernels_are_not_applied_and_that_is_said(tool: Any, tmp_path: Path, kernels: Any) -> None:
    steps, note, left = tool.steps_of("linear", "N=1,K=2", "H200", result_of(tmp_path / "steps.jsonl", kernels))
    assert list(steps) == note["rows"] == [32]
    assert left == ["linear N=1,K=2, 8 rows: steps had other kernels of triton"]


def test_a_table_of_steps_stays_as_it_is_when_kernels_change(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rungs are as stale as its times, which its reader says; its ladder is not made of calls alone meanwhile."""
    tables = import_module("tuned_tables")
    path = next(path for path in sorted(SHIPPED.glob("linear/*.json")) if "steps" in json.loads(path.read_text()))
    table = json.loads(path.read_text())
    assert {name: table[name] for name in ("ladder", "steps")} == {
        name: tables.summary(path)[name] for name in ("ladder", "steps")
    }
    monkeypatch.setattr(tables, "steps_of", lambda *shape: ({}, {}, ["other kernels"]))
    found = tables.summary(path)
    assert found["steps"] == table["steps"] and "ladder" not in found


def test_steps_of_an_experiment_are_what_its_run_timed(tool: Any) -> None:
    """What the result holds is made of the run anew; nothing is chosen that was slower than what was installed."""
    module = import_module("steps_of_experiment")
    rows = [json.loads(line) for line in tool.RESULT.read_text().splitlines()]
    if "about" not in rows[0]:
        pytest.skip("the program has been run itself")
    try:
        assert rows == module.converted()
    except subprocess.CalledProcessError:
        pytest.skip("the history that made the run is not here")
    assert all(min(o["us_more"] for o in row["options"]) == 0.0 for row in rows if "options" in row)
    assert {row["rows"] for row in rows if "chosen_us" in row and row["chosen_us"] < 0.997 * row["installed_us"]} == {
        row["rows"] for row in rows if "options" in row
    }
