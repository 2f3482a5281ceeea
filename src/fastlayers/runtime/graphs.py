"""CUDA graphs: capture functions over static inputs, one graph a key, and replay them.

    capture_all({key: fn, …})    largest key first, one memory pool, Python's collector frozen meanwhile
    capture(key, fn)             two warm-up calls on a side stream, then the capture
    outputs = replay(key)        the tensors that fn returned at capture, with new values
    ledger                       seconds, bytes and replays of every graph

What ``fn`` reads and writes must keep its address: static inputs are refreshed in place before a replay.
Source: SGLang's graph runners (buckets, largest first, one pool, the collector frozen meanwhile).
"""

from __future__ import annotations

import logging
import time
import traceback
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from fastlayers.comm.trail import TRAIL
from fastlayers.errors import ArgumentError, CaptureError, as_integers, check_positive
from fastlayers.runtime import compile_log
from fastlayers.runtime.gc_pause import gc_pause
from fastlayers.runtime.streams import side_lock, side_stream

log = logging.getLogger(__name__)
# Captures of one graph: processes that share a cache of kernels disturb each other.
ATTEMPTS = 3


def decode_buckets(max_batch: int, multiple_of: int = 1) -> tuple[int, ...]:
    """Return the batch sizes to capture for decode, ascending.

    1, 2, 4, 8, 12; every 8 from 16 to 256; every 16 to 496; every 32 above, and ``max_batch`` itself. With
    ``multiple_of`` (the ranks of an attention group) sizes below ``max_batch`` that are not its multiples are left
    out; ``max_batch`` stays, so that every batch has a bucket, and the model pads its rows.
    """
    check_positive("decode_buckets", max_batch=max_batch, multiple_of=multiple_of)
    max_batch, multiple_of = as_integers(max_batch, multiple_of)
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 497, 16), *range(512, max_batch + 1, 32)]
    kept = [size for size in sizes if size < max_batch and size % multiple_of == 0]
    return (*kept, max_batch)


def bucket_of(buckets: Sequence[int], batch: int) -> int | None:
    """Return the smallest of the ascending ``buckets`` that holds ``batch`` rows; ``None``: run it uncaptured."""
    place = bisect_left(buckets, batch)
    return buckets[place] if place < len(buckets) else None


class GraphRuntime(Protocol):
    """What :class:`CudaGraphs` needs of the machine; :class:`EagerRuntime` stands in where there is no GPU."""

    def warm_up(self, fn: Callable[[], Any], times: int) -> None:
        """Call ``fn`` so often, away from the current stream, and wait for it."""

    def capture(self, fn: Callable[[], Any]) -> tuple[Any, Any]:
        """Return ``(graph, what fn returned)``; ``graph`` has ``replay()`` and ``reset()``."""

    def free_bytes(self) -> int:
        """Return the device memory that nobody uses, everything finished and cached blocks given back."""

    def close_pool(self) -> None:
        """Forget the memory pool: the last graph is gone."""


def _cuda_device(device: torch.device | str | int | None) -> torch.device:
    accepted = "a CUDA device; without one CudaGraphs(runtime=EagerRuntime()), which is for tests"
    try:
        found = torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError("CudaGraphs", "device", repr(device), accepted) from error
    if found.type != "cuda":
        raise ArgumentError("CudaGraphs", "device", repr(device), accepted)
    if not torch.cuda.is_available():
        given = f"{device!r} on a machine without a usable NVIDIA GPU"
        raise ArgumentError("CudaGraphs", "device", given, accepted)
    return found


@contextmanager
def _own_cublas_workspaces() -> Iterator[None]:
    """Have the capture inside take cuBLAS's workspace from its own pool, and nobody else use that afterwards.

    torch keeps one workspace for each stream. One that the warm-up took from the general pool would be written by every
    replay, though anyone may free it: inductor frees all of them whenever it records a graph. One that a capture takes
    is kept by the pool for as long as its graphs live.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class CudaRuntime:
    """CUDA graphs by torch, all in one memory pool and captured on one stream.

    Parameters
    ----------
    device
        CUDA device.
    pool
        Handle of a pool to share with other graphs (``torch.cuda.graph_pool_handle()``); default: an own one.
    """

    def __init__(self, device: torch.device | str | int | None = None, pool: Any = None) -> None:
        self.device = _cuda_device(device)
        self.stream = side_stream(self.device)
        self._given = self._pool = pool

    def warm_up(self, fn: Callable[[], Any], times: int) -> None:
        """Call ``fn`` so often on the side stream, and wait for it."""
        with side_lock, torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for _ in range(times):
                    fn()
            torch.cuda.current_stream().wait_stream(self.stream)
            torch.cuda.synchronize()

    def capture(self, fn: Callable[[], Any]) -> tuple[Any, Any]:
        """Return ``(graph, what fn returned)``."""
        graph = torch.cuda.CUDAGraph()
        with side_lock, torch.cuda.device(self.device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            before = torch.cuda.current_stream()
            try:
                # thread_local: what other threads do (pinned copies, allocations) is no part of this capture.
                with (
                    _own_cublas_workspaces(),
                    torch.cuda.graph(graph, self._pool, self.stream, capture_error_mode="thread_local"),
                ):
                    outputs = fn()
            except BaseException:
                torch.cuda.set_stream(before)
                self._abandon()
                raise
        return graph, outputs

    def _abandon(self) -> None:
        """Undo what torch leaves behind where the end of a broken capture raises: it goes on recording to the pool.

        The next capture takes a new pool; graphs in the old one keep it.
        """
        device, pool = torch.cuda.current_device(), self._pool
        self._pool = None
        try:
            torch._C._cuda_endAllocateToPool(device, pool)
        except RuntimeError as error:  # the capture's end came that far: the graph gives the pool back itself
            log.debug("%s", error)
        else:
            torch._C._cuda_releasePool(device, pool)

    def free_bytes(self) -> int:
        """Return the driver's count, after cached blocks were given back."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info()[0]

    def close_pool(self) -> None:
        """Take a new pool next time, unless one was given: torch frees a pool with its last graph."""
        self._pool = self._given


class EagerRuntime:
    """Graphs without a GPU: a replay calls the function and writes its results into those of the capture.

    The contract is that of CUDA graphs (fixed outputs, static inputs), the speed is not: for tests.
    """

    class Graph:
        """A function that pretends to be a graph."""

        def __init__(self, fn: Callable[[], Any], outputs: Any) -> None:
            self.fn, self.outputs = fn, outputs

        def replay(self) -> None:
            """Call the function once more, into the same outputs."""
            for old, new in zip(tree_leaves(self.outputs), tree_leaves(self.fn()), strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)

        def reset(self) -> None:
            """Let go of the function and its outputs."""
            del self.fn, self.outputs

    def warm_up(self, fn: Callable[[], Any], times: int) -> None:
        """Call ``fn`` so often."""
        for _ in range(times):
            fn()

    def capture(self, fn: Callable[[], Any]) -> tuple[Any, Any]:
        """Call ``fn`` and keep its results; unlike a real capture, this computes."""
        outputs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, fn())
        return self.Graph(fn, outputs), outputs

    def free_bytes(self) -> int:
        """Return 0: nothing is counted."""
        return 0

    def close_pool(self) -> None:
        """There is none."""


@dataclass
class GraphRecord:
    """One line of the ledger.

    Parameters
    ----------
    key
        As given to :meth:`CudaGraphs.capture`.
    warm_up_seconds, capture_seconds : float
    bytes : int
        Device memory that the capture took (graph and its share of the pool), and the caller's ``static_bytes``.
        With one pool, the first and largest graph pays for what later ones reuse.
    replays : int
    """

    key: Hashable
    warm_up_seconds: float
    capture_seconds: float
    bytes: int
    replays: int = 0


@dataclass
class _Captured:
    graph: Any
    outputs: Any
    fn: Callable[[], Any]  # holds the static inputs, which the graph itself does not keep alive
    record: GraphRecord


class CudaGraphs:
    """Captured functions by key, least recently used first out.

    Parameters
    ----------
    device
        CUDA device; default: the current one.
    max_bytes : int, optional
        Limit of the ledger's bytes; beyond it the graphs replayed longest ago are freed. The newest always stays.
    pool : optional
        Memory pool to share, see :class:`CudaRuntime`.
    warm_ups : int
        Calls of a function before its capture: kernels get compiled, libraries choose their workspaces.
    freeze : bool
        Capture under :func:`gc_pause`.
    runtime : GraphRuntime, optional
        Default: :class:`CudaRuntime`.

    Raises
    ------
    ArgumentError
        The device is not CUDA's, or there is none.

    Notes
    -----
    All graphs share one pool, so an output is valid until the next replay of *any* of them. A freed graph's part of
    the pool serves the next capture; the device gets it back with the last graph.

    Examples
    --------
    >>> import torch
    >>> from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
    >>> x = torch.zeros(2)
    >>> graphs = CudaGraphs(runtime=EagerRuntime())  # on a GPU: CudaGraphs()
    >>> y = graphs.capture("double", lambda: x * 2)
    >>> x.fill_(3.0).tolist(), graphs.replay("double").tolist(), y.tolist()
    ([3.0, 3.0], [6.0, 6.0], [6.0, 6.0])
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        *,
        max_bytes: int | None = None,
        pool: Any = None,
        warm_ups: int = 2,
        freeze: bool = True,
        runtime: GraphRuntime | None = None,
    ) -> None:
        check_positive("CudaGraphs", warm_ups=warm_ups)
        if max_bytes is not None:
            check_positive("CudaGraphs", max_bytes=max_bytes)
        (self.max_bytes, self.warm_ups), self.freeze = as_integers(max_bytes, warm_ups), freeze
        self.runtime: GraphRuntime = runtime if runtime is not None else CudaRuntime(device, pool)
        self.evicted = 0
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """The captured keys, least recently replayed first."""
        return tuple(self._graphs)

    @property
    def ledger(self) -> list[GraphRecord]:
        """What every graph cost and how often it ran, least recently replayed first."""
        return [captured.record for captured in self._graphs.values()]

    @property
    def bytes(self) -> int:
        """Sum of the ledger's bytes."""
        return sum(record.bytes for record in self.ledger)

    @property
    def replays(self) -> int:
        """Sum of the ledger's replays."""
        return sum(record.replays for record in self.ledger)

    def capture(
        self, key: Hashable, fn: Callable[[], Any], *, restore: Callable[[], None] | None = None, static_bytes: int = 0
    ) -> Any:
        """Warm ``fn`` up, capture it, and return its outputs (tensors whose values come with each replay).

        Parameters
        ----------
        key : hashable
        fn : callable
            No arguments; reads and writes tensors that keep their addresses, and stays alive with the graph. It runs
            several times before anything is replayed.
        restore : callable, optional
            Undoes what those runs changed (lengths that count up); called after the warm-ups and after the capture,
            also if they fail.
        static_bytes : int
            Memory of the caller's that lives as long as this graph (a cache), for the byte limit.

        Raises
        ------
        CaptureError
            ``fn`` raised, synchronised or compiled a Triton kernel, or another package compiled at each of three
            attempts (their caches do not tell in which process); names the key and the innermost layer. Other graphs
            are as before, and nothing of this one is left.
        ArgumentError
            The key is taken.
        """
        with gc_pause(self.freeze):
            return self._capture(key, fn, restore, static_bytes, self.warm_ups)

    def capture_all(
        self,
        functions: Mapping[Any, Callable[[], Any]],
        *,
        size: Callable[[Any], Any] | None = None,
        restore: Callable[[], None] | None = None,
        progress: Callable[[Any], None] | None = None,
        seen: bool = False,
    ) -> None:
        """Capture several functions, the largest first, under one frozen collector.

        Parameters
        ----------
        functions : mapping
            Key to function, as for :meth:`capture`.
        size : callable, optional
            ``size(key)``; default: the key itself.
        restore : callable, optional
            As for :meth:`capture`, for each.
        progress : callable, optional
            Told each key when it is captured.
        seen : bool
            What they run has run before, in these sizes: but the first is warmed up only if its capture fails.

        Raises
        ------
        CaptureError
            As :meth:`capture`; graphs captured before the failing one stay.
        """
        with gc_pause(self.freeze):
            for place, key in enumerate(sorted(functions, key=size, reverse=True)):
                try:
                    self._capture(key, functions[key], restore, 0, 0 if seen and place else self.warm_ups)
                except CaptureError as error:
                    if not (seen and place):
                        raise
                    log.warning("%s; it is warmed up, and captured once more", error)
                    self.capture(key, functions[key], restore=restore)
                if progress is not None:
                    progress(key)

    def replay(self, key: Hashable) -> Any:
        """Replay on the current stream and return the static outputs, valid until the next replay of any key."""
        captured = self._graphs.get(key)
        if captured is None:
            raise ArgumentError("CudaGraphs.replay", "key", repr(key), f"a captured one: {list(self._graphs)}")
        self._graphs.move_to_end(key)
        captured.record.replays += 1
        TRAIL.step("replay", key)
        captured.graph.replay()
        return captured.outputs

    def outputs(self, key: Hashable) -> Any:
        """Return a graph's static outputs without replaying it."""
        if key not in self._graphs:
            raise ArgumentError("CudaGraphs.outputs", "key", repr(key), f"a captured one: {list(self._graphs)}")
        return self._graphs[key].outputs

    def drop(self, key: Hashable) -> None:
        """Free one graph; unknown keys are ignored."""
        captured = self._graphs.pop(key, None)
        if captured is not None:
            self.runtime.free_bytes()  # waits: a replay may be under way
            captured.graph.reset()
            if not self._graphs:
                self.runtime.close_pool()

    def clear(self) -> None:
        """Free all graphs."""
        for key in self.keys:
            self.drop(key)

    def _capture(
        self, key: Hashable, fn: Callable[[], Any], restore: Callable[[], None] | None, static_bytes: int, warm_ups: int
    ) -> Any:
        if key in self._graphs:
            raise ArgumentError("CudaGraphs.capture", "key", repr(key), "a key that is not captured yet")
        failed: list[Exception] = []
        undo = restore or (lambda: None)

        def noticed() -> Any:
            """Call fn; keep its exception, which a failing end of the capture would hide."""
            try:
                return fn()
            except Exception as error:
                failed.append(error)
                raise

        begin = time.perf_counter()
        try:
            self.runtime.warm_up(noticed, warm_ups)
            undo()
            warm, free = time.perf_counter(), self.runtime.free_bytes()
            graph, outputs = self._captured_calmly(key, noticed, undo)
        except Exception as error:
            if not self._graphs:
                self.runtime.close_pool()
            cause = failed[0] if failed else error
            raise CaptureError(f"CUDA graph {key!r}: {_where(cause)}{type(cause).__name__}: {cause}") from cause
        finally:
            undo()
        taken = max(0, free - self.runtime.free_bytes())
        record = GraphRecord(key, warm - begin, time.perf_counter() - warm, taken + static_bytes)
        self._graphs[key] = _Captured(graph, outputs, fn, record)
        self._evict()
        return outputs

    def _captured_calmly(self, key: Hashable, fn: Callable[[], Any], undo: Callable[[], None]) -> tuple[Any, Any]:
        """Capture while nothing is compiled; again if deep_gemm or flashinfer, here or in another process, did so."""
        for left in reversed(range(ATTEMPTS)):
            try:
                with compile_log.forbidden(f"CUDA graph {key!r}"), TRAIL.aside() as calls:
                    graph, outputs = self.runtime.capture(fn)
            except compile_log.QuietCompileError as error:
                graph.reset()
                if not left:
                    raise
                if not self._graphs:
                    self.runtime.close_pool()
                log.warning("%s; it is captured once more", error)
                undo()
            else:
                break
        TRAIL.step(f"capture {calls.digest():x}", key)
        return graph, outputs

    def _evict(self) -> None:
        while self.max_bytes is not None and self.bytes > self.max_bytes and len(self._graphs) > 1:
            oldest = next(iter(self._graphs))
            log.info("CUDA graph %r is freed: %d bytes of graphs, limit %d", oldest, self.bytes, self.max_bytes)
            self.drop(oldest)
            self.evicted += 1


def _where(error: BaseException) -> str:
    """Return the innermost module that ``error`` passed through, by its name in the outermost one: ``"layers.3: "``."""
    modules = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [module for module in modules if isinstance(module, nn.Module)]
    if not found:
        return ""
    names = {id(module): name for name, module in found[0].named_modules()}
    name = names.get(id(found[-1]), "")
    return f"{name} ({type(found[-1]).__name__}): " if name else f"{type(found[-1]).__name__}: "
