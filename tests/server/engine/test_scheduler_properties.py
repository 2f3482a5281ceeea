"""The scheduler under everything at once, on an executor that checks each cell of the cache that a row reads.

The invariants' numbers are those of the server's contract. A step is one row or chunk, executed and checked.
"""

from __future__ import annotations

import math
import random
import sys
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fastlayers_server.engine.cache import PrefixCache
from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.protocol import pack_ids
from fastlayers_server.engine.request import RUNNING
from fastlayers_server.engine.scheduler import Scheduler
from fastlayers_server.parallel.frames import Mirror

sys.path.insert(0, str(Path(__file__).parent))
from world import EOS, VOCAB, World, script

PAGE_SIZES = (1, 16, 64)
SEASONS = 48  # of each part


def tokens(kind: int, length: int) -> list[int]:
    """Return a prompt; those of one kind share their beginnings."""
    random_ = random.Random(kind)
    return [random_.randrange(VOCAB) for _ in range(length)]


def config(page_size: int, room: float, longest: int, **options: object) -> SchedulerConfig:
    """Return limits of a cache that holds ``room`` requests of the greatest length."""
    pages = int(room * -(-longest // page_size)) + 1
    return SchedulerConfig(
        VOCAB, longest, max(pages, -(-longest // page_size) + 1), page_size, (EOS,), features=(), **options  # type: ignore[arg-type]
    )  # fmt: skip


class Serving(RuleBasedStateMachine):
    """Requests come, are aborted, finished and preempted, in any order."""

    @initialize(
        page_size=st.sampled_from(PAGE_SIZES),
        room=st.floats(1.0, 6.0),
        running=st.integers(1, 8),
        chunk=st.integers(1, 80),
        extends=st.integers(1, 4),
        partials=st.integers(1, 3),
        cache=st.booleans(),
        policy=st.sampled_from(["fcfs", "lpm"]),
        priority=st.booleans(),
        drop=st.booleans(),
        pieces=st.integers(0, 2),
        mixed=st.booleans(),
        delay=st.integers(0, 2),
        draft=st.one_of(st.none(), st.tuples(st.integers(1, 5), st.integers(0, 5))),
        tree=st.booleans(),
    )
    def begin(
        self, page_size: int, room: float, running: int, chunk: int, extends: int, partials: int, cache: bool,
        policy: str, priority: bool, drop: bool, pieces: int, mixed: bool, delay: int,
        draft: tuple[int, int] | None, tree: bool,
    ) -> None:  # fmt: skip
        self.longest = 160 if page_size < 64 else 320
        limits = config(
            page_size, room, self.longest, max_running=running, max_batched_tokens=chunk, max_extend_requests=extends,
            max_partial_prefills=partials, prefix_cache=cache, policy=policy, enable_priority=priority,
            drop_last_block=drop, max_queued_requests=24, max_queued_tokens=4000, mixed=mixed and not pieces,
        )  # fmt: skip
        if pieces:  # deterministic mode, which drafts nothing and mixes nothing
            piece, draft = pieces * math.lcm(page_size, 16), None
            limits = msgspec.structs.replace(limits, piece=piece, max_batched_tokens=max(piece, chunk))
        self.world = World(limits, delay=delay, draft=draft, tree=tree)

    @rule(
        kind=st.integers(0, 3),
        length=st.integers(1, 140),
        new=st.integers(1, 30),
        least=st.integers(0, 4),
        stop=st.lists(st.integers(2, 5), max_size=2),
        ignore=st.booleans(),
        priority=st.integers(-1, 1),
        patience=st.sampled_from([0.0, 0.0, 0.05]),
        namespace=st.sampled_from([b"", b"", b"other"]),
        siblings=st.integers(0, 2),
    )
    def submit(
        self, kind: int, length: int, new: int, least: int, stop: list[int], ignore: bool, priority: int,
        patience: float, namespace: bytes, siblings: int,
    ) -> None:  # fmt: skip
        world, group = self.world, 0
        for _ in range(1 + siblings):
            rid = world.submit(
                tokens(kind, length), new, min_new_tokens=min(least, new), stop_ids=tuple(stop), ignore_eos=ignore,
                priority=priority, deadline=world.now + patience if patience else 0.0, namespace=namespace, group=group,
            )  # fmt: skip
            group = group or rid

    @rule(count=st.integers(1, 40))
    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.world.tick()

    @precondition(lambda self: self.world.scheduler.live)
    @rule(which=st.integers(0, 100), how=st.sampled_from(["abort", "finish", "both"]))
    def end(self, which: int, how: str) -> None:
        world = self.world
        rid = list(world.scheduler.live)[which % len(world.scheduler.live)]
        if how != "finish":
            world.scheduler.end([rid, 10**9], world.now)
        if how != "abort":
            world.scheduler.end([rid], world.now, "stop")
        world.collect()
        world.check()

    @rule()
    def flush(self) -> None:
        self.world.scheduler.cache.flush()
        self.world.check()

    @rule(seconds=st.sampled_from([0.1, 5.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    def teardown(self) -> None:
        if hasattr(self, "world") and self.world.whole:
            self.world.run()
            self.world.check_idle()


TestServing = Serving.TestCase
TestServing.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def season(seed: int, ticks: int, busy: bool) -> tuple[int, int]:
    """Serve random requests under random limits for so many ticks; returns the steps, and the mixed ticks."""
    r = random.Random(seed)
    longest = 160 if busy else r.choice([96, 160, 320])
    limits = config(
        r.choice(PAGE_SIZES[1:] if busy else PAGE_SIZES), r.choice([16.0, 30.0] if busy else [1.0, 3.0, 8.0]), longest,
        max_running=64 if busy else r.choice([1, 4, 16]), max_batched_tokens=r.choice([64, 200, 1000, 3][: 4 - busy]),
        max_extend_requests=r.randint(1, 6), max_partial_prefills=r.randint(1, 3), prefix_cache=r.random() < 0.8,
        policy=r.choice(["fcfs", "lpm"]), enable_priority=r.random() < 0.4, drop_last_block=r.random() < 0.3,
        max_queued_requests=15, max_queued_tokens=1500, mixed=seed % 2 > 0,
    )  # fmt: skip
    draft = (r.randint(1, 5), r.randint(0, 5)) if r.random() < 0.3 else None
    block = math.lcm(limits.page_size, 16)
    if draft is None and not limits.mixed and limits.max_batched_tokens >= 2 * block and r.random() < 0.7:
        limits = msgspec.structs.replace(limits, piece=block * r.choice([1, 2]))
    bad = (lambda rid, position: rid % 29 == 0 and position == 2) if r.random() < 0.3 else None
    world = World(limits, delay=r.randint(0, 2), draft=draft, tree=r.random() < 0.5, nonfinite=bad)
    world.mirror = Mirror() if seed % 9 == 0 else None
    load, world.check_every = 1.0 if busy else r.uniform(0.05, 0.8), 16
    for _ in range(ticks):
        if r.random() < load and world.scheduler.queue.count < 20:
            new = r.randint(1, 100 if busy else 60)
            world.submit(
                tokens(r.randint(0, 4), r.randint(1, longest - new)), new, stop_ids=(2,) if r.random() < 0.3 else (),
                min_new_tokens=r.choice([0, 0, min(3, new)]), ignore_eos=busy or r.random() < 0.5,
                priority=r.randint(-1, 1), deadline=world.now + 0.2 if r.random() < 0.1 else 0.0,
                namespace=r.choice([b"", b"", b"other"]), group=world.rids if r.random() < 0.1 else 0,
            )  # fmt: skip
        if world.scheduler.live and r.random() < 0.03:
            rid = r.choice(list(world.scheduler.live))
            if r.random() < 0.5:
                world.scheduler.end([rid], world.now)
            else:
                world.scheduler.end([rid], world.now, "stop")
            world.collect()
        if r.random() < 0.003:
            world.scheduler.cache.flush()
        world.tick()
    if seed % 5 == 0:  # I17: whoever aborts everything finds what was there before anybody came
        world.scheduler.end(list(world.scheduler.live), world.now)
        world.collect()
        assert not world.scheduler.live
    world.run()
    world.check_idle()
    return world.executor.steps, world.mixed


@pytest.mark.parametrize("part", [*range(2), *(pytest.param(part, marks=pytest.mark.slow) for part in range(2, 16))])
def test_seasons(part: int) -> None:
    """Long runs, where caches fill and queues grow: half a million steps together, millions under ``-m slow``.

    Shorter ones, and at most twenty, find each planted fault.
    """
    seasons = [season(1000 * part + i, 400, busy=i % 3 > 0) for i in range(SEASONS)]
    assert sum(steps for steps, _ in seasons) > 250_000
    assert sum(mixed for _, mixed in seasons) > 1000


@pytest.mark.parametrize(("prompt", "cached"), [(70, [64, 48]), (64, [48, 32]), (17, [16, 0]), (16, [0, 0])])
def test_a_hit_is_without_its_last_block_where_a_draft_layer_needs_what_is_behind(
    prompt: int, cached: list[int]
) -> None:
    found = []
    for drop in (False, True):
        world = World(config(16, 4.0, 96, drop_last_block=drop))
        for _ in range(2):
            rid = world.submit(tokens(0, prompt), 4, ignore_eos=True)
            world.run()
        world.check_idle()
        found.append(world.told[rid].cached)
    assert found == cached


@pytest.mark.parametrize("draft", [None, (4, 0)])
def test_pages_of_logits_that_are_not_finite_are_zeroed_before_anybody_gets_them(draft: Any) -> None:
    """Nothing else runs when they are freed, and some were given back as those of drafts."""
    world = World(config(1, 2.0, 96), draft=draft, nonfinite=lambda rid, position: rid == 1 and position == 2)
    for _ in range(2):
        rid = world.submit(tokens(0, 15), 40, ignore_eos=True)
        world.run()
    assert (world.told[1].code, world.told[rid].finish) == ("nonfinite_logits", "length")
    assert not world.executor.dirty


def test_a_row_in_flight_behind_the_end_leaves_nothing_in_doubt_in_the_cache() -> None:
    """The block that the stop token fills is published before it is known that its row is not finite."""
    prompt = tokens(0, 28)
    world = World(config(16, 4.0, 96), delay=1, nonfinite=lambda rid, position: (rid, position) == (1, 4))
    stop = script(prompt, 1, 3)
    world.submit(prompt, 40, stop_ids=(stop,), min_new_tokens=4, ignore_eos=True)
    world.run()
    told = world.told[1]
    assert (told.finish, len(told.ids)) == ("stop", 4)
    assert world.scheduler.cache.evictable == 0 and world.executor.dirty
    again = world.submit([*prompt, *told.ids, 5], 4, ignore_eos=True)
    world.run()
    assert (world.told[again].cached, world.told[again].finish) == (0, "length")
    assert not world.executor.dirty, "zeroed before anybody gets them"
    world.check_idle()


def test_a_row_in_flight_of_who_was_preempted_leaves_nothing_in_doubt_in_the_cache() -> None:
    bad: set[int] = set()
    world = World(config(1, 3.0, 96), delay=1, nonfinite=lambda rid, position: rid in bad)
    world.submit(tokens(0, 20), 30, ignore_eos=True)
    victim = world.submit(tokens(1, 20), 30, ignore_eos=True)
    while len(world.told[victim].ids) < 3:
        world.tick()
    bad.add(victim)
    world.tick()
    bad.clear()
    cache = world.scheduler.cache
    others = cache.take(cache.free)
    world.check_every = 10**9  # pages are missing
    world.tick()
    assert world.scheduler.metrics.counters["preemptions_total"][""] == 1
    cache.give_back(others)
    world.check_every = 1
    world.run()
    assert (world.told[victim].code, world.told[1].finish) == ("nonfinite_logits", "length")
    assert not cache.match(b"", tokens(1, 20), 20) and cache.match(b"", tokens(0, 20), 20)
    world.check_idle()


def test_what_the_cache_keeps_beside_its_pages_is_no_more_than_they_are() -> None:
    """Whatever is used again and again, and however many namespaces clients think of."""
    cache, prompt = PrefixCache(9, 16), list(range(64))
    for turn in range(300):
        namespace = b"" if turn % 3 else turn.to_bytes(2, "little")
        path, pages = cache.match(namespace, prompt, 64), []  # type: ignore[var-annotated]
        cache.lock(path)
        pages += [page for node in path for page in node.pages] + cache.take(4 - len(path))
        cache.publish(namespace, path, prompt, pages, 4)
        cache.release(path, pages)
    assert cache.evictable == 8 and len(cache._roots) == 2
    assert len(cache._heap) <= 8


@pytest.mark.parametrize("known", [0, 15, 16, 40, 63, 64])
def test_a_prompt_is_found_alike_as_it_came(known: int) -> None:
    """Packed as far as it is, whichever block the packed part ends in, and where tokens differ behind it or in it."""
    cache, prompt = PrefixCache(9, 16), list(range(64))
    path, pages = [], cache.take(4)  # type: ignore[var-annotated]
    cache.publish(b"", path, prompt, pages, 4)
    for limit in range(-1, 65):
        assert cache.match(b"", prompt, limit, pack_ids(prompt[:known])) == path[: max(0, limit) // 16]
    for place in (0, 20, 47, 63):
        other = [*prompt[:place], 99, *prompt[place + 1 :]]
        assert cache.match(b"", other, 64, pack_ids(other[:known])) == path[: place // 16]


def test_who_ended_is_not_kept_until_its_deadline() -> None:
    world = World(config(16, 4.0, 96))
    rid = world.submit(tokens(0, 40), 4, deadline=3600.0)
    world.run()
    kept = weakref.ref(world.requests.pop(rid))
    world.executor.truths.clear()
    assert kept() is None
    world.now = 4000.0
    world.submit(tokens(0, 40), 4)
    world.run()


def forgetful_release(cache: PrefixCache) -> None:
    release = cache.release
    cache.release = lambda path, pages, forget=False: release(path[:-1], pages, forget)  # type: ignore[method-assign]


def shared_namespaces(cache: PrefixCache) -> None:
    match, publish = cache.match, cache.publish
    cache.match = lambda namespace, *rest: match(b"", *rest)  # type: ignore[method-assign]
    cache.publish = lambda namespace, *rest: publish(b"", *rest)  # type: ignore[method-assign]


def hit_not_locked(cache: PrefixCache) -> None:
    cache.lock = lambda path: None  # type: ignore[method-assign]


def whole_prompt_hit(cache: PrefixCache) -> None:
    match = cache.match
    cache.match = lambda namespace, tokens, limit, *rest: match(namespace, tokens, limit + 1, *rest)  # type: ignore[method-assign]


def given_twice(cache: PrefixCache) -> None:
    take = cache.take

    def twice(count: int) -> list[int]:
        taken = take(count)
        cache.give_back(taken[-1:] if cache.free % 7 == 3 else [])
        return taken

    cache.take = twice  # type: ignore[method-assign]


def ended_twice(scheduler: Scheduler) -> None:  # I8
    end = scheduler._end

    def twice(*args: Any, **options: Any) -> None:
        end(*args, **options)
        scheduler.outputs.append(scheduler.outputs[-1])

    scheduler._end = twice  # type: ignore[method-assign]


def waste_not_counted(scheduler: Scheduler) -> None:  # I15
    add = scheduler.metrics.add
    scheduler.metrics.add = lambda name, *rest: None if "wasted" in name else add(name, *rest)  # type: ignore[method-assign]


def deaf_to_ends(scheduler: Scheduler) -> None:  # I16
    submit = scheduler.submit

    def deaf(asked: Any, now: float) -> None:
        submit(msgspec.structs.replace(asked, stop_ids=(), ignore_eos=True), now)

    scheduler.submit = deaf  # type: ignore[method-assign]


def rows_left_out(scheduler: Scheduler) -> None:  # I10
    plan = scheduler.plan

    def fewer(*args: Any) -> Any:
        made = plan(*args)
        if scheduler.ticks % 50 > 47 and made.rows:
            made.rows.pop()
        return made

    scheduler.plan = fewer  # type: ignore[method-assign]


def columns_stay(scheduler: Scheduler) -> None:  # I4
    running, shrink = scheduler.running, scheduler.running.shrink

    def kept(request: Any) -> None:
        shrink(request)
        running.dropped.clear()

    running.shrink = kept  # type: ignore[method-assign]


def long_chunks(scheduler: Scheduler) -> None:  # I9
    chunk = scheduler._chunk
    scheduler._chunk = lambda start, goal, budget: chunk(start, goal, budget + 1)  # type: ignore[method-assign]


def everybody_fits(scheduler: Scheduler) -> None:  # I11
    scheduler.running.fits = lambda *given: True  # type: ignore[method-assign]


def oldest_preempted(scheduler: Scheduler) -> None:  # I13
    requests = scheduler.running.requests
    scheduler.running._victim = lambda: min(requests, key=lambda r: (r.priority, r.seq))  # type: ignore[method-assign]


def last_class_first(scheduler: Scheduler) -> None:  # I21
    waiting = scheduler.queue._order
    scheduler.queue.head = lambda: max(waiting, key=lambda r: r.priority, default=None)  # type: ignore[method-assign]


def same_block_not_told(cache: PrefixCache) -> None:  # I3
    publish = cache.publish
    cache.publish = lambda *given: publish(*given)[:0]  # type: ignore[method-assign]


def preempted_but_planned(scheduler: Scheduler) -> None:  # I3
    make_room = scheduler.running.make_room

    def room(lengths: dict[Any, int], plan: Any) -> Any:
        before = dict(lengths)
        victims = make_room(lengths, plan)
        lengths.update(before)
        return victims

    scheduler.running.make_room = room  # type: ignore[method-assign]


def first_tokens_twice(scheduler: Scheduler) -> None:  # I12
    commit_prompts = scheduler.commit_prompts

    def early(plan: Any, *rest: Any) -> None:
        commit_prompts(plan, *rest)
        plan.early = 0

    scheduler.commit_prompts = early  # type: ignore[method-assign]


def behind_certain_ends(scheduler: Scheduler) -> None:  # I14
    enter = scheduler.running.enter

    def later(plan: Any, request: Any, path: Any) -> None:
        enter(plan, request, path)
        request.end += request.seq % 2

    scheduler.running.enter = later  # type: ignore[method-assign]


def endless_queue(scheduler: Scheduler) -> None:  # I17
    submit = scheduler.submit

    def unbounded(asked: Any, now: float) -> None:
        kept, scheduler.queue.tokens = scheduler.queue.tokens, 0
        submit(asked, now)
        scheduler.queue.tokens += kept

    scheduler.submit = unbounded  # type: ignore[method-assign]


def tokens_stay(scheduler: Scheduler) -> None:  # I17
    remove = scheduler.queue.remove

    def kept(request: Any) -> None:
        remove(request)
        scheduler.queue.tokens += 1

    scheduler.queue.remove = kept  # type: ignore[method-assign]


def rejected_kept(scheduler: Scheduler) -> None:  # I20
    commit = scheduler.commit

    def longer(plan: Any, result: Any, now: float) -> None:
        commit(plan, result, now)
        for chunk in plan.verify:
            chunk.request.kv += chunk.request.state == RUNNING

    scheduler.commit = longer  # type: ignore[method-assign]


CACHES = (
    forgetful_release, shared_namespaces, hit_not_locked, whole_prompt_hit, given_twice, same_block_not_told
)  # fmt: skip
SCHEDULERS = {
    ended_twice: "after its end", waste_not_counted: "I15", deaf_to_ends: "says other tokens", rows_left_out: "I10",
    columns_stay: "has the table", long_chunks: "I9", everybody_fits: "I11", oldest_preempted: "I13",
    last_class_first: "I21", preempted_but_planned: "0", first_tokens_twice: "says other tokens",
    behind_certain_ends: "I14", endless_queue: "I17", tokens_stay: "I17", rejected_kept: "prefix that is not its own",
}  # fmt: skip


@pytest.mark.parametrize("plant", [*CACHES, *SCHEDULERS])
def test_planted_faults_are_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner: Any = PrefixCache if plant in CACHES else Scheduler
    original = owner.__init__

    def planted(self: Any, *args: Any) -> None:
        original(self, *args)
        plant(self)

    monkeypatch.setattr(owner, "__init__", planted)
    with pytest.raises((AssertionError, KeyError, IndexError), match=SCHEDULERS.get(plant)):
        for seed in range(20):
            season(seed, 300, busy=False)


@pytest.mark.parametrize(
    "what", ["admitted", "pages", "poisoned", "chunks", "verify", "rows", "starts", "sampled", "special", "mixed"]
)
def test_a_rank_that_hears_otherwise_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """I18, whatever of a plan is lost on the way."""
    hear = Mirror.plan

    def partly(self: Mirror, frame: bytes) -> Any:
        plan, *rest = hear(self, frame)
        setattr(plan, what, type(getattr(plan, what))())
        return plan, *rest

    monkeypatch.setattr(Mirror, "plan", partly)
    with pytest.raises(AssertionError, match="I18"):
        for seed in range(0, 360, 9):
            season(seed, 400, busy=False)
