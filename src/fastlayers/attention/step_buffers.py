"""Static buffers of a step's metadata: on the device, and on the host, where NumPy writes them at once.

Mirrored      bytes here and there; sent by one copy, through a ring of pinned blocks
PageTable     pages by request; only rows that changed are sent
StepBuffers   everything else
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import index
from typing import Any

import numpy as np
import torch

from fastlayers.attention.kv_cache.pool import MAX_PAGES
from fastlayers.errors import ArgumentError

RING = 4  # copies that may be under way
ALIGNMENT = 16  # bytes, of which Triton's kernels are compiled to know
_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class Mirrored:
    """Bytes on the device and on the host; on a CPU both are the same.

    Parameters
    ----------
    wanted : sequence of (int, torch.dtype)
        Elements and dtype of each field.
    device : torch.device

    Attributes
    ----------
    fields : list of (Tensor, ndarray)
        Of each field the view on the device and the one here.
    host_bytes : ndarray
        May be written again as soon as :meth:`send` returns: the device reads a pinned copy.
    """

    def __init__(self, wanted: Sequence[tuple[int, torch.dtype]], device: torch.device) -> None:
        sizes = [count * dtype.itemsize for count, dtype in wanted]
        # Each field begins where kernels like it to.
        starts = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        total = starts[-1]
        self.device_bytes = torch.zeros(total, dtype=torch.uint8, device=device)
        self._ring: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._turn = 0
        if device.type == "cuda":
            self.host_bytes = np.zeros(total, np.uint8)
            blocks = torch.zeros(RING, total, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._ring = [(block, torch.cuda.Event()) for block in blocks]
        else:
            self.host_bytes = self.device_bytes.numpy()
        self.fields: list[tuple[torch.Tensor, Any]] = []
        for first, size, (_, dtype) in zip(starts, sizes, wanted, strict=False):
            part = slice(first, first + size)
            self.fields.append((self.device_bytes[part].view(dtype), self.host_bytes[part].view(_NUMPY[dtype])))

    def send(self, first: int = 0, last: int | None = None) -> None:
        """Copy the bytes from ``first`` to ``last`` to the device, in stream order and without waiting for it."""
        if not self._ring:
            return
        block, copied = self._ring[self._turn]
        self._turn = (self._turn + 1) % RING
        copied.synchronize()  # of a copy long ago
        block.numpy()[first:last] = self.host_bytes[first:last]
        self.device_bytes[first:last].copy_(block[first:last], non_blocking=True)
        copied.record()


class StepBuffers:
    """The fields of a step's metadata but the page table, each as (on the device, on the host)."""

    def __init__(self, requests: int, tokens: int, device: torch.device) -> None:
        sizes = [(tokens, torch.int64), (tokens, torch.int64)]
        sizes += [(count, torch.int32) for count in (requests, requests, requests + 1, tokens)]
        self.mirrored = Mirrored(sizes, device)
        self.positions, self.loc, self.seq_lens, self.starts, self.cu, self.request = self.mirrored.fields
        # What a step of one token a request has, and keeps.
        self.cu[1][:] = np.arange(requests + 1)
        self.request[1][:] = np.arange(tokens)
        self.has_starts = False

    def views(self, rows: int, width: int) -> dict[str, Any]:
        """Return the device views that a step of ``rows`` requests and ``width`` tokens reads."""
        return {
            "seq_lens": self.seq_lens[0][:rows], "starts": self.starts[0][:rows],
            "cu_seqlens_q": self.cu[0][: rows + 1], "request_of_token": self.request[0][:width],
            "positions": self.positions[0][:width], "out_cache_loc": self.loc[0][:width],
        }  # fmt: skip


@dataclass(frozen=True)
class PageChanges:
    """What a step changes in a page table: which rows, and their pages, by row or as one array of all."""

    rows: Sequence[int]
    pages: dict[int, list[int]] | np.ndarray[Any, Any]


class PageTable:
    """Pages of each request of a step, 0 behind the last one.

    Attributes
    ----------
    device : Tensor int32 ``[max_batch, max_pages]``
    host : ndarray int32, of the same shape
    width : int
        Columns that may hold something.
    """

    def __init__(self, max_batch: int, max_pages: int, device: torch.device) -> None:
        self._mirrored = Mirrored([(max_batch * max_pages, torch.int32)], device)
        flat, host = self._mirrored.fields[0]
        self.device, self.host = flat.view(max_batch, max_pages), host.reshape(max_batch, max_pages)
        self._pages: list[list[int] | None] = [[] for _ in range(max_batch)]  # None: came with an array
        self._highest = [0] * max_batch  # page of each row, so that rows that did not change need no look
        self.width = 0

    def changes(self, table: Any, rows: int, num_pages: int | None) -> PageChanges:
        """Return what is new in the first ``rows`` rows, checked; most steps change little."""
        if is_array(table):
            return self._array_changes(table, rows, num_pages)
        changed: dict[int, list[int]] = {}
        for row in range(rows):
            pages: Sequence[int] = table[row] if row < len(table) else ()
            before = self._pages[row]
            if before is None or len(before) != len(pages) or not _alike(before, pages):
                changed[row] = _checked_pages(row, pages, num_pages)
            elif num_pages is not None and self._highest[row] >= num_pages:
                _checked_pages(row, pages, num_pages)
        return PageChanges(tuple(changed), changed)

    def _array_changes(self, table: np.ndarray[Any, Any], rows: int, num_pages: int | None) -> PageChanges:
        (count, columns), width = table.shape, self.width
        if table.size and (table.min() < 0 or table.max() >= (MAX_PAGES if num_pages is None else num_pages)):
            for row in range(count):
                _checked_pages(row, table[row].tolist(), num_pages)
        new = np.zeros(rows, bool)
        new[:count] = (self.host[:count, :columns] != table).any(1)
        if width > columns:
            new[:count] |= self.host[:count, columns:width].any(1)
        new[count:] = self.host[count:rows, :width].any(1)
        return PageChanges(np.flatnonzero(new).tolist(), table)

    def write(self, changes: PageChanges) -> None:
        """Bring the table up to date, here and on the device."""
        rows, pages = changes.rows, changes.pages
        if not rows:
            return
        if isinstance(pages, dict):
            lengths = np.array([len(found) for found in pages.values()])
            self.width = width = max(self.width, int(lengths.max()))
            block = np.zeros((len(rows), width), np.int32)
            given = np.fromiter(chain.from_iterable(pages.values()), np.int32, int(lengths.sum()))
            block[np.arange(width) < lengths[:, None]] = given
            self.host[rows, :width] = block
            for row, found in pages.items():
                self._pages[row], self._highest[row] = found, max(found, default=0)
        else:
            (count, columns), last = pages.shape, rows[-1] + 1
            self.host[:count, :columns] = pages
            self.host[:count, columns : self.width] = 0
            self.host[count:last, : self.width] = 0
            self.width = max(self.width, columns)
            for row in rows:
                self._pages[row] = None
        stride = 4 * self.host.shape[1]
        self._mirrored.send(min(rows) * stride, (max(rows) + 1) * stride)


def is_array(table: object) -> bool:
    """Return whether a page table is one array of integers, not rows of them."""
    return isinstance(table, np.ndarray) and table.ndim == 2 and table.dtype.kind == "i"


def _alike(before: list[int], pages: Sequence[int]) -> bool:
    try:
        if type(pages) is list:
            return before == pages
        return not isinstance(pages, bytes | bytearray) and before == list(pages)
    except (ValueError, RuntimeError):  # of arrays
        return False


def _checked_pages(row: int, pages: Sequence[int], num_pages: int | None) -> list[int]:
    """Return one request's pages as plain integers, or raise :class:`ArgumentError`."""
    try:
        found = [index(page) for page in pages]
    except (TypeError, RuntimeError):  # a fraction would be cut off, and another request's page written
        found = [-1]
    if bool in map(type, pages) or isinstance(pages, bytes | bytearray):  # flags and characters
        found = [-1]
    if found and (min(found) < 0 or max(found) >= (MAX_PAGES if num_pages is None else num_pages)):
        accepted = "page numbers: integers, 0 or more" if num_pages is None else f"pages in [0, {num_pages})"
        given = pages.tolist() if isinstance(pages, np.ndarray) else list(pages)
        raise ArgumentError("AttentionState.plan", f"page_table[{row}]", given, accepted)
    return found
