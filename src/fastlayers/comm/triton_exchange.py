"""Exchange of many rows between ranks in one launch: reduce-scatter, all-gather, and both around residual and norm.

    scatter   x[n·p, H] partial ─► inbox of each row's owner ─► Σ in rank order (own p rows) [+ residual [, norm]]
    gather    own p rows ─► outbox of every rank, [n·p, H]     (or e4m3 codes and scales: half the bytes)

Programs of equal number on all ranks exchange with each other: a program stores its rows and raises its flag on the
peer, in chunks, so that one chunk is on its way while the one before is added up. Flags only grow and are compared by
difference, so nothing is reset. Inboxes have two phases by a counter per program, on the device. The outbox has one,
so that what is gathered lies at one address in every replay: a rank stores there only after a flag has told it that
its reader has come as far as this call.

All ranks make the same calls with the same number of rows, zero included, each on one stream.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastlayers.comm.symmetric import Arena
from fastlayers.comm.triton_push import warps_of
from fastlayers.comm.triton_signals import address, await_signal, order, signal
from fastlayers.errors import ArgumentError
from fastlayers.integers import next_power_of_2
from fastlayers.norm.rms_norm.layer import ROUNDINGS
from fastlayers.norm.rms_norm.row import normalised, quantised_row
from fastlayers.operators import nothing, operator
from fastlayers.quant.coded_rows import CodedRows
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, release_dependents

NO_NORM = -1
PROGRAMS = 128
# Rows of a program between two flags.
CHUNK = 8
# What moves more rows of each rank than so many has more programs with shorter chunks: a reduce-scatter of 16,384 rows
# of two ranks takes 351 us instead of 396, while small exchanges take up to 6 us more (benchmarks/two_gpus.py rows).
MANY = 2048
# Rows beside each other whose scales, where they lie in columns, cross in packets of 16 bytes and not of 4: 183 us
# instead of 249 for 16,384 rows of two ranks, 14.3 instead of 14.9 for 256 (benchmarks/notes/exchange.md).
BESIDE = 4


def registers_of(ranks: int) -> int:
    """Return the registers of a thread of such rows: of two ranks few enough for two programs a multiprocessor."""
    return 64 if ranks == 2 else 128


def way_of(share: int, normed: bool = False) -> tuple[int, int]:
    """Return the programs and the chunk of an exchange of up to ``share`` rows of each rank.

    ``normed``: of a reduce-scatter, norm and all-gather, which more programs do not help (662 us instead of 670).
    """
    return (PROGRAMS, CHUNK) if share <= MANY or normed else (264, 4)


@triton.jit
def _send(x_ptr, x_stride, inboxes_ptr, flags_ptr, first, last, turn, slots, share, hidden, rank, epoch, column, inside,
          N: tl.constexpr):  # fmt: skip
    """Store the rows ``first … last`` of every other rank's share in its inbox, then raise its flag."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    for hop in tl.static_range(1, N):
        owner = (rank + hop) % N
        box = address(inboxes_ptr, owner, x_ptr.dtype.element_ty) + (turn * N + rank).to(tl.int64) * slots * hidden
        for row in range(first, last, programs):
            value = tl.load(x_ptr + (owner * share + row).to(tl.int64) * x_stride + column, mask=inside, other=0.0)
            tl.store(box + tl.cast(row, tl.int64) * hidden + column, value, mask=inside)
    for hop in tl.static_range(1, N):
        flag = address(flags_ptr, (rank + hop) % N, tl.int32)
        signal(flag + rank * programs + program, epoch)


@triton.jit
def _total(x_ptr, x_stride, inbox_ptr, row, turn, slots, share, hidden, rank, column, inside, N: tl.constexpr):
    """Return the sum over ranks of one own row, in rank order."""
    total = tl.zeros(column.shape, tl.float32)
    for source in tl.static_range(N):
        mine = source == rank
        slot = inbox_ptr + ((turn * N + source).to(tl.int64) * slots + row) * hidden + column
        theirs = tl.load(slot, mask=inside & (source != rank), other=0.0, volatile=True)
        own = tl.load(x_ptr + (rank * share + row).to(tl.int64) * x_stride + column, mask=inside & mine, other=0.0)
        total += theirs.to(tl.float32) + own.to(tl.float32)
    return total


@triton.jit
def _own_row(x_ptr, x_stride, residual_ptr, residual_stride, summed_ptr, inbox_ptr, row, turn, slots, share, hidden,
             rank, weight, eps, late, column, inside, N: tl.constexpr, SCATTER: tl.constexpr, ROUNDING: tl.constexpr,
             HAS_RESIDUAL: tl.constexpr):  # fmt: skip
    """Return one own row as it leaves, summed and normed; its sum is stored."""
    at = tl.cast(row, tl.int64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if SCATTER:
        total = _total(x_ptr, x_stride, inbox_ptr, row, turn, slots, share, hidden, rank, column, inside, N)
        h = cast(tl.where(late != 0, float("nan"), total), dtype)
    else:
        h = tl.load(x_ptr + at * x_stride + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        old = tl.load(residual_ptr + at * residual_stride + column, mask=inside, other=0.0)
        h = cast(h.to(tl.float32) + old.to(tl.float32), dtype)
    if SCATTER or HAS_RESIDUAL:
        tl.store(summed_ptr + at * hidden + column, h, mask=inside)
    if ROUNDING >= 0:
        h = cast(normalised(h, weight, hidden, eps, ROUNDING), dtype)
    return h


@triton.jit
def _give_coded(y, at, outboxes_ptr, scales_at, s_row, s_group, hidden, rank, BLOCK: tl.constexpr, N: tl.constexpr):
    """Store one row as codes and scales in every rank's outbox: codes first, ``scales_at`` bytes behind them scales."""
    codes, scale = quantised_row(y, BLOCK)
    group = tl.arange(0, BLOCK // 128)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    for hop in tl.static_range(N):
        box = address(outboxes_ptr, (rank + hop) % N, tl.uint8)
        tl.store(box + at * hidden + column, codes.to(tl.uint8, bitcast=True), mask=column < hidden)
        scales = (box + scales_at).to(tl.pointer_type(tl.float32))
        tl.store(scales + at * s_row + group.to(tl.int64) * s_group, scale, mask=group * 128 < hidden)


@triton.jit
def _give_beside(x_ptr, x_stride, residual_ptr, residual_stride, summed_ptr, outboxes_ptr, first, scales_at, s_row,
                 s_group, share, hidden, rank, weight, eps, column, inside, N: tl.constexpr, ROUNDING: tl.constexpr,
                 HAS_RESIDUAL: tl.constexpr, BESIDE: tl.constexpr, COLUMNS: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Store ``BESIDE`` own rows as :func:`_give_coded` does, and their scales at once; ``COLUMNS``: ``s_row`` is 1."""
    group, beside = tl.arange(0, BLOCK // 128), tl.arange(0, BESIDE)
    tile = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    kept = tl.zeros((BLOCK // 128, BESIDE), tl.float32)
    for each in tl.range(0, BESIDE, loop_unroll_factor=1):
        row = first + each
        there = row < share
        y = _own_row(x_ptr, x_stride, residual_ptr, residual_stride, summed_ptr, x_ptr, row, 0, 0, share, hidden, rank,
                     weight, eps, 0, column, inside & there, N, False, ROUNDING, HAS_RESIDUAL)  # fmt: skip
        codes, scale = quantised_row(y, BLOCK)
        at = (rank * share + row).to(tl.int64)
        for hop in tl.static_range(N):
            box = address(outboxes_ptr, (rank + hop) % N, tl.uint8)
            tl.store(box + at * hidden + tile, codes.to(tl.uint8, bitcast=True), mask=(tile < hidden) & there)
        kept = tl.where(beside[None, :] == each, scale[:, None], kept)
    at = (rank * share + first + beside)[None, :]
    if not COLUMNS:  # by a number the compiler would not see that scales of a column are neighbours
        at *= s_row
    place = group[:, None].to(tl.int64) * s_group + at
    for hop in tl.static_range(N):
        box = address(outboxes_ptr, (rank + hop) % N, tl.uint8) + scales_at
        there = (group[:, None] * 128 < hidden) & (first + beside < share)[None, :]
        tl.store(box.to(tl.pointer_type(tl.float32)) + place, kept, mask=there)


@triton.jit
def _given_up(y_ptr, summed_ptr, s_row, s_group, share, hidden, column, inside, N: tl.constexpr, SCATTER: tl.constexpr,
              GATHER: tl.constexpr, QUANT: tl.constexpr, ROUNDING: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """Give NaN, of codes as scales, and send nothing.

    A rank that comes to an earlier call then waits in vain, and gives up, too. Else it would find the rows of later
    calls behind the signals that it waits for.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    if SCATTER or HAS_RESIDUAL:
        for row in range(program, share, programs):
            tl.store(summed_ptr + tl.cast(row, tl.int64) * hidden + column, float("nan"), mask=inside)
    if QUANT:
        for row in range(program, N * share, programs):
            for group in range(0, hidden // 128):
                tl.store(y_ptr + row * s_row + group * s_group, float("nan"))
    elif GATHER or ROUNDING >= 0:  # what is gathered lies in the own outbox
        for row in range(program, N * share if GATHER else share, programs):
            tl.store(y_ptr + tl.cast(row, tl.int64) * hidden + column, float("nan"), mask=inside)


@kernel(do_not_specialize=("share", "slots", "rank", "deadline_ns", "s_row", "s_group"))
def _exchange_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, summed_ptr, inboxes_ptr, inbox_ptr, outboxes_ptr, flags_ptr, flag_ptr,
    state_ptr, status_ptr, x_stride, residual_stride, hidden, eps, share, slots, rank, deadline_ns, scales_at, s_row,
    s_group, N: tl.constexpr, SCATTER: tl.constexpr, GATHER: tl.constexpr, QUANT: tl.constexpr,
    ROUNDING: tl.constexpr, HAS_RESIDUAL: tl.constexpr, CHUNK: tl.constexpr, BESIDE: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    weight = 0.0
    if ROUNDING >= 0:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    await_inputs(PDL)
    release_dependents(PDL)
    late = tl.load(status_ptr)  # other kernels tell all ranks: registers are scarce here
    if late != 0:
        _given_up(y_ptr, summed_ptr, s_row, s_group, share, hidden, column, inside, N, SCATTER, GATHER, QUANT, ROUNDING,
                  HAS_RESIDUAL, BLOCK)  # fmt: skip
        return
    base = tl.load(state_ptr + 2 * program)
    turn = tl.load(state_ptr + 2 * program + 1) & 1
    step = CHUNK * programs
    # Equal on all ranks, and never zero: every rank waits for every other in every call.
    chunks = tl.maximum(tl.cdiv(share, step), 1)
    last = base + chunks
    for chunk in range(0, chunks + 1):
        if PART <= 1:
            if SCATTER:
                if chunk < chunks:
                    first = chunk * step + program
                    _send(x_ptr, x_stride, inboxes_ptr, flags_ptr, first, tl.minimum((chunk + 1) * step, share), turn,
                          slots, share, hidden, rank, base + chunk + 1, column, inside, N)  # fmt: skip
            else:
                if chunk == 0:  # nothing to add up: only that this rank's outbox may be written
                    _send(x_ptr, x_stride, inboxes_ptr, flags_ptr, 0, 0, turn, slots, share, hidden, rank, last, column,
                          inside, N)  # fmt: skip
        if PART == 0 or PART == 2:
            if chunk > 0:
                due = base + chunk if SCATTER else last
                for hop in tl.static_range(1, N):
                    giver = (rank + hop) % N
                    late = await_signal(flag_ptr + giver * programs + program, due, late, deadline_ns, status_ptr,
                                        1 + giver)  # fmt: skip
                done = tl.minimum(chunk * step, share)
                if BESIDE > 1:
                    for first in range((chunk - 1) * step + program * BESIDE, done, programs * BESIDE):
                        _give_beside(x_ptr, x_stride, residual_ptr, residual_stride, summed_ptr, outboxes_ptr, first,
                                     scales_at, s_row, s_group, share, hidden, rank, weight, eps, column, inside, N,
                                     ROUNDING, HAS_RESIDUAL, BESIDE, COLUMNS, BLOCK)  # fmt: skip
                else:
                    for row in range((chunk - 1) * step + program, done, programs):
                        y = _own_row(x_ptr, x_stride, residual_ptr, residual_stride, summed_ptr, inbox_ptr, row, turn,
                                     slots, share, hidden, rank, weight, eps, late, column, inside, N, SCATTER,
                                     ROUNDING, HAS_RESIDUAL)  # fmt: skip
                        at = (rank * share + row).to(tl.int64)
                        if QUANT:
                            _give_coded(y, at, outboxes_ptr, scales_at, s_row, s_group, hidden, rank, BLOCK, N)
                        elif GATHER:
                            for hop in tl.static_range(N):
                                box = address(outboxes_ptr, (rank + hop) % N, dtype)
                                tl.store(box + at * hidden + column, y, mask=inside)
                        elif ROUNDING >= 0:
                            tl.store(y_ptr + tl.cast(row, tl.int64) * hidden + column, y, mask=inside)
    if GATHER and (PART == 0 or PART == 2):
        for hop in tl.static_range(1, N):
            flag = address(flags_ptr, (rank + hop) % N, tl.int32)
            signal(flag + (N + rank) * programs + program, last)
    if GATHER and (PART == 0 or PART == 3):
        for hop in tl.static_range(1, N):
            giver = (rank + hop) % N
            late = await_signal(flag_ptr + (N + giver) * programs + program, last, late, deadline_ns, status_ptr,
                                1 + giver)  # fmt: skip
    if PART == 0 or PART == 3:
        tl.store(state_ptr + 2 * program, last)
        tl.store(state_ptr + 2 * program + 1, turn + 1)


@operator("exchange_rows", nothing, writes=("y", "summed", "inbox", "flag", "state", "status"))
def _exchange_rows(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, y: torch.Tensor, summed: torch.Tensor,
    inboxes: torch.Tensor, inbox: torch.Tensor, outboxes: torch.Tensor, flags: torch.Tensor, flag: torch.Tensor,
    state: torch.Tensor, status: torch.Tensor, eps: float, share: int, slots: int, rank: int, size: int,
    deadline_ns: int, scatter: bool, gather: bool, rounding: int, part: int, chunk: int, scales_at: int, s_row: int,
    s_group: int,
) -> None:  # fmt: skip
    hidden = x.shape[-1]
    others = x if residual is None else residual
    # What is added up was sent by programs that deal out its rows one by one.
    beside = BESIDE if scales_at and (s_row == 1 or rounding != NO_NORM) and not scatter else 1
    limits = {"maxnreg": registers_of(size)} if beside > 1 else {}
    _exchange_kernel[(state.shape[0],)](
        x, others, x if weight is None else weight, y, summed, inboxes, inbox, outboxes, flags, flag, state, status,
        x.stride(0), others.stride(0), hidden, eps, share, slots, rank, deadline_ns, scales_at, s_row, s_group,
        N=size, SCATTER=scatter, GATHER=gather, QUANT=scales_at > 0, ROUNDING=rounding,
        HAS_RESIDUAL=residual is not None, CHUNK=chunk, BESIDE=beside, COLUMNS=beside > 1 and s_row == 1,
        BLOCK=next_power_of_2(hidden), PART=part, num_warps=warps_of(hidden), **limits, **order(x.device),
    )  # fmt: skip


class Exchange:
    """Reduce-scatter and all-gather of rows over an arena; capture-safe.

    What is gathered is a view of the outbox: it holds until the next call of this object.

    Parameters
    ----------
    arena : Arena
    hidden_size : int
    dtype : torch.dtype
    slots : int
        Most rows of one rank a call.
    programs, chunk : int
        Equal in all calls and on all ranks; see :func:`way_of`.
    """

    def __init__(
        self, arena: Arena, hidden_size: int, dtype: torch.dtype, slots: int, programs: int = PROGRAMS,
        chunk: int = CHUNK,
    ) -> None:  # fmt: skip
        self.arena, self.hidden_size, self.dtype, self.slots = arena, hidden_size, dtype, slots
        size = arena.size
        self.chunk = chunk
        self.inbox = arena.carve((2, size, slots, hidden_size), dtype)
        self.outbox = arena.carve((size * slots, hidden_size), dtype)
        self.flags = arena.carve((2 * size, programs), torch.int32)
        # Flags seen and calls made, of each program.
        self.state = torch.zeros(programs, 2, dtype=torch.int32, device=arena.device)

    @staticmethod
    def nbytes_for(size: int, hidden_size: int, dtype: torch.dtype, slots: int, programs: int = PROGRAMS) -> int:
        """Return the bytes that it carves."""
        return 3 * size * slots * hidden_size * dtype.itemsize + 8 * size * programs + 3 * 256

    def _run(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, y: torch.Tensor,
        summed: torch.Tensor, share: int, eps: float, rounding: str, scatter: bool, gather: bool, part: int,
        scales: tuple[int, int, int] = (0, 0, 0),
    ) -> None:  # fmt: skip
        arena = self.arena
        if share > self.slots or x.dtype != self.dtype or x.shape[-1] != self.hidden_size:
            accepted = f"at most {self.slots} rows of each rank, of {self.hidden_size} values of {self.dtype}"
            raise ArgumentError("Exchange", "x", f"{share} rows of each rank of {tuple(x.shape)} {x.dtype}", accepted)
        how = NO_NORM if weight is None else ROUNDINGS.index(rounding)
        _exchange_rows(
            x, residual, weight, y, summed, self.inbox.peers, self.inbox.tensor, self.outbox.peers, self.flags.peers,
            self.flags.tensor, self.state, arena.status, eps, share, self.slots, arena.rank, arena.size,
            arena.deadline_ns, scatter, gather, how, part, self.chunk, *scales,
        )  # fmt: skip

    def scatter(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, weight: torch.Tensor | None = None,
        eps: float = 0.0, rounding: str = ROUNDINGS[0], *, part: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return ``(norm(h), h)`` of the own rows ``[T / n, H]``: ``h`` = Σ of ``x [T, H]``, plus ``residual``.

        Without ``weight``: ``(h, h)``. ``part``: 0; for ranks in one process 1, 2 and 3, each on all of them.
        """
        share = self._share(x)
        summed = x.new_empty(share, x.shape[1])
        y = summed if weight is None else torch.empty_like(summed)
        self._run(x, residual, weight, y, summed, share, eps, rounding, True, False, part)
        return y, summed

    def gather(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, weight: torch.Tensor | None = None,
        eps: float = 0.0, rounding: str = ROUNDINGS[0], *, part: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return ``(norm(h) of all ranks [n * p, H], own h [p, H])`` with ``h`` = ``x [p, H]``, plus ``residual``."""
        share = x.shape[0]
        summed = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        whole = self.outbox.tensor[: share * self.arena.size]
        self._run(x, residual, weight, whole, summed, share, eps, rounding, False, True, part)
        return whole, summed

    def gather_quantised(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, weight: torch.Tensor | None = None,
        eps: float = 0.0, rounding: str = ROUNDINGS[0], *, layout: str = "row", part: int = 0,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:  # fmt: skip
        """Return ``((codes, scales) of all ranks, own h)``: :meth:`gather` of rows that each rank quantises first.

        Codes are e4m3 ``[n * p, H]``, scales fp32 ``[n * p, H / 128]`` in the memory of ``layout``, as
        :class:`~fastlayers.quant.group_quant.layer.GroupQuant` makes them, bit by bit.
        """
        share = x.shape[0]
        summed = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        codes, scales, how = self._coded(share * self.arena.size, layout)
        self._run(x, residual, weight, scales, summed, share, eps, rounding, False, True, part, how)
        return (codes, scales), summed

    def _coded(self, rows: int, layout: str) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int, int]]:
        """Return where the outbox holds codes and scales of so many rows, and what tells the kernel so."""
        if self.hidden_size % 128:
            raise ArgumentError("Exchange", "hidden_size", self.hidden_size, "a multiple of 128, to be quantised")
        groups, box = self.hidden_size // 128, self.outbox.tensor.view(-1).view(torch.uint8)
        scales_at = self.arena.size * self.slots * self.hidden_size
        codes = box[: rows * self.hidden_size].view(torch.float8_e4m3fn).view(rows, self.hidden_size)
        room = box[scales_at:].view(torch.float32)
        if layout == "row":
            scales = room[: rows * groups].view(rows, groups)
        else:
            padded = rows if layout == "col" else (rows + 3) // 4 * 4
            scales = room[: groups * padded].view(groups, padded).t()[:rows]
        return codes, scales, (scales_at, scales.stride(0), scales.stride(1))

    def scatter_gather(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, weight: torch.Tensor | None = None,
        eps: float = 0.0, rounding: str = ROUNDINGS[0], *, codes: str | None = None, part: int = 0,
    ) -> tuple[Any, torch.Tensor]:  # fmt: skip
        """Return ``(norm(h) of all rows [T, H], own h [T / n, H])``: :meth:`scatter`, then its rows from all ranks.

        ``codes``: a layout of scales; then these rows are :class:`CodedRows`, as :meth:`gather_quantised` makes them.
        """
        share = self._share(x)
        summed = x.new_empty(share, x.shape[1])
        if codes is not None:
            q, s, how = self._coded(x.shape[0], codes)
            self._run(x, residual, weight, s, summed, share, eps, rounding, True, True, part, how)
            return CodedRows(q, s), summed
        whole = self.outbox.tensor[: x.shape[0]]
        self._run(x, residual, weight, whole, summed, share, eps, rounding, True, True, part)
        return whole, summed

    def _share(self, x: torch.Tensor) -> int:
        if x.shape[0] % self.arena.size:
            raise ArgumentError("Exchange", "rows", x.shape[0], f"a multiple of {self.arena.size} ranks")
        return x.shape[0] // self.arena.size
