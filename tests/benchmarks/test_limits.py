"""The table of what is near the hardware's limit, from made-up results."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    for name in ("benchmarks", "tools"):
        monkeypatch.syspath_prepend(str(ROOT / name))
    monkeypatch.setattr(import_module("performance_rows"), "RESULTS", tmp_path)
    monkeypatch.setattr(import_module("limit_targets"), "TUNED", tmp_path / "tuned")
    return import_module("limit_targets")


def write(path: Path, commit: str, *rows: Row, device: str = "H200 (sm_90)") -> None:
    head = {"command": "x", "commit": commit, "device": device}
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in (head, *rows))


def lines(limits: Any) -> dict[int, list[str]]:
    """Return the table's cells by row: what was measured, and that over what it must be."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in limits.limits().splitlines()[2:12]]
    return {int(row[0]): row[4:] for row in cells}


def test_nothing_is_said_of_what_was_not_measured(limits: Any, tmp_path: Path) -> None:
    assert {tuple(cells) for cells in lines(limits).values()} == {("not measured yet", "")}
    write(tmp_path / "generate.jsonl", "abc", {"model": "qwen3_8b", "batch": 1, "tpot_ms": 3.0}, device="H100 (sm_90)")
    assert lines(limits)[2] == ["not measured yet", ""]
    write(tmp_path / "generate.jsonl", "def", {"model": "qwen3_8b", "batch": 1, "tpot_ms": 3.0})
    assert lines(limits)[2] == ["3.00 / not measured yet ms (def)", "0.80 / – ×"]
    assert limits.limits().endswith("\n\n0 of 10 are met.")


def test_a_target_is_met_where_each_figure_is(limits: Any, tmp_path: Path) -> None:
    generated = tmp_path / "generate.jsonl"
    write(generated, "old", {"model": "gpt_oss_20b", "batch": 1, "tpot_ms": 1.2})
    write(generated, "new", {"model": "gpt_oss_20b", "batch": 1, "tpot_ms": 1.34})
    write(generated, "other", {"model": "gpt_oss_20b", "batch": 32, "tpot_ms": 4.3})
    write(
        generated, "more", *({"model": "qwen3_30b_a3b", "batch": n, "tpot_ms": ms} for n, ms in ((1, 1.9), (32, 13.9)))
    )
    found = lines(limits)
    assert found[3] == ["1.34 / 4.30 ms (new; other)", "0.99 / 1.00 ×, met"]
    assert found[1] == ["1.90 / 13.90 ms (more)", "0.97 / 1.01 ×"]
    assert limits.limits().endswith("1 of 10 are met: 3.")


def test_experts_that_no_run_of_the_page_has_are_told_as_tuned(limits: Any, tmp_path: Path) -> None:
    table = {
        "ladder": [{"max_tokens": 8, "backend": "ours"}, {"max_tokens": None, "backend": "theirs"}],
        "tokens": [1, 32], "times": {"ours": [30.0, 130.0], "theirs": [50.0, 120.0]}, "metadata": {"commit": "abc"},
    }  # fmt: skip
    name = "E=32,k=4,D=2880,I=2880,mxfp4,swiglu_oai,device_name=H200.json"
    (tmp_path / "tuned/fused_moe").mkdir(parents=True)
    (tmp_path / "tuned/fused_moe" / name).write_text(json.dumps(table))
    assert lines(limits)[6] == ["not measured yet / 120 / not measured yet µs (abc, when tuned)", "– / 0.96 / – ×"]
    row = {
        "model": "openai/gpt-oss-20b tp1",
        "tokens": 32,
        "auto": True,
        "backend": "triton",
        "us": 126.0,
        "cfg": "",
        "key": "",
    }
    write(tmp_path / "fused_moe.jsonl", "def", row)
    assert lines(limits)[6][0] == "not measured yet / 126 / not measured yet µs (def)"


def test_the_layer_is_told_with_packages_or_else_without(limits: Any, tmp_path: Path) -> None:
    decode = [{"what": "decode", "batch": n, "us": us} for n, us in ((1, 60.0), (64, 410.0), (128, 540.0))]
    more = [{"what": "prefill", "tokens": 4096, "us": 2100.0}, {"what": "attention", "batch": 1, "us": 9.4}]
    write(tmp_path / "tp8_layer_alone.jsonl", "one", *decode, *more)
    found = lines(limits)
    assert found[4] == ["60.0 / 410 / 540 µs (one, torch and Triton alone)", "1.00 / 0.98 / 0.98 ×, met"]
    assert found[5] == ["2,100 µs (one, torch and Triton alone)", "1.31 ×"]
    assert found[7] == ["9.40 / not measured yet µs (one, torch and Triton alone)", "0.99 / – ×"]
    write(tmp_path / "tp8_layer.jsonl", "two", *decode[:2], {"what": "prefill", "tokens": 4096, "us": 1500.0})
    found = lines(limits)
    assert found[4][0] == "60.0 / 410 / 540 µs (two; one, torch and Triton alone)" and found[5][1] == "0.94 ×, met"
    # Without packages: whole steps that both have.
    assert found[10] == [
        "whole steps: 2 of 3, worst 1.40 × (DeepSeek-V3's layer, prefill of 4,096) (without one; with two)", "1.33 ×"
    ]  # fmt: skip


def test_without_packages_whole_steps_count_and_calls_stand_beside(limits: Any, tmp_path: Path) -> None:
    call = {"auto": True, "key": "a", "us": 2.0, "model": "m", "cfg": ""}
    write(tmp_path / "mla_alone.jsonl", "x", call, call | {"key": "b"}, call | {"key": "c", "auto": False})
    write(tmp_path / "mla.jsonl", "y", call | {"us": 1.0}, call | {"key": "b"}, call | {"key": "c"})
    measured, ratio = lines(limits)[10]
    assert (
        measured == "calls of mla: 1 of 2, worst 2.00 × (without x; with y); whole steps not measured yet" and not ratio
    )
    for name, ms in (("generate_alone", 4.0), ("generate", 3.9)):
        write(tmp_path / f"{name}.jsonl", "z", {"model": "qwen3_8b", "batch": 1, "tpot_ms": ms})
    measured, ratio = lines(limits)[10]
    assert measured.startswith("whole steps: 1 of 1, worst 1.03 × (Qwen3-8B, batch 1); calls of mla: 1 of 2")
    assert ratio == "0.98 ×, met"


def test_our_kernels_are_timed_as_well_without_packages(limits: Any, tmp_path: Path) -> None:
    tp8 = {"model": "deepseek-ai/DeepSeek-V3 tp8", "cfg": "num_shared=0", "auto": True, "key": "k"}
    write(tmp_path / "fused_moe.jsonl", "a", tp8 | {"tokens": 1, "us": 20.0, "backend": "triton"})
    write(tmp_path / "fused_moe.jsonl", "b", tp8 | {"tokens": 4096, "us": 800.0, "backend": "deep_gemm", "key": "l"})
    assert lines(limits)[6][0].endswith("20.0 µs (a)") and lines(limits)[8][0].endswith("/ 800 µs (b)")
    slow = [
        tp8 | {"tokens": n, "us": us, "backend": "triton", "key": k}
        for n, us, k in ((1, 15.5, "k"), (4096, 1400.0, "l"))
    ]
    write(tmp_path / "fused_moe_alone.jsonl", "c", *slow)
    found = lines(limits)
    assert found[6][0].endswith("15.50 µs (c, torch and Triton alone)") and found[8][0].endswith("/ 800 µs (b)")


def test_each_figure_is_found_in_the_committed_results(limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    results = ROOT / "benchmarks" / "results" / "performance"
    monkeypatch.setattr(import_module("performance_rows"), "RESULTS", results)
    monkeypatch.setattr(limits, "TUNED", ROOT / "src/fastlayers/tuned")
    found = lines(limits)
    for row in (1, 2, 3, 6, 8, 9):
        assert "not measured" not in found[row][0] and found[row][1], row
    assert not found[7][0].endswith("not measured yet")
