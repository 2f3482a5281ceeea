"""Sum over ranks + residual + norm in one launch, for few rows: each rank pushes its rows to all others and adds up.

    x[T, H] partial ─► inbox of every other rank ─► Σ in rank order ─► + residual ─► summed ─► norm ─► y

A word that has arrived differs from −0, which is never sent: data are their own flags, so there is no fence and no
second round trip. The reader puts −0 back. Two phases by a counter per row, which lives on the device: nothing of a
launch changes between replays, and any number of rows may follow any other.

All ranks of the axis make the same calls with the same number of rows, each on one stream. A program waits only for
programs of its own number, and pushes each row before it waits for that row: it does not matter how many programs of a
launch are resident together. Sums are fp32 in rank order,
rounded once; all ranks get the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastlayers.comm.symmetric import Arena
from fastlayers.comm.triton_signals import address, given_up, now, order
from fastlayers.errors import ArgumentError
from fastlayers.integers import next_power_of_2
from fastlayers.norm.rms_norm.layer import ROUNDINGS
from fastlayers.norm.rms_norm.row import normalised, quantised_row
from fastlayers.operators import operator
from fastlayers.quant.coded_rows import CodedRows, empty_codes
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, release_dependents

NO_NORM = -1
# −0 of the dtype: what an empty word holds.
EMPTY = {torch.bfloat16: 0x8000, torch.float16: 0x8000, torch.float32: 0x80000000}
# Rows in flight: more programs than a GPU holds at once would only queue.
PROGRAMS = 132


@triton.jit
def _push(x, row, inboxes_ptr, epoch_ptr, slots, hidden, rank, column, inside, WORD: tl.constexpr,
          EMPTY: tl.constexpr, N: tl.constexpr):  # fmt: skip
    turn = tl.load(epoch_ptr + row) & 1
    bits = x.to(WORD, bitcast=True)
    bits = tl.where(bits == EMPTY, 0, bits).to(WORD)
    at = ((turn * N + rank).to(tl.int64) * slots + row) * hidden + column
    for hop in tl.static_range(1, N):  # each rank begins with another peer
        box = address(inboxes_ptr, (rank + hop) % N, WORD)
        tl.store(box + at, bits, mask=inside)


@triton.jit
def _arrived(inbox_ptr, turn, source, row, slots, hidden, column, due, late, deadline_ns, status_ptr,
             WORD: tl.constexpr, EMPTY: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Wait for one rank's row, leave the slot empty, and return its words."""
    slot = inbox_ptr + ((turn * N + source).to(tl.int64) * slots + row) * hidden + column
    bits = tl.load(slot, mask=due, other=0, volatile=True)
    missing = tl.max((bits == EMPTY).to(tl.int32), axis=0)
    limit = now() + deadline_ns
    while (missing != 0) & (late == 0):
        bits = tl.load(slot, mask=due, other=0, volatile=True)
        missing = tl.max((bits == EMPTY).to(tl.int32), axis=0)
        if (missing != 0) & (now() >= limit):
            late = 1
            tl.store(status_ptr, 1 + source)
    tl.store(slot, tl.full(column.shape, EMPTY, WORD), mask=due)
    return bits, late


@triton.jit
def _finish(x, row, late, residual_ptr, weight, y_ptr, scales_ptr, summed_ptr, inbox_ptr, epoch_ptr, status_ptr,
            residual_stride, s_row, s_group, hidden, eps, slots, rank, deadline_ns, column, inside, WORD: tl.constexpr,
            EMPTY: tl.constexpr, N: tl.constexpr, ROUNDING: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
            QUANT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.cast(row, tl.int64)
    dtype: tl.constexpr = x.dtype
    epoch = tl.load(epoch_ptr + row)
    if HAS_RESIDUAL:  # on its way while we wait
        residual = tl.load(residual_ptr + at * residual_stride + column, mask=inside, other=0.0)
    if N == 2:  # two terms have one order
        bits, late = _arrived(inbox_ptr, epoch & 1, 1 - rank, row, slots, hidden, column, inside, late, deadline_ns,
                              status_ptr, WORD, EMPTY, N)  # fmt: skip
        total = x.to(tl.float32) + bits.to(dtype, bitcast=True).to(tl.float32)
    else:
        total = tl.zeros(column.shape, tl.float32)
        for source in range(N):
            due = inside & (source != rank)
            bits, late = _arrived(inbox_ptr, epoch & 1, source, row, slots, hidden, column, due, late, deadline_ns,
                                  status_ptr, WORD, EMPTY, N)  # fmt: skip
            total += tl.where(due, bits.to(dtype, bitcast=True).to(tl.float32), x.to(tl.float32))
    total = tl.where(late != 0, float("nan"), total)
    h = cast(total, dtype)
    if HAS_RESIDUAL:
        h = cast(h.to(tl.float32) + residual.to(tl.float32), dtype)
    tl.store(summed_ptr + at * hidden + column, h, mask=inside)
    if ROUNDING >= 0:
        y = cast(normalised(h, weight, hidden, eps, ROUNDING), dtype)
        if QUANT:
            codes, scale = quantised_row(y, BLOCK)
            group = tl.arange(0, BLOCK // 128)
            place = group[:, None] * 128 + tl.arange(0, 128)[None, :]
            tl.store(y_ptr + at * hidden + place, codes.to(tl.uint8, bitcast=True), mask=place < hidden)
            tl.store(scales_ptr + at * s_row + group.to(tl.int64) * s_group, scale, mask=group * 128 < hidden)
        else:
            tl.store(y_ptr + at * hidden + column, y, mask=inside)
    tl.store(epoch_ptr + row, epoch + 1)
    return late


@kernel(do_not_specialize=("rows", "slots", "rank", "deadline_ns", "s_row", "s_group"))
def _push_sum_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, scales_ptr, summed_ptr, inboxes_ptr, inbox_ptr, epoch_ptr, status_ptr,
    x_stride, residual_stride, s_row, s_group, hidden, eps, rows, slots, rank, deadline_ns,
    WORD: tl.constexpr, EMPTY: tl.constexpr, N: tl.constexpr, ROUNDING: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    QUANT: tl.constexpr, SINGLE: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    weight = 0.0
    if ROUNDING >= 0:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    await_inputs(PDL)  # nothing is read or pushed before
    release_dependents(PDL)
    late = given_up(status_ptr)
    if SINGLE:  # a program has one row, and keeps it
        x = tl.load(x_ptr + first.to(tl.int64) * x_stride + column, mask=inside, other=0.0)
        if PART != 2:
            _push(x, first, inboxes_ptr, epoch_ptr, slots, hidden, rank, column, inside, WORD, EMPTY, N)
        if PART != 1:
            _finish(x, first, late, residual_ptr, weight, y_ptr, scales_ptr, summed_ptr, inbox_ptr, epoch_ptr,
                    status_ptr, residual_stride, s_row, s_group, hidden, eps, slots, rank, deadline_ns, column, inside,
                    WORD, EMPTY, N, ROUNDING, HAS_RESIDUAL, QUANT, BLOCK)  # fmt: skip
    else:
        step = tl.num_programs(0)
        if PART <= 1:
            x = tl.load(x_ptr + first.to(tl.int64) * x_stride + column, mask=inside, other=0.0)
            _push(x, first, inboxes_ptr, epoch_ptr, slots, hidden, rank, column, inside, WORD, EMPTY, N)
        for row in range(first, rows, step):
            # The next row is on its way before this one is waited for: the link is busy meanwhile.
            following = row + step
            if PART <= 1:
                if following < rows:
                    x = tl.load(x_ptr + tl.cast(following, tl.int64) * x_stride + column, mask=inside, other=0.0)
                    _push(x, following, inboxes_ptr, epoch_ptr, slots, hidden, rank, column, inside, WORD, EMPTY, N)
            if PART != 1:
                x = tl.load(x_ptr + tl.cast(row, tl.int64) * x_stride + column, mask=inside, other=0.0)
                late = _finish(x, row, late, residual_ptr, weight, y_ptr, scales_ptr, summed_ptr, inbox_ptr, epoch_ptr,
                               status_ptr, residual_stride, s_row, s_group, hidden, eps, slots, rank, deadline_ns,
                               column, inside, WORD, EMPTY, N, ROUNDING, HAS_RESIDUAL, QUANT, BLOCK)  # fmt: skip


def warps_of(hidden_size: int) -> int:
    """Return the warps of a program that holds one row."""
    return min(16, max(1, next_power_of_2(hidden_size) // 512))


def _fake(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, peers: torch.Tensor,
    inbox: torch.Tensor, epoch: torch.Tensor, status: torch.Tensor, eps: float, rounding: int, rank: int, size: int,
    deadline_ns: int, part: int, warps: int, programs: int, codes: str,
) -> list[torch.Tensor]:  # fmt: skip
    rows = [x.new_empty(x.shape) for _ in range(1 if rounding == NO_NORM else 2)]
    return [*empty_codes(x, codes), rows[-1]] if codes else rows


@operator("push_sum", _fake, writes=("inbox", "epoch", "status"))
def _push_sum(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, peers: torch.Tensor,
    inbox: torch.Tensor, epoch: torch.Tensor, status: torch.Tensor, eps: float, rounding: int, rank: int, size: int,
    deadline_ns: int, part: int, warps: int, programs: int, codes: str,
) -> list[torch.Tensor]:  # fmt: skip
    rows, hidden = x.shape
    summed = torch.empty_like(x, memory_format=torch.contiguous_format)
    coded = empty_codes(x, codes) if codes else []
    y = coded[0].view(torch.uint8) if coded else summed if rounding == NO_NORM else torch.empty_like(summed)
    scales = coded[1] if coded else y
    if rows:
        grid = min(rows, programs)
        others = x if residual is None else residual
        _push_sum_kernel[(grid,)](
            x, others, x if weight is None else weight, y, scales, summed, peers, inbox, epoch, status,
            x.stride(0), others.stride(0), *scales.stride(), hidden, eps, rows, epoch.shape[0], rank, deadline_ns,
            WORD=tl.uint32 if x.dtype.itemsize == 4 else tl.uint16, EMPTY=EMPTY[x.dtype], N=size, ROUNDING=rounding,
            HAS_RESIDUAL=residual is not None, QUANT=bool(coded), SINGLE=rows == grid, BLOCK=next_power_of_2(hidden),
            PART=part, num_warps=warps, **order(x.device),
        )  # fmt: skip
    if coded:
        return [*coded, summed]
    return [summed] if rounding == NO_NORM else [y, summed]


class PushSum:
    """One-shot sum over the ranks of an arena, for up to ``slots`` rows; capture-safe, allocates its outputs.

    Parameters
    ----------
    arena : Arena
        Made with ``nbytes_for``; call ``arena.ready()`` after the last operator was constructed.
    hidden_size : int
    dtype : torch.dtype
        bf16, fp16 or fp32.
    slots : int
        Most rows a call.
    """

    def __init__(self, arena: Arena, hidden_size: int, dtype: torch.dtype, slots: int) -> None:
        if dtype not in EMPTY:
            raise ArgumentError("PushSum", "dtype", dtype, ", ".join(map(str, EMPTY)))
        self.arena, self.hidden_size, self.dtype, self.slots = arena, hidden_size, dtype, slots
        self.warps, self.programs = warps_of(hidden_size), PROGRAMS
        self.inbox = arena.carve((2, arena.size, slots, hidden_size), dtype, -0.0)
        self._words = self.inbox.tensor.view(torch.uint32 if dtype.itemsize == 4 else torch.uint16)
        # Counted by the own kernels only.
        self.epoch = torch.zeros(slots, dtype=torch.int32, device=arena.device)

    @staticmethod
    def nbytes_for(size: int, hidden_size: int, dtype: torch.dtype, slots: int) -> int:
        """Return the bytes that it carves."""
        return 2 * size * slots * hidden_size * dtype.itemsize + 256

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        eps: float = 0.0,
        rounding: str = ROUNDINGS[0],
        *,
        codes: str | None = None,
        part: int = 0,
    ) -> tuple[Any, torch.Tensor]:
        """Return ``(norm(h), h)`` with ``h`` = Σ over ranks of ``x [T, H]``, plus ``residual``.

        Without ``weight``: ``(h, h)``. ``codes``: a layout of scales; then ``norm(h)`` is
        :class:`~fastlayers.quant.coded_rows.CodedRows`, as GroupQuant makes them, bit by bit. ``part``: 0; for ranks
        in one process 1 (push) on all of them, then 2.
        """
        arena = self.arena
        how = NO_NORM if weight is None else ROUNDINGS.index(rounding)
        found = _push_sum(
            x, residual, weight, self.inbox.peers, self._words, self.epoch, arena.alarm, eps, how, arena.rank,
            arena.size, arena.deadline_ns, part, self.warps, self.programs, codes or "",
        )  # fmt: skip
        return (found[0] if codes is None else CodedRows(found[0], found[1])), found[-1]
