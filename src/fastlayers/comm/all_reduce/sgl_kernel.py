"""AllReduce by sgl_kernel's kernels, by name, for up to eight megabytes.

    rows ─copy─► own buffer ─► every rank reads all buffers and adds up                           two ranks, few bytes
                            ─► every rank adds up a part of all buffers, then reads all parts     otherwise

The package takes addresses of the other ranks' memory, wherever they come from: here from symmetric memory, as our own
kernels'. So allocations of expandable segments, of which no cudaIpc handle exists, do no harm. Sums are fp32, rounded
once; with more than two ranks and many bytes each rank begins with its own term, and all ranks get the same bits.
"""

from __future__ import annotations

import importlib
import weakref
from functools import partial

import torch

from fastlayers.comm.all_reduce.layer import MOST_BYTES, AllReduceConfig
from fastlayers.comm.parallel import Axis
from fastlayers.comm.symmetric import ALIGNMENT, SymmArena
from fastlayers.errors import ArgumentError

# Records of eight addresses: those of calls that are not captured, and one for each captured call.
RECORDS, ADDRESSES = 1 << 16, 8


class SglAllReduce:
    """Copies rows into a buffer that other ranks read; the first of a workspace makes it, on all ranks together."""

    def __init__(self, cfg: AllReduceConfig) -> None:
        self.cfg, self.most = cfg, MOST_BYTES // (cfg.hidden_size * cfg.dtype.itemsize)
        made, device = cfg.workspace, cfg.workspace.arena.device
        self.sums: CustomSums = made.of_package("sgl_kernel", partial(CustomSums, cfg.axis, device))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a new tensor."""
        self.cfg.check_slots(x.shape[0], self.most, "which are 8 MB")
        return self.sums(x.contiguous()) if x.shape[0] else x


class CustomSums:
    """The package's object for the ranks of an axis, and the memory that it works in; collective."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        importlib.import_module("sgl_kernel")
        self.ops = torch.ops.sgl_kernel
        counters = self.ops.meta_size() + MOST_BYTES  # behind them what a rank has added up
        arena = SymmArena(axis, counters + MOST_BYTES + 2 * ALIGNMENT, device)
        self.records = torch.zeros(RECORDS, ADDRESSES, dtype=torch.int64, device=device)
        shared, inputs = (arena.carve((size,), torch.uint8) for size in (counters, MOST_BYTES))
        heads, places = shared.peers.tolist(), inputs.peers.tolist()  # and what was filled is filled
        self.arena, self.own = arena, places[axis.rank]
        self.handle = self.ops.init_custom_ar(heads, self.records.view(torch.uint8).flatten(), axis.rank, True)
        self._end = weakref.finalize(self, self.ops.dispose, self.handle)
        for _ in range(2):
            self.ops.register_buffer(self.handle, places)
        # A captured call reads the first record that is free, which the package fills behind the capture, in a call of
        # all ranks and from cudaIpc handles. All calls copy into one buffer, so all records are known now.
        self.free = RECORDS - 2
        row = self.records.new_tensor(places)
        if not torch.equal(self.records[:2, : axis.size], row.expand(2, -1)):
            accepted = "one whose records are eight addresses, as those of sglang-kernel 0.4.5"
            raise ArgumentError("AllReduce", "backend", "a version of sgl_kernel with other records", accepted)
        self.records[2:, : axis.size] = row
        arena.ready()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of contiguous rows, a new tensor."""
        if _capturing(x):
            if not self.free:
                accepted = f"{RECORDS - 2:,} in all; capture fewer buckets"
                raise ArgumentError("AllReduce", "captured calls of sgl_kernel", RECORDS - 1, accepted)
            self.free -= 1
        total = torch.empty_like(x)
        self.ops.all_reduce(self.handle, x, total, self.own, MOST_BYTES)
        return total


def _capturing(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
