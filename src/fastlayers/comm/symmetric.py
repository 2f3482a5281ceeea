"""Symmetric memory: one allocation that every rank of an axis can address, carved into inboxes, flags and counters.

    arena of rank r:   [ inbox | outbox | flags | … | alarm ] carved in the same order, at the same offsets, everywhere
    Shared.peers       address of one part on rank 0, 1, …   what kernels store to

:class:`SymmArena` is torch's symmetric memory over NVLink; :func:`local_arenas` are the arenas of several ranks in one
process, for tests: all ranks push, then all ranks read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fastlayers import env
from fastlayers.comm.parallel import Axis
from fastlayers.comm.processes import gather_objects, naming_lost
from fastlayers.errors import ArgumentError, CollectiveMismatch

# Kernels store 16 bytes at a time, and peers' programs poll lines of their own.
ALIGNMENT = 256


@dataclass(frozen=True)
class Shared:
    """One part of an arena: the own copy, and its addresses on all ranks (int64 ``[ranks]``, on the device)."""

    tensor: torch.Tensor
    peers: torch.Tensor


class NoSymmetricMemory(RuntimeError):
    """Why no arena was made, on any rank."""


def all_well(what: str, failures: Sequence[str | None]) -> None:
    """Raise :class:`NoSymmetricMemory` if a rank says why it could not get something."""
    for rank, why in enumerate(failures):
        if why is not None:
            raise NoSymmetricMemory(f"rank {rank} could not get {what}: {why}")


class Phases(dict[str, float]):
    """Seconds of what follows one another, by name; the clock starts when this is made."""

    def __init__(self) -> None:
        super().__init__()
        self._since = time.perf_counter()

    def end(self, name: str) -> None:
        """Note the seconds since the phase before ended."""
        now = time.perf_counter()
        self[name], self._since = self.get(name, 0.0) + now - self._since, now


def alarm_bytes(size: int) -> int:
    """Return the bytes at the end of an allocation that an arena of so many ranks takes for itself, aligned."""
    return -(-(8 + 8 * size) // ALIGNMENT) * ALIGNMENT + ALIGNMENT


class Arena:
    """What kernels that address other ranks are given; the base of both kinds.

    Parameters
    ----------
    size, rank : int
        Of the axis.
    buffer : uint8 Tensor
        The own part of the allocation; :func:`alarm_bytes` of it are no room for anything else.
    bases : sequence of int
        Address of the allocation on every rank.
    deadline_s : float
        How long a kernel waits for another rank. Then it sets ``status`` and no kernel of this arena waits any more;
        sums that it returns are NaN. Before the next sum of few rows, or exchange of tokens, sends anything, it sets
        all ranks'; exchanges of many rows then send nothing. One that comes too late would otherwise take rows of
        later calls.

    Attributes
    ----------
    status : int32 Tensor ``[1]``
        0, or 1 + the rank that was waited for in vain, by whichever rank.
    alarm : int32 Tensor ``[2 + 2 * size]``
        What kernels are given: the status word, ``size``, and the addresses of all ranks' status words.
    """

    def __init__(
        self, size: int, rank: int, buffer: torch.Tensor, bases: Sequence[int], deadline_s: float = 30.0
    ) -> None:
        self.size, self.rank, self.buffer, self.bases = size, rank, buffer, tuple(bases)
        # The allocation of each rank, where a test or a proof looks at it.
        self.views: Sequence[torch.Tensor] = ()
        self.deadline_ns = int(deadline_s * 1e9)
        self.used, self.room = 0, buffer.numel() - alarm_bytes(size)
        place = -(-self.room // ALIGNMENT) * ALIGNMENT
        self.alarm = buffer[place : place + 8 + 8 * size].view(torch.int32)
        self.alarm[:2].copy_(torch.tensor([0, size]))
        self.alarm[2:].view(torch.int64).copy_(torch.tensor([base + place for base in self.bases]))
        self.status = self.alarm[:1]

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.buffer.device

    def carve(self, shape: Sequence[int], dtype: torch.dtype, fill: float = 0) -> Shared:
        """Return the next part, filled; the same calls on all ranks, in the same order, then :meth:`ready`.

        Raises
        ------
        ArgumentError
            The arena is used up; it never grows.
        """
        wanted = prod(shape) * dtype.itemsize
        if self.used + wanted > self.room:
            accepted = f"at most {self.room - self.used:,} of {self.room:,} bytes, which are left"
            raise ArgumentError("SymmArena", "carve", f"{wanted:,} bytes", accepted)
        start, self.used = self.used, self.used + -(-wanted // ALIGNMENT) * ALIGNMENT
        tensor = self.buffer[start : start + wanted].view(dtype).view(*shape)
        tensor.fill_(fill)
        peers = torch.tensor([base + start for base in self.bases], dtype=torch.int64, device=self.device)
        return Shared(tensor, peers)

    def ready(self) -> None:
        """Wait until every rank has filled what it carved; before anyone's first push."""

    def prove(self, gather: Callable[[Any], list[Any]]) -> str | None:
        """Return why not every rank reaches the memory of every other, or ``None``; before anything is carved.

        Every rank stores a word of its own on every other and reads it back, then looks at what came here: drivers that
        say that it can be done have been wrong.

        Parameters
        ----------
        gather : callable
            Returns the objects of all ranks, given this one's; a collective call, behind which the others' stores are
            done.
        """
        back = []
        for peer in range(self.size):
            there = self.views[peer][: 4 * self.size].view(torch.int32)[self.rank : self.rank + 1]
            there.fill_(100 + self.rank * self.size + peer)  # and + 0: kernels, which go the way that ours go
            back.append(int(there + 0) == 100 + self.rank * self.size + peer)
        gather(None)
        came = self.buffer[: 4 * self.size].view(torch.int32).tolist()
        good = [one == 100 + peer * self.size + self.rank and back[peer] for peer, one in enumerate(came)]
        for rank, row in enumerate(gather(good)):
            if not all(row):
                return f"no peer access between ranks {row.index(False)} and {rank}"
        return None

    def failed(self) -> int | None:
        """Return the rank that was waited for in vain, or ``None``; waits for the device."""
        code = int(self.status.item())
        return code - 1 if code else None


class SymmArena(Arena):
    """An arena over torch's symmetric memory: collective over ``axis.group``, before any capture.

    Parameters
    ----------
    axis : Axis
        With a process group, whose ranks are on GPUs of one host.
    nbytes : int
        Equal on all ranks.
    device : torch device
    deadline_s : float
    phases : Phases, optional
        Where the seconds of making it are noted.

    Raises
    ------
    CollectiveMismatch
        The ranks ask for different sizes.
    NoSymmetricMemory
        On every rank alike: one of them has no memory for it, or cannot reach that of another.

    Notes
    -----
    NVLink multicast stays off: nothing here uses it, and on some fabrics asking for it fails.
    """

    def __init__(
        self, axis: Axis, nbytes: int, device: torch.device, deadline_s: float = 30.0, phases: Phases | None = None
    ) -> None:
        env.disable_multicast()
        self.phases = phases = phases if phases is not None else Phases()
        self.axis, self.group = axis, axis.group
        buffer, failed = None, None
        try:
            buffer = self._allocate(nbytes + alarm_bytes(axis.size), device)
        except RuntimeError as error:  # torch's of memory, among others
            failed = str(error).splitlines()[0][:200]
        phases.end("allocated")
        asked = self._gather((nbytes, failed))
        if len({size for size, _ in asked}) != 1:
            sizes = [size for size, _ in asked]
            raise CollectiveMismatch(f"SymmArena: the ranks ask for {sizes} bytes; accepted: one size on all ranks")
        all_well(f"{nbytes:,} bytes of symmetric memory", [why for _, why in asked])
        assert buffer is not None
        phases.end("sizes compared")
        views: list[torch.Tensor] = []
        try:
            views = self._meet(buffer, axis.size)
        except RuntimeError as error:
            failed = str(error).splitlines()[0][:200]
        phases.end("rendezvous")
        all_well("the memory of the other ranks", self._gather(failed))
        views[axis.rank] = buffer
        super().__init__(axis.size, axis.rank, buffer, [view.data_ptr() for view in views], deadline_s)
        self.views = views
        refusal = self.prove(self._gather)
        phases.end("proved")
        if refusal is not None:
            raise NoSymmetricMemory(refusal)

    def _allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        import torch.distributed._symmetric_memory as symmetric_memory

        # What torch's empty() calls, which imports sympy before it: most of a second.
        found: torch.Tensor = symmetric_memory._SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        return found

    def _meet(self, buffer: torch.Tensor, size: int) -> list[torch.Tensor]:
        """Return the allocations of all ranks, as they are addressed from here."""
        import torch.distributed._symmetric_memory as symmetric_memory

        self.handle: Any = symmetric_memory.rendezvous(buffer, self.group)
        nbytes, own = buffer.numel(), self.handle.get_buffer(self.handle.rank, (buffer.numel(),), torch.uint8, 0)
        shift = buffer.data_ptr() - own.data_ptr()  # torch may place a tensor at an offset of its block
        return [self.handle.get_buffer(peer, (nbytes,), torch.uint8, shift) for peer in range(size)]

    def _gather(self, mine: Any) -> list[Any]:
        return gather_objects(mine, self.axis, "making symmetric memory")

    def ready(self) -> None:
        import torch.distributed as dist

        torch.cuda.synchronize(self.device)
        self.phases.end("carved, filled")
        with naming_lost(self.axis, "making symmetric memory"):
            dist.barrier(group=self.group)
        torch.cuda.synchronize(self.device)
        self.phases.end("barrier")


def local_arenas(size: int, nbytes: int, device: torch.device | str = "cpu", deadline_s: float = 2.0) -> list[Arena]:
    """Return the arenas of ``size`` ranks that are all in this process, each with memory of its own."""
    buffers = [torch.empty(nbytes + alarm_bytes(size), dtype=torch.uint8, device=device) for _ in range(size)]
    bases = [buffer.data_ptr() for buffer in buffers]
    made = [Arena(size, rank, buffers[rank], bases, deadline_s) for rank in range(size)]
    for arena in made:
        arena.views = buffers
    return made
