"""The host's share of serving, without a GPU: processor time of front and engine, over an engine that computes nothing.

    python benchmarks/server_host.py                                  256 streams of 512 tokens in and 128 out
    python benchmarks/server_host.py --tick-ms 9 --rows 256 --out 64 --profile front.pstats
    python benchmarks/server_host.py --tick                           plan, commit and message of a tick of 256 rows

Three processes, as in production: the client of ``fastlayers bench serve``, a front, and an engine whose steps take
``--tick-ms`` and draw a token that means nothing. One JSON line: µs of each process's processor for a token (a run of
``--out`` tokens less one of 1 token) and for a request (the latter), and what clients saw. Linux only: processor times
are read from /proc. ``--tick``: an engine alone, on this thread; medians of its processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastlayers_server.engine.child import Phase
from fastlayers_server.engine.config import EngineConfig, SchedulerConfig
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.protocol import Abort, EngineInfo, Sampling, Submit, encode, pack_ids
from fastlayers_server.engine.request import TickPlan, TickResult
from fastlayers_server.engine.scheduler import Scheduler

VOCABULARY = 151_936
PAGE = 64


class Step:
    """Tokens that are known at launch, and told when the tick's time is over."""

    def __init__(self, plan: TickPlan, ready_at: float) -> None:
        self._tokens, self._ready_at = [[7 + plan.tick % 1000]] * len(plan.sampled), ready_at

    def sample(self, masks: Any = None) -> None:
        """Nothing is left to do."""

    def first(self) -> list[list[int]]:
        """Tell nothing before the rest."""
        return []

    def result(self) -> TickResult:
        """Return the tokens."""
        time.sleep(max(0.0, self._ready_at - time.monotonic()))
        return TickResult(self._tokens)


class Hollow:
    """Answers plans: an extend takes ``per_token`` seconds a token, a decode step ``tick``."""

    def __init__(self, tick: float, per_token: float) -> None:
        self.tick, self.per_token, self._free_at = tick, per_token, 0.0

    def launch(self, plan: TickPlan) -> Step:
        """Note when a device would be done."""
        seconds = self.per_token * plan.extend_tokens + self.tick * bool(plan.rows)
        self._free_at = max(self._free_at, time.monotonic()) + seconds
        return Step(plan, self._free_at)

    def explain(self) -> Any:
        """Return nothing worth knowing."""
        return {}

    def profile(self, start: bool) -> str:
        """There is nothing to profile."""
        raise RuntimeError("an engine that computes nothing has no profile")

    def counters(self) -> dict[str, dict[str, float]]:
        """There are no graphs, and nothing compiles."""
        return {}


def engine() -> int:
    """Run the engine's process."""
    from fastlayers_server.engine.child import main

    def make(config: EngineConfig, phase: Phase, epoch: int) -> Engine:
        limits = SchedulerConfig(
            VOCABULARY, 4096, config.max_running_requests * 65, PAGE, (1,), max_running=config.max_running_requests,
            prefix_cache=not config.no_prefix_cache,
        )  # fmt: skip
        tick, per_token = (float(each) for each in config.model.split())
        info = EngineInfo(epoch, VOCABULARY, 4096, (1,), PAGE, limits.num_pages, limits.max_running, 2048, 20, ())
        return Engine(Scheduler(limits), Hollow(tick, per_token), info=info)  # type: ignore[arg-type]

    return main(make)


def ticks(rows: int, count: int = 400) -> dict[str, Any]:
    """Return milliseconds of an engine's ticks, their parts, and of ticks in which one request ends and one comes."""
    limits = SchedulerConfig(VOCABULARY, 4096, rows * 65, PAGE, (1,), max_running=rows)
    made = Engine(Scheduler(limits), Hollow(0.0, 0.0), encode, overlap=True)  # type: ignore[arg-type]
    spent: dict[str, list[float]] = {}

    def timed(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            begin = time.thread_time()
            found = call(*arguments)
            spent.setdefault(what, []).append(time.thread_time() - begin)
            return found

        return run

    def ask(rid: int) -> None:
        ids = [5 + (rid * 31 + place) % 1000 for place in range(300 + rid % 256)]
        made.post(Submit(rid, pack_ids(ids), Sampling(0.0), 3000, ignore_eos=True))

    for rid in range(1, rows + 1):
        ask(rid)
    while len(made.scheduler.running.requests) < rows or made.scheduler.queue.count:
        made.tick()
    for _ in range(200):
        made.tick()
    scheduler: Any = made.scheduler
    scheduler.plan, scheduler.commit = timed("plan", scheduler.plan), timed("commit", scheduler.commit)
    made.deliver = timed("message", made.deliver)
    found: dict[str, Any] = {"rows": rows}
    rids = iter(range(rows + 1, 10**6))
    for case in ("steady", "one leaves, one comes"):
        spent.clear()
        for _ in range(count):
            if case != "steady":
                made.post(Abort((next(iter(made.scheduler.live)),)))
                ask(next(rids))
            timed("tick", made.tick)()
        found[case] = {what: round(1e3 * statistics.median(each), 3) for what, each in spent.items()}
    return found


def front(port: str, settings: str) -> None:
    """Run the front's process."""
    from fastlayers_server import log as logs
    from fastlayers_server.engine.client import EngineClient
    from fastlayers_server.front.app import make_app, make_front
    from fastlayers_server.front.server import Runner
    from fastlayers_server.front.tokens import TokenText
    from fastlayers_server.serve_command import bound
    from fastlayers_server.serve_config import ServeConfig

    given = json.loads(settings)
    logs.configure("warning")
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "model_type": "qwen3"}))
    config = EngineConfig(model=f"{given['tick']} {given['per_token']}", max_running_requests=given["rows"])
    client = EngineClient(config, [sys.executable, __file__, "engine"])
    named = ServeConfig(served_model_name=("hollow",), open_admin=True)
    made = make_front(named, client, TokenText(folder, None, True))
    runner = Runner(make_app(made), made)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as running:
        if given["profile"]:
            profile = cProfile.Profile()
            profile.enable()
        running.run(runner.serve([bound("127.0.0.1", int(port))]))
        if given["profile"]:
            profile.disable()
            profile.dump_stats(given["profile"])


def seconds_of(pid: int) -> float:
    """Return the processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def child_of(pid: int) -> int:
    """Return the engine's process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()  # it is the child of the thread that started it
    return next(int(each) for task in tasks for each in (task / "children").read_text().split())


async def load(url: str, rows: int, n_in: int, n_out: int, pids: dict[str, int]) -> dict[str, Any]:
    """Send all requests at once, and return what they cost."""
    import aiohttp

    from fastlayers_server.bench import serve
    from fastlayers_server.bench.client import Target
    from fastlayers_server.bench.datasets import random_asks

    target = Target(f"{url}/v1/completions", "hollow", False, {"temperature": 0, "ignore_eos": True})
    asks = random_asks(rows, n_in, n_out, VOCABULARY, n_out)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=2**20) as session:
        before, own = {name: seconds_of(pid) for name, pid in pids.items()}, time.process_time()
        answers, duration = await serve.load(session, target, asks, [0.0] * rows, 0)
        spent = {name: seconds_of(pid) - before[name] for name, pid in pids.items()}
    wrong = [answer.error for answer in answers if answer.error]
    if wrong:
        raise SystemExit(f"{len(wrong)} requests failed, the first: {wrong[0]}")
    return {
        "duration": duration, "client": time.process_time() - own, **spent,
        "ttft": statistics.median(a.ttft for a in answers),
        "events": sum(len(a.itl) + 1 for a in answers), "tokens": sum(a.output_len for a in answers),
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--out", type=int, default=128)
    parser.add_argument("--tick-ms", type=float, default=9.0)
    parser.add_argument("--prefill-us", type=float, default=12.0, help="of the device for a prompt token")
    parser.add_argument("--port", type=int, default=8911)
    parser.add_argument("--profile", default="", help="write the front's profile here; its times are no measurement")
    parser.add_argument("--tick", action="store_true", help="measure an engine's ticks instead")
    given = parser.parse_args()
    if given.tick:
        print(json.dumps(ticks(given.rows)))
        return
    settings = {
        "tick": given.tick_ms / 1e3,
        "per_token": given.prefill_us / 1e6,
        "rows": given.rows,
        "profile": given.profile,
    }
    server = subprocess.Popen([sys.executable, __file__, "front", str(given.port), json.dumps(settings)])
    try:
        print(json.dumps(asyncio.run(measured(given, server.pid))))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


async def measured(given: argparse.Namespace, pid: int) -> dict[str, Any]:
    """Run a warm-up, requests of one token, and requests of all of them."""
    import aiohttp
    from soak import until_ready

    url = f"http://127.0.0.1:{given.port}"
    async with aiohttp.ClientSession() as session:
        await until_ready(session, url, 60.0)
    pids = {"front": pid, "engine": child_of(pid)}
    sizes = given.rows, given.input
    await load(url, *sizes, 4, pids)
    one = await load(url, *sizes, 1, pids)
    all_of_them = await load(url, *sizes, given.out, pids)
    more = all_of_them["tokens"] - one["tokens"]
    found: dict[str, Any] = {"rows": given.rows, "input": given.input, "out": given.out, "tick_ms": given.tick_ms}
    for name in ("front", "engine", "client"):
        found[f"{name}_us_token"] = round(1e6 * (all_of_them[name] - one[name]) / more, 1)
        found[f"{name}_us_request"] = round(1e6 * one[name] / given.rows)
    floor = given.prefill_us / 1e6 * given.rows * given.input + given.tick_ms / 1e3 * (given.out - 1)
    return found | {
        "seconds": round(all_of_them["duration"], 3), "device_seconds": round(floor, 3),
        "ttft_ms": round(1e3 * all_of_them["ttft"], 1),
        "tokens_event": round(all_of_them["tokens"] / all_of_them["events"], 2),
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        raise SystemExit(engine())
    if sys.argv[1:2] == ["front"]:
        front(*sys.argv[2:4])
    else:
        main()
