"""What is said of a trace: gaps, work that lies over other work, and waits for other ranks."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("profiles")


# Two steps: a product, a sum over ranks that starts 1 us early, a gap of 2 us; the second sum waits 6 us longer.
EVENTS = [("gemm", 0.0, 10.0), ("_push_sum_kernel", 9.0, 4.0), ("gemm", 15.0, 10.0), ("_push_sum_kernel", 24.0, 10.0)]


def test_gaps_overlaps_and_waits_are_told_apart(profiles: Any) -> None:
    found = profiles.summary(EVENTS, 2)
    assert {name: found[name] for name in ("span_us", "busy_us", "gaps_us", "work_us", "wait_us", "kernels")} == {
        "span_us": 17.0, "busy_us": 16.0, "gaps_us": 1.0, "work_us": 17.0, "wait_us": 3.0, "kernels": 2.0,
    }  # fmt: skip
    assert found["between_ranks_us"] == 7.0
    assert [(row["name"], row["us"], row["calls"]) for row in found["longest"]] == [
        ("gemm", 10.0, 1.0), ("_push_sum_kernel", 7.0, 1.0)
    ]  # fmt: skip


def test_a_trace_file_is_read_by_its_graph_launches(profiles: Any, tmp_path: Path) -> None:
    kernels = [{"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in EVENTS]
    host = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0.0, "dur": 5.0}
    path = tmp_path / "engine-0.json"
    path.write_text(json.dumps({"traceEvents": [*kernels, host, host]}))
    assert profiles.of_trace(path) == profiles.summary(EVENTS, 2)
    path.write_text(json.dumps({"traceEvents": kernels}))
    assert "no_profile" in profiles.of_trace(path)


def test_launches_of_one_layer_in_their_order(profiles: Any) -> None:
    """Three equal layers; the second launch of each begins before the first has ended."""
    events = [
        event
        for start in (0.0, 20.0, 40.0)
        for event in (("gemm", start, 10.0), ("norm", start + 8.0, 6.0 + (start == 20.0)))
    ]
    found = profiles.one_layer(events[::-1], 3)
    assert [(row["name"], row["us"], row["later_us"]) for row in found] == [("gemm", 10.0, 15.0), ("norm", 6.0, 4.0)]
    assert profiles.one_layer(events[:5], 3) == [] == profiles.one_layer([], 3)
