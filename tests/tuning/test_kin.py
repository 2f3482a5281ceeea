"""A device without tables follows those of one of the same compute capability, and says whose they are."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fastlayers as fl
from fastlayers import env, tuning
from fastlayers.device import DESCRIBED, Device
from fastlayers.registry import Backend, Choice, Registry
from fastlayers.tuning import ladder
from fastlayers.tuning import probe as probe_module
from fastlayers.tuning.probe_shapes import shapes_without_a_table
from fastlayers.tuning.table import kin, lenders

H100, H200, H20, B200 = (DESCRIBED[name] for name in ("H100", "H200", "H20", "B200"))


@dataclass(frozen=True)
class Shape:
    """A configuration with two sizes."""

    n: int
    k: int = 64

    def tuning_key(self) -> str:
        return f"N={self.n},K={self.k}"


class Even:
    """Whose parameters are for even sizes."""

    def __init__(self, cfg: Any, config: dict[str, int] | None = None) -> None:
        self.cfg, self.config = cfg, config

    @staticmethod
    def fits(cfg: Shape, config: dict[str, int]) -> bool:
        return cfg.n % 2 == 0


def toy(layer: str = "toy") -> Registry:
    return Registry(layer, [Backend(name, Even) for name in "abcd"])


def store(folder: Path, device: Device, cfg: Shape, backend: str, layer: str = "toy") -> Path:
    first = {"max_tokens": 8, "backend": backend, "microseconds": 5.0, "config": {"BLOCK": cfg.n}}
    last = {"max_tokens": None, "backend": "d", "microseconds": 50.0}
    path = tuning.path_of(folder, layer, cfg.tuning_key(), device)
    times = {"tokens": [1], "times": {backend: [5.0], "d": [9.0], "c": [6.0]}}
    head = {"schema": 1, "layer": layer, "device": device.name, "key": cfg.tuning_key()}
    tuning.write(path, head | {"ladder": [first, last]} | times)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(ladder, "_announced", set())
    return tmp_path


def test_kin_are_devices_of_the_same_capability_the_nearest_first() -> None:
    assert [other.name for other in kin(H100)] == ["H200", "H20"]
    assert [other.name for other in kin(H20)] == ["H100", "H200"]  # as near as each other: by name
    assert kin(B200) == kin(DESCRIBED["cpu"]) == []
    unknown = replace(H200, name="NVIDIA_GH200_480GB", sm_count=114)
    assert [other.name for other in kin(unknown)] == ["H100", "H200", "H20"]


def test_a_table_of_a_kin_device_serves_without_its_times(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = store(folder, H200, Shape(8), "b")
    choice = toy().choose(Shape(8), H100)
    assert choice.name == "b:8|d" and choice.build().impls[0].config == {"BLOCK": 8}
    assert choice.evidence == f"H200's tuned table {path.name}"
    assert [rung.microseconds for rung in choice.rungs] == [None, None]
    assert [rung.microseconds for rung in toy().choose(Shape(8), H200).rungs] == [5.0, 50.0]
    nearest = toy().choose(Shape(9), H100)
    assert nearest.name == "b:8|d" and nearest.evidence == f"H200's nearest tuned table {path.name}"
    assert nearest.build().impls[0].config is None  # it does not fit
    assert toy().choose(Shape(8), B200).evidence == "rank"
    # One line for all layers and shapes: it names both devices.
    store(folder, H200, Shape(8), "b", layer="other")
    assert toy("other").choose(Shape(8), H100).name == "b:8|d"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith(f"toy: no tuned table for N=8,K=64 on H100; {path.name} serves it, as tables of H200, also")
    assert "unknown amount" in line and line.endswith("fastlayers tune --layer toy --shape n=8")


def test_who_lends_first(folder: Path) -> None:
    def evidence() -> str:
        return toy().choose(Shape(8), H100).evidence

    def tables() -> list[tuple[str, str]]:
        found = lenders("toy", Shape(8).tuning_key(), H100)
        return [(other.name, path.name.partition(",device")[0]) for path, other in found]

    store(folder, B200, Shape(8), "a")
    assert evidence() == "rank" and tables() == []
    store(folder, H200, Shape(16), "a")
    assert evidence().startswith("H200's nearest tuned table N=16,")
    store(folder, H20, Shape(8), "b")
    assert evidence().startswith("H20's tuned table N=8,")
    twins = store(folder, H200, Shape(8), "c")  # as many multiprocessors
    store(folder, H100, Shape(64), "a")
    assert evidence().startswith("H200's tuned table N=8,")
    assert tables() == [("H200", "N=8,K=64"), ("H100", "N=64,K=64"), ("H20", "N=8,K=64"), ("H200", "N=16,K=64")]
    twins.unlink()
    assert evidence().startswith("nearest tuned table N=64,")
    probed = store(tuning.probed_dir(), H100, Shape(8), "b")
    assert evidence() == f"probed at a warm-up: {probed.name}"
    own = store(folder, H100, Shape(8), "a")
    assert evidence() == f"tuned table {own.name}" and toy().choose(Shape(8), H100).rungs[0].microseconds == 5.0


def test_a_kin_device_of_whose_ladder_nothing_runs_is_passed_over(folder: Path) -> None:
    store(folder, H200, Shape(8), "a")
    here = Registry("toy", [Backend(name, Even, () if name == "c" else ("no_such_package",)) for name in "abcd"])
    assert here.choose(Shape(8), H100).evidence == "rank"
    store(folder, H20, Shape(8), "c")
    assert here.choose(Shape(8), H100).evidence.startswith("H20's tuned table N=8,")


class Holder(nn.Module):
    """A module that holds one choice."""

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.choice = choice


def test_times_of_a_kin_device_are_never_judged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(folder, H200, Shape(8), "b")
    monkeypatch.setattr(ladder, "changes", lambda *_: ("torch 1.0, now 2.0",))
    own, other = (Holder(toy().choose(Shape(8), device)) for device in (H200, H100))
    assert other.choice.evidence.endswith("device_name=H200.json, made with other versions (torch 1.0, now 2.0)")
    assert [choice.device for choice, _ in probe_module._suspects(nn.ModuleList([own, other]), True)] == [H200]
    # A warm-up times such a shape, and the tuner what is lent to it.
    assert [choice.device for choice in shapes_without_a_table(other, True)] == [H100]
    assert list(shapes_without_a_table(own, True)) == []
    assert [row["backend"] for row in tuning.lent_rungs("toy", Shape(8).tuning_key(), H100)] == ["b", "d"]
    # What neighbours' ladders cost is told of a device's own tables only.
    store(folder, H100, Shape(8), "b")
    assert tuning.borrowed_ratios("toy", H100) == {} and tuning.borrowed_loss("toy", H100) is None


def test_explain_says_whose_times_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(folder, H200, Shape(8), "b")
    here = toy()
    monkeypatch.setattr(importlib.import_module("fastlayers.explain"), "registry", lambda layer: here)
    told = {}
    for device in (H100, H200):
        (found,) = fl.explain(Holder(here.choose(Shape(8), device)))
        told[device.name] = found.slower
        assert ("µs" in found.chosen) is (device is H200)
    assert told["H100"] == {
        "a": "not measured in H200's tuned table",
        "c": "in H200's tuned table at best 1.20 × the chosen one's time, at 1 tokens",
    }
    assert told["H200"]["a"] == "not measured in the tuned table"


def test_shipped_tables_serve_an_h100(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fastlayers.linear.fp8_block.layer import FP8_LINEAR, FP8LinearConfig

    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path))
    cfg = FP8LinearConfig(7168, 2112)
    found, own = (FP8_LINEAR.choose(cfg, device) for device in (H100, H200))
    assert found.evidence.startswith("H200's tuned table N=2112,K=7168") and found.name == own.name
    assert [rung.config for rung in found.rungs] == [rung.config for rung in own.rungs]
