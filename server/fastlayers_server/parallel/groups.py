"""Several attention groups: a scheduler of each, all on the first rank, and one plan of all of them a tick.

    submit ─► the group that has most of the prompt cached, or least to do ─► its scheduler
    tick      plan of group 0, plan of group 1, … ─► all ranks; each computes its group's, in step with the others

Groups have slots, pages, a prefix cache and a queue of their own; limits of the configuration are each group's.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from fastlayers_server.engine.protocol import Submit, unpack_ids
from fastlayers_server.engine.request import Request, TickPlan, TickResult
from fastlayers_server.engine.scheduler import Scheduler

# A group that has so much of a prompt cached gets it, unless it has so many times as much to do as another.
CACHED_SHARE, BUSIER = 0.5, 1.5


class GroupsPlan(TickPlan):
    """One tick of all groups: their plans, and of all what a loop reads; no group drafts, or has grammars."""

    plans: list[TickPlan] = msgspec.field(default_factory=list)


class _All:
    """Attributes of several objects: numbers added up, what runs side by side."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        found = [getattr(part, name) for part in self._parts]
        return ChainMap(*found) if isinstance(found[0], dict) else sum(found)


class _Caches(_All):
    def flush(self) -> int:
        """Forget what nobody uses; returns the pages."""
        return sum(part.flush() for part in self._parts)


class Groups:
    """What :class:`~fastlayers_server.engine.loop.Engine` needs of a scheduler, over one for each group.

    Parameters
    ----------
    schedulers : sequence of Scheduler
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.each, first = list(schedulers), schedulers[0]
        self.config, self.budget, self.metrics = first.config, first.budget, first.metrics
        self.history, self.outputs = first.history, first.outputs
        for scheduler in self.each[1:]:  # told and measured once
            scheduler.budget, scheduler.metrics, scheduler.history = self.budget, self.metrics, self.history
            scheduler.outputs = first.outputs  # news of all groups, in the order in which they came
        self.live: ChainMap[int, Request] = ChainMap(*(scheduler.live for scheduler in self.each))
        self.running = _All([scheduler.running for scheduler in self.each])
        self.queue = _All([scheduler.queue for scheduler in self.each])
        self.cache = _Caches([scheduler.cache for scheduler in self.each])

    @property
    def ticks(self) -> int:
        """How many were planned."""
        return self.each[0].ticks

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self.each[0].draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        for scheduler in self.each:
            scheduler.draining = draining

    @property
    def backlog(self) -> bool:
        """Whether a group has one."""
        return any(scheduler.backlog for scheduler in self.each)

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits in any group."""
        return all(scheduler.idle for scheduler in self.each)

    def submit(self, submit: Submit, now: float) -> None:
        """Queue a request in the group that suits it, or refuse it."""
        self._group_of(submit).submit(submit, now)

    def _group_of(self, submit: Submit) -> Scheduler:
        for scheduler in self.each:  # what is known twice is refused; siblings share their prompt
            if submit.rid in scheduler.live or (submit.group and submit.group in scheduler.live):
                return scheduler
        ids = unpack_ids(submit.prompt) if len(submit.prompt) % 4 == 0 else []
        work = [sum(r.end - r.kv for r in scheduler.live.values()) for scheduler in self.each]
        least = work.index(min(work))
        cached = [
            len(scheduler.cache.match(submit.namespace, ids, len(ids) - 1, submit.prompt)) * scheduler.cache.block
            for scheduler in self.each
        ]  # fmt: skip
        most = cached.index(max(cached))
        kept = ids and cached[most] >= CACHED_SHARE * len(ids) and work[most] <= BUSIER * work[least]
        return self.each[most if kept else least]

    def end(self, rids: Iterable[int], now: float, finish: str = "abort", code: str = "", message: str = "") -> None:
        """End live requests of these exact rids, as of :class:`Scheduler`."""
        for rid in rids:
            for scheduler in self.each:
                scheduler.end([rid], now, finish, code, message)

    def plan(self, now: float, draft: Any = None) -> GroupsPlan:
        """Decide what the next tick of every group launches."""
        plans = [scheduler.plan(now) for scheduler in self.each]
        rows, chunks = [row for each in plans for row in each.rows], [chunk for each in plans for chunk in each.chunks]
        return GroupsPlan(plans[0].tick, rows=rows, chunks=chunks, plans=plans)

    def commit(self, plan: GroupsPlan, results: Sequence[TickResult], now: float) -> None:
        """Take the tokens of a launched plan, group by group."""
        for scheduler, planned, found in zip(self.each, plan.plans, results, strict=True):
            scheduler.commit(planned, found, now)
