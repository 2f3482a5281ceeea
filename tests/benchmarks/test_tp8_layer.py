"""The clocks of the layer of one rank of eight, on a device that is made up."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


class Device:
    """A device that works through what is queued, and events on it; waiting lasts as long as it was told."""

    def __init__(self, busy_ms: float) -> None:
        self.now, self.busy, self.asleep, self.naps = 0.0, busy_ms, False, list[int]()

    def event(self, **kind: bool) -> Any:
        made = SimpleNamespace(at=0.0)
        made.record = lambda: setattr(made, "at", self.now)
        made.query = lambda: not self.asleep
        made.elapsed_time = lambda other: other.at - made.at
        return made

    def sleep(self, cycles: int) -> None:
        self.naps.append(cycles)
        self.asleep = cycles >= 2**29  # a shorter wait is over before the host has queued all

    def work(self, *given: Any) -> list[torch.Tensor]:
        self.now += self.busy
        return [torch.zeros(2)]


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stack of two layers whose device takes 3 ms a step."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    program, device = import_module("tp8_layer"), Device(3.0)
    monkeypatch.setattr(program, "SETTLING", 0.0)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", device.sleep, raising=False)
    made = program.Stack.__new__(program.Stack)
    made.cuda, made.layers, made.device_of_the_test = True, [None] * 2, device
    made.sizes = program.Sizes(2, (1,), 4096, 4096, 10)
    made.graphs = SimpleNamespace(replay=device.work)
    return made


def test_replays_are_queued_back_to_back_and_the_first_do_not_count(stack: Any) -> None:
    found = stack.replays("any")
    assert found == [pytest.approx(3000.0)] * 10
    assert stack.row(found) == {"us": 1500.0, "quartiles_us": [1500.0, 1500.0], "runs": 10}
    assert stack.row(found, 5)["us"] == 300.0


def test_a_prompt_is_timed_where_all_of_it_was_queued_before(stack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = stack.device_of_the_test
    row = stack.queued(device.work, 4)
    assert (row["us"], row["runs"], row["finite"], row["host_ahead"]) == (1500.0, 4, True, False)
    assert device.naps[0] < device.naps[1] and len(set(device.naps[-4:])) == 1  # longer and longer, then at most
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: setattr(device, "asleep", True))
    assert stack.queued(device.work, 4)["host_ahead"] is True
