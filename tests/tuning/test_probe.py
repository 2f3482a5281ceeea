"""The probe of tables made with other versions: which are probed, what a loser says, and that it is said once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import fastlayers as fl
from fastlayers import env, tuning
from fastlayers.device import as_device
from fastlayers.linear.fp8_block.layer import FP8_LINEAR, FP8LinearConfig
from fastlayers.linear.fp8_block.torch import TorchFP8Linear
from fastlayers.registry import Backend
from fastlayers.tuning import probe as probe_module
from fastlayers.tuning.clock import Timing, take_turns

CFG = FP8LinearConfig(256, 128)


class Other(TorchFP8Linear):
    """A second backend for the upper rung."""


@dataclass
class Known:
    us: float

    def run(self) -> float:
        return self.us


class KnownClock:
    """torch takes ``torch_us``, everything else 10 µs."""

    def __init__(self, torch_us: float) -> None:
        self.torch_us = torch_us

    def prepare(self, call: Callable[[], object]) -> Known:
        call()
        return Known(10.0 if isinstance(call.args[0], Other) else self.torch_us)  # type: ignore[attr-defined]

    def measure(self, calls: Mapping[str, Known], rounds: int) -> dict[str, Timing]:
        return take_turns(calls, rounds)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write a table of two rungs that says which torch it was made with."""
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(probe_module, "_probed", set())
    row = Backend("other", Other, auto_on=("cpu",))
    monkeypatch.setattr(FP8_LINEAR, "ranked", [row, *FP8_LINEAR.ranked])

    def table(version: str) -> None:
        rungs = [
            {"max_tokens": 16, "backend": "torch", "microseconds": 9.0},
            {"max_tokens": None, "backend": "other", "microseconds": 20.0},
        ]
        about = {"versions": {"torch": {"torch": version}}}
        path = tuning.path_of(tmp_path, "fp8_linear", CFG.tuning_key(), as_device("cpu"))
        tuning.write(path, {"schema": 1, "layer": "fp8_linear", "device": "cpu", "ladder": rungs, "metadata": about})

    return table


def test_a_first_rung_that_lost_is_said_once(write: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    write("1.0")
    layer = fl.FP8BlockLinear(256, 128)
    assert "other versions (torch 1.0" in layer.choice.evidence
    (probe,) = probe_module.probe_tables(layer, lambda: KnownClock(11.6))
    assert (probe.us, probe.others_us, probe.table_us) == (11.6, 10.0, 9.0)
    assert probe.verdict == "at 16 tokens its torch takes 11.6 µs, another rung 10.0 µs"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("to renew it: fastlayers tune --layer fp8_linear --shape 'in_features=256,out_features=128'")
    assert probe_module.probe_tables(layer, lambda: KnownClock(99.0)) == []


@pytest.mark.parametrize(("us", "verdict"), [(11.4, None), (9.0, None), (6.0, None)])
def test_a_rung_that_still_wins_is_not_talked_about(
    write: Callable[[str], None], caplog: pytest.LogCaptureFixture, us: float, verdict: None
) -> None:
    write("1.0")
    (probe,) = probe_module.probe_tables(fl.FP8BlockLinear(256, 128), lambda: KnownClock(us))
    assert probe.verdict is verdict and caplog.records == []


def test_a_rung_that_is_slower_than_its_table(write: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "SLOWER_THAN_OTHERS", 10.0)
    write("1.0")
    (probe,) = probe_module.probe_tables(fl.FP8BlockLinear(256, 128), lambda: KnownClock(12.0))
    assert probe.verdict == "at 16 tokens its torch takes 12.0 µs instead of 9.0 µs"


def test_a_ladder_cut_to_what_runs_here_is_not_judged_by_another_token_count(
    write: Callable[[str], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("1.0")
    absent = [replace(row, needs=("no_such_package",)) if row.name == "other" else row for row in FP8_LINEAR.ranked]
    monkeypatch.setattr(FP8_LINEAR, "ranked", absent)
    layer = fl.FP8BlockLinear(256, 128)
    assert "without its rungs of other" in str(fl.explain(layer)) and "not other: no_such_package" in str(
        fl.explain(layer)
    )
    # 9 µs is what torch took at 16 tokens; what it takes at more is nowhere.
    (probe,) = probe_module.probe_tables(layer, lambda: KnownClock(99.0))
    assert probe.verdict is None and probe.table_us is None and caplog.records == []


def test_a_table_without_token_counts_gives_no_time_for_its_last_rung(
    write: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("1.0")
    (path,) = tuning.tables("fp8_linear", as_device("cpu"))
    table = tuning.read(path, "fp8_linear", as_device("cpu"))
    last = [{"max_tokens": None, "backend": "torch", "microseconds": 9.0}]
    tuning.write(path, {**table, "ladder": last})
    (probe,) = probe_module.probe_tables(fl.FP8BlockLinear(256, 128), lambda: KnownClock(99.0))
    assert probe.verdict is None
    monkeypatch.setattr(probe_module, "_probed", set())
    tuning.write(path, {**table, "ladder": last, "measured": [{"tokens": 8, "backend": "torch", "us": 9.0}]})
    (probe,) = probe_module.probe_tables(fl.FP8BlockLinear(256, 128), lambda: KnownClock(99.0))
    assert probe.verdict == "at 8 tokens its torch takes 99.0 µs instead of 9.0 µs"


def test_only_tables_of_other_versions_are_probed_and_only_on_cuda(write: Callable[[str], None]) -> None:
    import torch

    write(str(torch.__version__))
    assert probe_module.probe_tables(fl.FP8BlockLinear(256, 128), lambda: KnownClock(99.0)) == []
    write("1.0")
    assert probe_module.probe_tables(fl.FP8BlockLinear(256, 128)) == []  # as fl.warmup calls it, on a CPU
    named = fl.FP8BlockLinear(256, 128, backend="torch")
    assert probe_module.probe_tables(named, lambda: KnownClock(99.0)) == []
    near = fl.FP8BlockLinear(512, 128)
    assert "nearest" in near.choice.evidence
    assert probe_module.probe_tables(near, lambda: KnownClock(99.0)) == []


def test_probing_has_a_limit_in_time(write: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    write("1.0")
    ticks = iter((0.0, probe_module.SECONDS + 1))
    assert probe_module.probe_tables(fl.FP8BlockLinear(256, 128), lambda: KnownClock(99.0), lambda: next(ticks)) == []
    assert "not all" in caplog.text


def test_another_process_takes_what_was_found_until_something_changes(
    write: Callable[[str], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(us: float) -> float:
        monkeypatch.setattr(probe_module, "_probed", set())  # as in another process
        caplog.clear()
        (probe,) = probe_module.probe_tables(fl.FP8BlockLinear(256, 128), lambda: KnownClock(us))
        return probe.us

    write("1.0")
    assert again(11.6) == 11.6 and again(99.0) == 11.6
    assert "at 16 tokens its torch takes 11.6" in caplog.text  # the warning stays
    write("1.1")  # another table
    assert again(12.0) == 12.0 and again(99.0) == 12.0
    (record,) = tuning.probed_dir().glob("*")
    record.write_text('{"of nobody": 3}')
    assert again(13.0) == 13.0
    record.unlink()
    record.mkdir()
    (record / "in the way").touch()
    assert again(14.0) == 14.0 and "cannot be written" in caplog.text
    assert list(tuning.probed_dir().glob("*.partial")) == []


def test_a_warm_up_probes_and_loading_does_not(write: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def suspects(model: object, everywhere: bool) -> list[object]:
        asked.append(model)
        return []

    monkeypatch.setattr(probe_module, "_suspects", suspects)
    layer = fl.FP8BlockLinear(256, 128)
    fl.finalize(layer)
    assert asked == []
    fl.warmup(layer, [1], progress=False, probe=False).watch.close()
    assert asked == []
    fl.warmup(layer, [1], progress=False).watch.close()
    assert asked == [layer]
