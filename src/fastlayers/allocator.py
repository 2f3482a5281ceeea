"""A buffer of zeros that is handed out piece by piece and zeroed again once per step: :class:`BumpAllocator`.

    |slot|pad|slot|pad|      free       |        one allocation, every slot starts at a multiple of 16 bytes
                       ^ used                  ^ capacity

Small accumulators (absolute maxima, counters) must start at zero each step. One memset a step replaces one a
layer. No kernel of this library needs it: counters are left at zero by their last reader, maxima and counts are stored
before they are read, so that a step zeroes nothing. It is for kernels that others register.
"""

from __future__ import annotations

import math

import torch

from fastlayers.errors import (
    AllocatorOverflowError,
    ArgumentError,
    as_integers,
    check_device,
    check_kind,
    check_plain,
    check_positive,
)
from fastlayers.memory import memory_for
from fastlayers.registry import Backend, Registry

ALIGNMENT = 16
BUMP_ALLOCATOR = Registry(
    "bump_allocator",
    [Backend("torch", "fastlayers.allocator:BumpAllocator", auto_on=("cpu", "cuda"), note="one memset a step")],
)


class BumpAllocator:
    """Hands out zeroed tensors from one buffer; each byte once per step.

    Parameters
    ----------
    capacity_bytes : int
        Size of the buffer, rounded up to 16 bytes.
    device
        Of the buffer.

    Notes
    -----
    The same requests in the same order give the same addresses in every step, so a captured graph stays
    valid. Inside a capture :meth:`begin_step` zeroes the whole buffer, because replays are not alone in
    using it. A slot stays the caller's until the next :meth:`begin_step`.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> allocator = fl.BumpAllocator(1024)
    >>> allocator.begin_step()
    >>> allocator.alloc("layers.0.absmax", (3,)).tolist()
    [0.0, 0.0, 0.0]
    >>> allocator.ledger()
    {'layers.0.absmax': 16}
    """

    def __init__(self, capacity_bytes: int, device: torch.device | str | None = None) -> None:
        check_positive("BumpAllocator", capacity_bytes=capacity_bytes)
        (capacity_bytes,) = as_integers(capacity_bytes)
        self.capacity = _aligned(capacity_bytes)
        # One alignment more than asked for, in case the device's allocator starts at an odd address.
        where = check_device("BumpAllocator", device)
        with memory_for("BumpAllocator", capacity_bytes=capacity_bytes):
            storage = torch.zeros(self.capacity + ALIGNMENT, dtype=torch.uint8, device=where)
        offset = -storage.data_ptr() % ALIGNMENT
        self.buffer = storage[offset : offset + self.capacity]
        self.used = 0
        self.high_water = 0
        self._ledger: dict[str, int] = {}

    @property
    def left(self) -> int:
        """Bytes not yet handed out in this step."""
        return self.capacity - self.used

    def begin_step(self) -> None:
        """Zero whatever was handed out so far (one memset) and start again at the buffer's beginning."""
        capturing = self.buffer.is_cuda and torch.cuda.is_current_stream_capturing()
        dirty = self.capacity if capturing else self.high_water
        if dirty:
            self.buffer[:dirty].zero_()
        self.used = 0
        self._ledger.clear()

    def alloc(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a zeroed contiguous tensor, 16-byte aligned.

        Parameters
        ----------
        name : str
            The requester, for the ledger; asking twice gives two slots.
        shape : tuple[int, ...]
        dtype : torch.dtype

        Raises
        ------
        AllocatorOverflowError
            The buffer has no room: the message names the requester, its bytes, what is left, and the ledger.
            The allocator is as it was before.
        ArgumentError
            A negative size, or an argument of another type.
        """
        check_plain("BumpAllocator", "str", name=name)
        check_kind("BumpAllocator", torch.dtype, dtype=dtype)
        check_plain("BumpAllocator", "tuple[int, ...]", shape=tuple(shape) if isinstance(shape, list) else shape)
        if any(size < 0 for size in shape):
            raise ArgumentError("BumpAllocator", "shape", tuple(shape), "sizes of 0 or more")
        wanted = math.prod(shape) * dtype.itemsize
        taken = _aligned(wanted)
        if taken > self.left:
            rows = "\n".join(f"  {size:>10,}  {owner}" for owner, size in self._ledger.items()) or "  (empty)"
            raise AllocatorOverflowError(
                f"BumpAllocator: {name} asks for {taken:,} bytes, {self.left:,} of {self.capacity:,} are left\n{rows}"
            )
        slot = self.buffer[self.used : self.used + wanted].view(dtype).view(shape)
        self.used += taken
        self.high_water = max(self.high_water, self.used)
        self._ledger[name] = self._ledger.get(name, 0) + taken
        return slot

    def ledger(self) -> dict[str, int]:
        """Return the bytes handed out in this step by requester, alignment included."""
        return dict(self._ledger)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
