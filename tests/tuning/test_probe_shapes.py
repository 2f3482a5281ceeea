"""Shapes without a table are timed at a warm-up, once for a device and its versions."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers import env, tuning
from fastlayers.device import as_device
from fastlayers.linear.fp8_block.layer import FP8_LINEAR
from fastlayers.linear.fp8_block.torch import TorchFP8Linear
from fastlayers.registry import Backend, Choice
from fastlayers.runtime import warmup
from fastlayers.tuning import ladder as ladder_module
from fastlayers.tuning import probe_shapes as module
from fastlayers.tuning import search
from fastlayers.tuning.clock import Timing, take_turns
from fastlayers.tuning.probe_shapes import Probed, probe_shapes, shapes_without_a_table
from fastlayers.tuning.rungs import OutOfTimeError, TuneError
from fastlayers.tuning.samples import Option
from fastlayers.tuning.search import Bench


class Steady(TorchFP8Linear):
    """A backend that takes 10 µs whatever comes."""


@dataclass
class Known:
    us: float

    def run(self) -> float:
        return self.us


class KnownClock:
    """torch takes a third of a microsecond a token."""

    def prepare(self, call: Callable[[], object]) -> Known:
        impl, inputs = call.args[0], call.args[1]  # type: ignore[attr-defined]
        return Known(10.0 if isinstance(impl, Steady) else len(inputs["x"]) / 3)

    def measure(self, calls: Mapping[str, Known], rounds: int, seconds: float = 0.0) -> dict[str, Timing]:
        return take_turns(calls, rounds)


def bench(choice: Choice) -> Bench:
    return Bench(choice.layer, choice.cfg, torch.device("cpu"), KnownClock())  # type: ignore[arg-type]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(FP8_LINEAR, "ranked", [Backend("steady", Steady, auto_on=("cpu",)), *FP8_LINEAR.ranked])
    return tmp_path / "cache"


def test_a_shape_is_timed_once_and_auto_follows(cache: Path) -> None:
    layer = fl.FP8BlockLinear(256, 128)
    assert (layer.choice.name, layer.choice.evidence) == ("steady", "rank")
    said: list[str] = []
    (path,) = probe_shapes(layer, bench=bench, said=said.append)
    assert cache in path.parents and said == [f"fp8_linear {layer.cfg.tuning_key()}"]
    assert layer.choice.name == "steady" and layer.choose_again()
    assert layer.choice.name == "torch:16|steady"
    assert layer.choice.evidence == f"probed at a warm-up: {path.name}"
    assert fl.FP8BlockLinear(256, 128).choice.name == "torch:16|steady"
    assert probe_shapes(layer, bench=bench) == []
    (found,) = fl.explain(layer)
    assert "torch" in found.chosen and "probed" in found.evidence


def test_what_changed_is_probed_again_and_a_tuned_table_comes_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = probe_shapes(fl.FP8BlockLinear(256, 128), bench=bench)
    whole = path.read_text()
    path.write_text("{")
    assert fl.FP8BlockLinear(256, 128).choice.evidence == "rank"
    path.write_text(whole)
    with monkeypatch.context() as context:
        context.setattr(ladder_module, "changes", lambda *_: ("kernels of torch have changed",))
        assert fl.FP8BlockLinear(256, 128).choice.evidence == "rank"
        assert len(list(shapes_without_a_table(fl.FP8BlockLinear(256, 128), everywhere=True))) == 1
    cfg, here = fl.FP8BlockLinear(256, 128).cfg, as_device("cpu")
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    tuned = tuning.path_of(tmp_path, "fp8_linear", cfg.tuning_key(), here)
    tuning.write(
        tuned,
        {"schema": 1, "layer": "fp8_linear", "device": "cpu", "ladder": [{"max_tokens": None, "backend": "torch"}]},
    )
    assert fl.FP8BlockLinear(256, 128).choice.evidence == f"tuned table {tuned.name}"
    assert probe_shapes(fl.FP8BlockLinear(256, 128), bench=bench) == []


def test_what_is_left_alone(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    named, automatic = fl.FP8BlockLinear(256, 128, backend="torch"), fl.FP8BlockLinear(256, 128)
    assert probe_shapes(named, bench=bench) == []
    assert probe_shapes(automatic) == []  # as a warm-up calls it, on a CPU
    report = fl.warmup(automatic, tokens=[2], progress=False)
    report.watch.close()
    assert report.probed == [] and not (cache / "probed").exists()
    ticks = iter((0.0, module.SECONDS + 1))
    assert probe_shapes(automatic, bench=bench, now=lambda: next(ticks)) == []
    assert "not all shapes" in caplog.records[-1].message

    def full(choice: Choice) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory\nmore")

    assert probe_shapes(automatic, bench=full) == []
    assert caplog.records[-1].message.endswith("was not probed: CUDA out of memory")
    with monkeypatch.context() as context:
        context.setattr(tuning, "write", fail)
        assert probe_shapes(automatic, bench=bench) == []
    assert "keeps its ladder: No space" in caplog.records[-1].message


def fail(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_only_what_shares_the_packed_layout_is_timed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Backend("other", Steady, auto_on=("cpu",), weight_layout="other")
    monkeypatch.setattr(FP8_LINEAR, "ranked", [FP8_LINEAR.named("torch"), other])
    layer = fl.FP8BlockLinear(256, 128)
    assert layer.choice.name == "torch" and probe_shapes(layer, bench=bench) == []


def test_decode_is_probed_in_each_context(cache: Path) -> None:
    rotary = fl.RotaryEmbedding(16, max_position=20000)
    layer = fl.Attention(64, 4, 2, 16, rotary=rotary, page_size=16)

    def decode(longest: int | None = None) -> list[int]:
        found = list(shapes_without_a_table(layer, everywhere=True, longest=longest))
        return [choice.cfg.context for choice in found if choice.layer == "gqa" and choice.cfg.phase == "decode"]

    assert decode() == decode(1 << 20) == [1024, 4096, 16384]
    assert decode(8192) == [1024, 4096] and decode(100) == [1024]


def test_what_decoding_takes_longest_for_is_probed_first(cache: Path) -> None:
    rotary = fl.RotaryEmbedding(16, max_position=4096)
    attention = fl.Attention(64, 4, 2, 16, rotary=rotary, page_size=16)
    model = torch.nn.ModuleList([fl.RMSNorm(64, dtype=torch.bfloat16), attention, fl.FP8BlockLinear(256, 128)])
    said: list[str] = []

    def nothing(choice: Choice) -> Any:
        raise TuneError("nothing ran")

    found = probe_shapes(model, bench=nothing, said=said.append)
    assert (found, found.left, found.shapes) == ([], 0, len(said))
    kinds = ["decode" if ",decode," in name else "other phase" if "page=" in name else name.split()[0] for name in said]
    assert kinds[:2] == ["decode"] * 2 and [name.rpartition("=")[2] for name in said[:2]] == ["1024", "4096"]
    assert (
        kinds.index("fp8_linear") < kinds.index("rms_norm") < kinds.index("other phase") and kinds.count("decode") == 2
    )


class Passing(KnownClock):
    """To make an option ready takes a second and a half."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def prepare(self, call: Callable[[], object]) -> Known:
        self.seconds += 1.5
        return super().prepare(call)


def test_the_shape_under_way_when_the_time_is_over_is_given_up(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.ModuleList([fl.FP8BlockLinear(256, 128), fl.FP8BlockLinear(512, 128), fl.FP8BlockLinear(768, 128)])
    clock, benches = Passing(), list[Bench]()

    def passing(choice: Choice) -> Bench:
        benches.append(Bench(choice.layer, choice.cfg, torch.device("cpu"), clock))  # type: ignore[arg-type]
        return benches[-1]

    def probe() -> Probed:
        return probe_shapes(model, bench=passing, now=lambda: clock.seconds)

    found = probe()
    assert len(found) == 1 and (found.left, found.shapes) == (2, 3)
    assert module.SECONDS < clock.seconds <= module.SECONDS + 1.5
    assert caplog.records[-1].message == "not all shapes without a tuned table were probed (60 s): 2 of 3 are left"
    assert len(benches) == 2 and benches[-1].failed == {}
    tables = [path for path in (cache).rglob("*.json") if path.parent.name == "fp8_linear"]
    assert tables == found and model[1].choice.evidence == "rank"
    clock.seconds = 0.0
    again = probe()  # goes on where the first one stopped
    assert len(again) == 1 and (again.left, again.shapes) == (1, 2) and again != found


def test_options_that_wait_for_a_thread_are_not_begun_behind_the_end(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, waited, begun = types.SimpleNamespace(type="cuda"), list[Any](), list[str]()
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(search, "side_stream", lambda place: None)
    monkeypatch.setattr(search, "packages_of", lambda row: ("triton",))
    made = bench(fl.FP8BlockLinear(256, 128).choice)
    made.place, made.threads = place, 1  # type: ignore[assignment]

    def over() -> None:
        if begun:
            raise OutOfTimeError("over")

    made.check_time = over
    with pytest.raises(OutOfTimeError):
        made._compile({Option(name): partial(begun.append, name) for name in ("torch", "steady")})
    assert begun == ["torch"] and waited == [place, place] and made.failed == {}


def test_a_warm_up_reports_what_probing_took(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, asked = fl.FP8BlockLinear(256, 128), list[int | None]()

    def probed(model: Any, *, build: bool, longest: int | None) -> Probed:
        asked.append(longest)
        return probe_shapes(model, build=build, longest=longest, bench=bench)

    monkeypatch.setattr(warmup, "probe_shapes", probed)
    with monkeypatch.context() as context:
        context.setattr(module, "SECONDS", -1.0)
        report = fl.warmup(layer, tokens=[2], progress=False)
    report.watch.close()
    assert [label for label, _, _ in report.steps] == [
        "0 of 1 shapes without a table probed, 1 left", "FP8BlockLinear 2"
    ]  # fmt: skip
    layer.max_length = 4096
    report = fl.warmup(layer, tokens=[2], progress=False)
    report.watch.close()
    (label, seconds, _), *rest = report.steps
    assert label == "1 shapes without a table probed" and 0 < seconds < report.seconds and len(rest) == 1
    assert len(report.probed) == 1 and layer.choice.name == "torch:16|steady" and asked == [None, 4096]
    report = fl.warmup(layer, tokens=[2], progress=False)
    report.watch.close()
    assert [label for label, _, _ in report.steps] == ["FP8BlockLinear 2"]
