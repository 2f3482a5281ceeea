"""What the first rank says to the others: bytes over a Gloo group of their own, in the order in which it says them.

Nobody hears for long where nothing is asked for, so this group has no deadline: a rank whose first one is gone is ended
by torchrun, and one whose parent is gone ends itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

FRAME = 1 << 16  # bytes of the first message, of which eight say how many there are; the rest follows
FOREVER = timedelta(days=30)


class Channel:
    """Made on all ranks of the default process group, together."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self._group = dist.new_group(backend="gloo", timeout=FOREVER)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._frame = torch.zeros(FRAME, dtype=torch.uint8)

    def tell(self, message: bytes | None) -> None:
        """Say something, or (``None``) that nothing follows; on the first rank."""
        length = -1 if message is None else len(message)
        data = length.to_bytes(8, "little", signed=True) + (message or b"")
        head = bytearray(data[:FRAME])
        self._frame[: len(head)] = torch.frombuffer(head, dtype=torch.uint8)
        self._dist.broadcast(self._frame, 0, group=self._group)
        if len(data) > FRAME:
            self._dist.broadcast(torch.frombuffer(bytearray(data[FRAME:]), dtype=torch.uint8), 0, group=self._group)

    def hear(self) -> bytes | None:
        """Wait for what is said next; on the other ranks."""
        self._dist.broadcast(self._frame, 0, group=self._group)
        said = self._frame.numpy().tobytes()
        length = int.from_bytes(said[:8], "little", signed=True)
        if length < 0:
            return None
        if length + 8 <= FRAME:
            return said[8 : 8 + length]
        rest = torch.empty(length + 8 - FRAME, dtype=torch.uint8)
        self._dist.broadcast(rest, 0, group=self._group)
        return said[8:] + rest.numpy().tobytes()

    def collect(self, data: bytes) -> list[bytes]:
        """Return what every rank brings, in their order; on all ranks."""
        lengths = self._gather(torch.tensor([len(data)], dtype=torch.int64))
        most = max(map(int, lengths))
        parts = self._gather(torch.frombuffer(bytearray(data.ljust(most, b"\0")), dtype=torch.uint8))
        return [part.numpy().tobytes()[: int(length)] for part, length in zip(parts, lengths, strict=True)]

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._dist.all_gather(found, mine, group=self._group)
        return found


def pack(tensor: torch.Tensor) -> bytes:
    """Return a tensor of int32 (masks of a grammar) as bytes: its rows, then its values."""
    rows = tensor.to("cpu", torch.int32).contiguous()
    return rows.shape[0].to_bytes(8, "little") + rows.numpy().tobytes()


def unpack(message: bytes, device: torch.device) -> torch.Tensor:
    """Return the tensor of :func:`pack` on a device."""
    rows = int.from_bytes(message[:8], "little")
    values = torch.frombuffer(bytearray(message[8:]), dtype=torch.int32)
    return values.view(rows, -1).to(device)


class Digest:
    """A running checksum of the tokens of all plans, in their order; equal on all ranks, or one of them is wrong."""

    def __init__(self) -> None:
        self.count, self.value = 0, 0

    def add(self, tokens: Sequence[Sequence[int]]) -> None:
        """Take the tokens of the next plan."""
        self.count, self.value = self.count + 1, zlib.crc32(repr([list(each) for each in tokens]).encode(), self.value)
