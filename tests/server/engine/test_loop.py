"""The loop on the scripted executor: ahead of its tokens or not, drafting now and then, whatever a front says when."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.protocol import Abort, Control, FromEngine, Sampling, Shutdown, StepOut, Submit, pack_ids
from fastlayers_server.engine.request import Request, TickPlan, TickResult

sys.path.insert(0, str(Path(__file__).parent))
from world import EOS, VOCAB, Told, World


class NowAndThen:
    """Drafts of a world, in some ticks."""

    def __init__(self, world: World, random_: random.Random, share: float) -> None:
        self._world, self._random, self._share = world, random_, share
        self.verified, self.k = 0, 1

    def wanted(self, running: int) -> bool:
        return running > 0 and self._random.random() < self._share

    def prepare(self) -> None:
        """Nothing."""

    def draft(self, request: Request, limit: int) -> Sequence[int]:
        return self._world._drafts(request, limit)

    def observe(self, plan: TickPlan, result: TickResult, seconds: float) -> None:
        self.verified += len(plan.verify)

    def explain(self) -> None:
        """Nothing."""


class Looped(World):
    """A world whose ticks are those of an :class:`Engine`."""

    def __init__(self, config: SchedulerConfig, random_: random.Random, overlap: bool, **options: Any) -> None:
        super().__init__(config, delay=int(overlap), **options)
        self.drafts = NowAndThen(self, random_, random_.random()) if self.draft else None
        self.engine = Engine(
            self.scheduler, self.executor, self._deliver, overlap=overlap, drafts=self.drafts,  # type: ignore[arg-type]
            clock=lambda: self.now, pause=self._pause,
        )  # fmt: skip

        submit = self.scheduler.submit

        def noted(asked: Submit, now: float) -> None:
            submit(asked, now)
            self.requests |= self.scheduler.live

        self.scheduler.submit = noted  # type: ignore[method-assign]

    def _pause(self, seconds: float) -> None:
        self.now += seconds

    def _deliver(self, message: FromEngine) -> None:
        if isinstance(message, StepOut):
            self.hear(message.outputs)

    def submit(self, prompt: Sequence[int], max_new: int = 8, **options: Any) -> int:
        self.rids += 1
        submit = Submit(self.rids, pack_ids(prompt), Sampling(seed=self.rids), max_new, arrival=self.now, **options)
        self.told[self.rids] = Told(submit)
        self.engine.post(submit)
        return self.rids

    def tick(self) -> Any:
        self.now += 0.01
        launched = self.engine.tick()
        self.check()
        return launched

    def settle(self) -> None:
        self.engine._settle()
        self.engine._flush()

    def run(self, limit: int | None = None) -> int:
        ticks = 0
        while self.engine._inbox or self.scheduler.live:
            self.tick()
            ticks += 1
            assert ticks < (limit or 5000), "no progress"
        self.settle()
        return ticks


def season(seed: int, ticks: int = 120) -> int:
    """Serve for so many ticks what a front may say; returns how often drafts were verified."""
    r = random.Random(seed)
    size = r.choice([1, 16])
    limits = SchedulerConfig(
        VOCAB, 160, int(r.choice([1.0, 3.0, 8.0]) * -(-160 // size)) + 2, size, (EOS,), features=(),
        max_running=r.choice([1, 4, 8]), max_batched_tokens=r.choice([24, 64, 200]), mixed=r.random() < 0.5,
        max_extend_requests=r.randint(1, 5), prefix_cache=r.random() < 0.8, max_queued_requests=15,
        max_queued_tokens=1500,
    )  # fmt: skip
    draft = (r.randint(1, 5), r.randint(0, 5)) if r.random() < 0.6 else None
    world = Looped(limits, r, overlap=r.random() < 0.8, draft=draft, tree=r.random() < 0.3)
    for _ in range(ticks):
        if r.random() < 0.25:
            new, kind = r.randint(1, 40), random.Random(r.randint(0, 4))
            prompt = [kind.randrange(VOCAB) for _ in range(r.randint(1, 160 - new))]
            world.submit(prompt, new, ignore_eos=r.random() < 0.5, min_new_tokens=r.choice([0, 0, min(3, new)]))
        if world.scheduler.live and r.random() < 0.06:
            rids = r.choice(list(world.scheduler.live)), 10**9
            world.engine.post(Abort(rids, r.choice(["abort", "stop"])))  # type: ignore[arg-type]
        if r.random() < 0.03:
            world.engine.post(Control(1, r.choice(["flush_cache", "stats", "drain", "resume", "explain"])))
        world.tick()
    if seed % 4 == 0:
        world.engine.close()
    world.run()
    world.check_idle()
    return world.drafts.verified if world.drafts is not None else 0


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_whatever_a_front_says_each_request_gets_its_own_tokens_and_one_end(part: int) -> None:
    assert sum(season(100 * part + each) for each in range(30)) > 100


def test_what_comes_behind_a_shutdown_is_refused() -> None:
    """In the same tick, too, and whatever else is said."""
    limits = SchedulerConfig(VOCAB, 160, 40, 16, (EOS,), features=())
    world = Looped(limits, random.Random(0), overlap=True)
    first = world.submit([5, 6], 30, ignore_eos=True)
    world.tick()
    world.engine.post(Shutdown())
    behind = [world.submit([5, 6], 4)]
    world.engine.post(Control(1, "resume"))
    behind += [world.submit([5, 6], 4)]
    world.run()
    assert world.told[first].finish == "length"
    assert [world.told[rid].code for rid in behind] == ["draining"] * 2
