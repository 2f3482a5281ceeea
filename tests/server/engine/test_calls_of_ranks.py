"""A server's rank that calls others differently than the first one is named with the call, before the next plan."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastlayers.comm.parallel import Axis
from fastlayers.comm.trail import TRAIL
from fastlayers.errors import CollectiveOrderError
from fastlayers.testing.world import Rank, world
from fastlayers_server.engine import protocol as p
from fastlayers_server.engine.request import Request, TickPlan, TickResult
from fastlayers_server.parallel.channel import Calls, Channel
from fastlayers_server.parallel.follower import follow
from fastlayers_server.parallel.groups import GroupsPlan
from fastlayers_server.parallel.leader import Leader
from fastlayers_server.parallel.together import GroupExecutor, GroupLeader, GroupSlotStep, follow_together

sys.path.insert(0, str(Path(__file__).parents[2]))
from silent_ranks import WIDE, X, silent

PLANS, FAULTY = 5, 2  # how many, and in which one the ranks differ


# What the two ranks call in one plan, and what the second one says of it.
ALIKE = "alike"
FAULTS: dict[str, tuple[Any, Any, str]] = {
    ALIKE: (lambda over, graphs: over.all_gather(X), lambda over, graphs: over.all_gather(X), ""),
    "swapped": (
        lambda over, graphs: (over.all_gather(X), over.all_reduce_(WIDE)),
        lambda over, graphs: (over.all_reduce_(WIDE), over.all_gather(X)),
        "number 2 since ranks last agreed: rank 0 made all_gather with float32[4, 8]; rank 1 made all_reduce with "
        "float32[2, 8]",
    ),
    "missing": (
        lambda over, graphs: over.all_gather(X),
        lambda over, graphs: None,
        "number 2 since ranks last agreed: rank 0 made all_gather with float32[4, 8]; rank 1 made none",
    ),
    "one more": (
        lambda over, graphs: None,
        lambda over, graphs: over.all_gather(X),
        "number 2 since ranks last agreed: rank 0 made none; rank 1 made all_gather with float32[4, 8]",
    ),
    "another shape": (
        lambda over, graphs: over.all_gather(X),
        lambda over, graphs: over.all_gather(WIDE),
        "rank 0 made all_gather with float32[4, 8]; rank 1 made all_gather with float32[2, 8]",
    ),
    "another replay": (
        lambda over, graphs: graphs.replay(1),
        lambda over, graphs: graphs.replay(2),
        "captured steps, number 1 since ranks last agreed: rank 0 made replay of 1; rank 1 made replay of 2",
    ),
}  # fmt: skip


class Script(GroupExecutor):
    """Calls what a fault says: one sum in each plan, and in one of them more."""

    def __init__(self, rank: Rank, parallel: Any, fault: str) -> None:
        self.over, self.graphs = silent(parallel.tp)
        self.model, self.launched, self.call = SimpleNamespace(parallel=parallel), 0, FAULTS[fault][rank.rank]

    def launch(self, plan: TickPlan) -> Any:
        self.over.all_reduce_(X)
        if plan.tick == FAULTY:
            self.call(self.over, self.graphs)
        self.launched += 1
        return SimpleNamespace(result=lambda: TickResult([[7]] * len(plan.rows)))

    def launch_together(self, plan: TickPlan, extends: Any, rows: Any) -> Any:
        return self.launch(plan)


def plan_of(tick: int) -> TickPlan:
    request = Request(p.Submit(1, p.pack_ids([5, 6, 7])), 3, [5, 6, 7], frozenset({1}), 0)
    request.slot = 1
    plan = TickPlan(tick, rows=[request], starts=[3], admitted=[request] if tick == 0 else [])
    plan.complete()
    return plan


def serve(rank: Rank, groups: int, fault: str) -> tuple[str, int, float]:
    """Return what a rank said, how many plans it launched, and the seconds that it took."""
    executor, channel = Script(rank, rank.spec(attn_dp=groups), fault), Channel()
    begin, said = time.monotonic(), "nothing"
    if rank.rank:
        try:
            (follow if groups == 1 else follow_together)(executor, channel)  # type: ignore[arg-type]
        except CollectiveOrderError as error:
            said = str(error)
    else:
        leader: Any = (Leader if groups == 1 else GroupLeader)(executor, channel)  # type: ignore[arg-type]
        for tick in range(PLANS):
            both = [plan_of(tick) for _ in range(2)]
            leader.launch(both[0] if groups == 1 else GroupsPlan(tick, plans=both))
        leader.close()
    assert TRAIL.lines[rank.spec().tp.ranks].count == (said == "nothing")  # of the last plan
    return said, executor.launched, time.monotonic() - begin


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_calls_differently_says_what(fault: str, groups: int) -> None:
    # Groups replay steps of their own.
    passes = fault == ALIKE or (groups == 2 and fault == "another replay")
    (_, every, _), (said, launched, seconds) = world(2).run(serve, groups, fault)
    assert every == PLANS and seconds < 5
    if passes:
        assert (said, launched) == ("nothing", PLANS)
        return
    assert said.startswith(f"in the plan before tick {FAULTY + 1} on rank 1: ") and FAULTS[fault][2] in said
    assert said.endswith("FASTLAYERS_DEBUG=1 names where a call is made, before it is launched.")
    assert launched == FAULTY + 1


def buckets(rank: Rank) -> tuple[list[int], list[str]]:
    """Return numbers of two replays of one bucket and of one of another, and the words of the last."""
    step, found, words = GroupSlotStep.__new__(GroupSlotStep), [], []
    step.model = SimpleNamespace(parallel=rank.spec(attn_dp=2))
    step._together = SimpleNamespace(groups=2, plan=lambda *a, **k: None, refresh=lambda *a: None)  # type: ignore[assignment]
    step.counts = None
    TRAIL.take(rank.spec().tp)
    for bucket in (4, 4, 8, None):
        step._agree(2, bucket)
        number, told = TRAIL.take(rank.spec().tp, steps=False)
        found.append(number)
        words.append(told())
    return found, words


def test_groups_compare_the_buckets_that_they_replay() -> None:
    one, other = world(2).run(buckets)
    assert one == other
    (first, second, larger, eager), words = one
    assert first == second and len({first, larger, eager}) == 3
    assert "a replay of bucket 8" in words[2] and "a decode step" in words[3]


def test_what_a_plan_costs_the_first_rank() -> None:
    """Of a replay, and of a step of as many calls as can be named; microseconds."""
    axis = Axis(2, 0, (0, 1))
    calls, times = Calls(axis), {}
    for many in (1, 64):
        found = []
        for _ in range(200):
            for _ in range(many):
                TRAIL.note("all_reduce", axis, X.shape, X.dtype)
            begin = time.perf_counter()
            calls.take()
            found.append((time.perf_counter() - begin) * 1e6)
        times[many] = min(found)
    TRAIL.lines.clear()
    print(f"{times[1]:.1f} us a plan of one call, {times[64]:.1f} us of 64")
    assert times[1] < 200 and times[64] < 1000
