"""Tuned tables: they build ladders, and a bad one is refused with its name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastlayers import env, tuning
from fastlayers.device import DESCRIBED
from fastlayers.registry import Backend, Registry

H200 = DESCRIBED["H200"]


@dataclass(frozen=True)
class Config:
    n: int

    def tuning_key(self) -> str:
        return f"N={self.n}"


class Impl:
    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg


def table() -> Registry:
    return Registry("toy", [Backend("a", Impl), Backend("b", Impl), Backend("c", Impl, weight_layout="other")])


def write(folder: Path, **changes: object) -> Path:
    rows = [
        {"max_tokens": 16, "backend": "b", "microseconds": 3.5},
        {"max_tokens": 64, "backend": "c", "microseconds": 3.0},
        {"max_tokens": None, "backend": "a", "microseconds": 9.0},
    ]
    path = folder / "toy" / "N=8,device_name=H200.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": 1, "layer": "toy", "device": "H200", "ladder": rows} | changes))
    return path


def test_table_builds_a_ladder_over_one_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    write(tmp_path)
    choice = table().choose(Config(8), H200)
    assert choice.name == "b:16|a" and "N=8,device_name=H200.json" in choice.evidence
    assert [rung.microseconds for rung in choice.rungs] == [3.5, 9.0]
    assert choice.evidence == "tuned table N=8,device_name=H200.json"


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2},
        {"layer": "other"},
        {"device": "A100"},
        {"ladder": []},
        {"ladder": [{"max_tokens": 8, "backend": "a"}]},
        {"ladder": [{"max_tokens": 8}, {"max_tokens": None, "backend": "a"}]},
        {"ladder": [{"max_tokens": 8, "backend": ["a"]}, {"max_tokens": None, "backend": "a"}]},
        {
            "ladder": [
                {"max_tokens": 9, "backend": "a"},
                {"max_tokens": 8, "backend": "b"},
                {"max_tokens": None, "backend": "a"},
            ]
        },
    ],
)
def test_bad_tables_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    path = write(tmp_path, **changes)
    with pytest.raises(tuning.TunedTableError, match=path.name.replace("=", ".")):
        table().choose(Config(8), H200)


def test_corrupt_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    write(tmp_path).write_text("{not json")
    with pytest.raises(tuning.TunedTableError, match="corrupt"):
        table().choose(Config(8), H200)
