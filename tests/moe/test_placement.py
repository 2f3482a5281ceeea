"""Plans of which expert lies where; the map from experts to slots; experts that change their slots on several ranks."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastlayers as fl
from fastlayers import env
from fastlayers.comm.expert_exchange.layer import ExpertExchange
from fastlayers.comm.parallel import Axis, ParallelSpec
from fastlayers.errors import ArgumentError
from fastlayers.moe.placement.moves import move_experts, transfers
from fastlayers.moe.placement.planner import first_placement, plan_placement, rank_loads
from fastlayers.moe.placement.table import ExpertPlacement
from fastlayers.testing.world import Rank, world

sys.path.insert(0, str(Path(__file__).parents[1]))
from quick_interpreter import hasten

if env.triton_interpret():  # in the ranks, too, which load this file alone
    hasten()

BOUND = 4 / 3  # of the best placement there is


@st.composite
def problems(draw: Any) -> tuple[list[int], int, fl.EplbConfig]:
    ranks = draw(st.integers(1, 4))
    size = draw(st.integers(1, 4 if ranks < 4 else 3))
    spare = draw(st.integers(0, min(4, ranks * size - size)))
    one = st.one_of(st.integers(0, 100), st.sampled_from([0, 1, 50, 1000]))
    loads = draw(st.lists(one, min_size=ranks * size - spare, max_size=ranks * size - spare))
    return loads, ranks, fl.EplbConfig(num_redundant_experts=spare, min_gain=0.0)


def best_load(loads: list[int], slots: int, ranks: int) -> float:
    """Return the least that the fullest rank can have, over all placements."""
    best, size = float("inf"), slots // ranks
    for counts in itertools.product(range(1, min(ranks, slots - len(loads) + 1) + 1), repeat=len(loads)):
        if sum(counts) != slots:
            continue
        items = sorted((load / c for load, c in zip(loads, counts, strict=True) for _ in range(c)), reverse=True)
        states = {(tuple([0.0] * ranks), tuple([0] * ranks))}
        for item in items:
            following = set()
            for totals, held in states:
                for r in range(ranks):
                    if held[r] < size and totals[r] + item < best:
                        pair = sorted(
                            (t + item * (i == r), h + (i == r))
                            for i, (t, h) in enumerate(zip(totals, held, strict=True))
                        )
                        following.add((tuple(t for t, _ in pair), tuple(h for _, h in pair)))
            states = following
        best = min([best, *(max(totals) for totals, _ in states)])
    return best


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_plans(problem: tuple[list[int], int, fl.EplbConfig]) -> None:
    check_plan(*problem)


def test_every_small_plan() -> None:
    """All loads of up to four experts in up to eight slots of up to four ranks: idle, alike, and one that has most."""
    seen = 0
    for ranks, size, count in itertools.product(range(1, 5), range(1, 5), range(1, 5)):
        if not count <= ranks * size <= min(8, count * ranks):  # a rank needs no expert twice
            continue
        config = fl.EplbConfig(num_redundant_experts=ranks * size - count, min_gain=0.0)
        for loads in itertools.product((0, 1, 3, 50), repeat=count):
            check_plan(list(loads), ranks, config)
            seen += 1
    assert seen > 1000


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_small_plan_of_groups_and_nodes(every: int) -> None:
    """All that one to three nodes can hold of up to four experts, in every number of groups and of further slots."""
    seen, moved, refused = 0, 0, 0
    for nodes, per_node, size, count in itertools.product((1, 2, 3), (1, 2), range(1, 5), range(1, 7)):
        ranks = nodes * per_node
        if not count <= ranks * size <= min(8, count * ranks):
            continue
        for groups in (each for each in range(1, count + 1) if count % each == 0):
            config = fl.EplbConfig(ranks * size - count, min_gain=0.0, num_groups=groups, num_nodes=nodes)
            if size > count // nodes and groups % nodes == 0 and nodes > 1:  # a rank would hold an expert twice
                with pytest.raises(
                    ArgumentError, match=f"on the {per_node} ranks of one of {nodes} nodes, on each once"
                ):
                    plan_placement([1] * count, first_placement(count, ranks * size), ranks, config)
                refused += 1
                continue
            chosen = itertools.product((0, 1, 50) if count < 5 else (0, 50), repeat=count)
            for loads in itertools.islice(chosen, None, None, every):
                plan = check_plan(list(loads), ranks, config)
                homes = [{e // (count // groups) for e in held} for held in _parts(plan, nodes)]
                if groups % nodes == 0 and plan != first_placement(count, len(plan)):
                    assert sorted(group for home in homes for group in home) == list(range(groups)), (loads, plan)
                    assert {len(home) for home in homes} == {groups // nodes}, (loads, plan)
                    moved += nodes > 1
                seen += 1
    assert seen * every > 2000 and moved * every > 100 and refused > 5


def _parts(plan: list[int], count: int) -> list[list[int]]:
    size = len(plan) // count
    return [plan[part * size : (part + 1) * size] for part in range(count)]


def check_plan(loads: list[int], ranks: int, config: fl.EplbConfig) -> list[int]:
    """Look at what holds of every plan, whatever it was made for, and return it."""
    slots = config.slots(len(loads), ranks)
    first = first_placement(len(loads), slots)
    plan = plan_placement(loads, first, ranks, config)
    assert len(plan) == slots and set(plan) == set(range(len(loads)))  # equally many slots a rank, an expert has one
    assert max(Counter(plan).values()) <= ranks
    assert max(rank_loads(loads, plan, ranks)) <= max(rank_loads(loads, first, ranks))
    assert plan_placement(loads, first, ranks, config) == plan
    assert plan_placement(loads, plan, ranks, config) == plan  # nothing changed, nothing moves
    assert plan_placement([3 * load for load in loads], plan, ranks, config) == plan
    # No rank has an expert twice that has work, so each of its slots is of use.
    assert plan == first or all(held.count(e) == 1 for held in _parts(plan, ranks) for e in held if loads[e])
    return plan


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_no_rank_has_much_more_than_it_must(problem: tuple[list[int], int, fl.EplbConfig]) -> None:
    loads, ranks, config = problem
    slots = config.slots(len(loads), ranks)
    if slots > 8:
        loads, ranks, slots = loads[:4], 2, 4
        config = fl.EplbConfig(num_redundant_experts=slots - len(loads), min_gain=0.0)
    plan = plan_placement(loads, first_placement(len(loads), slots), ranks, config)
    assert max(rank_loads(loads, plan, ranks)) <= BOUND * best_load(loads, slots, ranks) + 1e-9


def test_large_skewed_loads_are_balanced() -> None:
    loads, config = [100_000 // (1 + e) for e in range(256)], fl.EplbConfig(num_redundant_experts=32)
    first = first_placement(256, 288)
    plan = plan_placement(loads, first, 8, config)
    before, after = (rank_loads(loads, each, 8) for each in (first, plan))
    assert max(before) > 1.5 * sum(before) / 8 and max(after) < 1.01 * sum(after) / 8
    # A little other loads gain less than min_gain: nothing moves for them.
    assert plan_placement([load + 5 for load in loads], plan, 8, config) is not None
    assert plan_placement([load + 5 for load in loads], plan, 8, config) == plan


def test_groups_stay_on_their_node() -> None:
    loads = [90, 1, 1, 1, 40, 1, 1, 1, 30, 1, 1, 1, 20, 1, 1, 1]
    config = fl.EplbConfig(num_redundant_experts=4, num_groups=4, num_nodes=2)
    plan = plan_placement(loads, first_placement(16, 20), 4, config)
    nodes = [{e // 4 for e in plan[:10]}, {e // 4 for e in plan[10:]}]
    assert sorted(map(sorted, nodes)) == [[0, 3], [1, 2]]
    everywhere = plan_placement(loads, first_placement(16, 20), 4, replace(config, num_nodes=3 - 2))
    assert max(rank_loads(loads, everywhere, 4)) < max(rank_loads(loads, plan, 4))


def test_what_cannot_be_placed_is_named() -> None:
    config = fl.EplbConfig(num_redundant_experts=1)
    with pytest.raises(ArgumentError, match="accepted: 0 and a multiple of 2, as 2 ranks"):
        config.slots(8, 2)
    with pytest.raises(ArgumentError, match="at most 8: 2 ranks hold each of 8 experts once"):
        fl.EplbConfig(num_redundant_experts=10).slots(8, 2)
    with pytest.raises(ArgumentError, match="num_redundant_experts is 4; accepted: 0 with ep = 1, where nothing"):
        fl.EplbConfig(num_redundant_experts=4).slots(8, 1)
    assert fl.EplbConfig().slots(8, 1) == 8
    for ranks in (1, 2):
        with pytest.raises(ArgumentError, match=f"num_nodes is 3; accepted: a divisor of ep = {ranks}, the ranks"):
            fl.EplbConfig(num_nodes=3).slots(8, ranks)
    with pytest.raises(ArgumentError, match="num_groups"):
        fl.EplbConfig(num_groups=3).slots(8, 2)
    with pytest.raises(ArgumentError, match="each of 3 experts, equally many on each rank"):
        plan_placement([1, 2, 3], [0, 1, 1, 1], 2, config)
    with pytest.raises(ArgumentError, match="num_redundant_experts"):
        fl.EplbConfig(num_redundant_experts=-1)
    with pytest.raises(ArgumentError, match="ep"):
        fl.Ranks(eplb=2)  # type: ignore[arg-type]


def check_slots(placement: ExpertPlacement) -> None:
    """Raise unless slots follow positions, and pairs are counted; the placement is of 4 experts in 6 slots."""
    placement.place([2, 0, 1, 3, 2, 0])
    ids = torch.tensor([[2, 0], [2, 3], [-1, 2], [1, -1]], dtype=torch.int32)
    slots = placement(ids, torch.tensor([4, 5, 6, 9]))
    assert slots.dtype == torch.int32
    assert slots.tolist() == [[0, 1], [4, 3], [-1, 0], [2, -1]]
    assert placement.load.tolist() == [1, 1, 3, 1]
    assert placement(ids[:0], torch.arange(0)).shape == (0, 2)
    outside = placement(torch.tensor([[4, 2]], dtype=torch.int32), torch.tensor([2**40 + 1]))  # no such expert
    assert outside.tolist() == [[-1, 4]] and placement.load.tolist() == [1, 1, 4, 1]
    # Neither the row nor the other rows decide.
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(placement(ids[order], torch.tensor([4, 5, 6, 9])[order]), slots[order])
    for wrong in ([0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 0, 4], [0, 1, 2, 3, 0, -1]):
        with pytest.raises(ArgumentError, match="1 to 2 of an expert"):
            placement.place(wrong)
    assert placement.logical == placement.physical_to_logical.tolist() == [2, 0, 1, 3, 2, 0]


def test_tables_come_into_being_where_a_module_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        placement = placement_of("auto")
    placement.place([3, 0, 2, 1, 2, 0])
    placement.to_empty(device="cpu")
    assert placement.physical_to_logical.tolist() == placement.logical == [3, 0, 2, 1, 2, 0]
    slots = placement(torch.tensor([[0, 3]], dtype=torch.int32), torch.tensor([1]))
    assert slots.tolist() == [[5, 0]] and placement.load.tolist() == [1, 0, 0, 1]
    chosen = []
    monkeypatch.setattr(placement, "_choose", lambda device: chosen.append(torch.device(device).type))
    placement.to("cpu").to(torch.float64).to("meta")
    assert chosen == ["meta"]  # another type of device takes another backend


def placement_of(backend: str) -> ExpertPlacement:
    return ExpertPlacement(4, Axis(2, 0), fl.EplbConfig(num_redundant_experts=2), backend=backend)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_slots_follow_positions_and_count_pairs(backend: str) -> None:
    check_slots(placement_of(backend))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_positions_reach_every_slot_of_an_expert_and_no_other(backend: str) -> None:
    """In all placements of three experts in up to five slots of one to five ranks."""
    ids, seen = torch.tensor([[0, 1, 2]], dtype=torch.int32).expand(12, 3).contiguous(), 0
    for slots, ranks in ((3, 1), (4, 2), (4, 4), (5, 5)):
        config = fl.EplbConfig(num_redundant_experts=slots - 3)
        placement = ExpertPlacement(3, Axis(ranks, 0), config, backend=backend)
        for logical in itertools.product(range(3), repeat=slots):
            if set(logical) != {0, 1, 2} or max(Counter(logical).values()) > ranks:
                continue
            placement.place(list(logical))
            found = placement(ids, torch.arange(100, 112))
            for expert in range(3):
                held = [slot for slot, each in enumerate(logical) if each == expert]
                assert Counter(found[:, expert].tolist()) == dict.fromkeys(held, 12 // len(held)), logical
            seen += 1
    assert seen > 100


def by_row(right: Any) -> Any:
    return lambda ids, positions, *tables: right(ids, torch.arange(len(ids)), *tables)


def by_the_batch(right: Any) -> Any:
    return lambda ids, positions, *tables: right(ids, positions + len(ids), *tables)


@pytest.mark.parametrize("bug", [by_row, by_the_batch])
def test_slots_by_anything_else_are_caught(bug: Any) -> None:
    placement = placement_of("torch")
    placement.core = bug(placement.core)
    with pytest.raises(AssertionError):
        check_slots(placement)


def test_backends_agree_on_drawn_tokens() -> None:
    generator = torch.Generator().manual_seed(3)
    config, found = fl.EplbConfig(num_redundant_experts=24), []
    ids = torch.randint(-1, 40, (200, 6), generator=generator, dtype=torch.int32)
    positions = torch.randint(0, 5000, (200,), generator=generator)
    for backend in ("torch", "triton"):
        placement = ExpertPlacement(40, Axis(4, 1), config, backend=backend)
        slots = placement(ids, positions)
        found.append((slots.tolist(), placement.load.tolist()))
        held = torch.tensor(placement.logical)[slots.clamp(min=0)]
        assert torch.equal(torch.where(slots >= 0, held, -1), ids)  # a slot holds the expert that was asked for
        assert len(set(slots[ids == 0].tolist())) == 2
    assert found[0] == found[1]


# ---- experts on several ranks ----------------------------------------------------------------------------------------

EXPERTS, HIDDEN, INNER, TOP_K, TOKENS = 8, 8, 8, 3, 20


def whole_numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def weights_of(expert: int, exact: bool) -> tuple[torch.Tensor, torch.Tensor]:
    w13, w2 = whole_numbers((2 * INNER, HIDDEN), expert), whole_numbers((HIDDEN, INNER), 100 + expert)
    return (w13, w2) if exact else (w13 / 3, w2 / 7)


def layer_of(spec: ParallelSpec, config: fl.EplbConfig | None, exact: bool) -> fl.FusedMoE:
    placement = None if config is None else ExpertPlacement(EXPERTS, spec.ep, config, "cpu")
    layer = fl.FusedMoE(
        HIDDEN, INNER, EXPERTS, TOP_K, ep=spec.ep, placement=placement, activation="swiglu_oai" if exact else "silu",
        alpha=0.0, dtype=torch.float32, backend="auto" if exact else "triton",
    )  # fmt: skip
    held = range(EXPERTS)[layer.expert_slice] if placement is None else placement.logical[layer.expert_slice]
    for local, expert in enumerate(held):
        layer.w13[local], layer.w2[local] = weights_of(expert, exact)
    layer.finalize()
    return layer


def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = whole_numbers((TOKENS, HIDDEN), 1)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)]).int()
    ids[3, 1], ids[7] = -1, -1
    return x, whole_numbers((TOKENS, TOP_K), 2).abs() + 1, ids, torch.arange(TOKENS) % 11


def _dot_row_by_row(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    """Multiply as a GPU does: BLAS, which the interpreter asks, may sum a tile's last rows in another order."""
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle((a.data[:, :, None] * b.data[None]).sum(1) + d.data, d.dtype.scalar)


def moved_row_by_row(rank: Rank, spare: int, plans: list[list[int]]) -> list[tuple[Any, ...]]:
    from triton.runtime.interpreter import InterpreterBuilder

    with patch.object(InterpreterBuilder, "create_dot", _dot_row_by_row):
        return moved(rank, spare, plans, False)


def moved(rank: Rank, spare: int, plans: list[list[int]], exact: bool) -> list[tuple[Any, ...]]:
    from fastlayers.comm.collectives import collectives

    spec, over = rank.spec(ep=rank.size), collectives(rank.spec(ep=rank.size).tp)
    x, weights, ids, positions = routed()
    plain = over.all_reduce_(layer_of(spec, None, exact)(x, weights, ids))
    layer = layer_of(spec, fl.EplbConfig(num_redundant_experts=spare), exact)
    assert layer.placement is not None
    addresses = [p.data_ptr() for p in (*layer.parameters(), *layer.buffers())]
    found = []
    for plan in [layer.placement.logical, *plans]:
        lacking = set(plan[layer.expert_slice]) - set(layer.placement.logical[layer.expert_slice])
        came = move_experts(layer, plan) == len(lacking) * 4 * 3 * INNER * HIDDEN  # what a rank has is not sent to it
        held = layer.placement.logical[layer.expert_slice]
        right = came and all(torch.equal(layer.w13[i], weights_of(e, exact)[0]) for i, e in enumerate(held))
        right &= all(torch.equal(layer.w2[i], weights_of(e, exact)[1]) for i, e in enumerate(held))
        y = over.all_reduce_(layer(x, weights, layer.placement(ids, positions)))
        same = [p.data_ptr() for p in (*layer.parameters(), *layer.buffers())] == addresses
        alike = [_grouped(ids, positions, plan, rank.size)[t] for t in range(len(ids))]
        found.append((right and same, (y == plain).all(-1).tolist(), (y - plain).abs().max().item(), alike))
    assert layer.placement.load.sum() == (1 + len(plans)) * int((ids >= 0).sum())
    return found


def _grouped(ids: torch.Tensor, positions: torch.Tensor, plan: list[int], ranks: int) -> list[bool]:
    """Return for each token whether its experts lie together on ranks, in their order, as without a placement."""
    size, found = len(plan) // ranks, []
    for row, position in zip(ids.tolist(), positions.tolist(), strict=True):
        groups: tuple[list[list[int]], list[list[int]]] = ([[] for _ in range(ranks)], [[] for _ in range(ranks)])
        for expert in (e for e in row if e >= 0):
            slots = [slot for slot, e in enumerate(plan) if e == expert]
            groups[0][slots[position % len(slots)] // size].append(expert)
            groups[1][expert // (EXPERTS // ranks)].append(expert)
        found.append(groups[0] == groups[1])
    return found


PLANS = {
    2: (2, [[7, 5, 4, 3, 2, 1, 6, 0, 0, 5], [0, 1, 2, 3, 3, 4, 5, 0, 6, 7], [1, 0, 2, 3, 4, 5, 6, 7, 4, 2]]),
    4: (4, [[0, 1, 7, 2, 3, 5, 4, 1, 6, 5, 0, 2], [5, 1, 0, 0, 3, 2, 4, 0, 6, 7, 5, 0]]),
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_exact_sums_are_equal_under_any_placement(ranks: int) -> None:
    spare, plans = PLANS[ranks]
    for answers in world(ranks).run(moved, spare, plans, True):
        for right, equal, _, _ in answers:
            assert right and all(equal)


def test_a_token_has_the_same_bits_where_its_experts_are_grouped_alike() -> None:
    # Our kernels' rule: a CPU's matrix products also depend on how many rows are computed together, and which.
    spare, plans = PLANS[2]
    other = 0
    for answers in world(2).run(moved_row_by_row, spare, plans):
        for right, equal, error, alike in answers:
            assert right and error < 1e-3
            assert all(same for same, together in zip(equal, alike, strict=True) if together)
            other += sum(not same for same in equal)
    assert other > 0  # the rule says something: elsewhere bits do differ


def no_memory(rank: Rank) -> tuple[Any, ...]:
    layer = layer_of(rank.spec(ep=2), fl.EplbConfig(), True)
    assert layer.placement is not None
    before = [layer.w13.clone(), layer.w2.clone(), list(layer.placement.logical)]
    empty = torch.empty_like

    def short(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("no memory on this rank")

    torch.empty_like = short if rank.rank == 1 else empty  # type: ignore[assignment]
    try:
        refused = move_experts(layer, [4, 1, 2, 3, 0, 5, 6, 7])
    finally:
        torch.empty_like = empty
    same = torch.equal(before[0], layer.w13) and torch.equal(before[1], layer.w2)
    unchanged = same and before[2] == layer.placement.logical
    return refused, unchanged, move_experts(layer, [4, 1, 2, 3, 0, 5, 6, 7]), layer.placement.logical


def test_nobody_moves_where_a_rank_has_no_memory() -> None:
    for refused, unchanged, moved_bytes, logical in world(2).run(no_memory):
        assert refused is None and unchanged
        assert moved_bytes == 4 * 3 * INNER * HIDDEN and logical == [4, 1, 2, 3, 0, 5, 6, 7]


def exchanged(rank: Rank, plan: list[int], exact: bool) -> tuple[bool, bool]:
    """Send tokens to the slots of their experts, of every rank a part of them."""
    spec = rank.spec(ep=2)
    x, weights, ids, positions = routed()
    layer = layer_of(spec, fl.EplbConfig(num_redundant_experts=2), exact)
    assert layer.placement is not None
    move_experts(layer, plan)
    exchange = ExpertExchange(spec.ep, HIDDEN, layer.placement.num_slots, TOP_K, dtype=torch.float32)
    own = slice(rank.rank * TOKENS // 2, (rank.rank + 1) * TOKENS // 2)
    slots = layer.placement(ids, positions)

    def experts(rows: torch.Tensor, local: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        there = torch.where(local >= 0, local + layer.expert_slice.start, -1)
        return layer(rows, share, there)

    y = exchange(x[own], slots[own], weights[own], experts)
    plain = layer_of(ParallelSpec(), None, exact)(x, weights, ids)[own]
    return torch.equal(y, plain), bool((y - plain).abs().max() < 1e-3)


def test_tokens_are_sent_to_the_slots_of_their_experts() -> None:
    for plan in PLANS[2][1]:
        assert world(2).run(exchanged, plan, True) == [(True, True)] * 2
    assert all(close for _, close in world(2).run(exchanged, PLANS[2][1][0], False))


def test_transfers_name_each_lacking_expert_once() -> None:
    sent = transfers([0, 1, 2, 3, 4, 0], [0, 3, 3, 3, 4, 1], 2)
    assert [tuple(each) for each in sent] == [(3, 1, 0, 0), (1, 0, 1, 1)]
    assert transfers([0, 1, 2, 3], [1, 0, 3, 2], 2) == []


def test_threads_cannot_send() -> None:
    layer = layer_of(ParallelSpec.grid(2, 0, ep=2), fl.EplbConfig(), True)
    with pytest.raises(ArgumentError, match="a process group"):
        move_experts(layer, [7, 6, 5, 4, 3, 2, 1, 0])
    with pytest.raises(ArgumentError, match="without a placement"):
        move_experts(layer_of(ParallelSpec(), None, True), [0])


def test_layers_name_placements_that_do_not_fit() -> None:
    config = fl.EplbConfig()
    with pytest.raises(ArgumentError, match="placement is 5 experts"):
        fl.FusedMoE(8, 8, 6, 2, placement=ExpertPlacement(5, Axis(), config))
    with pytest.raises(ArgumentError, match="PackedExpertNames"):
        fl.FusedMoE(8, 8, 6, 2, interleaved=True, placement=ExpertPlacement(6, Axis(), config))
