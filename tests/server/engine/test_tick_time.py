"""The host's time of a tick at 256 rows: what a GPU waits for where it is faster than the host."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.attention.buckets import ExtendBuckets
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers_server.engine import protocol as p
from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.executor import TorchExecutor
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.request import Chunk, Request, TickPlan, TickResult
from fastlayers_server.engine.scheduler import Scheduler

sys.path.insert(0, str(Path(__file__).parent))
from serving import make_model

ROWS, TICKS = 256, 60
LIMIT = 3e-3  # three times what is meant: of this thread's own processor time, on whatever machine


class Hollow(EagerRuntime):
    """Graphs whose replay costs nothing: what is left is the host's work."""

    class Graph(EagerRuntime.Graph):
        def replay(self) -> None:
            """Leave everything as it was."""


class Nothing:
    """Answers every plan with the same token."""

    def launch(self, plan: TickPlan) -> Any:
        self.rows = len(plan.sampled)
        return self

    def result(self) -> TickResult:
        return TickResult([[7]] * self.rows)

    def counters(self) -> dict[str, dict[str, float]]:
        return {}


class Timed:
    """An executor whose launches are timed, and whose prompts are known without being computed."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor, self.seconds = executor, []  # type: ignore[var-annotated]
        executor.extending.extend_chunks = self._no_chunks  # type: ignore[method-assign]

    def _no_chunks(
        self, chunks: Sequence[Chunk], mode: str, requests: Sequence[Request] = (), starts: Sequence[int] = ()
    ) -> tuple[torch.Tensor, None]:
        return torch.zeros(len(chunks) + len(requests), 96), None

    def launch(self, plan: TickPlan) -> Any:
        begin = time.thread_time()
        step = self._executor.launch(plan)
        self.seconds.append(time.thread_time() - begin)
        return step

    def counters(self) -> dict[str, dict[str, float]]:
        return {}


def config() -> SchedulerConfig:
    return SchedulerConfig(96, 4096, ROWS * 20, 64, (1,), max_running=ROWS, max_extend_requests=64)


def full(engine: Engine) -> Iterator[int]:
    """Fill an engine, and yield the names of more requests."""
    for rid in range(1, ROWS + 1):
        engine.post(submit(rid))
    while len(engine.scheduler.running.requests) < ROWS or engine.scheduler.queue.count:
        engine.tick()
    engine.tick()
    return iter(range(ROWS + 1, 10**6))


def submit(rid: int) -> p.Submit:
    return p.Submit(rid, p.pack_ids([5 + rid % 80] * (300 + rid % 256)), p.Sampling(0.0), 2000, ignore_eos=True)


def nobody_comes(engine: Engine, rids: Iterator[int]) -> None:
    """All rows stay where they are."""


def one_leaves(engine: Engine, rids: Iterator[int]) -> None:
    """The request in front ends, all others move up, and another one comes."""
    engine.post(p.Abort((next(iter(engine.scheduler.live)),)))
    engine.post(submit(next(rids)))


WAYS = pytest.mark.parametrize("change", [nobody_comes, one_leaves])


@WAYS
def test_plan_commit_and_message(change: Callable[[Engine, Iterator[int]], None]) -> None:
    executor: Any = Nothing()
    engine = Engine(Scheduler(config()), executor, p.encode, overlap=False)  # type: ignore[arg-type]
    rids, seconds = full(engine), []
    for _ in range(TICKS):
        change(engine, rids)
        begin = time.thread_time()
        engine.tick()
        seconds.append(time.thread_time() - begin)
    assert len(engine.scheduler.running.requests) == ROWS
    assert statistics.median(seconds) < LIMIT


@pytest.fixture(scope="module")
@torch.inference_mode()
def captured() -> tuple[Engine, Iterator[int], Any, CudaGraphs]:
    """Return an engine that is full, names of more requests, its executor and its graphs."""
    graphs = CudaGraphs(runtime=Hollow())
    executor = TorchExecutor(make_model("qwen", 64), config(), graphs=graphs, extend_buckets=ExtendBuckets((), ()))
    executor.decoding.buckets = (ROWS,)  # one graph is enough
    executor.decoding.capture(modes=["greedy"])
    timed: Any = Timed(executor)
    engine = Engine(Scheduler(config()), timed, p.encode, overlap=True)  # type: ignore[arg-type]
    return engine, full(engine), timed, graphs


@WAYS
@torch.inference_mode()
def test_launch_of_a_captured_step(
    change: Callable[[Engine, Iterator[int]], None], captured: tuple[Engine, Iterator[int], Any, CudaGraphs]
) -> None:
    engine, rids, timed, graphs = captured
    timed.seconds.clear()
    before = graphs.replays
    for _ in range(TICKS):
        change(engine, rids)
        engine.tick()
    assert len(engine.scheduler.running.requests) == ROWS and graphs.replays - before >= TICKS - 1
    assert statistics.median(timed.seconds) < LIMIT
