"""The map from experts to the slots that hold them, on the device: :class:`ExpertPlacement`.

    E = experts, P = slots of all ranks, X = most slots of one expert, T = tokens, k = top_k

    slot[t,j] = replicas[e, positions[t] mod count[e]]    e = topk_ids[t,j];  -1 where e is outside [0,E)
    load[e]  += pairs of e                                int32, counted in the same place; padding counts nothing

The position of a token in its request decides which of an expert's slots it takes: neither its row nor chance does, so
a request's tokens go the same way in any batch. Slots of one expert hold the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastlayers.comm.parallel import Axis
from fastlayers.errors import ArgumentError, as_integers, check_kind, check_positive, check_tensor
from fastlayers.memory import memory_for
from fastlayers.moe.placement.planner import EplbConfig, first_placement
from fastlayers.registry import Registry, torch_backend, triton_backend

_HERE = "fastlayers.moe.placement"
EXPERT_PLACEMENT = Registry(
    "expert_placement",
    [
        replace(triton_backend(f"{_HERE}.triton:TritonSlots"), note="finds slots and counts pairs in one launch"),
        replace(torch_backend(f"{_HERE}.table:TorchSlots"), note="a launch for each operation"),
    ],
)


class TorchSlots:
    """Any device."""

    def __init__(self, cfg: object) -> None:
        pass

    def __call__(
        self, topk_ids: torch.Tensor, positions: torch.Tensor, replicas: torch.Tensor, count: torch.Tensor,
        load: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return the slots ``[T, k]``; adds to ``load``."""
        expert = topk_ids.clamp(0, replicas.shape[0] - 1)  # -1 would wrap to the last one
        real = topk_ids == expert
        load.index_add_(0, expert.flatten(), real.flatten().to(torch.int32))
        return torch.where(real, replicas[expert, positions[:, None] % count[expert]], -1)


class ExpertPlacement(nn.Module):
    """Which slots hold each expert of one layer, and how often each expert was chosen.

    Parameters
    ----------
    num_experts : int
    ep : Axis
        Ranks over which the slots are dealt out, in equal runs.
    config : EplbConfig
    device : torch device, optional
    backend : str

    Attributes
    ----------
    logical : list[int]
        Expert of each slot, as the host knows it.
    physical_to_logical, replicas, count : int32 Tensor
        ``[P]``, ``[E, X]`` (-1: none) and ``[E]``. Their addresses never change, so that captured steps stay right.
    load : int32 Tensor ``[E]``
        Pairs since it was last set to zero.

    Notes
    -----
    Capture-safe; no call waits for the device.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> from fastlayers.moe.placement.table import ExpertPlacement
    >>> placement = ExpertPlacement(3, fl.Axis(), fl.EplbConfig())
    >>> placement.place([2, 0, 1])
    >>> ids = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
    >>> placement(ids, torch.tensor([7, 8])).tolist(), placement.load.tolist()
    ([[1, 0], [2, -1]], [1, 1, 1])
    """

    physical_to_logical: torch.Tensor
    replicas: torch.Tensor
    count: torch.Tensor
    load: torch.Tensor

    def __init__(
        self,
        num_experts: int,
        ep: Axis,
        config: EplbConfig,
        device: torch.device | str | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_positive("ExpertPlacement", num_experts=num_experts)
        check_kind("ExpertPlacement", Axis, ep=ep)
        check_kind("ExpertPlacement", EplbConfig, config=config)
        (num_experts,) = as_integers(num_experts)
        self.num_experts, self.ep, self.config = num_experts, ep, config
        self.num_slots = config.slots(num_experts, ep.size)
        most = min(ep.size, 1 + config.num_redundant_experts)
        with memory_for("ExpertPlacement", num_experts=num_experts):
            for name, shape in (
                ("physical_to_logical", (self.num_slots,)), ("replicas", (num_experts, most)),
                ("count", (num_experts,)), ("load", (num_experts,)),
            ):  # fmt: skip
                self.register_buffer(name, torch.zeros(shape, dtype=torch.int32, device=device), persistent=False)
        self.backend = backend
        self._choose(device)
        self.logical: list[int] = []
        self.place(first_placement(num_experts, self.num_slots))

    def _choose(self, device: torch.device | str | None) -> None:
        self.core: Any = EXPERT_PLACEMENT.choose(self.config, device, self.backend).build().pick(1)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ExpertPlacement:
        before, after = self.count.device, fn(self.count.new_empty(0)).device
        if after.type != before.type:
            self._choose(after)
        super()._apply(fn, recurse)
        if before.type == "meta" and after.type != "meta":  # where tables had no values
            self.load.zero_()
            self.place(self.logical)
        return self

    @property
    def own_slots(self) -> slice:
        """The slots of this rank."""
        return self.ep.part(self.num_slots, "ExpertPlacement slots")

    def place(self, logical: Sequence[int]) -> None:
        """Take another expert for each slot; whoever calls has moved the weights."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(logical):
            if 0 <= expert < self.num_experts:
                slots[expert].append(slot)
        counts = [len(held) for held in slots]
        most, few = self.replicas.shape[1], min(counts)
        if not len(logical) == sum(counts) == self.num_slots or few == 0 or max(counts) > most:
            each = "{} slots, {} to {} of an expert"
            given, accepted = each.format(sum(counts), few, max(counts)), each.format(self.num_slots, 1, most)
            raise ArgumentError("ExpertPlacement", "logical", given, accepted)
        self.logical = list(logical)
        rows = [held + [-1] * (most - len(held)) for held in slots]
        for table, values in (
            (self.physical_to_logical, self.logical), (self.replicas, rows), (self.count, counts)
        ):  # fmt: skip
            table.copy_(torch.tensor(values, dtype=torch.int32, device="cpu"))

    def forward(self, topk_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots ``[T, k]`` (int32) of experts; counts them.

        Parameters
        ----------
        topk_ids : int32 Tensor ``[T, k]``
            -1: none.
        positions : int64 or int32 Tensor ``[T]``
            Of the tokens in their requests, none negative.
        """
        check_tensor("ExpertPlacement", "topk_ids", topk_ids, shape=(None, None), dtype=torch.int32)
        check_tensor("ExpertPlacement", "positions", positions, shape=(topk_ids.shape[0],))
        slots: torch.Tensor = self.core(topk_ids, positions, self.replicas, self.count, self.load)
        return slots
