"""The order checker: whatever ranks do differently is named on each of them before anything is launched."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from fastlayers.comm.all_reduce.layer import AllReduce
from fastlayers.comm.collectives import Collectives, collectives
from fastlayers.comm.order import DEADLINE, CheckedCollectives, Order
from fastlayers.comm.parallel import Axis
from fastlayers.comm.processes import own as own_process
from fastlayers.errors import CollectiveOrderError, RankLostError
from fastlayers.testing.world import Rank, world

SHORT = timedelta(seconds=1.5)  # for what never comes; ranks of a busy machine are further apart than that
SECONDS = 5.0
SILENT = ("an idle rank stays out", "another axis")


class Spy(Collectives):
    """Counts what was launched."""

    launched = 0

    def _launch(self, *args: Any) -> None:
        self.launched += 1

    all_reduce_ = all_gather = reduce_scatter = all_gather_variable = reduce_scatter_variable = _launch  # type: ignore[assignment]


def steps(fault: str, own: bool, tp: CheckedCollectives, dp: CheckedCollectives) -> None:
    """Make three calls, of which rank 1 (``own``) makes one otherwise."""
    x, wide = torch.zeros(4, 8), torch.zeros(2, 8)
    tp.all_reduce_(x)
    if fault in SILENT:
        tp.order.deadline = SHORT
    if own and fault == "swapped calls":
        tp.all_gather(wide)
        tp.all_reduce_(x)
        return
    if own and fault == "an extra call":
        tp.all_reduce_(wide)
    if own and fault == "another axis":
        dp.all_reduce_(x)
        tp.order.store.set(f"{tp.order.name}/went another way", "")
        return
    if fault == "another axis":  # what is told of it has been said
        tp.order.store.wait([f"{tp.order.name}/went another way"], timedelta(seconds=60))
    if not (own and fault in ("a missing call", "an idle rank stays out")):
        tp.all_reduce_(
            x[:2] if own and fault == "another bucket" else x.half() if own and fault == "another dtype" else x
        )
    if own and fault == "an idle rank stays out":
        return
    if own and fault == "another operation":
        tp.reduce_scatter(wide)
    elif fault == "other sizes":
        tp.all_gather_variable(wide, (2, 2 + own))
    else:
        tp.all_gather(wide)


MINE = "call 2 between ranks (0, 1): rank 0 calls all_reduce with float32[4, 8]"
THEN = "call 3 between ranks (0, 1): rank 0 calls"
FAULTS = {  # what rank 0 reads of itself and of rank 1; the number of calls that were launched
    "swapped calls": (MINE, "rank 1 calls all_gather with float32[2, 8]", 1),
    "an extra call": (MINE, "rank 1 calls all_reduce with float32[2, 8]", 1),
    "a missing call": (MINE, "rank 1 calls all_gather", 1),
    "another axis": (MINE, "its last: call 1 between ranks (1,), all_reduce", 1),
    "another bucket": (MINE, "rank 1 calls all_reduce with float32[2, 8]", 1),
    "another dtype": (MINE, "rank 1 calls all_reduce with float16[4, 8]", 1),
    "another operation": (f"{THEN} all_gather", "rank 1 calls reduce_scatter", 2),
    "other sizes": (f"{THEN} all_gather_variable", "of [2, 3] rows", 2),
    "an idle rank stays out": (MINE, "rank 1 says nothing of it for 1.5 s, its last: call 1 between ranks (0, 1)", 1),
}  # fmt: skip


def differ(rank: Rank) -> dict[str, tuple[str, int, float]]:
    found = {}
    store = torch.distributed.distributed_c10d._get_default_store()
    grouped = rank.spec(attn_dp=2)
    for fault in ("nothing", *FAULTS):
        order = Order(store, rank.rank, 2, name=f"test {fault}")
        spy = Spy(grouped.tp)
        tp, dp = CheckedCollectives(grouped.tp, spy, order), CheckedCollectives(grouped.attn_tp, spy, order)
        torch.distributed.barrier()  # one that stayed out is ahead
        begin, said = time.monotonic(), "nothing"
        try:
            steps(fault, rank.rank == 1, tp, dp)
        except CollectiveOrderError as error:
            said = str(error)
        found[fault] = (said, spy.launched, time.monotonic() - begin)
    return found


def test_what_differs_is_named_on_every_rank() -> None:
    one, two = world(2).run(differ)
    assert one.pop("nothing")[:2] == two.pop("nothing")[:2] == ("nothing", 3)
    for fault, (own, theirs, launched) in FAULTS.items():
        said, count, seconds = one[fault]
        assert own in said and theirs in said and "test_order.py:" in said, (fault, said)
        assert count == launched and said.endswith("Nothing was launched.")
        assert seconds < SECONDS  # nobody waited for the deadline
        if fault not in SILENT:  # which go on by themselves
            assert two[fault][1] == launched and "rank 0 calls" in two[fault][0], (fault, two[fault])


def along(rank: int, order: Order, lines: list[tuple[int, ...]]) -> str:
    try:
        for line in lines:
            order.check("all_reduce", Axis(len(line), line.index(rank), line), torch.zeros(2, 8))
    except (CollectiveOrderError, RankLostError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ranks_that_wait_for_each_other_along_two_axes_say_so_at_once() -> None:
    """With the usual deadline: neither will ever make the other's call."""
    store, whole, part = torch.distributed.HashStore(), (0, 1, 2, 3), (0, 1)
    orders = [Order(store, rank, 4, name="crossed") for rank in range(2)]
    assert orders[0].deadline == DEADLINE
    begin = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(along, rank, order, [part, (part, whole)[rank]]) for rank, order in enumerate(orders)]
        said = [job.result() for job in jobs]
    assert time.monotonic() - begin < SECONDS
    calls = f"call 2 between ranks {part}", f"call 1 between ranks {whole}"
    end = "all_reduce with float32[2, 8] at test_order.py:"
    for rank in range(2):
        assert said[rank].startswith(f"CollectiveOrderError: {calls[rank]}: rank {rank} calls all_reduce"), said
        assert f"rank {1 - rank} makes {calls[1 - rank]}, {end}" in said[rank], said
        assert said[rank].endswith("and waits there for this one. Nothing was launched."), said


@pytest.mark.parametrize("seconds", [2.5, pytest.param(10.0, marks=pytest.mark.slow)])
def test_a_host_that_is_late_is_waited_for(seconds: float) -> None:
    store, line = torch.distributed.HashStore(), (0, 1)
    orders = [Order(store, rank, 2, name="late") for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(along, 0, orders[0], [line, line])
        time.sleep(seconds)
        assert pool.submit(along, 1, orders[1], [line, line]).result() == first.result() == "nothing"


def test_a_rank_whose_process_has_ended_is_lost() -> None:
    store, gone = torch.distributed.HashStore(), [*own_process()[:2], "another"]
    order, begin = Order(store, 0, 2, name="ended"), time.monotonic()
    axis = Axis(2, 0, (0, 1), processes=(tuple(own_process()), tuple(gone)))
    with pytest.raises(
        RankLostError, match=rf"; rank 1 is gone, its process {gone[1]} has ended, its last: nothing\."
    ) as caught:
        order.check("all_reduce", axis, torch.zeros(2, 8))
    assert caught.value.rank == 1 and time.monotonic() - begin < SECONDS


def used(rank: Rank) -> list[str]:
    axis = rank.spec().tp
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTLAYERS_DEBUG", "1")
        over, layer = collectives(axis), AllReduce(axis, 8, dtype=torch.float32)
    assert isinstance(over, CheckedCollectives) and over.order is layer._order
    before = over.order.calls[axis.ranks]
    assert torch.equal(over.all_gather(torch.full((1, 8), float(rank.rank)))[1], torch.ones(8))
    assert torch.equal(layer(torch.ones(2, 8)), torch.full((2, 8), 2.0))
    assert torch.equal(over.gather_by_sum(torch.ones(1, 8), torch.ones(1, 8), 2, rank.rank), torch.ones(2, 8))
    for _ in range(70):  # more than are kept
        over.reduce_scatter(torch.ones(2, 8))
    assert over.order.calls[axis.ranks] == before + 74  # the layer, and the group's call inside
    said = []
    try:
        layer(torch.ones(1 + rank.rank, 8))
    except CollectiveOrderError as error:
        said.append(str(error))
    assert not isinstance(collectives(axis), CheckedCollectives)
    return said


def test_under_the_debug_variable() -> None:
    for said in world(2).run(used):
        assert "rank 0 calls AllReduce with float32[1, 8]" in said[0]
        assert "rank 1 calls AllReduce with float32[2, 8]" in said[0]
