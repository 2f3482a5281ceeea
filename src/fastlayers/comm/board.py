"""What the processes of one host tell each other between steps: messages through memory that all of them map.

    rank r writes its next message into its own ring ─► every other rank reads it, and says how far it has read

A message is there at once, without a call of the system, a thread or the device. Each record has a checksum of itself
and of its number, so that no order of stores needs to be trusted. Who waits looks now and then whether the other
process is still there: one that is gone is named at once, one that stands still when the deadline is over.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastlayers.comm.parallel import Axis
from fastlayers.comm.processes import AGAIN, ended, gather_objects, host, own, rank_lost

_DEPTH = 8  # records of a ring
_SIZE = 1 << 16  # bytes of a message that one record holds; longer ones take several
_HEAD = struct.Struct("<qqqq")  # number, bytes of the message, bytes here, checksum
_STRIDE = _HEAD.size + _SIZE
_LOOKS, _HASTY = 200, 64  # before a rank that waits rests between its looks; the first of them without a pause
_REST, _LONGEST_REST = 2e-5, 1e-3
_ALIVE_SECONDS = 0.05
_MEMORY = Path("/dev/shm")


class Board:
    """Messages between the processes of an axis, all on one host; made on all of them, together.

    Every rank reads every message of every other rank, in their order.

    Parameters
    ----------
    axis : Axis
        With a process group.
    deadline_s : float, optional
        How long a rank that lives is waited for; default: for ever.

    Raises
    ------
    OSError
        On all ranks: there is no room for it on the host, or one of them does not see the memory of the first, as in a
        container of its own.
    RankLostError
        In :meth:`read` and :meth:`post`: a process is gone, or says nothing within the deadline.
    """

    def __init__(self, axis: Axis, deadline_s: float | None = None) -> None:
        self.rank, self.size, self.deadline_s = axis.rank, axis.size, deadline_s
        # Ranks are named as in the world.
        self._names = axis.ranks if len(axis.ranks) == axis.size else tuple(range(axis.size))
        self._seen, self._sent = [0] * axis.size, 0
        nbytes = axis.size * (8 * axis.size + _DEPTH * _STRIDE)
        file, failed = None, ""
        try:
            file = _reserved(nbytes) if axis.rank == 0 else None
        except OSError as error:
            failed = f"Board: rank {self._names[0]} has no room for {nbytes:,} bytes: {error}"
        told = gather_objects((file.name if file is not None else failed, own()), axis, "making a board")
        if told[0][0].startswith("Board: "):
            raise OSError(told[0][0])
        try:
            with open(told[0][0], "r+b") as shared:
                self._memory = mmap.mmap(shared.fileno(), nbytes)
        except OSError as error:
            failed = f"Board: rank {self._names[axis.rank]} does not see what rank {self._names[0]} has made: {error}"
        reached = gather_objects(failed, axis, "making a board")
        if file is not None:
            file.close()  # everybody has it: nobody else needs its name
        if any(reached):
            raise OSError(next(filter(None, reached)))
        self._read = memoryview(self._memory).cast("q")  # [reader, writer]: records read, behind which a ring is free
        self._rings = 8 * axis.size * axis.size
        # Processes that cannot be seen from here (of another container) have the deadline only.
        self._processes = [process if not ended(process) else None for _, process in told]

    @staticmethod
    def make(axis: Axis, deadline_s: float | None = None) -> Board | None:
        """Return the board of an axis, or ``None`` where its ranks are on several hosts or no processes; collective."""
        import torch.distributed as dist

        if axis.size == 1 or not isinstance(axis.group, dist.ProcessGroup):
            return None
        hosts = gather_objects(host(), axis, "asking for the ranks' hosts")
        return Board(axis, deadline_s) if len(set(hosts)) == 1 else None

    def exchange(self, data: bytes) -> list[bytes]:
        """Return what every rank brings, in rank order; on all ranks."""
        self.post(data)
        return [data if rank == self.rank else self.read(rank) for rank in range(self.size)]

    def post(self, data: bytes) -> None:
        """Write the next message for all others."""
        for start in range(0, max(1, len(data)), _SIZE):
            piece = data[start : start + _SIZE]
            self._sent += 1
            for reader in range(self.size):
                if reader != self.rank:
                    self._wait(reader, partial(self._free, reader))
            at = self._place(self.rank, self._sent)
            self._memory[at + _HEAD.size : at + _HEAD.size + len(piece)] = piece
            head = _HEAD.pack(self._sent, len(data), len(piece), zlib.crc32(piece, self._sent & 0xFFFFFFFF))
            self._memory[at : at + _HEAD.size] = head

    def read(self, rank: int) -> bytes:
        """Wait for the next message of another rank, and return it."""
        whole = b""
        while True:
            number = self._seen[rank] + 1
            total, piece = self._wait(rank, partial(self._record, rank, number))
            self._seen[rank] = number
            self._read[self.rank * self.size + rank] = number
            whole += piece
            if len(whole) >= total:
                return whole

    def _free(self, reader: int) -> bool:
        """Return whether a rank has read what the next record takes the place of."""
        return self._read[reader * self.size + self.rank] + _DEPTH >= self._sent

    def _place(self, rank: int, number: int) -> int:
        return self._rings + (rank * _DEPTH + number % _DEPTH) * _STRIDE

    def _record(self, rank: int, number: int) -> tuple[int, bytes] | None:
        """Return a record that has come as a whole."""
        at = self._place(rank, number)
        found, total, size, check = _HEAD.unpack_from(self._memory, at)
        if found != number or not 0 <= size <= _SIZE:
            return None
        piece = self._memory[at + _HEAD.size : at + _HEAD.size + size]
        return (total, piece) if zlib.crc32(piece, number & 0xFFFFFFFF) == check else None

    def _wait(self, rank: int, ready: Callable[[], Any]) -> Any:
        """Return what ``ready`` returns as soon as that is true."""
        for look in range(_LOOKS):
            if found := ready():
                return found
            if look >= _HASTY:
                time.sleep(0)  # whoever shares this core; a call of the system may take longer than the exchange
        begin = looked = time.monotonic()
        rest = _REST
        while not (found := ready()):
            now = time.monotonic()
            if now - looked > _ALIVE_SECONDS:
                looked = now
                process = self._processes[rank]
                if process is not None and ended(process) and not ready():
                    gone = f"is gone, its process {process[1]} has ended"
                    raise rank_lost(f"Board: rank {self._names[rank]} {gone}; {AGAIN}", "Board", self._names[rank])
                if self.deadline_s is not None and now - begin > self.deadline_s:
                    silent = f"said nothing for {self.deadline_s:g} s"
                    raise rank_lost(f"Board: rank {self._names[rank]} {silent}; {AGAIN}", "Board", self._names[rank])
            time.sleep(rest)
            rest = min(_LONGEST_REST, 1.2 * rest)
        return found


def _reserved(nbytes: int) -> Any:
    """Return a file of this size, in memory where there is room."""
    in_memory = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 2 * nbytes
    file = tempfile.NamedTemporaryFile(prefix="fastlayers-", dir=_MEMORY if in_memory else None)  # noqa: SIM115
    os.posix_fallocate(file.fileno(), 0, nbytes)  # without room a write would end the process later
    return file
