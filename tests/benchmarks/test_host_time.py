"""The host's time is measured on several of its cores, each for itself."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("host_time")


@pytest.mark.parametrize("most", [1, 7])
def test_each_core_is_measured_and_all_are_given_back(program: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(program, "CORES", most)
    monkeypatch.setattr(program, "rounds", lambda call: [*os.sched_getaffinity(0), call()])
    found = program.by_core(lambda: "called")
    assert [core for core, _ in found] == sorted({core for core, _ in found}) and 1 <= len(found) <= most
    assert {core for core, _ in found} <= before and all(said == "called" for _, said in found)
    assert os.sched_getaffinity(0) == before


def test_a_round_is_told_with_the_longer_loop_around_it(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program.torch.cuda, "synchronize", lambda: None)
    loops, called = iter([0.2, 0.2] * 3 + [0.2, 0.5, 0.4, 0.3]), []
    monkeypatch.setattr(program, "loop_ms", lambda turns, repeats: next(loops))
    found = program.rounds(lambda: called.append(1), 2)
    assert [each.loop_ms for each in found] == [0.5, 0.4] and all(0 <= each.wall_ms < 1000 for each in found)
    assert len(called) == 5 and next(loops, None) is None


def test_what_is_taken_while_a_core_is_shared_does_not_count(program: Any) -> None:
    first, second = (
        [program.Round(*each) for each in core] for core in (((8, 0.24), (14, 0.46)), ((9, 0.27), (10, 0.28)))
    )
    assert program.unshared([first, second]) == [8, 9] and program.unshared([first[1:]]) == [14]


def test_cores_are_given_back_behind_an_error(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(program, "rounds", lambda call: call())
    with pytest.raises(ZeroDivisionError):
        program.by_core(lambda: 1 / 0)
    assert os.sched_getaffinity(0) == before
