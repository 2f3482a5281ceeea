"""Trials of launches: of router, rotations, rows between ranks; on a CPU before a GPU's time goes into them."""

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
def imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what imports a program as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "trials"))
    return import_module


@pytest.fixture
def router(imported: Any) -> Any:
    return imported("router_launch")


@pytest.fixture
def rotary(imported: Any) -> Any:
    return imported("rotary_launch")


def rows_of(tmp_path: Path, program: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a program on the CPU and return its rows without the description of the run."""
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / "trials" / program), *arguments, "--out", str(out)]
    roots = {"PYTHONPATH": os.pathsep.join(ROOTS), "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | roots, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in out.read_text().splitlines()][1:]


def without_time(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> list[dict[str, Any]]:
    """Return the rows of a program that has no time for anything."""
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["program", *options, "--seconds", "0", "--out", str(out)])
    module.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()][1:]
    assert rows and all(row["left_out"] == "no time is left" for row in rows)
    return rows


@pytest.mark.slow
def test_every_line_of_the_routers_runs(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "router_launch.py", "--small", "--device", "cpu", "--seconds", "600")
    assert all(row["same"] is True and row["us"] > 0 and row["op"] == "router" for row in rows)
    assert {"before", "now", "32x8", "4x4", "2x2"} < {row["variant"] for row in rows}


@pytest.mark.slow
def test_every_launch_of_a_rotation_has_the_bits_of_todays(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "rotary_launch.py", "--check", "--seconds", "600")
    assert all(row["same"] is True for row in rows)
    named = {(row["tokens"], row["launch"]) for row in rows}
    ways = {(count, f"now {way}") for count in (1, 16, 64, 4096) for way in ("early", "plain", "apart")}
    assert ways < named and {(1, "8x1 plain"), (16, "32x8 plain"), (64, "64x16 early"), (4096, "64x4 plain")} < named


def test_without_time_each_point_is_named(
    router: Any, rotary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = without_time(router, tmp_path, monkeypatch, "--small", "--device", "cpu")
    assert rows[0]["op"] == "router"
    timed = {(what["model"], what["tokens"]) for _, what in router.points(small=False)}
    table = {
        layer: {(item.model, count) for item in router.small_ops() if item.layer == layer for count in item.tokens}
        for layer in ("router", "rotary")
    }
    assert len(table["router"]) == 10 and table["router"] < timed
    assert len(without_time(rotary, tmp_path, monkeypatch, "--check")) == len(list(rotary.points(False, "cpu")))
    tried = {made.args for made in rotary.points(False, "cpu") if made.func is rotary.alone}
    # Of many tokens those that a model's other shapes are timed at: 512 and 16,384 of one were never slower.
    assert table["rotary"] - {(args[0], args[2]) for args in tried} == {("real shape", 512), ("real shape", 16384)}


def test_what_was_before_what_is_now_and_others_in_a_short_run(
    rotary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list(rotary.few_points(False, "cpu"))
    assert len(without_time(rotary, tmp_path, monkeypatch, "--check", "--few")) == len(made)
    points = {(args[0], args[2]) for args in (each.args for each in made)}
    real = {("real shape", tokens) for tokens in (1, 16, 64, 128, 256)}
    assert points == real | {(f"{model} tp1", 16) for model in ("openai/gpt-oss-20b", "Qwen/Qwen3-8B")}
    for tokens, heads in ((1, 129), (16, 129), (64, 129), (16, 72), (16, 40)):
        first, now, *others = (each.name for each in rotary.early_launches(tokens, heads))
        assert (first, now) == (f"before: {'32x2' if tokens == 64 else '8x2'} early", "now early")
        assert len(set(others)) == 6 and {f"now early, {order}" for order in rotary.EDITS} < set(others)
    # What was before: more than a few tokens had their angles through shared memory.
    for launch, wanted in ((rotary.Launch(32, 2, before=True), False), (rotary.Launch(32, 2), True)):
        with launch.taken():
            assert rotary.rotary_triton._program(64, 40, 64) == (32, 2, wanted)


@pytest.mark.slow
def test_other_orders_of_the_code_have_the_bits_of_what_was(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "rotary_launch.py", "--check", "--few", "--seconds", "600")
    assert len(rows) > 40 and all(row["same"] is True for row in rows)
    assert {"now early, loads first", "now early, released behind loads"} < {row["launch"] for row in rows}


def test_an_order_of_other_code_is_refused(rotary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rotary.EDITS, "new", (("no such line", ""),))
    with pytest.raises(ValueError, match="0 times 'no such line'"):
        rotary.edited("new")


def test_other_launches_are_undone(router: Any, rotary: Any) -> None:
    kept = router.router_triton._rows_and_warps, rotary.rotary_triton._program, rotary.rotary_triton.dependent_launch
    with router.routing((8, 2)), rotary.Launch(32, 8, "apart").taken():
        assert router.router_triton._rows_and_warps(4096, 8, 32, 256, 8, 1, True) == (8, 2)
        assert rotary.rotary_triton._program(1, 129, 256) == (32, 8, True)
        assert rotary.rotary_triton.dependent_launch(torch.device("cuda")) == {"PDL": False}
    found = router.router_triton._rows_and_warps, rotary.rotary_triton._program, rotary.rotary_triton.dependent_launch
    assert found == kept


def test_a_plain_launch_waits_and_lets_the_next_one_start(rotary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"PDL": True, "launch_pdl": True}
    monkeypatch.setattr(rotary.rotary_triton, "dependent_launch", lambda device: usual)
    found = {}
    for way in rotary.WAYS:
        with rotary.Launch(way=way).taken():
            found[way] = rotary.rotary_triton.dependent_launch(torch.device("cuda"))
    assert found == {"early": usual, "plain": {"PDL": True}, "apart": {"PDL": False}}


def test_ways_of_a_prompts_rows_have_the_librarys_bits(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "prompt_rows.py", "--check")
    assert {row["op"] for row in rows} == {"scatter", "activate", "norm"} and all(row["same"] for row in rows)
    ways = [(row["quant"], row["way"]) for row in rows if row["op"] == "activate"]
    assert ways == [(quant, way) for quant in ("fp8_block", "none") for way in ("pairs", "blocks")] * 2


def test_rows_of_a_prompt_without_time_are_left_out(
    imported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = without_time(imported("prompt_rows"), tmp_path, monkeypatch, "--check")
    assert [row["op"] for row in left] == ["scatter", "activate", "activate"] * 2 + ["norm"]
    left = without_time(imported("prompt_rows"), tmp_path, monkeypatch, "--check", "--op", "activate")
    assert [row["op"] for row in left] == ["activate"] * 4


@pytest.mark.slow
def test_launches_compile_without_spilling() -> None:
    roots = {"PYTHONPATH": os.pathsep.join(ROOTS), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(ROOT / "benchmarks" / "trials" / "rotary_launch.py"), "--compile"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | roots, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"64 8x2", "128 64x8"} < {row["launch"] for row in rows} and all(row["spills"] <= 24 for row in rows)


def test_other_bits_are_told(router: Any) -> None:
    rows: list[dict[str, Any]] = []
    kept = SimpleNamespace(put=rows.append)
    one = router.Trial(kept, "cpu")
    values = iter((1.0, 1.0, 2.0))
    variants = dict.fromkeys(("before", "now"), lambda: router.routing(None))
    one({"op": "x"}, lambda: None, lambda: {"y": torch.tensor([next(values)])}, variants)
    assert [row["same"] for row in rows] == [True, True] and not one.bad
    values = iter((1.0, 2.0))
    one({"op": "x"}, lambda: None, lambda: {"y": torch.tensor([next(values)])}, variants, {"peer": lambda: None})
    assert [row.get("same") for row in rows[2:]] == [True, False, None] and len(one.bad) == 1
    on_gpu = router.Trial(kept, "cpu")
    on_gpu.device = "cuda"
    near = {"y": torch.tensor([1.0])}, {"y": torch.tensor([1.0 + 1e-7])}
    assert one.same(*near) and not on_gpu.same(*near)
