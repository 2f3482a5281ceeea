"""An engine over two attention groups on the CPU: its tokens are those of one rank, whichever group a request is in."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from fastlayers.attention.buckets import ExtendBuckets
from fastlayers.comm.parallel import SINGLE
from fastlayers.errors import ArgumentError, CollectiveMismatch
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.testing.world import Rank, world
from fastlayers_models.auto import AutoModel
from fastlayers_models.find import TINY, assets
from fastlayers_server.engine import protocol as p
from fastlayers_server.engine.config import EngineConfig, SchedulerConfig
from fastlayers_server.engine.executor import TorchExecutor
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.request import TickPlan, TickResult
from fastlayers_server.engine.scheduler import Scheduler
from fastlayers_server.engine.startup import scheduler_config
from fastlayers_server.parallel.channel import Channel
from fastlayers_server.parallel.follower import follow
from fastlayers_server.parallel.groups import Groups, GroupsPlan
from fastlayers_server.parallel.leader import Leader
from fastlayers_server.parallel.together import GroupExecutor, GroupLeader, _pack, follow_together
from fastlayers_server.serve_config import parse

sys.path.insert(0, str(Path(__file__).parent))
from test_process import Front  # type: ignore[import-not-found]
from test_ranks import _children, freezes, noticed  # type: ignore[import-not-found]

SETTINGS: dict[str, Any] = dict(
    device="cpu", max_num_batched_tokens=64, num_pages=64, page_size=16, max_model_len=256, max_running_requests=8
)
LIMITS = SchedulerConfig(vocab_size=100, max_model_len=64, num_pages=9, page_size=16, max_running=4)


def submit(rid: int, prompt: list[int], new: int = 8, **more: Any) -> p.Submit:
    return p.Submit(rid, p.pack_ids(prompt), p.Sampling(0.0), new, **more)


# ---- the schedulers ----------------------------------------------------------------------------------------------


def groups_with(*prompts: list[int]) -> Groups:
    """Return two groups, the first of which has computed these prompts, and nothing runs."""
    made = Groups([Scheduler(LIMITS), Scheduler(LIMITS)])
    for rid, prompt in enumerate(prompts, 1000):
        made.each[0].submit(submit(rid, prompt, 1), 0.0)
        while not made.each[0].idle:
            plan = made.each[0].plan(0.0)
            made.each[0].commit(plan, TickResult([[7]] * len(plan.sampled)), 0.0)
    made.outputs.clear()
    return made


def where(made: Groups) -> list[list[int]]:
    return [sorted(scheduler.live) for scheduler in made.each]


def test_requests_go_where_least_is_to_do() -> None:
    made = groups_with()
    for rid, new in ((1, 40), (2, 4), (3, 4), (4, 40)):
        made.submit(submit(rid, [5, 6, 7], new), 0.0)
    assert where(made) == [[1], [2, 3, 4]]
    assert made.live[4].rid == 4 and made.queue.count == 4 and made.queue.tokens == 12 and not made.idle
    assert not made.outputs and len(made.running.requests) == 0 and made.cache.free == 16


def test_a_prompt_that_a_group_knows_goes_there_unless_it_is_busy() -> None:
    known = list(range(2, 50))
    made = groups_with(known)
    made.submit(submit(1, [60] * 20, 10), 0.0)  # the first group of equals
    made.submit(submit(2, [61] * 20, 10), 0.0)
    made.submit(submit(3, [62] * 3, 4), 0.0)
    assert where(made) == [[1, 3], [2]]
    made.submit(submit(4, known, 4), 0.0)  # 37 against 30 to do: not half as much again
    assert where(made) == [[1, 3, 4], [2]]
    made.submit(submit(5, known, 4), 0.0)  # now it is
    assert where(made) == [[1, 3, 4], [2, 5]]


def test_what_is_known_by_its_number_stays_in_its_group() -> None:
    made = groups_with()
    made.submit(submit(1, [5] * 30, 20), 0.0)
    made.submit(submit(2, [5] * 30, 20, group=1), 0.0)  # a sibling
    made.submit(submit(1, [9], 2), 0.0)
    assert where(made) == [[1, 2], []]
    assert [(o.rid, o.code) for o in made.outputs] == [(1, "duplicate_request_id")]
    made.submit(submit(3, [], 2), 0.0)
    assert made.outputs[-1].code == "invalid_prompt"
    made.end([2, 77], 0.0)
    made.end([1], 0.0, "error", "internal_error", "so")
    assert made.idle and [(o.rid, o.finish) for o in made.outputs[2:]] == [(2, "abort"), (1, "error")]
    made.draining = True
    made.submit(submit(4, [5], 2), 0.0)
    assert made.draining and made.outputs[-1].code == "draining"


def test_a_burst_finds_the_free_slots_of_each_group() -> None:
    limits = msgspec.structs.replace(LIMITS, max_running=3, max_queued_requests=1)
    made = Groups([Scheduler(limits), Scheduler(limits)])
    for rid in range(1, 10):
        made.submit(submit(rid, [5, 6], 8), 0.0)
    assert list(map(len, where(made))) == [4, 4] and [output.code for output in made.outputs] == ["queue_full"]
    made.plan(0.0)
    made.submit(submit(10, [5, 6], 8, group=1), 0.0)  # a group's slots are its own
    assert [(output.rid, output.code) for output in made.outputs[1:]] == [(10, "queue_full")]


def test_a_plan_of_all_groups() -> None:
    made = groups_with()
    assert made.plan(0.0).empty
    for rid in (1, 2, 3):
        made.submit(submit(rid, [5, 6, 7], 2), 0.0)
    plan = made.plan(0.0)
    assert [each.extend_tokens for each in plan.plans] == [6, 3] and len(plan.chunks) == 3 and not plan.rows
    drawn = [TickResult([[10 * group]] * len(each.sampled)) for group, each in enumerate(plan.plans)]
    made.commit(plan, drawn, 0.0)
    assert {o.rid: o.ids for o in made.outputs} == {1: (0,), 3: (0,), 2: (10,)}
    following = made.plan(0.0)
    assert [len(each.rows) for each in following.plans] == [2, 1] and len(following.rows) == 3
    made.end([2], 0.0, "stop")
    made.end(list(made.live), 0.0, "error", "engine_restarting", "over")
    assert made.idle and made.metrics.counters["requests_total"] == {"stop": 1.0, "error": 2.0}
    assert made.ticks == 3 and made.cache.flush() == 0


# ---- the ranks ---------------------------------------------------------------------------------------------------


class OneRank:
    """A channel in whose world each rank of a group draws what is given."""

    size, axis = 2, SINGLE

    def __init__(self, *drawn: list[list[int]]) -> None:
        self.drawn, self.said = drawn, []  # type: ignore[var-annotated]

    def tell(self, message: bytes | None) -> None:
        self.said.append(message)

    def collect(self, data: bytes) -> list[bytes]:
        return [data, *(_pack(TickResult(each)) for each in self.drawn)]


class Parallel:
    def __init__(self, groups: int, ranks: int) -> None:
        self.attn_dp, self.attn_tp = type("A", (), {"size": groups}), type("A", (), {"size": ranks})


def leader(channel: OneRank, groups: int, ranks: int) -> GroupLeader:
    executor = GroupExecutor.__new__(GroupExecutor)
    executor.model = type("M", (), {"parallel": Parallel(groups, ranks)})
    return GroupLeader(executor, channel)  # type: ignore[arg-type]


def test_ranks_of_a_group_must_draw_alike() -> None:
    two = leader(OneRank([[4]]), 2, 1).reported(lambda: TickResult([[3], [2]]))
    assert [each.tokens for each in two] == [[[3], [2]], [[4]]]
    equal = leader(OneRank([[3]], [[5]], [[5]]), 2, 2).reported(lambda: TickResult([[3]]))
    assert [each.tokens for each in equal] == [[[3]], [[5]]]
    with pytest.raises(CollectiveMismatch, match="rank 3 drew other tokens than rank 2 of its group"):
        leader(OneRank([[3]], [[5]], [[6]]), 2, 2).reported(lambda: TickResult([[3]]))


class Calls(GroupExecutor):
    """One rank of a group, which notes what it would launch: an extend, a decode step, and of how many tokens each."""

    def __init__(self, group: int) -> None:
        self.extending, self.decoding, self.made = SimpleNamespace(counts=None), SimpleNamespace(counts=None), []  # type: ignore[var-annotated]
        self.model = SimpleNamespace(
            parallel=SimpleNamespace(attn_dp=SimpleNamespace(size=2, rank=group), attn_tp=SimpleNamespace(size=1))
        )

    def launch(self, plan: TickPlan) -> Any:
        extends, rows, group = self.extending.counts, self.decoding.counts, self.model.parallel.attn_dp.rank
        own = (plan.extend_tokens, len(plan.rows)) == (extends[group], rows[group])
        self.made.append((plan.tick, self.extends(plan), self.decodes(plan), (extends, rows), own))


def test_groups_with_nothing_to_do_make_the_calls_of_those_that_have() -> None:
    """I19: the same steps of the same sizes in each tick, and as many."""
    groups, channel, ranks = Groups([Scheduler(LIMITS), Scheduler(LIMITS)]), OneRank(), [Calls(0), Calls(1)]
    first, draw, idle = GroupLeader(ranks[0], channel), random.Random(0), 0  # type: ignore[arg-type]
    for rid in range(1, 40):
        for which in range(draw.choice([0, 1, 1, 4])):
            groups.submit(submit(100 * rid + which, [5] * draw.randint(1, 30), draw.randint(1, 20)), 0.0)
        for _ in range(draw.randint(1, 40)):
            plan = groups.plan(0.0)
            if not plan.empty:
                first.launch(plan)
                idle += any(each.empty for each in plan.plans)
                drawn = [TickResult([[7]] * len(each.sampled)) for each in plan.plans]
                groups.commit(plan, drawn, 0.0)
    heard = iter([*channel.said, None])
    follow_together(ranks[1], SimpleNamespace(hear=lambda: next(heard), axis=SINGLE))  # type: ignore[arg-type]
    assert ranks[0].made == ranks[1].made and idle > 50
    assert all(own and (extends or decodes) for _, extends, decodes, _, own in ranks[0].made)


PROMPTS = ([5, 6, 7], [9, 8], [2 + i % 50 for i in range(150)], [4] * 5, [11, 12])


def serve(executor: Any, scheduler: Any) -> dict[int, list[int]]:
    """Return the tokens of requests of every kind, of which some come later and one alone."""
    engine = Engine(scheduler, executor, overlap=True)
    found: dict[int, list[int]] = {}

    def deliver(message: Any) -> None:
        for output in message.outputs if isinstance(message, p.StepOut) else ():
            found.setdefault(output.rid, []).extend(output.ids)

    engine.deliver = deliver
    settings = [
        p.Sampling(0.0),
        p.Sampling(0.9, seed=11),
        p.Sampling(0.0),
        p.Sampling(0.8, seed=5, presence_penalty=1.0),
    ]
    for rid, (prompt, sampling) in enumerate(zip(PROMPTS, [*settings, p.Sampling(0.0)], strict=True), 1):
        new = 20 if rid == 5 else 6
        engine.post(p.Submit(rid, p.pack_ids(prompt), sampling, new, ignore_eos=True, logprobs=1 if rid == 1 else -1))
        engine.tick()
    while not scheduler.idle:
        engine.tick()
    engine.close()
    return found


def on_a_rank(rank: Rank, attn_dp: int, ep: int, captured: bool) -> Any:
    config = EngineConfig(model="tiny", tp=rank.size // attn_dp, attn_dp_size=attn_dp, ep=ep, **SETTINGS)
    model = AutoModel.from_pretrained(
        assets() / TINY, dtype=torch.float32, device="cpu", page_size=16, parallel=rank.spec(attn_dp=attn_dp, ep=ep)
    )
    limits = scheduler_config(config, model)
    graphs = CudaGraphs(runtime=EagerRuntime(), warm_ups=1, freeze=False) if captured else None
    executor, channel = GroupExecutor(model, limits, graphs=graphs), Channel()
    executor.capture()
    if rank.rank:
        follow_together(executor, channel)
        return executor.graph_counts()
    first = GroupLeader(executor, channel)
    found = serve(first, Groups([Scheduler(limits) for _ in range(attn_dp)]))
    first.close()
    assert first.explain()["groups"] == attn_dp and first.explain()["ranks"] == rank.size
    return found, executor.graph_counts()


def spread_on_a_rank(rank: Rank, captured: bool) -> Any:
    """As :func:`on_a_rank`, of one group whose prompts' steps are spread over the ranks; also how many there were."""
    config = EngineConfig(model="tiny", tp=rank.size, **SETTINGS)
    model: Any = AutoModel.from_pretrained(
        assets() / TINY, dtype=torch.float32, device="cpu", page_size=16, parallel=rank.spec()
    )
    model.spread_rows, steps = range(3, 65), []
    plan = model.single_step

    def planned(meta: Any) -> Any:
        steps.append(plan(meta))
        return steps[-1]

    model.single_step = planned
    limits = scheduler_config(config, model)
    graphs = CudaGraphs(runtime=EagerRuntime(), warm_ups=1, freeze=False) if captured else None
    buckets = ExtendBuckets((16, 64), (1, 4))
    executor, channel = TorchExecutor(model, limits, graphs=graphs, extend_buckets=buckets), Channel()
    executor.capture()
    if rank.rank:
        follow(executor, channel)
        return sum(step.spread for step in steps)
    first = Leader(executor, channel)
    found = serve(first, Scheduler(limits))
    first.close()
    return found, [step.rows[0] - step.real[0] for step in steps if step.spread]


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    model = AutoModel.from_pretrained(assets() / TINY, dtype=torch.float32, device="cpu", page_size=16)
    limits = scheduler_config(EngineConfig(model="tiny", **SETTINGS), model)
    return serve(TorchExecutor(model, limits), Scheduler(limits))


@pytest.mark.parametrize(
    ("size", "attn_dp", "ep"), [(2, 2, 1), pytest.param(2, 2, 2, marks=pytest.mark.slow), (4, 2, 4)]
)
def test_tokens_are_those_of_one_rank(alone: dict[int, list[int]], size: int, attn_dp: int, ep: int) -> None:
    assert sorted(map(len, alone.values())) == [6, 6, 6, 6, 20]
    found, *others = world(size).run(on_a_rank, attn_dp, ep, False)
    assert found[0] == alone
    assert not found[1][0] and all(not replays for replays, _ in others)


# Its groups are those that the test above leaves to the slow ones.
def test_captured_steps_of_groups(alone: dict[int, list[int]]) -> None:
    (found, (replays, eager)), (others, _) = world(2).run(on_a_rank, 2, 2, True)
    assert found == alone
    # Both ranks replay as often, by kinds that their own requests need; only prompts run without a graph.
    assert sum(replays.values()) == sum(others.values()) > 15 and not eager.get("no graph for greedy")


@pytest.mark.parametrize("captured", [False, True])
def test_a_group_whose_prompts_are_spread_over_ranks(alone: dict[int, list[int]], captured: bool) -> None:
    (found, pads), others = world(2).run(spread_on_a_rank, captured)
    assert found == alone
    assert len(pads) == others > 3 and (captured or max(pads) == 1)  # a token is missing where a prompt's are odd


def test_a_server_of_two_groups() -> None:
    ranks = Front("tiny", command=None, attn_dp_size=2, ep=2, no_freeze_gc=True, **SETTINGS)
    single = Front("tiny", in_process=True, **SETTINGS)
    single.until(p.EngineInfo)
    info = ranks.until(p.EngineInfo)
    assert (info.max_running, info.num_pages) == (16, 128) and "prompt_logprobs" not in info.features
    for front in (single, ranks):
        for rid, prompt in enumerate(PROMPTS, 1):
            front.link.submit(submit(rid, list(prompt), 6, ignore_eos=True), front.feed)
        for rid in range(1, 6):
            assert front.end_of(rid).finish == "length", front.finished[rid]
    assert ranks.ids == single.ids
    ranks.link.submit(submit(9, [5, 6], 5, prompt_logprobs=1), ranks.feed)
    assert ranks.end_of(9).code == "invalid_prompt"
    single.engine.shutdown()
    assert freezes(ranks)
    ranks.engine.shutdown()


@pytest.mark.slow
def test_a_lost_rank_of_two_groups() -> None:
    """As of one group (``test_ranks.py``); in what the others wait for it, ``tests/comm/test_lost_ranks.py`` tries."""
    ranks = Front("tiny", command=None, attn_dp_size=2, ep=2, **SETTINGS)
    ranks.until(p.EngineInfo)
    workers = _children(ranks.engine.pid)
    ranks.submit(10, 240)
    while len(ranks.ids.get(10, ())) < 3:
        ranks.until(p.StepOut)
    os.kill(workers[1], signal.SIGKILL)
    assert ranks.end_of(10).code == "engine_restarting"
    died = ranks.until(p.Died)
    assert died.restarting and noticed(died), died
    assert ranks.until(p.EngineInfo).epoch == 2
    ranks.submit(11, 4)
    assert ranks.end_of(11).finish == "length"
    ranks.engine.shutdown()


def test_what_groups_cannot_is_refused() -> None:
    assert parse(["--attn-dp-size", "2", "--ep", "2"])[0].attn_dp_size == 2
    with pytest.raises(ArgumentError, match="--attn-dp-size is 2; accepted: 1 with --deterministic"):
        parse(["--attn-dp-size", "2", "--deterministic"])
    with pytest.raises(ArgumentError, match="--attn-dp-size is 2; accepted: 1 with drafts"):
        parse(["--attn-dp-size", "2", "--speculative-algorithm", "ngram"])
    with pytest.raises(ArgumentError, match="--in-process is given; accepted: nothing with several ranks"):
        parse(["--attn-dp-size", "2", "--in-process"])


def test_an_empty_plan_of_groups_has_nothing() -> None:
    plan = groups_with().plan(0.0)
    assert isinstance(plan, GroupsPlan) and len(plan.plans) == 2
    assert plan.empty and not plan.rows and not plan.chunks and not plan.verify and not plan.masked
