"""A scheduler on the scripted executor, and everything that must hold after each tick and at the end."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.protocol import Output, Sampling, Submit, pack_ids, unpack_ids
from fastlayers_server.engine.request import ENDED, RUNNING, Request, TickPlan, Tree
from fastlayers_server.engine.scheduler import Scheduler
from fastlayers_server.parallel.frames import Mirror, encode

sys.path.insert(0, str(Path(__file__).parent))
from scripted import ScriptedExecutor

EOS = 1
VOCAB = 23


def script(prompt: Sequence[int], seed: int, position: int) -> int:
    return hash((hash(tuple(prompt)), seed, position)) % VOCAB


def expected(submit: Submit) -> tuple[list[int], str]:
    """Return what a request says if nothing disturbs it, and how it ends; written without the scheduler."""
    prompt, out = unpack_ids(submit.prompt), []  # type: ignore[var-annotated]
    ends = set(submit.stop_ids) | (set() if submit.ignore_eos else {EOS})
    while True:
        token = script(prompt, submit.sampling.seed, len(out))
        while token in ends and len(out) + 1 < submit.min_new_tokens:
            token += 1
        out.append(token)
        if token in ends and len(out) >= submit.min_new_tokens:
            return out, "stop"
        if len(out) == submit.max_new_tokens:
            return out, "length"


@dataclass
class Told:
    """What the front saw of a request."""

    submit: Submit
    ids: list[int] = field(default_factory=list)
    finish: str = ""
    code: str = ""
    cached: int = -1
    wanted: tuple[list[int], str] | None = None


def plain(plan: TickPlan) -> tuple[Any, ...]:
    """Return a plan as numbers: what ranks without a scheduler must hear of it."""
    chunks = [(c.request.slot, c.start, c.ids, c.samples, list(c.parents)) for c in (*plan.chunks, *plan.verify)]
    admitted = [(r.slot, r.tokens, r.prompt_len, r.ends) for r in plan.admitted]
    special = [(place, request.slot, drawn) for place, request, drawn in plan.special]
    slots = [[r.slot for r in requests] for requests in (plan.rows, plan.sampled)]
    return (plan.tick, admitted, plan.pages, plan.poisoned, chunks, len(plan.verify), slots, plan.starts, special,
            plan.masked, plan.mixed)  # fmt: skip


def path_to(place: int, ids: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return the tokens from one of a tree back to its root."""
    return [ids[place], *path_to(parents[place], ids, parents)] if place >= 0 else []


class World:
    """Drives plans, launches and commits; results come ``delay`` ticks late.

    ``draft``: (how many tokens ahead are drafted, how many of them are right), or None; ``tree``: among wrong ones.
    """

    def __init__(
        self, config: SchedulerConfig, *, delay: int = 0, draft: tuple[int, int] | None = None, tree: bool = False,
        nonfinite: Any = None,
    ) -> None:  # fmt: skip
        self.scheduler = Scheduler(config)
        self.config, self.delay, self.draft, self.tree = config, delay, draft, tree
        self.executor = ScriptedExecutor(script, config.page_size, nonfinite=nonfinite)
        self.pending: deque[tuple[TickPlan, Any]] = deque()
        self.told: dict[int, Told] = {}
        self.requests: dict[int, Request] = {}
        self.now = 0.0
        self.rids = 0
        self.left_out, self.mixed = False, 0
        self.mirror: Mirror | None = None
        self.trees: dict[Request, Tree] = {}
        self.whole = True  # False after something failed
        self.check_every = 1

    def submit(self, prompt: Sequence[int], max_new: int = 8, **options: Any) -> int:
        self.rids += 1
        seed = options.pop("seed", self.rids)
        submit = Submit(self.rids, pack_ids(prompt), Sampling(seed=seed), max_new, arrival=self.now, **options)
        self.told[self.rids] = Told(submit)
        self.scheduler.submit(submit, self.now)
        if self.rids in self.scheduler.live:
            self.requests[self.rids] = self.scheduler.live[self.rids]
        self.collect()
        return self.rids

    def collect(self) -> None:
        """Take the news as a front does: one end each, nothing behind it."""
        outputs = list(self.scheduler.outputs)
        self.scheduler.outputs.clear()
        self.hear(outputs)

    def hear(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            told = self.told[output.rid]
            assert not told.finish, f"news of {output.rid} after its end"
            told.ids += output.ids
            if output.cached_tokens >= 0:
                assert told.cached < 0, "cached_tokens told twice"
                told.cached = output.cached_tokens
            told.finish, told.code = output.finish, output.code
            self._check_text(told, output)

    @staticmethod
    def _check_text(told: Told, output: Output) -> None:
        if told.wanted is None:
            told.wanted = expected(told.submit)
        ids, finish = told.wanted
        assert told.ids == ids[: len(told.ids)], f"{output.rid} says other tokens"
        if told.finish in ("stop", "length") and output.ids:
            assert (told.ids, told.finish) == (ids, finish), f"{output.rid} ends otherwise"
        if output.finish == "error":
            assert output.code and output.message

    def tick(self) -> TickPlan:
        scheduler, config = self.scheduler, self.config
        self.whole, draft = False, None
        if self.draft is not None:
            self.settle()
            draft = self._drafts
        elif self.pending:
            self._first_tokens(*self.pending[0])
        before = list(scheduler.running.requests)
        decoding = [r for r in before if r.kv >= r.goal and r.left > 0]
        waiting = {r: r.priority for r in scheduler.queue}
        resumed = {r for r in waiting if r.cached >= 0}
        oldest = min(before, key=lambda r: (r.priority, r.seq), default=None)
        backlog = scheduler.backlog
        plan = scheduler.plan(self.now, draft)
        self.now += 0.01
        # I9
        assert (
            len(plan.rows) + len(plan.verify) <= config.max_running
            and len(scheduler.running.requests) <= config.max_running
        )
        assert plan.extend_tokens <= config.max_batched_tokens, "I9: more than a chunk"
        assert len(plan.chunks) <= config.max_extend_requests
        # I9 of mixed steps: rows beside chunks are part of their extend, which is no longer for that
        beside = bool(plan.rows and plan.chunks and not plan.verify)
        apart = backlog and 2 * plan.extend_tokens > config.max_batched_tokens
        fits = plan.extend_tokens + len(plan.rows) <= config.most_tokens
        assert plan.mixed == (config.mixed and beside and fits and not apart)
        assert not plan.mixed or plan.extend_tokens + len(plan.rows) <= config.most_tokens
        self.mixed += plan.mixed
        partial = sum(r.kv < r.goal for r in scheduler.running.requests)
        assert partial <= config.max_partial_prefills
        # I10: who can decode does, or loses its slot; beside whole steps of a backlog nobody is left out twice in a row
        launched = {*plan.rows, *(chunk.request for chunk in plan.verify)}
        left_out = not all(r in launched or r.state != RUNNING for r in decoding)
        apart = apart and scheduler.budget.extend and not self.left_out and plan.chunks
        assert not left_out or apart, "I10: a row is left out"
        self.left_out = left_out
        ahead = {chunk.request: len(chunk.ids) - 1 for chunk in plan.verify}
        certain = [r for r in plan.sampled if len(r.tokens) + r.inflight + ahead.get(r, 0) > r.end]
        assert not certain, "I14: launched behind an end that is certain"
        for chunk in plan.verify if self.tree else ():
            tree = self.trees.pop(chunk.request)
            for place in range(len(tree)):
                wanted = [*path_to(place, tree, tree.parents), chunk.request.tokens[-1]]
                assert path_to(place + 1, chunk.ids, chunk.parents) == wanted, "I20: behind another draft"
        # I13
        victims = [r for r in before if r.state not in (RUNNING, ENDED)]
        assert oldest not in victims, "I13: the oldest is preempted"
        assert all(r.rid in scheduler.history[-1]["preempted"] for r in victims) or plan.empty
        self._check_admission(plan, waiting, resumed)
        if not plan.empty and self.mirror is not None:
            seen, *heard = self.mirror.plan(encode(plan, scheduler.ticks, 7))
            assert (plain(seen), heard) == (plain(plan), [scheduler.ticks, 7]), "I18"
        if not plan.empty:
            self.pending.append((plan, self.executor.launch(plan)))
        while len(self.pending) > self.delay or (plan.empty and self.pending):
            self._commit()
        self.collect()
        if scheduler.ticks % self.check_every == 0:
            self.check()
        self.whole = True
        return plan

    def _check_admission(self, plan: TickPlan, waiting: dict[Request, int], resumed: set[Request]) -> None:
        scheduler = self.scheduler
        left = [r for r in waiting if r.state != ENDED and r not in plan.admitted]
        for admitted in plan.admitted:
            assert all(admitted.priority <= r.priority for r in left), "I21: a lower class overtook"
            if self.config.policy == "fcfs" and admitted not in resumed:
                assert all(admitted.seq < r.seq for r in left if r.priority == admitted.priority), "I21: overtaken"
            # I7: one token is computed, for its logits
            assert admitted.kv <= admitted.goal and (admitted.path == [] or admitted.goal > len(admitted.tokens) - 1)
        # The pages of drafts come back at commit.
        if plan.admitted and len(scheduler.running.requests) > 1 and self.draft is None:
            promised = scheduler.running.promised(scheduler.running.requests)
            assert promised <= scheduler.cache.available, "I11: admitted what will be preempted"
        for request in waiting:
            assert request.passed <= 8

    def _drafts(self, request: Request, limit: int) -> list[int]:
        assert self.draft is not None
        count, right = self.draft
        prompt, seed, drawn = request.tokens[: request.prompt_len], request.submit.sampling.seed, request.drawn
        if drawn % 3 == 0:  # as lookup finds now more, now fewer
            count = drawn % (count + 1)
        ids = [script(prompt, seed, drawn + i) for i in range(min(count, limit))]
        if not self.tree:
            return [token if i < right else (token + 1) % VOCAB for i, token in enumerate(ids)]
        # Behind each right token two wrong ones and (as far as wanted) the next right one, in the middle.
        tree, last = Tree([], []), -1
        for i, token in enumerate(ids):
            tree += [(token + 1) % VOCAB, token if i < right else (token + 3) % VOCAB, (token + 2) % VOCAB]
            tree.parents += [last] * 3
            last = len(tree) - 2
        self.trees[request] = tree = Tree(tree[:limit], tree.parents[:limit])
        return tree

    def _first_tokens(self, plan: TickPlan, step: Any) -> None:
        """Take the tokens of prompts before the others, mostly, as a loop does between two ticks."""
        if plan.rows and plan.chunks and plan.tick % 3:
            self.scheduler.commit_prompts(plan, step.first(), self.now)
            self.collect()

    def _commit(self) -> None:
        plan, step = self.pending.popleft()
        self.scheduler.commit(plan, step.result(), self.now)

    def settle(self) -> None:
        while self.pending:
            self._commit()
        self.collect()

    def check(self) -> None:
        """I1, I2, I6: every page is in one state, and counts are what the live requests say."""
        scheduler, cache = self.scheduler, self.scheduler.cache
        free = list(cache._free)
        owners: dict[int, str] = {}
        users: dict[Any, int] = {}
        for page in free:
            assert 0 < page < cache.num_pages and page not in owners, f"page {page} is free twice"
            owners[page] = "free"
        for request in scheduler.running.requests:
            held = len(request.path) * cache.pages_per_block
            assert request.pages[:held] == [page for node in request.path for page in node.pages]
            for page in request.pages[held:]:
                assert page not in owners, f"page {page} is {owners[page]} and private"
                owners[page] = "private"
            for node in request.path:
                users[node] = users.get(node, 0) + 1
        nodes = {*cache.nodes(), *users}
        for node in nodes:
            assert node.users == users.get(node, 0), "a count without its user"
            for page in node.pages:
                assert page not in owners, f"page {page} is {owners[page]} and in a node"
                owners[page] = "locked" if node.users else "evictable"
            if node.users and node.parent is not None and node.parent.parent is not None:
                assert node.parent.users >= node.users, "a child with more users than its parent"
        assert all(root.children for root in cache._roots.values()), "I17: a namespace of nothing"
        kept = [node for *_, node in cache._heap]
        assert len({*kept}) == len(kept), "I17: kept twice"
        states = list(owners.values())
        counts = (cache.free, cache.private, cache.locked, cache.evictable)
        assert counts == tuple(states.count(s) for s in ("free", "private", "locked", "evictable"))
        assert len(owners) == cache.num_pages - 1
        waiting = list(scheduler.queue)
        new, limits = [r.prompt_len for r in waiting if r.cached < 0], self.config
        assert sum(new) <= limits.max_queued_tokens, "I17: beyond a bound"
        most = limits.max_queued_requests + limits.max_running
        assert len(waiting) + len(scheduler.running.requests) <= most, "I17: beyond a bound"
        counted = scheduler.queue.count, scheduler.queue.tokens
        assert counted == (len(waiting), sum(r.prompt_len for r in waiting)), "I17: miscounted"

    def run(self, limit: int | None = None) -> int:
        """Tick until nothing lives; returns the ticks."""
        if limit is None:  # I10: each tick computes something of somebody; a preemption repeats what it took
            tokens = [len(r.tokens) + r.submit.max_new_tokens for r in self.scheduler.live.values()]
            limit = 200 + 4 * sum(tokens) * max(1, len(tokens))
        ticks = idle = 0
        while self.scheduler.live:
            idle = (idle + 1) * self.tick().empty
            ticks += 1
            assert ticks <= limit and idle < 150, "no progress"  # who is held for another one's prompt waits for 100
        self.settle()
        return ticks

    def check_idle(self) -> None:
        """What must hold when everything has ended: ledgers, and a state equal to a fresh one."""
        scheduler, cache = self.scheduler, self.scheduler.cache
        assert all(told.finish for told in self.told.values()), "I8: a request without an end"
        assert cache.locked == cache.private == 0
        counters = scheduler.metrics.counters
        told = sum(len(t.ids) for t in self.told.values())
        wasted = sum(counters["wasted_tokens_total"].values())
        bad = counters["nonfinite_rows_total"].get("", 0)
        assert self.executor.sampled == told + wasted + bad, "I15"
        ended = [
            r
            for r in self.requests.values()
            if self.told[r.rid].finish in ("stop", "length") and r.tokens[r.prompt_len :]
        ]
        assert all(r.high == r.prompt_len for r in ended)
        prompt = counters["prompt_tokens_total"]
        assert prompt.get("computed", 0) + prompt.get("cached", 0) == sum(r.high for r in self.requests.values()), "I15"
        stops = sum(t.finish == "stop" for t in self.told.values())
        assert counters["wasted_tokens_total"].get("overlap", 0) <= stops * max(1, self.delay) or self.draft, "I14"
        for request in ended if self.draft is None else ():
            told_of = self.told[request.rid]
            behind = len(self.executor.truths[request].tokens) - request.prompt_len - len(told_of.ids)
            assert behind <= self.delay * (told_of.finish == "stop"), "I14: drawn behind an end"
        scheduler.cache.flush()
        assert cache.evictable == 0 and cache.free == cache.num_pages - 1
        assert not scheduler.running.requests and not scheduler.live and not list(scheduler.queue)
        fresh = Scheduler(self.config)
        assert sorted(scheduler.running._slots) == sorted(fresh.running._slots)
        for now, then in ((cache, fresh.cache), (scheduler.queue, fresh.queue)):
            for name in ("_roots", "_heap", "_order", "tokens", "count"):
                assert getattr(now, name, None) == getattr(then, name, None), f"I17: {name} is not as it was"
