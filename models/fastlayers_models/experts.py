"""Experts that may lie in several slots: routing to slots, and experts that move between steps as their loads change.

    a step     positions of all rows ─► each MoE layer: router ─► experts ─► slots, counted
    between    every ``step_interval`` steps the counts of all layers come to the host; then ``layers_per_step`` layers
               are planned and moved at each boundary, by every rank alike

Ranks make the same steps, so they move at the same boundary without asking each other. What a token's output is does
not depend on where experts lie, but for one rounding: a rank adds up the experts that it holds, in the order of top-k,
and ranks are added in their order. So a token has the same bits under two placements that group its experts alike by
rank (always on one rank, and with one expert a token), where a row's product does not depend on the rows beside it, as
in our kernels.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

import fastlayers as fl
from fastlayers.attention.meta import AttentionMeta
from fastlayers.comm.collectives import collectives
from fastlayers.comm.communicator import RankOps
from fastlayers.comm.padding import StepTokens
from fastlayers.comm.token_moves import TokenMoves
from fastlayers.errors import ArgumentError
from fastlayers.moe.placement.moves import all_ranks, connect, move_experts
from fastlayers.moe.placement.planner import plan_placement
from fastlayers.moe.placement.table import ExpertPlacement
from fastlayers.quant.spec import QuantSpec

log = logging.getLogger(__name__)
Routed = tuple[torch.Tensor, torch.Tensor]  # the weights of a token's experts, and their ids or slots


class PlacedRows(NamedTuple):
    """What routing to slots must know of an MLP's rows: which are real, and their positions in their requests."""

    valid: torch.Tensor | None
    positions: torch.Tensor


class OwnRows(NamedTuple):
    """What an MLP whose tokens are exchanged must know of its own rows, and how many rows each rank has."""

    valid: torch.Tensor | PlacedRows | None
    sizes: tuple[int, ...]


def placement_of(context: Any, num_experts: int) -> ExpertPlacement | None:
    """Return the placement of one layer's experts, where the ranks were given one; ``context``: a ModelContext."""
    parallel = context.parallel
    return None if parallel.eplb is None else ExpertPlacement(num_experts, parallel.ep, parallel.eplb, context.device)


def experts_held(parallel: fl.ParallelSpec, num_experts: int) -> set[int]:
    """Return the experts whose weights this rank reads."""
    if parallel.eplb is None:
        return set(range(num_experts)[parallel.ep.part(num_experts, "experts")])
    placement = ExpertPlacement(num_experts, parallel.ep, parallel.eplb, "cpu")
    return set(placement.logical[placement.own_slots])


def check_experts_are_there(model: Any) -> None:
    """Raise :class:`ArgumentError` for a model whose ranks deal out experts, and that has none."""
    ep = model.parallel.ep.size
    if ep > 1 and all(getattr(layer, "mlp_kind", "moe") == "dense" for layer in model.decoder.layers):
        accepted = "1: no layer of this model has experts, and its MLPs are split by tp * dp anyway"
        raise ArgumentError(type(model).__name__, "parallel.ep", ep, accepted)


def quant_of_experts(quant: QuantSpec, name: str, count: int) -> QuantSpec:
    """Return the number format of all experts ``name.E.gate_proj``, …: one for all, as their weights are one tensor.

    Raises
    ------
    ArgumentError
        A rule keeps some of them as they are, and not others.
    """
    first = quant.for_module(f"{name}.0.gate_proj")
    for each, skipped in _skipped(quant, name, count) if quant.format != "none" else ():
        if skipped != (first.format == "none"):
            other = quant.for_module(each)
            given = f"{other.format} for {each}, {first.format} for {name}.0.gate_proj"
            raise ArgumentError("FusedMoE", "quantization_config", given, "one format for all experts of a layer")
    return first


def _skipped(quant: QuantSpec, name: str, count: int) -> Iterator[tuple[str, bool]]:
    """Yield the parts of experts, and whether a rule skips each, as :meth:`QuantSpec.for_module` says.

    What does not depend on the expert is looked up once: a checkpoint may list thousands of modules.
    """
    rules, words = frozenset(quant.skip), name.split(".")
    if any(".".join(words[:end]) in rules for end in range(1, len(words) + 1)):
        return  # all of them are
    patterns = [re.compile(rule[3:]) for rule in quant.skip if rule.startswith("re:")]
    # Of the whole name, and of its ends: "a.experts.", "experts.", "".
    heads = [".".join((*words[start:], "")) for start in range(len(words) + 1)]
    for expert, part in product(range(count), ("gate_proj", "up_proj", "down_proj")):
        end = f"{expert}.{part}"
        named = part in rules or f"{name}.{expert}" in rules or any(head + end in rules for head in heads)
        yield f"{name}.{end}", named or any(pattern.search(f"{name}.{end}") for pattern in patterns)


def route(router: fl.TopKRouter, x: torch.Tensor, valid: Any, placement: Any = None) -> Routed:
    """Return ``(topk_weights, topk_ids)``; rows that ``valid`` (see ``CausalLM``) excludes cost no expert work."""
    if placement is not None:
        return route_to_slots(placement, valid, lambda real: route(router, x, real))
    if valid is not None and valid.dtype == torch.int32:
        return router(x, valid)
    topk_weights, topk_ids = router(x)
    return topk_weights, topk_ids if valid is None else topk_ids.masked_fill(~valid[:, None], -1)


def exchanged_experts(
    router: fl.TopKRouter, experts: fl.FusedMoE, moves: TokenMoves, x: torch.Tensor, rows: Any
) -> torch.Tensor:
    """Return what routed experts, wherever they are, make of ``x``: own rows, whole.

    ``rows``: of :func:`routed_rows`.
    """
    if not isinstance(rows, OwnRows):
        raise ArgumentError("exchanged_experts", "valid", type(rows).__name__, "OwnRows, by which tokens are exchanged")
    topk_weights, topk_ids = route(router, x, rows.valid, experts.placement)
    found: torch.Tensor = moves.exchange(
        x, topk_ids, topk_weights, lambda there, ids, weights: experts(there, weights, ids, local=True), rows.sizes
    )
    return found


def route_to_slots(placement: ExpertPlacement, rows: Any, choose: Callable[[torch.Tensor | None], Routed]) -> Routed:
    """Return ``(topk_weights, slots)`` of the experts that ``choose(which rows are real)`` returns; counts them.

    ``rows``: of :meth:`ExpertBalancer.rows`.
    """
    if not isinstance(rows, PlacedRows):
        accepted = "PlacedRows, by which a token finds an expert's slot"
        raise ArgumentError("route", "valid", type(rows).__name__, accepted)
    topk_weights, topk_ids = choose(rows.valid)
    return topk_weights, placement(topk_ids, rows.positions)


def routed_rows(model: Any, step: StepTokens, meta: AttentionMeta, valid: torch.Tensor | None = None) -> Any:
    """Return what a model's layers take as ``valid``; with experts that move also the rows' positions.

    Where tokens are exchanged it is of this rank's own rows.
    """
    valid = valid if valid is not None else model.valid_rows(step)
    if model.token_moves is None:
        return valid if model.balancer is None else model.balancer.rows(valid, meta, step)
    parts, parallel = step.attn_tp, model.parallel
    mine = step.rows[parallel.attn_dp.rank] // parts
    if valid is not None and valid.dtype == torch.int32:  # how many of one group's rows, from the first on
        valid = (valid - parallel.attn_tp.rank * mine).clamp(0, mine)
    elif valid is not None:
        start = step.offsets[parallel.attn_dp.rank] + parallel.attn_tp.rank * mine
        valid = valid[start : start + mine]
    sizes = tuple(rows // parts for rows in step.rows for _ in range(parts))
    return OwnRows(valid if model.balancer is None else model.balancer.rows(valid, meta, step), sizes)


class ExpertBalancer:
    """Moves the experts of a model between its steps; all ranks call :meth:`tick` before the same steps.

    Parameters
    ----------
    model : CausalLM
        Whose ``parallel.eplb`` says how.

    Attributes
    ----------
    steps, moved, received : int
        Steps so far, layers whose experts were moved, and bytes that came to this rank with them.

    Raises
    ------
    ArgumentError
        No layer of the model has experts that can lie elsewhere.
    """

    def __init__(self, model: Any) -> None:
        self.config, parallel = model.parallel.eplb, model.parallel
        layers = [layer for layer in model.decoder.layers if getattr(_experts(layer), "placement", None) is not None]
        if not layers:
            accepted = "None: it has no experts, or its checkpoints hold all of them in one tensor"
            raise ArgumentError(type(model).__name__, "parallel.eplb", self.config, accepted)
        self.layers = [_experts(layer) for layer in layers]
        self.ranks, self._ops = collectives(parallel.tp), RankOps(parallel)
        self._scattered = layers[0].communicator.place == "scattered"
        self._waiting: deque[tuple[Any, list[int]]] = deque()
        self.steps = self.moved = self.received = 0
        if self.config.step_interval:
            connect(self.layers[0].placement.ep, model.device)

    @staticmethod
    def make(model: Any) -> ExpertBalancer | None:
        """Return the balancer of a model whose experts may move, else ``None``."""
        return None if model.parallel.eplb is None else ExpertBalancer(model)

    def rows(self, valid: torch.Tensor | None, meta: AttentionMeta, step: StepTokens) -> PlacedRows:
        """Return what the step's MLPs route by; with several attention groups a collective call."""
        ops = self._ops
        positions = pad(meta.positions, (0, step.rows[ops.attn_dp.rank] - meta.positions.shape[0]))
        if self._scattered:
            positions = ops.attn_tp.own_slice(positions)
        elif ops.many_groups:
            positions = ops.gather_replicate(positions[:, None], step)[:, 0]
        return PlacedRows(valid, positions)

    def tick(self) -> None:
        """Begin another step: look at the loads where that is due, or move the next layers."""
        self.steps += 1
        for _ in range(min(self.config.layers_per_step, len(self._waiting))):
            self._balance(*self._waiting.popleft())
        if not self._waiting and self.config.step_interval and self.steps % self.config.step_interval == 0:
            self.look()

    def look(self) -> None:
        """Take the loads since the last look, of all ranks; waits for them. The next ticks balance by them."""
        counted = [experts.placement.load for experts in self.layers]
        loads = self.ranks.all_reduce_(torch.stack(counted).long()).tolist()
        for load in counted:
            load.zero_()
        self._waiting.extend(zip(self.layers, loads, strict=True))

    def _balance(self, experts: Any, loads: list[int]) -> None:
        placement = experts.placement
        after = plan_placement(loads, placement.logical, placement.ep.size, self.config)
        if after != placement.logical:
            received = move_experts(experts, after, lambda good: all_ranks(self.ranks, good))
            if received is None:
                log.warning("a rank has no memory to move experts: those of this layer stay where they are")
                return
            self.received += received
            self.moved += 1


def _experts(layer: Any) -> Any:
    return getattr(getattr(layer, layer.MLP), "experts", None)
