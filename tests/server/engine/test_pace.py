"""When tokens come: the engine's loop over a device that only takes time, as an H200 was measured to take it."""

from __future__ import annotations

import statistics
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastlayers.attention import buckets
from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.executor import BETWEEN
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.protocol import Sampling, StepOut, Submit, pack_ids
from fastlayers_server.engine.request import TickPlan, TickResult
from fastlayers_server.engine.scheduler import Scheduler

sys.path.insert(0, str(Path(__file__).parent))
from world import World

# Milliseconds of extends by tokens, of decode steps by rows with some 600 tokens each, and what rows add to an extend
# that they are part of; microseconds of a row for each token behind it. About what engines measured when they started
# on an H200: with 1,024 tokens behind each row, which they take for granted.
TOKENS = (16, 32, 64, 128, 256, 512, 640, 768, 1024, 1536, 2048, 4096, 8192)
PADDED = sorted({*buckets.TOKENS, *BETWEEN})  # captured, whether or not somebody measured them
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEVICES: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float], float]] = {
    "Qwen3-8B": (
        (5.2, 5.3, 5.5, 6.3, 7.8, 12.0, 15.0, 17.7, 23.5, 35.5, 47.0, 95.0, 190.0),
        (4.4, 4.4, 4.5, 4.6, 4.9, 5.5, 6.7, 8.5, 12.0), (0.1, 0.1, 0.2, 0.3, 0.5, 1.0, 1.9, 3.8, 7.6), 0.038,
    ),
    "Qwen3-30B-A3B": (
        (4.9, 5.8, 6.2, 8.0, 9.8, 11.5, 13.0, 14.6, 17.8, 24.9, 32.6, 60.0, 112.0),
        (2.6, 3.9, 5.4, 8.2, 11.5, 14.8, 16.9, 19.0, 21.9), (1.3, 2.8, 3.4, 5.6, 8.4, 10.7, 12.0, 13.5, 16.0), 0.019,
    ),
    "GPT-OSS-20B": (
        (4.6, 5.4, 6.5, 8.4, 9.9, 12.9, 14.4, 15.9, 19.6, 25.3, 31.4, 58.0, 105.0),
        (2.2, 2.9, 3.6, 4.2, 5.1, 5.9, 6.7, 8.2, 10.5), (0.1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.9, 1.5), 0.004,
    ),
}  # fmt: skip
HOST = 0.001  # seconds from a plan to the device
IN, OUT = 512, 128


def between(sizes: Sequence[int], times: Sequence[float], size: int) -> float:
    """Return seconds: those measured, what lies between them, in proportion beyond."""
    place = bisect_left(sizes, size)
    if place == len(sizes):
        return 1e-3 * times[-1] * size / sizes[-1]
    if sizes[place] == size or not place:
        return 1e-3 * times[place]
    low, high = sizes[place - 1 : place + 1]
    return 1e-3 * (times[place - 1] + (times[place] - times[place - 1]) * (size - low) / (high - low))


class Device:
    """Takes time, and draws the same token for everybody; requests arrive while it does."""

    def __init__(self, name: str, arrivals: Sequence[float], mixed: bool = True, lengths: Sequence[int] = ()) -> None:
        self.lengths = lengths or [IN] * len(arrivals)
        self.extends, self.decodes, besides, a_token = DEVICES[name]
        longer = [1e-3 * a_token * (1024 - 600) * rows for rows in ROWS]
        self.besides = [max(0.0, each - more) for each, more in zip(besides, longer, strict=True)]
        self.now = self.free_at = 0.0
        self.arrivals = deque(enumerate(sorted(arrivals), 1))
        self.came: dict[int, float] = {}
        self.heard: dict[int, list[float]] = {}
        config = SchedulerConfig(150_000, 4096, 256 * 66, max_running=256, mixed=mixed)
        scheduler = Scheduler(config)
        scheduler.budget.measured(
            {n: between(TOKENS, self.extends, n) for n in (*PADDED, *TOKENS[-2:])},
            {n: 1e-3 * (t + more) for n, t, more in zip(ROWS, self.decodes, longer, strict=True)},
            {n: 1e-3 * t for n, t in zip(ROWS, besides, strict=True)} if mixed else {},
        )
        executor: Any = self
        self.engine = Engine(scheduler, executor, self.hear, clock=lambda: self.now, pause=self.pause)
        self.idle = 0.0  # seconds in which nothing ran though somebody was there
        self.ticks = 0

    def pause(self, seconds: float) -> None:
        self.until(self.now + seconds)

    def until(self, when: float) -> None:
        """Let time pass."""
        self.now = max(self.now, when)
        while self.arrivals and self.arrivals[0][1] <= self.now:
            rid, at = self.arrivals.popleft()
            self.came[rid] = at
            prompt = pack_ids([(rid * 7919 + place * 31) % 149_000 for place in range(self.lengths[rid - 1])])
            self.engine.post(Submit(rid, prompt, Sampling(0.0), OUT, ignore_eos=True, arrival=at))

    def launch(self, plan: TickPlan) -> Any:
        """Begin a plan behind what was launched before."""
        self.ticks += 1
        begin = max(self.free_at, self.now + HOST)
        self.idle += begin - self.free_at if plan.rows else 0.0
        new, rows = plan.extend_tokens, len(plan.rows)
        mixed = plan.mixed
        new += rows if mixed else 0
        captured = next((n for n in PADDED if n >= new), new)
        extended = begin + (between(TOKENS, self.extends, captured) if new else 0.0)
        self.free_at = extended + (between(ROWS, self.decodes, rows) if rows and not mixed else 0.0)
        if mixed:
            self.free_at = extended = extended + between(ROWS, self.besides, rows)
        return Step(self, plan, extended, self.free_at)

    def counters(self) -> dict[str, dict[str, float]]:
        return {}

    def hear(self, message: Any) -> None:
        for output in message.outputs if isinstance(message, StepOut) else ():
            self.heard.setdefault(output.rid, []).extend([self.now] * len(output.ids))

    def run(self) -> None:
        """Serve everybody."""
        self.until(0.0)
        while self.arrivals or not self.engine.scheduler.idle or self.engine._pending or self.engine._inbox:
            if not self.engine.tick() and self.engine.scheduler.idle and self.arrivals:
                self.until(self.arrivals[0][1])
            self.until(self.now)

    @property
    def speed(self) -> float:
        return sum(map(len, self.heard.values())) / self.now

    @property
    def first(self) -> list[float]:
        return [times[0] - self.came[rid] for rid, times in self.heard.items()]

    @property
    def gaps(self) -> list[float]:
        return [b - a for times in self.heard.values() for a, b in pairwise(times)]


class Step:
    def __init__(self, device: Device, plan: TickPlan, extended: float, ends: float) -> None:
        self._device, self._plan, self._extended, self._ends = device, plan, extended, ends

    def first(self) -> list[list[int]]:
        self._device.until(self._extended)
        return [[7] for chunk in self._plan.chunks if chunk.samples]

    def done(self) -> bool:
        return self._device.now >= self._ends

    def result(self) -> TickResult:
        self._device.until(self._ends)
        return TickResult([[7]] * len(self._plan.sampled))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "Qwen3-8B" else ()) for n in DEVICES])
def test_poisson_arrivals_at_70_percent(name: str) -> None:
    """The targets of the issue, over a device that is exactly as fast as its table."""
    full = Device(name, [0.0] * 256)
    full.run()
    assert all(len(times) == OUT for times in full.heard.values()) and len(full.heard) == 256
    assert full.ticks <= 146  # 16 whole steps of prompts, 127 of rows, and what is launched in vain
    rate = 0.7 * full.speed / OUT
    arrivals = np.cumsum(np.random.default_rng(4).exponential(1 / rate, 1000)).tolist()
    device = Device(name, arrivals)
    device.run()
    gaps, first = np.array(device.gaps), np.array(device.first)
    p99, median = np.percentile(gaps, 99), np.median(gaps)
    # 40 ms, three medians and 60 ms are wanted over HTTP, which took up to 1.2 times as long between tokens as this
    # device, and up to 10 ms more to the first one.
    assert p99 <= 0.036 and p99 <= 2.4 * median and gaps.max() <= 0.18
    assert np.median(first) <= 0.055 and np.percentile(first, 99) <= 0.22


@pytest.mark.parametrize("faster", [1.0, 1.2])
def test_the_device_hardly_waits_for_plans_that_are_made_late(faster: float) -> None:
    """Whoever arrives is in the next step, also where steps are shorter than those measured."""
    arrivals = np.cumsum(np.random.default_rng(5).exponential(1 / 25, 600)).tolist()
    device = Device("Qwen3-30B-A3B", arrivals)
    device.extends = [each / faster for each in device.extends]
    device.decodes = [each / faster for each in device.decodes]
    device.run()
    assert device.idle < 0.01 * device.now
    early = Device("Qwen3-30B-A3B", arrivals)
    early.extends, early.decodes = device.extends, device.decodes
    early.engine.patience.LEAD = 1e3  # type: ignore[misc]
    early.run()
    assert early.idle <= device.idle
    assert np.median(device.first) < np.median(early.first) - 0.5e-3 * between(ROWS, device.decodes, 64) * 1e3


# Between the two lies test_poisson_arrivals_at_70_percent.
@pytest.mark.parametrize("load", [pytest.param(0.5, marks=pytest.mark.slow), 0.85])
def test_other_rates_and_prompts_of_all_lengths(load: float) -> None:
    """Who decodes sees the limit that was asked for at any rate that can be served; first tokens come later."""
    for name in DEVICES:
        draw = np.random.default_rng(6)
        rate = load * (53.0 if name.startswith("Qwen") else 83.0)
        arrivals = np.cumsum(draw.exponential(1 / rate, 600)).tolist()
        lengths = np.clip(draw.lognormal(np.log(IN) - 0.32, 0.8, 600), 16, 3000).astype(int).tolist()
        device = Device(name, arrivals, lengths=lengths)
        device.run()
        gaps, first = np.array(device.gaps), np.array(device.first)
        assert len(device.heard) == 600 and gaps.max() <= 0.2
        assert np.percentile(gaps, 99) <= 0.040 and np.percentile(first, 99) <= (0.2 if load < 0.7 else 0.4)


@pytest.mark.parametrize("name", DEVICES)
def test_a_backlog_takes_little_longer_than_its_steps_must(name: str) -> None:
    """Requests that do not come at once fill no whole number of steps; the last of them are served whole, too."""
    device = Device(name, [0.0003 * place for place in range(256)])
    device.run()
    steps = 256 * IN // 8192 * device.extends[-1] + (OUT - 1) * device.decodes[-1]
    # Every second whole step has rows behind it: a few decode steps more, some of which their early ends save.
    assert device.ticks <= 16 + OUT + 3 and device.now <= 1.03e-3 * steps


@pytest.mark.parametrize("name", DEVICES)
def test_whoever_came_while_the_device_stood_does_not_make_rows_wait_as_long_again(name: str) -> None:
    """Fewer wait then than run: their prompts come in steps that rows see the end of, not in all that a step holds.

    Nor with the rows in one step that is larger than those captured, when just as many wait as make a backlog.
    """
    arrivals = np.cumsum(np.random.default_rng(4).exponential(1 / 39, 200)).tolist()
    device = Device(name, arrivals)
    launch, stood = device.launch, 2.5

    def late(plan: TickPlan) -> Any:
        if device.now >= stood > device.free_at - 0.1:
            device.free_at = stood + 0.35
        assert not plan.mixed or plan.extend_tokens + len(plan.rows) <= max(PADDED)
        return launch(plan)

    device.launch = late  # type: ignore[method-assign]
    device.run()
    pairs = [pair for times in device.heard.values() for pair in pairwise(times)]
    assert max(b - a for a, b in pairs if a < stood + 0.3 < b) >= 0.35
    assert max(b - a for a, b in pairs if a >= stood + 0.3) <= 0.15
    # And it says where it stood: not in whole steps, whose times it knows.
    assert [each["where"] for each in device.engine.stalls.last] == ["device"]
    assert device.engine.stats().counters["stalls_total"] == {"device": 1.0}
    assert device.engine.stalls.last[0]["ms"] >= 300 and device.engine.stalls.last[0]["rows"] > 10
    assert len(device.heard) == 200


def test_prompts_for_the_slots_that_free_up_come_with_the_rows() -> None:
    """However many wait: a decode step beside a prompt costs hardly more than the prompt."""
    limits = SchedulerConfig(
        23, 256, 400, 16, (1,), max_running=8, max_batched_tokens=128, max_queued_requests=100, mixed=True
    )  # fmt: skip
    world = World(limits, delay=1)
    world.scheduler.budget.measured({16: 0.001, 128: 0.004}, {1: 0.001, 8: 0.002}, {8: 0.0001})
    for rid in range(60):
        world.submit([2 + (rid * 7 + place) % 20 for place in range(40)], 5 + rid % 5, ignore_eos=True)
    apart = 0
    while world.scheduler.live:
        plan = world.tick()
        apart += bool(plan.rows and plan.chunks and not plan.mixed)
    assert world.mixed >= 10 and apart <= 3
    assert all(told.finish == "length" for told in world.told.values())


def test_a_first_token_does_not_wait_for_the_rows_beside_it() -> None:
    arrivals = [0.0] * 20 + [0.5 + 0.2 * i for i in range(5)]
    device = Device("Qwen3-30B-A3B", arrivals, mixed=False)
    device.run()
    alone = 1e-3 * device.extends[TOKENS.index(IN)]
    row = 1e-3 * between(ROWS, device.decodes, 20)
    late = [times[0] - device.came[rid] for rid, times in device.heard.items() if device.came[rid] > 0.1]
    # The step in flight, one that was planned already, and the chunk; not the rows of the same tick.
    assert len(late) == 5 and max(late) < 2 * 1e3 * row + alone + 3 * HOST
    everybody = [when for times in device.heard.values() for when in times]
    assert all(everybody.count(times[0]) == 1 for rid, times in device.heard.items() if device.came[rid] > 0.1)


def test_first_tokens_of_a_mixed_step_are_told_before_those_of_its_rows() -> None:
    """A front has much to write for the rows; who has just begun would wait for all of it."""
    device = Device("Qwen3-30B-A3B", [0.0] * 20 + [0.5 + 0.03 * i for i in range(20)])
    messages: list[tuple[float, dict[int, bool]]] = []

    def hear(message: Any) -> None:
        if isinstance(message, StepOut):
            messages.append((device.now, {output.rid: output.rid not in device.heard for output in message.outputs}))
        Device.hear(device, message)

    device.engine.deliver = hear
    device.run()
    late = [(when, firsts) for when, firsts in messages if when > 0.5 and any(firsts.values())]
    assert sum(map(len, (firsts for _, firsts in late))) == 20  # nobody else is in their messages
    for when, _ in late:
        same = [any(firsts.values()) for other, firsts in messages if other == when]
        assert len(same) == 2 and same[0]  # and the rows' message comes at the same time, behind it
    assert all(len(times) == OUT for times in device.heard.values())


def test_rows_wait_at_most_every_second_whole_step_of_a_backlog() -> None:
    limits = SchedulerConfig(
        23, 256, 400, 16, (1,), max_running=32, max_batched_tokens=128, max_queued_requests=100
    )  # fmt: skip
    world = World(limits, delay=1)
    world.scheduler.budget.measured({16: 0.001, 128: 0.004}, {1: 0.001, 32: 0.002})
    for rid in range(40):
        world.submit([2 + (rid * 7 + place) % 20 for place in range(60)], 12, ignore_eos=True)
    left_out = 0
    while world.scheduler.live:
        world.tick()  # checks that nobody is left out twice in a row, and that everybody says what it would alone
        left_out += world.left_out
    assert left_out >= 3
    assert all(told.finish == "length" for told in world.told.values())
    assert statistics.mean(len(told.ids) for told in world.told.values()) == 12


def test_a_loop_and_its_plans_count_the_same_rows_beside_a_backlog() -> None:
    """Whoever has all its tokens in flight is no row of the next plan, though it runs: eight are a backlog then."""
    limits = SchedulerConfig(23, 256, 400, 16, (1,), max_running=64, max_batched_tokens=512, max_extend_requests=64)
    scheduler = Scheduler(limits)
    scheduler.budget.measured({16: 0.001, 512: 0.004}, {1: 0.001, 64: 0.002})

    def ask(rids: range, tokens: int) -> None:
        for rid in rids:
            scheduler.submit(Submit(rid, pack_ids([3, 4, rid % 20]), Sampling(0.0), tokens), 0.0)

    ask(range(1, 9), 2)
    ask(range(9, 41), 20)
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, TickResult([[7]] * len(plan.sampled)), 0.0)
    scheduler.plan(0.0)  # its tokens are in flight: of eight they are the last
    ask(range(41, 49), 20)
    assert len(scheduler.running.requests) == 40 and scheduler.queue.count == 8
    assert scheduler.backlog
    scheduler.plan(0.0)
    assert scheduler.history[-1]["chunk_limit"] == scheduler.budget.whole(32)
