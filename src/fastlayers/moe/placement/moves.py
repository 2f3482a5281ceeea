"""Experts change their slots between two steps: :func:`move_experts`.

    every rank, from the same two placements: who sends which expert to whom
    ─► all have spare memory for what comes, or nobody moves
    ─► own experts copied aside, all others received into spare memory
    ─► copied into the slots, then the tables: addresses stay, captured steps go on

Nothing is written before all that comes has come. The spare memory is as large as the experts that change on this rank,
and is free again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fastlayers.comm.collectives import Collectives, GlooCollectives, TorchCollectives, collectives
from fastlayers.comm.parallel import Axis
from fastlayers.comm.processes import naming_lost
from fastlayers.errors import ArgumentError
from fastlayers.moe.fused_moe.layer import FusedMoE


class Transfer(NamedTuple):
    """An expert that a rank needs and does not have: from which slot of which rank."""

    expert: int
    source: int
    slot: int
    target: int


def transfers(before: Sequence[int], after: Sequence[int], ranks: int) -> list[Transfer]:
    """Return what must be sent so that the slots hold ``after``, each expert once to a rank that lacks it."""
    size, found = len(before) // ranks, []
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(before):
        holders.setdefault(expert, []).append(slot)
    for target in range(ranks):
        mine = range(target * size, (target + 1) * size)
        had = {before[slot] for slot in mine}
        for expert in sorted({after[slot] for slot in mine} - had):
            slots = holders[expert]
            slot = slots[target % len(slots)]  # several ranks that need it ask different ones
            found.append(Transfer(expert, slot // size, slot % size, target))
    return found


def move_experts(experts: FusedMoE, after: Sequence[int], agree: Callable[[bool], bool] | None = None) -> int | None:
    """Let the slots of one layer hold other experts, on all ranks of its axis together.

    Parameters
    ----------
    experts : FusedMoE
        With a placement; its weights and the placement's tables are written in place, in stream order.
    after : sequence of int
        Expert of each slot; equal on all ranks.
    agree : callable, optional
        Returns whether all ranks that hold parts of these experts have memory for what comes, given whether this one
        has; a collective call. Default: the ranks of the axis are all of them.

    Returns
    -------
    int or None
        Bytes that this rank received; ``None``: a rank has no memory for them, and nothing was moved on any.

    Raises
    ------
    ArgumentError
        The layer has no placement, or there is no process group to send by.
    """
    placement = experts.placement
    if placement is None:
        raise ArgumentError("move_experts", "experts", "without a placement", "a FusedMoE(…, placement=…)")
    axis, before = placement.ep, placement.logical
    own, size = placement.own_slots, placement.num_slots // axis.size
    sent = transfers(before, after, axis.size)
    if sent and not isinstance(axis.group, dist.ProcessGroup):
        raise ArgumentError("move_experts", "axis.group", type(axis.group).__name__, "a process group")
    with torch.inference_mode():
        held = [p.data for p in experts.parameters(recurse=False)]
        wanted = {after[slot] for slot in range(own.start, own.stop) if after[slot] != before[slot]}
        here = {expert: slot % size for slot, expert in enumerate(before) if own.start <= slot < own.stop}
        spare: dict[int, list[torch.Tensor]] = {}
        try:
            for expert in sorted(wanted):
                spare[expert] = [torch.empty_like(part[0]) for part in held]
        except (torch.OutOfMemoryError, MemoryError):
            spare.clear()
        if not (agree or _agree_over(axis))(len(spare) == len(wanted)):
            return None
        for expert in wanted & here.keys():
            for part, value in zip(held, spare[expert], strict=True):
                value.copy_(part[here[expert]])
        received = _exchange(held, spare, sent, axis)
        for slot in range(own.start, own.stop):
            if after[slot] != before[slot]:
                for part, value in zip(held, spare[after[slot]], strict=True):
                    part[slot - own.start].copy_(value)
        placement.place(after)
    return received


def _agree_over(axis: Axis) -> Callable[[bool], bool]:
    return lambda good: good if axis.group is None else all_ranks(collectives(axis), good)


def all_ranks(ranks: Collectives, good: bool) -> bool:
    """Return whether this holds on all ranks; waits for them."""
    cuda = isinstance(ranks, TorchCollectives) and not isinstance(ranks, GlooCollectives)
    flag = torch.full((1,), int(good), dtype=torch.int32, device="cuda" if cuda else "cpu")
    return int(ranks.all_reduce_(flag)) == ranks.size


def connect(axis: Axis, device: torch.device) -> None:
    """Send a byte from each rank to each other; collective. NCCL's first sends otherwise hold up a step for 0.2 s."""
    if axis.size == 1 or not isinstance(axis.group, dist.ProcessGroup):
        return
    others = [dist.get_global_rank(axis.group, rank) for rank in range(axis.size) if rank != axis.rank]
    calls: list[dist.P2POp] = []
    for peer in others:
        for how in (dist.isend, dist.irecv):
            calls.append(dist.P2POp(how, torch.zeros(1, dtype=torch.uint8, device=device), peer, axis.group))
    _wait(calls, axis, "connecting ranks between which experts move")


def _exchange(held: list[torch.Tensor], spare: dict[int, list[torch.Tensor]], sent: list[Transfer], axis: Axis) -> int:
    """Send what others lack, and fill ``spare`` with what this rank lacks; return its bytes."""
    calls: list[dist.P2POp] = []
    received = 0
    for expert, source, slot, target in sent:
        if axis.rank not in (source, target):
            continue
        parts = spare[expert] if axis.rank == target else [part[slot] for part in held]
        received += sum(part.numel() * part.element_size() for part in parts) if axis.rank == target else 0
        how: Any = dist.irecv if axis.rank == target else dist.isend
        peer = dist.get_global_rank(axis.group, source if axis.rank == target else target)
        # As bytes: not every backend sends every number format.
        calls += [dist.P2POp(how, part.view(torch.uint8), peer, axis.group) for part in parts]
    _wait(calls, axis, "moving experts")
    return received


def _wait(calls: list[dist.P2POp], axis: Axis, operation: str) -> None:
    with naming_lost(axis, operation):
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
