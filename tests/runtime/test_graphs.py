"""CUDA graphs without a GPU: order, collector, LRU, ledger, errors; the GPU tests are at the end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fastlayers.errors import ArgumentError, CaptureError
from fastlayers.runtime import compile_log
from fastlayers.runtime.gc_pause import gc_pause
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime, bucket_of, decode_buckets


class Runtime(EagerRuntime):
    """Counts what it is asked to do; each capture takes as many bytes as ``cost`` says."""

    def __init__(self, cost: int = 10) -> None:
        self.cost, self.free, self.events = cost, 1000, []  # type: ignore[var-annotated]

    def warm_up(self, fn: Callable[[], Any], times: int) -> None:
        self.events.append(("warm_up", times))
        super().warm_up(fn, times)

    def capture(self, fn: Callable[[], Any]) -> tuple[Any, Any]:
        self.events.append(("capture", gc.get_freeze_count() > 20_000, gc.isenabled()))
        graph, outputs = super().capture(fn)
        self.free -= self.cost
        return graph, outputs

    def free_bytes(self) -> int:
        return self.free

    def close_pool(self) -> None:
        self.events.append(("close_pool",))


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    usual = gc.get_freeze_count()  # some Pythons begin with hundreds
    assert usual < 10_000
    yield
    assert gc.isenabled()
    assert gc.get_freeze_count() <= usual


def test_buckets() -> None:
    assert decode_buckets(1) == (1,)
    assert decode_buckets(20) == (1, 2, 4, 8, 12, 16, 20)
    assert decode_buckets(32, multiple_of=4) == (4, 8, 12, 16, 24, 32)
    all_of_them = decode_buckets(640)
    assert all_of_them[-5:] == (512, 544, 576, 608, 640)
    assert 256 in all_of_them and 264 not in all_of_them and 272 in all_of_them
    assert [bucket_of((1, 2, 8), n) for n in (1, 2, 3, 8, 9)] == [1, 2, 8, 8, None]
    with pytest.raises(ArgumentError, match="max_batch"):
        decode_buckets(0)


def test_buckets_of_groups_hold_every_batch() -> None:
    assert decode_buckets(13, 2) == (2, 4, 8, 12, 13)
    assert decode_buckets(20, multiple_of=8) == (8, 16, 20)
    assert decode_buckets(3, 8) == (3,)


@pytest.mark.parametrize("device", [None, "cpu", "cuda", "cuda:0", torch.device("cpu"), 0, "gpu", 1.5])
def test_graphs_need_a_gpu(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match=r"CudaGraphs: device is .*EagerRuntime\(\)"):
        CudaGraphs(device)


def test_replay_reads_static_inputs_and_keeps_its_outputs() -> None:
    x, graphs = torch.ones(3), CudaGraphs(runtime=Runtime())
    y = graphs.capture(("decode", 1), lambda: {"y": x * 2})["y"]
    x.fill_(5.0)
    assert y.tolist() == [2.0] * 3
    replayed = graphs.replay(("decode", 1))["y"]
    assert replayed is y
    assert y.tolist() == [10.0] * 3
    assert graphs.outputs(("decode", 1))["y"] is y
    assert (("decode", 1) in graphs, 2 in graphs, len(graphs)) == (True, False, 1)
    with pytest.raises(ArgumentError, match=r"CudaGraphs.replay: key is 7"):
        graphs.replay(7)
    with pytest.raises(ArgumentError, match="not captured yet"):
        graphs.capture(("decode", 1), lambda: x)


def test_largest_first_under_one_gc_pause() -> None:
    calls: list[int] = []
    runtime, done = Runtime(), []  # type: ignore[var-annotated]
    graphs = CudaGraphs(runtime=runtime)
    work = {n: lambda n=n: calls.append(n) or torch.ones(n) for n in (2, 8, 4)}
    graphs.capture_all(work, progress=done.append)
    assert done == [8, 4, 2]
    assert calls == [8] * 3 + [4] * 3 + [2] * 3  # two warm-ups and the capture
    assert [event for event in runtime.events if event[0] == "capture"] == [("capture", True, False)] * 3
    seen = CudaGraphs(runtime=Runtime())
    calls.clear()
    seen.capture_all(work, seen=True)
    assert calls == [8] * 3 + [4] + [2]  # the first tells what there is to load
    by_size = CudaGraphs(runtime=Runtime())
    by_size.capture_all({"a": lambda: 1, "b": lambda: 2}, size={"a": 5, "b": 3}.get)
    assert by_size.keys == ("a", "b")


def test_the_collector_may_stay_as_it_is() -> None:
    runtime = Runtime()
    CudaGraphs(runtime=runtime, freeze=False).capture(1, lambda: torch.ones(1))
    assert ("capture", False, True) in runtime.events


def test_collector_keeps_an_earlier_freeze_and_its_switch() -> None:
    gc.freeze()
    gc.disable()
    try:
        with gc_pause(), gc_pause():
            assert not gc.isenabled()
        assert gc.get_freeze_count() > 20_000
        assert not gc.isenabled()
    finally:
        gc.unfreeze()
        gc.enable()
    with pytest.raises(KeyError), gc_pause(), gc_pause():
        assert gc.get_freeze_count() > 20_000
        raise KeyError


def test_a_pause_looks_through_nothing() -> None:
    """Its own collections were what made capture under it slower than without."""
    seen: list[str] = []
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    frozen = gc.get_freeze_count()
    try:
        with gc_pause(), gc_pause():
            assert gc.get_freeze_count() > frozen
            [[number] for number in range(50_000)]  # would set it off many times
        assert seen == [] and gc.get_freeze_count() == 0 and gc.isenabled()
        [[number] for number in range(50_000)]
        kept = [[number] for number in range(50_000)]
        assert seen and len(kept) == 50_000, "it is on again"
    finally:
        gc.callbacks.pop()


def test_a_pause_within_a_pause_does_not_count_what_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each capture is a pause of its own, and there may be a hundred in the pause of all."""
    with gc_pause():
        with monkeypatch.context() as patch:
            patch.setattr(gc, "get_freeze_count", lambda: pytest.fail("it walks through all of it"))
            CudaGraphs(runtime=EagerRuntime()).capture(1, lambda: torch.ones(1))
        assert gc.get_freeze_count() > 20_000 and not gc.isenabled()
    assert gc.isenabled()


def test_what_somebody_froze_stays_frozen_and_nothing_else_does() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        made = [[number] for number in range(1000)]
        # Some that are frozen may die meanwhile, by threads of tests before.
        with gc_pause():
            assert frozen - 1000 < gc.get_freeze_count() <= frozen and not gc.isenabled()
        assert frozen - 1000 < gc.get_freeze_count() <= frozen and len(made) == 1000
    finally:
        gc.unfreeze()


def test_ledger_and_eviction() -> None:
    runtime = Runtime(cost=10)
    graphs = CudaGraphs(runtime=runtime, max_bytes=35)
    for key in "abc":
        graphs.capture(key, lambda: torch.ones(1))
    graphs.replay("a")
    assert [(r.key, r.bytes, r.replays) for r in graphs.ledger] == [("b", 10, 0), ("c", 10, 0), ("a", 10, 1)]
    assert all(r.capture_seconds > 0 and r.warm_up_seconds > 0 for r in graphs.ledger)
    graphs.capture("d", lambda: torch.ones(1), static_bytes=5)
    assert (graphs.keys, graphs.bytes, graphs.evicted) == (("c", "a", "d"), 35, 1)
    graphs.capture("large", lambda: torch.ones(1), static_bytes=100)
    assert (graphs.keys, graphs.bytes, graphs.evicted, graphs.replays) == (("large",), 110, 4, 0)
    assert ("close_pool",) not in runtime.events
    graphs.clear()
    assert (len(graphs), runtime.events[-1]) == (0, ("close_pool",))
    graphs.drop("nothing")


def test_eviction_frees_outputs_and_static_inputs() -> None:
    import weakref

    graphs = CudaGraphs(runtime=Runtime())
    static = torch.ones(2)
    seen = [weakref.ref(static), weakref.ref(graphs.capture("a", lambda x=static: x + 1))]
    del static
    gc.collect()
    assert all(ref() is not None for ref in seen)
    graphs.drop("a")
    gc.collect()
    assert all(ref() is None for ref in seen)


class Broken(nn.Module):
    """Fails at the n-th call."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise ValueError("no such luck")
        return x + 1


@pytest.mark.parametrize("at", [1, 3])
def test_an_exception_names_key_and_layer_and_leaves_nothing(at: int) -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(Broken(at)))
    runtime, restored = Runtime(), []  # type: ignore[var-annotated]
    graphs = CudaGraphs(runtime=runtime)
    wanted = r"CUDA graph \(8, 'x'\): 1\.0 \(Broken\): ValueError: no such luck"
    with pytest.raises(CaptureError, match=wanted) as caught:
        graphs.capture((8, "x"), lambda: model(torch.ones(1)), restore=lambda: restored.append(1))
    assert isinstance(caught.value.__cause__, ValueError)
    assert (len(graphs), graphs.bytes, runtime.events[-1]) == (0, 0, ("close_pool",))
    assert restored
    graphs.capture((8, "x"), lambda: model(torch.ones(1)))
    assert graphs.replay((8, "x")).tolist() == [2.0]


def test_earlier_graphs_survive_a_failure() -> None:
    graphs, model = CudaGraphs(runtime=Runtime()), Broken(4)
    with pytest.raises(CaptureError, match="CUDA graph 1"):
        graphs.capture_all({2: lambda: model(torch.ones(2)), 1: lambda: model(torch.ones(1))})
    assert graphs.keys == (2,)
    assert graphs.replay(2).tolist() == [2.0, 2.0]


def test_what_was_not_seen_after_all_is_warmed_up(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def cold() -> torch.Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.ones(1)

    graphs = CudaGraphs(runtime=Runtime())
    graphs.capture_all({2: lambda: torch.ones(2), 1: cold}, seen=True)
    assert len(calls) == 4 and graphs.keys == (2, 1)
    assert "not permitted" in caplog.text and "captured once more" in caplog.text
    with pytest.raises(CaptureError, match="never"):
        graphs.capture_all({4: lambda: torch.ones(4), 3: _never}, seen=True)
    assert 4 in graphs and 3 not in graphs


def _never() -> None:
    raise RuntimeError("never")


def test_restore_undoes_what_warm_up_and_capture_count() -> None:
    length, graphs = torch.zeros(1), CudaGraphs(runtime=Runtime())
    graphs.capture("step", lambda: length.add_(1), restore=lambda: length.zero_())
    assert length.item() == 0
    graphs.replay("step")
    assert length.item() == 1


@pytest.mark.parametrize(("times", "captures"), [(1, 2), (2, 3), (9, 3)])
def test_a_quiet_compile_is_captured_again_and_an_error_at_last(
    times: int, captures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found: set[str] = set()
    monkeypatch.setattr(compile_log, "cached_kernels", lambda: set(found))
    closed, resets = [], []

    class Compiling(Runtime):
        tried = 0

        def capture(self, fn: Callable[[], Any]) -> tuple[Any, Any]:
            if self.tried < times:
                found.add(f"deep_gemm/kernel.{self.tried}")
            self.tried += 1
            graph, outputs = super().capture(fn)
            monkeypatch.setattr(graph, "reset", lambda: resets.append(graph))
            return graph, outputs

        def close_pool(self) -> None:
            closed.append(self.tried)

    length, runtime = torch.zeros(1), Compiling()
    graphs = CudaGraphs(runtime=runtime)

    def capture() -> None:
        graphs.capture(4, lambda: length.add_(1), restore=lambda: length.zero_())

    if times > 2:
        with pytest.raises(CaptureError, match=r"CUDA graph 4: .*compiled inside the capture: deep_gemm/kernel\.2"):
            capture()
        assert 4 not in graphs and len(resets) == 3
    else:
        capture()
        assert 4 in graphs and len(resets) == times == len(closed)
    assert runtime.tried == captures and length.item() == 0
    assert sum("captured once more" in record.message for record in caplog.records) == captures - 1


@pytest.mark.gpu
def test_gpu_replay_pool_and_failures() -> None:
    x = torch.ones(1 << 20, device="cuda")
    pool = torch.cuda.graph_pool_handle()

    def in_pool() -> int:
        # The driver's count, which the ledger takes, contains what other processes do, torch's what earlier tests left.
        found = torch.cuda.memory_snapshot()
        return sum(segment["total_size"] for segment in found if tuple(segment["segment_pool_id"]) == tuple(pool))

    graphs, taken = CudaGraphs(pool=pool), [0]
    steps = {n: lambda n=n: (x[:n] * 2 + 1).sin() for n in (1 << 20, 1 << 10)}
    graphs.capture_all(steps, progress=lambda key: taken.append(in_pool()))
    assert [record.key for record in graphs.ledger] == [1 << 20, 1 << 10]
    assert taken[1] >= 1 << 22 and taken[2] - taken[1] < taken[1]
    x.fill_(3.0)
    torch.testing.assert_close(graphs.replay(1 << 10), torch.full((1 << 10,), 7.0, device="cuda").sin())

    class Syncs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.cuda.is_current_stream_capturing():
                x.sum().item()
            return x + 1

    stream = torch.cuda.current_stream()
    for broken in (nn.Sequential(Syncs()), nn.Sequential(Broken(3))):
        with pytest.raises(CaptureError, match=r"CUDA graph 'bad': 0 \("):
            graphs.capture("bad", lambda m=broken: m(x))
        assert torch.cuda.current_stream() == stream
        assert "bad" not in graphs
        x.fill_(1.0)
        eager = (x * 2 + 1).sin()
        torch.testing.assert_close(graphs.replay(1 << 20), eager)
        graphs.capture("good", lambda: x - 1)
        assert not graphs.replay("good").any()
        graphs.drop("good")
    # Nothing is left of the failures: ordinary allocations come and go as ever.
    graphs.clear()
    before = torch.cuda.memory_reserved()
    big = torch.empty(1 << 28, device="cuda")
    del big
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.gpu
def test_gpu_triton_compile_inside_a_capture_is_an_error() -> None:
    import fastlayers as fl

    class Fresh(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.cuda.is_current_stream_capturing():
                norm = fl.RMSNorm(x.shape[-1], device="cuda", dtype=torch.float32, backend="triton")
                return norm(x)
            return x

    graphs, x = CudaGraphs(), torch.ones(2, 1234, device="cuda")
    with pytest.raises(CaptureError, match=r"RMSNorm: .*would be compiled inside the capture"):
        graphs.capture("fresh", lambda: Fresh()(x))
    assert "fresh" not in graphs


@pytest.mark.gpu
def test_gpu_workspaces_that_others_free_are_not_written_by_a_replay() -> None:
    x, w = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((16, 16384), (16384, 2048)))
    graphs = CudaGraphs()
    graphs.capture("product", lambda: x @ w)  # few rows, long sums: cuBLAS adds up parts in its workspace
    torch._C._cuda_clearCublasWorkspaces()  # as inductor does when it records a graph of its own
    with torch.cuda.stream(graphs.runtime.stream):  # type: ignore[attr-defined]
        others = [torch.zeros(size << 20, dtype=torch.uint8, device="cuda") for size in (1, 4, 8, 24, 32, 32, 33)]
    torch.cuda.synchronize()
    torch.testing.assert_close(graphs.replay("product"), x @ w)
    assert not any(other.any() for other in others)
