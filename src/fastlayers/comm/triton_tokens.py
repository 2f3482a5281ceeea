"""Tokens to the ranks that have their experts, and partial results back: two launches over symmetric memory.

    dispatch   token t of rank r ─► slot [r, t] of every rank that has one of its experts; ids and weights to all ranks
    combine    slot [r, t] ─► inbox [rank, t] of rank r ─► Σ over the ranks that took part, in rank order

Slots are fixed, so nothing is counted and the host knows nothing: a token that has no expert on a rank leaves its slot
there as it was, with ids of -1. What was dispatched lies at one address in every replay; a rank stores there only after
a flag has told it that its reader has come as far as this call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.comm.symmetric import Arena
from fastlayers.comm.triton_exchange import PROGRAMS
from fastlayers.comm.triton_push import warps_of
from fastlayers.comm.triton_signals import address, await_signal, given_up, order, signal
from fastlayers.errors import ArgumentError
from fastlayers.integers import next_power_of_2
from fastlayers.operators import nothing, operator
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, release_dependents


@triton.jit
def _signal_all(flags_ptr, first, rank, value, N: tl.constexpr):
    """Raise this program's flag on all other ranks; ``first``: 0, or N for the second set of flags."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    for hop in tl.static_range(1, N):
        flag = address(flags_ptr, (rank + hop) % N, tl.int32)
        signal(flag + (first + rank) * programs + program, value)


@triton.jit
def _await_all(flag_ptr, first, rank, value, late, deadline_ns, status_ptr, N: tl.constexpr):
    """Wait for the programs of this number on all other ranks."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    for hop in tl.static_range(1, N):
        giver = (rank + hop) % N
        late = await_signal(
            flag_ptr + (first + giver) * programs + program, value, late, deadline_ns, status_ptr, 1 + giver
        )
    return late


@kernel(do_not_specialize=("tokens", "local", "rank", "deadline_ns"))
def _dispatch_kernel(
    x_ptr, ids_ptr, weights_ptr, boxes_ptr, id_boxes_ptr, weight_boxes_ptr, flags_ptr, flag_ptr, state_ptr, status_ptr,
    x_stride, hidden, tokens, local, rank, deadline_ns,
    N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column, k = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    inside, chosen = column < hidden, k < K
    await_inputs(PDL)
    release_dependents(PDL)
    late = given_up(status_ptr)
    last = tl.load(state_ptr + program) + 1
    if PART <= 1:
        _signal_all(flags_ptr, 0, rank, last, N)
    if PART == 0 or PART == 2:
        late = _await_all(flag_ptr, 0, rank, last, late, deadline_ns, status_ptr, N)
        for token in range(program, tokens, tl.num_programs(0)):
            at = tl.cast(token, tl.int64)
            ids = tl.load(ids_ptr + at * K + k, mask=chosen, other=-1)
            weights = tl.load(weights_ptr + at * K + k, mask=chosen, other=0.0)
            row = tl.load(x_ptr + at * x_stride + column, mask=inside, other=0.0)
            slot = tl.cast(rank * tokens + token, tl.int64)
            for hop in tl.static_range(N):
                to = (rank + hop) % N
                # Local ids are made behind the mask: -1 would be an expert of the rank before.
                mine = (ids >= to * local) & (ids < (to + 1) * local)
                tl.store(address(id_boxes_ptr, to, tl.int32) + slot * K + k, tl.where(mine, ids - to * local, -1),
                         mask=chosen)  # fmt: skip
                tl.store(address(weight_boxes_ptr, to, tl.float32) + slot * K + k, tl.where(mine, weights, 0.0),
                         mask=chosen)  # fmt: skip
                if tl.max(mine.to(tl.int32), axis=0) != 0:
                    tl.store(address(boxes_ptr, to, x_ptr.dtype.element_ty) + slot * hidden + column, row, mask=inside)
        _signal_all(flags_ptr, N, rank, last, N)
    if PART == 0 or PART == 3:
        late = _await_all(flag_ptr, N, rank, last, late, deadline_ns, status_ptr, N)
        tl.store(state_ptr + program, last)


@kernel(do_not_specialize=("tokens", "slots", "local", "rank", "deadline_ns"))
def _combine_kernel(
    partial_ptr, slot_ids_ptr, ids_ptr, out_ptr, inboxes_ptr, inbox_ptr, flags_ptr, flag_ptr, state_ptr, status_ptr,
    hidden, tokens, slots, local, rank, deadline_ns,
    N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column, k = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    inside, chosen = column < hidden, k < K
    dtype: tl.constexpr = partial_ptr.dtype.element_ty
    await_inputs(PDL)
    release_dependents(PDL)
    late = given_up(status_ptr)
    last = tl.load(state_ptr + program) + 1
    turn = last & 1
    if PART <= 1:
        for hop in tl.static_range(1, N):
            to = (rank + hop) % N
            box = address(inboxes_ptr, to, dtype) + (turn * N + rank).to(tl.int64) * slots * hidden
            for token in range(program, tokens, tl.num_programs(0)):
                slot = tl.cast(to * tokens + token, tl.int64)
                ids = tl.load(slot_ids_ptr + slot * K + k, mask=chosen, other=-1)
                if tl.max(ids, axis=0) >= 0:
                    row = tl.load(partial_ptr + slot * hidden + column, mask=inside, other=0.0)
                    tl.store(box + tl.cast(token, tl.int64) * hidden + column, row, mask=inside)
        _signal_all(flags_ptr, 0, rank, last, N)
    if PART == 0 or PART == 2:
        late = _await_all(flag_ptr, 0, rank, last, late, deadline_ns, status_ptr, N)
        for token in range(program, tokens, tl.num_programs(0)):
            at = tl.cast(token, tl.int64)
            ids = tl.load(ids_ptr + at * K + k, mask=chosen, other=-1)
            total = tl.zeros(column.shape, tl.float32)
            for source in tl.static_range(N):
                mine = (ids >= source * local) & (ids < (source + 1) * local)
                part = tl.max(mine.to(tl.int32), axis=0) != 0
                came = inbox_ptr + ((turn * N + source).to(tl.int64) * slots + at) * hidden + column
                theirs = tl.load(came, mask=inside & part & (source != rank), other=0.0, volatile=True)
                own = tl.load(partial_ptr + (tl.cast(rank * tokens + token, tl.int64)) * hidden + column,
                              mask=inside & part & (source == rank), other=0.0)  # fmt: skip
                total += theirs.to(tl.float32) + own.to(tl.float32)
            total = tl.where(late != 0, float("nan"), total)
            tl.store(out_ptr + at * hidden + column, cast(total, dtype), mask=inside)
        tl.store(state_ptr + program, last)


@operator("dispatch_tokens", nothing, writes=("flag", "state", "status"))
def _dispatch(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, boxes: torch.Tensor, id_boxes: torch.Tensor,
    weight_boxes: torch.Tensor, flags: torch.Tensor, flag: torch.Tensor, state: torch.Tensor, status: torch.Tensor,
    local: int, rank: int, size: int, deadline_ns: int, part: int,
) -> None:  # fmt: skip
    tokens, hidden = x.shape
    _dispatch_kernel[(state.shape[0],)](
        x, ids, weights, boxes, id_boxes, weight_boxes, flags, flag, state, status,
        x.stride(0), hidden, tokens, local, rank, deadline_ns,
        N=size, K=ids.shape[1], WIDTH=next_power_of_2(ids.shape[1]), BLOCK=next_power_of_2(hidden), PART=part,
        num_warps=warps_of(hidden), **order(x.device),
    )  # fmt: skip


@operator("combine_tokens", nothing, writes=("out", "inbox", "flag", "state", "status"))
def _combine(
    partial: torch.Tensor, slot_ids: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, inboxes: torch.Tensor,
    inbox: torch.Tensor, flags: torch.Tensor, flag: torch.Tensor, state: torch.Tensor, status: torch.Tensor,
    slots: int, local: int, rank: int, size: int, deadline_ns: int, part: int,
) -> None:  # fmt: skip
    tokens, hidden = out.shape
    _combine_kernel[(state.shape[0],)](
        partial, slot_ids, ids, out, inboxes, inbox, flags, flag, state, status,
        hidden, tokens, slots, local, rank, deadline_ns,
        N=size, K=ids.shape[1], WIDTH=next_power_of_2(ids.shape[1]), BLOCK=next_power_of_2(hidden), PART=part,
        num_warps=warps_of(hidden), **order(partial.device),
    )  # fmt: skip


class TokenExchange:
    """Dispatch and combine over an arena; capture-safe. What is dispatched is a view: it holds until the next dispatch.

    Parameters
    ----------
    arena : Arena
    hidden_size, num_experts, top_k : int
        ``num_experts``: of all ranks together, in equal runs.
    dtype : torch.dtype
    slots : int
        Most tokens of one rank.
    programs : int
        Equal in all calls and on all ranks.
    """

    def __init__(
        self, arena: Arena, hidden_size: int, num_experts: int, top_k: int, dtype: torch.dtype, slots: int,
        programs: int = PROGRAMS,
    ) -> None:  # fmt: skip
        self.arena, self.hidden_size, self.dtype, self.slots, self.top_k = arena, hidden_size, dtype, slots, top_k
        self.local, n = num_experts // arena.size, arena.size
        self.rows = arena.carve((n * slots, hidden_size), dtype)
        self.ids = arena.carve((n * slots, top_k), torch.int32, -1)
        self.weights = arena.carve((n * slots, top_k), torch.float32)
        self.inbox = arena.carve((2, n, slots, hidden_size), dtype)
        self.there, self.back = (arena.carve((2 * n, programs), torch.int32) for _ in range(2))
        self.states = torch.zeros(2, programs, dtype=torch.int32, device=arena.device)

    @staticmethod
    def nbytes_for(
        size: int, hidden_size: int, top_k: int, dtype: torch.dtype, slots: int, programs: int = PROGRAMS
    ) -> int:
        """Return the bytes that it carves."""
        return size * slots * (3 * hidden_size * dtype.itemsize + 8 * top_k) + 16 * size * programs + 6 * 256

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, part: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``(rows [n * T, H], local ids int32 [n * T, K], weights fp32 [n * T, K])`` of all ranks' tokens.

        Parameters
        ----------
        x : Tensor ``[T, H]``
        ids : int32 Tensor ``[T, K]``
            Experts of all ranks; -1: none.
        weights : fp32 Tensor ``[T, K]``
        part : int
            0; for ranks in one process 1, 2 and 3, each on all of them.
        """
        tokens, arena = x.shape[0], self.arena
        if tokens > self.slots or x.dtype != self.dtype or ids.shape != (tokens, self.top_k):
            accepted = f"at most {self.slots} tokens of {self.dtype} with {self.top_k} experts each"
            raise ArgumentError("ExpertExchange", "x", f"{tuple(x.shape)} {x.dtype}, ids {tuple(ids.shape)}", accepted)
        _dispatch(
            x, ids, weights, self.rows.peers, self.ids.peers, self.weights.peers, self.there.peers, self.there.tensor,
            self.states[0], arena.alarm, self.local, arena.rank, arena.size, arena.deadline_ns, part,
        )  # fmt: skip
        count = arena.size * tokens
        return self.rows.tensor[:count], self.ids.tensor[:count], self.weights.tensor[:count]

    def combine(
        self, partial: torch.Tensor, local_ids: torch.Tensor, ids: torch.Tensor, *, part: int = 0
    ) -> torch.Tensor:
        """Return ``[T, H]``: Σ of the partial rows ``[n * T, H]`` of the ranks that took part, in rank order.

        ``local_ids``: as :meth:`dispatch` returned them; ``ids``: as given to it. ``part``: 0; for ranks in one process
        1 and 2.
        """
        arena = self.arena
        out = partial.new_empty(ids.shape[0], partial.shape[1])
        _combine(
            partial, local_ids, ids, out, self.inbox.peers, self.inbox.tensor, self.back.peers, self.back.tensor,
            self.states[1], arena.alarm, self.slots, self.local, arena.rank, arena.size, arena.deadline_ns, part,
        )  # fmt: skip
        return out
