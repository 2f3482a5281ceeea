"""Several ranks for tests: real processes over Gloo or NCCL (:func:`world`), or threads (:func:`simulate`).

Both call ``function(rank, *args)`` on every rank and return the results in rank order; ``rank`` is a :class:`Rank`,
whose ``spec(attn_dp=…, ep=…)`` is the :class:`ParallelSpec` of that rank with working groups.

    def double(rank, x):
        return collectives(rank.spec().tp).all_reduce_(x * rank.rank)

    def test_it():
        results = world(2).run(double, torch.ones(3))

Processes are started once per world size and used for all jobs of the test session; over Gloo, forked from one that has
imported torch. A function is sent by name (its module, or the path of its test file), arguments and results by pickle.
Threads share one interpreter: quicker to start, able to take any argument, and a rank that stops early is noticed at
once.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fastlayers.comm.collectives import Collectives
from fastlayers.comm.parallel import AXES, Axis, ParallelSpec


class WorldError(RuntimeError):
    """A rank raised, died or did not answer in time; the message names it and holds its traceback."""


@dataclass
class Rank:
    """One rank of a test world: its number, its device, and its specs (made once for each grid)."""

    rank: int
    size: int
    device: torch.device
    make_spec: Callable[[int, int], ParallelSpec]
    _specs: dict[tuple[int, int], ParallelSpec] = field(default_factory=dict)

    def spec(self, *, attn_dp: int = 1, ep: int = 1) -> ParallelSpec:
        """Return this rank's spec; in processes a collective call (all ranks, the same arguments)."""
        if (attn_dp, ep) not in self._specs:
            self._specs[attn_dp, ep] = self.make_spec(attn_dp, ep)
        return self._specs[attn_dp, ep]


# ---- threads ---------------------------------------------------------------------------------------------------


class Switchboard:
    """A group of threads that exchange tensors; stands in ``Axis.group``."""

    def __init__(self, size: int, timeout: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.slots: list[Any] = [None] * size
        self.calls: list[str] = [""] * size

    def collectives(self, axis: Axis) -> Collectives:
        """Return the collectives of one member."""
        return ThreadCollectives(axis)

    def exchange(self, rank: int, call: str, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all members; all must make the same call with fitting rows."""
        self.slots[rank], self.calls[rank] = x.clone(), call
        self.barrier.wait()
        tensors, calls = list(self.slots), list(self.calls)
        self.barrier.wait()
        if len(set(calls)) != 1:
            self.barrier.abort()
            raise WorldError(f"ranks make different calls: {calls}")
        return tensors


class ThreadCollectives(Collectives):
    """Collectives between threads; sums in rank order."""

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis)
        self.board: Switchboard = axis.group

    def _exchange(self, call: str, x: torch.Tensor) -> list[torch.Tensor]:
        return self.board.exchange(self.rank, call, x)

    def _sum(self, call: str, x: torch.Tensor) -> torch.Tensor:
        first, *rest = self._exchange(f"{call} {list(x.shape)}", x)
        total = first.clone()
        for other in rest:
            total += other
        return total

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        # In place, as over a real group: a caller that still needs its partial sums must fail here too.
        return x.copy_(self._sum("all_reduce", x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(f"all_gather {list(x.shape)}", x))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        self._equal_part("reduce_scatter", x)
        return self.own_slice(self._sum("reduce_scatter", x)).clone()

    def all_gather_variable(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        self._check_rows("all_gather_variable", x, sizes, sizes[self.rank])
        return torch.cat(self._exchange(f"all_gather_variable {tuple(sizes)}", x))

    def reduce_scatter_variable(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        self._check_rows("reduce_scatter_variable", x, sizes, sum(sizes))
        start = sum(sizes[: self.rank])
        return self._sum(f"reduce_scatter_variable {tuple(sizes)}", x)[start : start + sizes[self.rank]].clone()


def simulate(size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run ``function(rank, *args)`` on ``size`` ranks that are threads; return the results in rank order.

    Raises
    ------
    WorldError
        A rank raised (its exception is the cause), or the ranks made different calls.
    """
    boards: dict[tuple[Any, ...], Switchboard] = {}
    lock = threading.Lock()

    def make_spec(rank: int, attn_dp: int, ep: int) -> ParallelSpec:
        plain = ParallelSpec.grid(size, rank, attn_dp=attn_dp, ep=ep)
        with lock:
            for name in AXES:
                axis = getattr(plain, name)
                board = boards.setdefault((attn_dp, ep, name, axis.ranks), Switchboard(axis.size, timeout))
                plain = replace(plain, **{name: replace(axis, group=board)})
        return plain

    def one(rank: int) -> Any:
        try:
            seat = Rank(rank, size, torch.device("cpu"), lambda attn_dp, ep: make_spec(rank, attn_dp, ep))
            return function(seat, *args)
        except Exception:
            with lock:
                for board in boards.values():
                    board.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [(rank, error) for rank, f in enumerate(futures) if (error := f.exception()) is not None]
    if errors:
        # A broken barrier is an echo of another rank's error.
        causes = [e for e in errors if not isinstance(e[1], threading.BrokenBarrierError)] or errors
        rank, error = causes[0]
        raise WorldError(f"rank {rank} of {size}: {type(error).__name__}: {error}") from error
    return [f.result() for f in futures]


# ---- processes -------------------------------------------------------------------------------------------------


# Nothing of this library: the server that ranks are forked from looks for modules where the interpreter does, not where
# ``sys.path`` of the session says. The last one is what torch.use_deterministic_algorithms imports.
_PRELOADED = ["torch", "torch.distributed.device_mesh", "torch._inductor.config"]


_pools: list[World] = []


class World:
    """A pool of rank processes; get one from :func:`world`.

    ``backend="nccl"`` puts rank ``i`` on ``cuda:i``. Over Gloo, ranks have the environment of the session's first ones.
    """

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self._processes: list[Any] = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._stores = 0

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 300.0, dying: Sequence[int] = ()
    ) -> list[Any]:
        """Run ``function(rank, *args)`` on every rank and return the results in rank order.

        ``dying``: ranks whose processes end meanwhile; their result is ``None``, and the others end afterwards.

        Raises
        ------
        WorldError
            A rank raised, died or did not answer within ``timeout`` seconds. The processes are then ended, and
            the next call starts new ones.
        """
        if not self._processes:
            self._start()
        job = pickle.dumps((*_address(function), pickle.dumps(args)))
        failures: dict[int, str] = {}
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(job)
            except OSError as error:
                failures[rank] = f"its process is gone ({error})"
        answers = self._collect(failures, time.monotonic() + timeout, timeout, dying)
        if failures or dying:
            self.close()
        if failures:
            text = "\n".join(f"rank {rank} of {self.size}: {failures[rank]}" for rank in sorted(failures))
            raise WorldError(f"{function.__qualname__}\n{text}")
        return [answers[rank] for rank in range(self.size)]

    def _collect(
        self, failures: dict[int, str], deadline: float, timeout: float, dying: Sequence[int]
    ) -> dict[int, Any]:
        """Return the answers; after the first failure the others have two seconds left."""
        answers: dict[int, Any] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in failures}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                reason = "waits for the ranks that failed" if failures else f"no answer within {timeout:g} s"
                failures.update({rank: reason for rank in waiting.values()})
                break
            for pipe in ready:
                assert isinstance(pipe, multiprocessing.connection.Connection)
                rank = waiting.pop(pipe)
                try:
                    good, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError) as error:
                    good, value = rank in dying, f"its process died ({type(error).__name__})"
                    value = None if good else value
                if good:
                    answers[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + 2.0)
        return answers

    def _start(self) -> None:
        # Importing torch is seconds of a processor, of each rank; what has used CUDA cannot be forked.
        context: Any = multiprocessing.get_context("forkserver" if self.backend == "gloo" else "spawn")
        context.set_forkserver_preload(_PRELOADED)
        # A file store needs no port; the file is gone with the directory, once all ranks have met.
        self._directory = tempfile.TemporaryDirectory(prefix="fastlayers_world_")
        store = self._store()
        poisoned = torch.are_deterministic_algorithms_enabled()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            args = (theirs, rank, self.size, self.backend, store, list(sys.path), poisoned)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _store(self) -> str:
        """Return the path of a file by which ranks may meet, once."""
        self._stores += 1
        return str(Path(self._directory.name) / f"store{self._stores}")

    def rest(self) -> None:
        """End the groups of ranks over Gloo, not their processes; a later :meth:`run` makes new ones.

        Each group has a thread that looks a hundred times a second whether there is something to do: pools of a
        session that keep all their groups take a quarter of two processors.
        """
        if self._processes and self.backend == "gloo":
            job = pickle.dumps(self._store())
            for pipe in self._pipes:
                with suppress(OSError):  # its process is gone: the next job says so
                    pipe.send_bytes(job)

    def close(self) -> None:
        """End the processes; a later :meth:`run` starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=0.2)
            if process.is_alive():
                process.kill()
                process.join()
        if self._processes:
            self._directory.cleanup()
        self._processes, self._pipes = [], []


@lru_cache
def world(size: int, backend: str = "gloo") -> World:
    """Return the pool of ``size`` rank processes of this session; they start with the first job."""
    pool = World(size, backend)
    atexit.register(pool.close)
    _pools.append(pool)
    return pool


def rest() -> None:
    """Let all pools of this session rest: see :meth:`World.rest`."""
    for pool in _pools:
        pool.rest()


def _address(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return (module, path, qualified name); test files are found by path, packages by name."""
    if "<" in function.__qualname__:
        raise WorldError(f"{function.__qualname__} cannot be sent: define it at the top of its file")
    # Of a decorated function the file is the decorator's.
    return function.__module__, str(inspect.getsourcefile(inspect.unwrap(function))), function.__qualname__


@lru_cache
def _load(module: str, path: str) -> Any:
    if module == "__main__":
        return sys.modules["__main__"]  # multiprocessing has loaded it under this name, without running its guard
    if module.partition(".")[0] in ("fastlayers", "fastlayers_models", "fastlayers_server"):
        return importlib.import_module(module)
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    # Under its name, so that pickle finds the classes of the file on both sides.
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def _serve(pipe: Any, rank: int, size: int, backend: str, store: str, path: list[str], poisoned: bool) -> None:
    """Answer jobs until the pipe closes (the body of a rank's process)."""
    sys.path[:] = path
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(poisoned, warn_only=True)  # unwritten memory is filled, as in the parent
    seat: Rank | None = None
    while True:
        try:
            job = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            match pickle.loads(job):
                case str(store):  # to rest until the next job, and where the ranks then meet
                    if seat is not None:
                        torch.distributed.destroy_process_group()
                        seat = None
                    continue
                case module, file, name, arguments:
                    seat = seat or _join(rank, size, backend, store)
            function: Any = _load(module, file)
            for piece in name.split("."):
                function = getattr(function, piece)
            torch.manual_seed(0)
            # By value: torch's own way of sending tensors shares memory and file descriptors.
            data = pickle.dumps((True, function(seat, *pickle.loads(arguments))))
        except Exception:
            data = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(data)


def _join(rank: int, size: int, backend: str, store: str) -> Rank:
    """Meet the other ranks and return this one."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    cuda = backend == "nccl"
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=250)
    )
    mesh = init_device_mesh("cuda" if cuda else "cpu", (size,))
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    return Rank(rank, size, device, lambda attn_dp, ep: ParallelSpec.from_mesh(mesh, attn_dp=attn_dp, ep=ep))
