"""Which expert each physical slot holds, planned from how much work the experts have.

    E experts of load w[e];  P >= E slots, P / n on each of n ranks;  c[e] >= 1 slots of expert e, of load w[e] / c[e]

    spread    c: a further slot always for the expert whose slots have most, until there are P; also with 1, 2, 4, …
              of them for the idlest experts instead, where that packs better
    pack      slots by falling load, each to the rank with least that has a place and not yet this expert;
              then exchanges of two slots, as long as the fuller rank of the two gains
    settle    what stays on a rank keeps its slot; ranks (of one node) take the number under which they keep most

Hierarchical where ``nodes`` divides the router's groups: whole groups are packed to nodes first, and an expert's slots
stay on one node; otherwise all ranks are one node. Ties go to the lower number, so equal loads give equal plans on
every rank. A plan that lowers the largest load of a rank by less than ``min_gain`` leaves everything where it is.

Source: DeepSeek's expert-parallel load balancer (replication by load, hierarchical and global packing).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from fastlayers.errors import ArgumentError, as_integers, check_fields, check_plain, check_positive

_NAME = "EplbConfig"


@dataclass(frozen=True)
class EplbConfig:
    """Expert-parallel load balancing: how many slots, and when experts move.

    Parameters
    ----------
    num_redundant_experts : int
        Slots beyond one for each expert; with the experts a multiple of the ranks that split them.
    step_interval : int
        Steps between two looks at the loads; 0: experts stay where they are.
    layers_per_step : int
        Layers whose experts move between two steps at most: each costs that boundary its transfers.
    min_gain : float
        Part by which the largest load of a rank must fall, or a layer's experts stay.
    num_groups, num_nodes : int
        Of the router's expert groups and of the hosts; see the head of this file.

    Examples
    --------
    >>> from fastlayers.moe.placement.planner import EplbConfig
    >>> EplbConfig(num_redundant_experts=2).slots(14, 4)
    16
    """

    num_redundant_experts: int = 0
    step_interval: int = 1000
    layers_per_step: int = 1
    min_gain: float = 0.03
    num_groups: int = 1
    num_nodes: int = 1

    def __post_init__(self) -> None:
        check_fields(_NAME, self)
        counts = {"num_redundant_experts": self.num_redundant_experts, "step_interval": self.step_interval}
        check_plain(_NAME, "int >= 0", **counts)
        check_plain(_NAME, "float >= 0", min_gain=self.min_gain)
        check_positive(
            _NAME, layers_per_step=self.layers_per_step, num_groups=self.num_groups, num_nodes=self.num_nodes
        )

    def slots(self, num_experts: int, ranks: int) -> int:
        """Return the number of slots of all ranks, or raise :class:`ArgumentError` if there is no such placement."""
        slots = num_experts + self.num_redundant_experts
        if ranks == 1 and self.num_redundant_experts:
            accepted = "0 with ep = 1, where nothing deals out whole experts: further slots need ep > 1"
            raise ArgumentError(_NAME, "num_redundant_experts", self.num_redundant_experts, accepted)
        if slots % ranks:
            fits = [n for n in range(ranks) if (num_experts + n) % ranks == 0]
            accepted = f"{fits[0]} and a multiple of {ranks}, as {ranks} ranks hold equally many slots"
            raise ArgumentError(_NAME, "num_redundant_experts", self.num_redundant_experts, accepted)
        if slots > ranks * num_experts:
            accepted = f"at most {(ranks - 1) * num_experts}: {ranks} ranks hold each of {num_experts} experts once"
            raise ArgumentError(_NAME, "num_redundant_experts", self.num_redundant_experts, accepted)
        if ranks % self.num_nodes:
            accepted = f"a divisor of ep = {ranks}, the ranks among which whole experts are dealt out"
            raise ArgumentError(_NAME, "num_nodes", self.num_nodes, accepted)
        if num_experts % self.num_groups:
            raise ArgumentError(_NAME, "num_groups", self.num_groups, f"a divisor of {num_experts} experts")
        self._check_node(slots, num_experts, ranks)
        return slots

    @property
    def nodes(self) -> int:
        """Hosts on one of which all slots of an expert lie; 1: they lie anywhere."""
        return self.num_nodes if self.num_groups % self.num_nodes == 0 else 1

    def _check_node(self, slots: int, num_experts: int, ranks: int) -> None:
        """Raise :class:`ArgumentError` for more slots than the ranks of a node have use for."""
        each = ranks // self.nodes
        if slots > each * num_experts:
            accepted = f"at most {(each - 1) * num_experts}: an expert's slots lie on the {each} ranks of one of "
            accepted += f"{self.nodes} nodes, on each once"
            raise ArgumentError(_NAME, "num_redundant_experts", slots - num_experts, accepted)


def first_placement(num_experts: int, slots: int) -> list[int]:
    """Return the experts of all slots before there are loads: each in turn."""
    return [slot % num_experts for slot in range(slots)]


def rank_loads(loads: Sequence[int], placement: Sequence[int], ranks: int) -> list[float]:
    """Return the load of each rank, an expert's being shared equally by its slots."""
    counts = [0] * len(loads)
    for expert in placement:
        counts[expert] += 1
    each, size = [load / max(1, count) for load, count in zip(loads, counts, strict=True)], len(placement) // ranks
    return [sum(each[e] for e in placement[r * size : (r + 1) * size]) for r in range(ranks)]


def plan_placement(loads: Sequence[int], placement: Sequence[int], ranks: int, config: EplbConfig) -> list[int]:
    """Return the expert of each slot, given the ``loads`` of the experts and the ``placement`` as it is.

    Parameters
    ----------
    loads : sequence of int
        Of each expert, none negative.
    placement : sequence of int
        Expert of each slot, rank by rank; also says how many slots there are.
    ranks : int
    config : EplbConfig

    Returns
    -------
    list of int
        ``placement`` itself where nothing would be gained.

    Raises
    ------
    ArgumentError
        The numbers of slots, ranks and experts do not fit each other, or an expert has no slot.
    """
    loads, count = as_integers(*loads), len(loads)
    given = list(placement)
    if len(given) % ranks or set(given) != set(range(count)) or min(loads) < 0:
        said = f"{len(given)} slots of {ranks} ranks, {len(set(given))} experts with loads"
        raise ArgumentError("plan_placement", "placement", said, f"each of {count} experts, equally many on each rank")
    config._check_node(len(given), count, ranks)
    nodes = config.nodes
    size, per_node = len(given) // ranks, ranks // nodes
    planned: list[list[int]] = []
    for members in _experts_of_nodes(loads, config.num_groups, nodes):
        planned += _place(members, loads, per_node, size)
    found = _settle(planned, given, per_node)
    before, after = (max(rank_loads(loads, each, ranks)) for each in (given, found))
    return found if before - after > config.min_gain * before else given


def _experts_of_nodes(loads: Sequence[int], groups: int, nodes: int) -> list[list[int]]:
    """Return the experts of each node: whole groups of the router, equally many on each."""
    size = len(loads) // groups
    if nodes == 1:
        return [list(range(len(loads)))]
    items = [(float(sum(loads[g * size : (g + 1) * size])), g) for g in range(groups)]
    packed = _pack(items, nodes, groups // nodes)
    return [sorted(g * size + i for _, g in held for i in range(size)) for held in packed]


def _place(members: Sequence[int], loads: Sequence[int], ranks: int, size: int) -> list[list[int]]:
    """Return the experts of each rank of one node: the best of some ways to share the redundant slots."""
    own, spare = [loads[e] for e in members], ranks * size - len(members)
    # Beyond some point a further slot of a busy expert only stands in the way: the idlest get 0, 1, 2, 4, … of them.
    idle = [0, *(1 << n for n in range(spare.bit_length()))]
    found: list[list[list[tuple[float, int]]]] = []
    for few in idle:
        counts = _spread(own, spare, min(few, spare), ranks)
        items = [(load / c, e) for e, load, c in zip(members, own, counts, strict=True) for _ in range(c)]
        found.append(_pack(items, ranks, size))
    best = min(found, key=lambda held: max(sum(load for load, _ in each) for each in held))
    for _ in range(ranks * size):
        if not _exchange(best):
            break
    return [sorted(name for _, name in each) for each in best]


def _spread(loads: Sequence[int], spare: int, idle: int, most: int) -> list[int]:
    """Return the slots of each expert, <= ``most``: ``spare`` beyond one each, of which the idlest get ``idle``."""
    counts = [1] * len(loads)
    for sign, further in ((-1, spare - idle), (1, idle)):
        heap = [(sign * load / c, c, e) for e, (load, c) in enumerate(zip(loads, counts, strict=True)) if c < most]
        heapq.heapify(heap)
        for _ in range(further):
            _, count, e = heapq.heappop(heap)
            counts[e] = count + 1
            if counts[e] < most:
                heapq.heappush(heap, (sign * loads[e] / counts[e], counts[e], e))
    return counts


def _pack(items: list[tuple[float, int]], bins: int, size: int) -> list[list[tuple[float, int]]]:
    """Return ``bins`` lists of ``size`` of the items ``(load, name)``, with no name twice in one where that can be."""
    held: list[list[tuple[float, int]]] = [[] for _ in range(bins)]
    names: list[set[int]] = [set() for _ in range(bins)]
    heap = [(0.0, b) for b in range(bins)]
    for load, name in sorted(items, key=lambda item: (-item[0], item[1])):
        passed = []
        while heap and name in names[heap[0][1]]:
            passed.append(heapq.heappop(heap))
        total, chosen = heapq.heappop(heap) if heap else passed.pop(0)
        for each in passed:
            heapq.heappush(heap, each)
        held[chosen].append((load, name))
        names[chosen].add(name)
        if len(held[chosen]) < size:
            heapq.heappush(heap, (total + load, chosen))
    return held


def _exchange(held: list[list[tuple[float, int]]]) -> bool:
    """Exchange the two items by which the fullest bin gains most; ``False`` if there are none."""
    totals = [sum(load for load, _ in each) for each in held]
    names = [{name for _, name in each} for each in held]
    full = max(range(len(held)), key=lambda b: (totals[b], -b))
    best = (totals[full] * (1 - 1e-9), -1, -1, -1)  # rounding is no gain
    for other in range(len(held)):
        for i, (mine, name) in enumerate(held[full]):
            for j, (theirs, alien) in enumerate(held[other]):
                if theirs < mine and name not in names[other] and alien not in names[full]:
                    peak = max(totals[full] - mine + theirs, totals[other] + mine - theirs)
                    if peak < best[0]:
                        best = (peak, other, i, j)
    _, other, i, j = best
    if other >= 0:
        held[full][i], held[other][j] = held[other][j], held[full][i]
    return other >= 0


def _settle(planned: list[list[int]], placement: list[int], per_node: int) -> list[int]:
    """Return the expert of each slot, such that as few as possible are not what ``placement`` has there."""
    ranks, size = len(planned), len(placement) // len(planned)
    now = [placement[r * size : (r + 1) * size] for r in range(ranks)]
    pairs = [
        (-sum(min(planned[a].count(e), now[b].count(e)) for e in set(planned[a])), a != b, a, b)
        for a in range(ranks)
        for b in range(a - a % per_node, a - a % per_node + per_node)
    ]
    number: dict[int, int] = {}
    for _, _, a, b in sorted(pairs):
        if a not in number and b not in number.values():
            number[a] = b
    found: list[list[int]] = [[] for _ in range(ranks)]
    for a, b in number.items():
        left = list(planned[a])
        kept = [left.pop(left.index(e)) if e in left else -1 for e in now[b]]
        found[b] = [left.pop(0) if e < 0 else e for e in kept]
    return [e for each in found for e in each]
