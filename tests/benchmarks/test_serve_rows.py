"""What rows of servers say of starts, of stalls, and of the machine."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import adopt
import machine
import serve_rows


class Server:
    """Is ready at once."""

    port = 1

    def __init__(self, model: str, log: Path, more: tuple[str, ...]) -> None:
        starts.append("start")

    def ready(self, end: float) -> dict[str, Any]:
        return {"ready_s": 1.0 + len(starts)}

    def parts(self) -> list[list[Any]]:
        return [["imports", 0.5]]

    def compiled(self) -> dict[str, float]:
        return {}

    def stop(self) -> None:
        starts.append("stop")


starts: list[str] = []


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("kernels", [[0, 2, 2, 2], [2, 2]])
def test_a_start_that_compiled_is_told_and_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: list[int], once: bool
) -> None:
    starts.clear()
    left = iter(kernels)
    monkeypatch.setattr(serve_rows, "Server", Server)
    monkeypatch.setattr(serve_rows, "compiled", lambda: set(map(str, range(next(left)))))
    monkeypatch.setattr(serve_rows, "rows_of", lambda port, end, options: iter([{"row": "one"}]))
    options = argparse.Namespace(seconds=9.0, profile=False, once=once, tp=1, attn_dp_size=1, ep=1)
    rows = list(serve_rows.measure("tiny", options, tmp_path / "log"))
    again = len(kernels) == 4 and not once
    new = kernels[1] - kernels[0]
    assert [row["row"] for row in rows] == ["start, kernels compiled"] * again + ["start", "one", "since ready"]
    assert rows[0] == {"row": rows[0]["row"], "ready_s": 2.0, "compiled": new, "parts": [["imports", 0.5]]}
    assert rows[-3]["compiled"] == (0 if again else new)
    assert starts == ["start", "stop"] * (1 + again)


@pytest.mark.parametrize("small", [False, True])
def test_fewer_arrivals_than_were_asked_for_are_no_result(monkeypatch: pytest.MonkeyPatch, small: bool) -> None:
    monkeypatch.setattr(serve_rows, "bench", lambda port, end, *flags: {"request_throughput": 100.0})
    monkeypatch.setattr(serve_rows, "short", lambda found, *names: {})
    for name in ("waits", "stalls"):
        monkeypatch.setattr(serve_rows, name, lambda port: {})
    monkeypatch.setattr(serve_rows, "standing", lambda *given: [])
    options = argparse.Namespace(small=small, at_once=False, arrivals=2000)
    monkeypatch.setattr(serve_rows, "time", SimpleNamespace(monotonic=lambda: 7.0))
    *_, last = serve_rows.rows_of(1, 20.0, options)
    if small:
        assert last["row"] == "arrivals" and 60 <= last["requests"] <= 70
    else:
        assert last["left_out"].startswith("there was time for ") and last["left_out"].endswith(" of 2000")
        assert adopt.LEFT_OUT & last.keys()


def test_the_longest_stalls_since_the_watch_began(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine.Machine() as watched:
        time.sleep(0.1)
        watched.stalls.note("machine", 0.3)
    told = watched.told()
    assert told["lag_max_ms"] >= 0 and told["before"]["mem_total_mib"] > told["before"]["mem_free_mib"] > 0
    assert set(told["grew"]) == set(told["before"]) and told["grew"]["stolen_s"] >= 0
    old, new = watched.begin - 5.0, watched.begin + 2.0
    engine = [{"where": "device", "at": old, "ms": 900.0}, {"where": "device", "at": new, "ms": 350.0, "rows": 34}]
    answer = f'{{"stalls": {engine}, "front": {{"stalls": []}}}}'.replace("'", '"')
    monkeypatch.setattr(serve_rows, "get", lambda port, path: answer)
    client = [{"where": "client's loop", "at": new, "ms": 340.0}]
    found = serve_rows.standing(1, {"fastlayers": {"client_stalls": client}}, watched)
    assert [(each["who"], each["ms"]) for each in found if each["who"] != "machine" or each["ms"] == 300.0] == [
        ("engine", 350.0), ("client", 340.0), ("machine", 300.0),
    ]  # fmt: skip
    assert found[0] == {"who": "engine", "where": "device", "at": 2.0, "ms": 350.0, "rows": 34}


def test_memory_is_touched_where_less_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    empty = machine.np.empty

    def count(size: int, kind: Any) -> Any:
        touched.append(size)
        return empty(size, kind)

    monkeypatch.setattr(machine.np, "empty", count)
    monkeypatch.setattr(machine, "memory", lambda: {"MemFree": 10.0, "MemTotal": 20.0})
    assert machine.touch(1 / 128) >= 0 and touched == []
    assert machine.touch(1 / 64) >= 0 and touched == [2**24]
