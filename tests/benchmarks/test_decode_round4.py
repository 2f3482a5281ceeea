"""The fourth trial of whole decode steps: small models end well, what fails is a row, the note names each variant."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastlayers import env
from fastlayers.runtime.launch import Kinds

ROOT = Path(__file__).parents[2]
NOTE = ROOT / "benchmarks" / "notes" / "decode_phases.md"
interpreted = pytest.mark.skipif(not env.triton_interpret(), reason="needs TRITON_INTERPRET=1 without a GPU")


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in ("benchmarks", "benchmarks/trials"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    found = import_module("decode_round4")
    monkeypatch.setenv("FASTLAYERS_BACKEND", ",".join(f"{layer}=triton" for layer in found.TINY_BACKENDS))
    return found


def ran(trial: Any, *arguments: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a small run by variant; the last one of each."""
    options = trial.parsed(["--tiny", "--turns", "1", "--budget", "1000", *arguments])
    return {row["variant"]: row for row in trial.bench(options) if "variant" in row}


@interpreted
def test_what_is_wrong_fails_and_the_rest_is_timed(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges = trial.exchanges
    good = next(v for v in trial.VARIANTS if v.name == "linears evicted first")
    fused = next(v for v in trial.VARIANTS if v.name == "gate, up, silu 1 + 1")

    def breaks(steps: Any) -> Any:
        raise RuntimeError("no such kernel")

    class Half(exchanges.GatedUp):  # type: ignore[misc,name-defined]
        def __call__(self, module: Any, x: torch.Tensor, valid: Any = None) -> torch.Tensor:
            return super().__call__(module, x) * 0.5

    wrong = (exchanges.swap(exchanges.SwiGLU, "forward", Half(1, 1024)),)
    monkeypatch.setattr(trial, "VARIANTS", (
        good, replace(good, name="broken", group="a", swaps=(breaks,)),
        replace(fused, name="half", group="b", swaps=wrong, equal=False, probe="mlp"),
        replace(good, name="not called", group="c", swaps=(), calls=("vector_kernel",)),
    ))  # fmt: skip
    monkeypatch.setitem(trial.TINY, "vocab_size", 32)
    rows = ran(trial, "--models", "qwen3_8b", "--rows", "1")
    assert rows[good.name]["equal_to_base"] and rows[good.name]["replays_equal"] and rows[good.name]["us"] > 0
    assert rows["base"]["eager_equal"] is True
    failed = {name: row["failed"] for name, row in rows.items() if "failed" in row}
    assert set(failed) == {"broken", "half", "not called"}
    assert "no such kernel" in failed["broken"] and "nothing calls ['vector_kernel']" in failed["not called"]
    assert "mlp is 0.5 off" in failed["half"] and not any("us" in rows[name] for name in failed)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3_30b_a3b", "qwen3_8b", "gpt_oss_20b"])
def test_every_variant_runs(trial: Any, model: str) -> None:
    # Blocks of MXFP4 tokens take minutes in the interpreter; what is exchanged there the other models have, too.
    rows = ran(trial, "--models", model, "--rows", "1", *(["many"] if model != "gpt_oss_20b" else []))
    wanted = {v.name: v for v in trial.VARIANTS if model in v.predicted and (model != "gpt_oss_20b" or not v.many)}
    assert wanted.keys() <= rows.keys()
    for name, variant in wanted.items():
        row = rows[name]
        assert "failed" not in row and row["replays_equal"], row
        assert row["apart"] == 0.0 if variant.equal else row["probe_apart"] <= trial.TOLERANCE, row


def test_a_kernel_takes_what_the_library_gives_the_one_in_its_place(trial: Any) -> None:
    puts = [
        put for variant in trial.VARIANTS for put in variant.swaps if hasattr(getattr(put, "value", None), "kernel")
    ]
    assert len({put.value.kernel.__name__ for put in puts}) == 8
    for put in puts:
        own, usual = put.value.kernel, getattr(put.module, put.name)
        more = put.value.constants.keys() - set(usual.arg_names)
        assert [name for name in own.arg_names if name not in more] == usual.arg_names, own.__name__
        assert own.unspecialized == usual.unspecialized and put.value.constants.keys() <= set(own.arg_names)
    dense = trial.exchanges.dense
    split = [
        name for name in trial.exchanges.kernels.split_kernel.arg_names if name not in ("parts_ptr", "counters_ptr")
    ]
    assert split == dense._linear_kernel.arg_names


def test_the_note_predicts_each_variant(trial: Any) -> None:
    text = NOTE.read_text().partition("## Fourth round: predictions")[2]
    names = [variant.name for variant in trial.VARIANTS]
    assert len(names) == len(set(names))
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    told = {row[0].strip("|` "): [cell.strip(" |") for cell in row[1:4]] for row in rows}
    models = (trial.exchanges.B30, trial.exchanges.B8, trial.exchanges.OSS)
    for variant in trial.VARIANTS:
        assert told.get(variant.name) == [variant.predicted.get(model, "") for model in models], variant.name


def test_a_step_gains_beside_the_base_of_its_own_turns(trial: Any) -> None:
    took = {"base": [100.0, 104.0, 102.0, 98.0], "one": [90.0, 91.0, 93.0, 92.0]}
    assert trial.gained(took, "one") == {"us": 91.5, "spread_us": 1.2, "gain_us": 9.5}
    assert trial.gained({"base": [5.0]}, "base") == {"us": 5.0, "spread_us": 0.0, "gain_us": 0.0}
    assert trial.apart(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == pytest.approx(0.092, abs=1e-3)
    assert trial.apart(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")


def test_a_timeline_goes_from_end_to_end(trial: Any) -> None:
    """The second kernel begins while the first runs, and ends 2 behind it; so does the second of its kind."""
    events = [(0.0, 10.0, "a"), (8.0, 4.0, "b"), (20.0, 5.0, "a"), (24.0, 3.0, "b")]
    assert trial.timeline(events[::-1]) == [("a", 2, 7.5, 11.5), ("b", 2, 3.5, 2.0)]
    steps = [(10.0 * i + j, 0.5, name) for i in range(6) for j, name in enumerate(("turn", "attend"))]
    assert trial.layer(steps, "turn") == [
        (0.0, 0.5, "turn"),
        (1.0, 0.5, "attend"),
        (10.0, 0.5, "turn"),
        (11.0, 0.5, "attend"),
    ]
    assert trial.layer(steps[:4], "turn") == trial.layer(steps, "none") == []


def test_launches_are_forgotten_between_exchanges(trial: Any) -> None:
    kept = Kinds()
    kept.keep(("kind",), "launch")
    dense = trial.exchanges.dense
    dense._launches(1, 16, 32, 32, 32, torch.float32, False, (), torch.device("cpu"))
    assert dense._launches.cache_info().currsize > 0
    with trial.applied(None, ()):
        assert not kept and dense._launches.cache_info().currsize == 0


def test_a_lost_gpu_ends_one_variant_and_goes_on_from_its_model(trial: Any, tmp_path: Path) -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access")

    part = trial.Trial(
        SimpleNamespace(name="qwen3_8b", rows_of=int, synchronize=lost), False, Namespace(skip=[], variants=[])
    )
    with pytest.raises(trial.DeviceLost, match="first keys asked for"):
        part.attempt("first keys asked for", lost)
    part.steps.synchronize = lambda: None
    assert part.attempt("first keys asked for", lost) == "RuntimeError: an illegal memory access"
    out = tmp_path / "rows.jsonl"
    options = trial.parsed(["--out", str(out), "--skip", "own logits", "--rows", "many"])
    line = trial.again(["python", "decode_round4.py"], options, "qwen3_8b", "last program adds")
    left = trial.parsed(line[2:])
    assert left.models == ["qwen3_8b", "gpt_oss_20b"] and left.skip == ["own logits", "last program adds"]
    assert left.budget < options.budget and left.rows == ["many"] and left.out == out and left.variants == []
    with pytest.raises(SystemExit):
        trial.parsed(["--variants", "no such"])


def test_rows_are_appended_as_they_come(trial: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked = tmp_path / "rows.jsonl", list[list[str]]()
    out.write_text('{"earlier": 1}\n')

    def bench(options: Any) -> Any:
        yield {"model": "qwen3_8b", "built_s": 1.0}
        raise trial.DeviceLost("own logits") from RuntimeError("gone")

    monkeypatch.setattr(trial, "bench", bench)
    monkeypatch.setattr(trial, "describe_run", lambda device: {"device": str(device)})
    monkeypatch.setattr(trial.os, "execv", lambda program, arguments: asked.append(arguments))
    monkeypatch.setattr(trial.sys, "argv", ["decode_round4.py", "--out", str(out)])
    trial.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[0] == {"earlier": 1} and rows[1]["device"] == "cuda" and rows[2]["built_s"] == 1.0
    assert rows[3] == {"model": "qwen3_8b", "variant": "own logits", "failed": "the GPU is lost: gone"}
    ((*_, last),) = asked
    assert last == "own logits"
