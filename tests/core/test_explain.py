"""``fl.explain``: every backend that was not chosen, and why."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers import env, tuning
from fastlayers.device import Device, as_device
from fastlayers.errors import EnvironmentVariableError, UnknownNameError
from fastlayers.layer import Layer
from fastlayers.registry import LAYERS, PARTS, Backend, Registry, registry
from fastlayers.registry.spec import spec_of


@dataclass(frozen=True)
class Config:
    n: int = 8

    def tuning_key(self) -> str:
        return f"N={self.n}"


class Impl:
    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg


def odd(cfg: Config, device: Device) -> str | None:
    return "n is odd"


CPU = ("cpu",)
TOY = Registry(
    "toy",
    [
        Backend("refusing", Impl, refuse=odd, auto_on=CPU),
        Backend("best", Impl, auto_on=CPU),
        Backend("second", Impl, auto_on=CPU),
        Backend("guard", Impl, refuse=odd, auto_on=()),
        Backend("manual", Impl, auto_on=()),
        Backend("last", Impl, auto_on=(), last_resort_on=CPU),
    ],
)


class Toy(Layer):
    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        self.choose(TOY, Config(), "cpu", backend)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYERS, "toy", f"{__name__}:TOY")


def test_every_backend_that_was_not_chosen_has_its_reason() -> None:
    (found,) = fl.explain(Toy())
    assert found.chosen == "best" and found.refused == {"refusing": "n is odd", "guard": "n is odd"}
    assert found.slower == {
        "second": "ranked below best", "manual": "not automatic on cpu, taken by name", "last": "a last resort on cpu",
    }  # fmt: skip
    assert "    not refusing, guard: n is odd\n" in str(found)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_explained_by_its_rows(name: str) -> None:
    (found,) = fl.explain(name)
    names = {row.name for row in fl.backends(name)}
    assert found.layer == name and {found.chosen} | found.refused.keys() | found.slower.keys() == names


def test_names_that_are_none_list_the_parts_where_they_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for ask in (fl.explain, fl.backends):
        with pytest.raises(UnknownNameError, match=r"'comunicator' is unknown; known: linear, .*communicator"):
            ask("comunicator")
    with pytest.raises(UnknownNameError, match="'communicator' is a part without cases"):
        spec_of("communicator")
    # Nobody is asked which backend of a part to take: the variable would change nothing.
    monkeypatch.setenv(env.BACKEND, "communicator=collective")
    with pytest.raises(EnvironmentVariableError, match="'communicator' is a part, which chooses for itself; known: li"):
        fl.RMSNorm(8)


def test_a_named_choice_says_what_nobody_asked_for() -> None:
    (found,) = fl.explain(Toy("manual"))
    assert set(found.refused) == {"refusing", "guard"}
    assert found.slower == dict.fromkeys(("best", "second", "last"), "not asked for")


def test_the_tables_times_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    path = tuning.path_of(tmp_path, "toy", "N=8", as_device("cpu"))
    path.parent.mkdir()
    times: list[tuple[int, str, float]] = [(1, "best", 4.0), (1, "second", 2.0), (64, "best", 5.0), (64, "second", 4.0)]
    table: dict[str, Any] = {
        "schema": 1, "layer": "toy", "device": as_device("cpu").name,
        "ladder": [{"max_tokens": None, "backend": "second", "microseconds": 4.0}],
        "measured": [{"tokens": n, "backend": name, "us": us} for n, name, us in times],
    }  # fmt: skip
    path.write_text(json.dumps(table))
    (found,) = fl.explain(Toy())
    assert found.chosen.startswith("second") and found.evidence.startswith("tuned table")
    assert found.slower["best"] == "in the tuned table at best 1.25 × the chosen one's time, at 64 tokens"


def test_a_model_says_it_once() -> None:
    found = fl.explain(nn.Sequential(Toy(), Toy(), Toy("manual")))
    assert found.losers()[1] == ["as for 0"] and len(found.losers()[0]) == len(found.losers()[2]) + 2
    assert str(found).count("n is odd") == 2 and all(row.refused for row in found)


def test_the_readmes_example_shows_what_lost_on_a_cpu() -> None:
    experts = fl.FusedMoE(64, 32, num_experts=4, top_k=2, dtype=torch.float32, device="cpu")
    (found,) = fl.explain(experts)
    ranked = {backend.name for backend in registry("fused_moe").ranked}
    assert {found.chosen} | found.refused.keys() | found.slower.keys() == ranked and "deep_gemm" in found.refused


def test_a_module_without_our_layers_is_said_to_be_one() -> None:
    found = fl.explain(nn.Sequential(nn.Linear(2, 2)))
    assert len(found) == 0 and "no layer of fastlayers in this module" in str(found)
