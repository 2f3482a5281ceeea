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
    monkeypatch.setattr(program, "milliseconds", lambda call: [*os.sched_getaffinity(0), call()])
    monkeypatch.setattr(program, "loop_ms", iter(range(2 * most)).__next__)
    found = program.by_core(lambda: "called")
    assert [loop for _, loop in found] == [2 * number + 1 for number in range(len(found))]  # the longer one of two
    found = [took for took, _ in found]
    assert [core for core, _ in found] == sorted({core for core, _ in found}) and len(found) <= most
    assert {core for core, _ in found} <= before and all(said == "called" for _, said in found)
    assert os.sched_getaffinity(0) == before


def test_what_is_taken_on_a_core_that_is_shared_does_not_count(program: Any) -> None:
    assert program.of_unshared([(8.0, 2.4), (14.0, 4.6), (9.0, 2.7), (10.0, 2.8)]) == [8.0, 9.0]
    assert program.of_unshared([(14.0, 4.6)]) == [14.0]


def test_cores_are_given_back_behind_an_error(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(program, "milliseconds", lambda call: call())
    with pytest.raises(ZeroDivisionError):
        program.by_core(lambda: 1 / 0)
    assert os.sched_getaffinity(0) == before
