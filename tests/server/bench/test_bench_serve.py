"""The benchmark client: its figures against a server that knows what it did, its arithmetic, its refusals."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from fastlayers.errors import ArgumentError
from fastlayers_server.bench import command, datasets
from fastlayers_server.bench.client import Answer, Ask, Target, send
from fastlayers_server.bench.report import figures, text
from fastlayers_server.bench.serve import BenchConfig, _when_ready, arrivals, measured

GAPS = (0.05, 0.02, 0.03, 0.04)


class Scripted:
    """A server that notes when it sent each event."""

    def __init__(self, chat: bool = False, fail_every: int = 0, routes: dict[str, Any] | None = None) -> None:
        self.chat, self.fail_every, self.routes = chat, fail_every, routes or {}
        self.bodies: list[Any] = []
        self.sent: list[list[float]] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            return web.json_response({"error": {"message": "no"}}, status=500)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        times: list[float] = []
        self.sent.append(times)
        if self.chat:
            await self._say(response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await response.write(b": a comment\n\n")
        for gap in GAPS:
            await asyncio.sleep(gap)
            choice = {"delta": {"content": "x"}} if self.chat else {"text": "x"}
            times.append(time.perf_counter())
            await self._say(response, {"choices": [choice | {"index": 0}]})
        usage = {"prompt_tokens": 3, "completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": 1}}
        await self._say(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _say(self, response: web.StreamResponse, event: Any) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_get("/v1/models", _models)
        app.router.add_get("/server_info", _info)
        for path, handler in self.routes.items():
            app.router.add_get(path, handler)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]

    async def __aexit__(self, *_: Any) -> None:
        await self.runner.cleanup()


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "scripted"}]})


async def _info(_: web.Request) -> web.Response:
    return web.json_response({"version": "1", "engine": {"vocab_size": 100}})


@pytest.mark.parametrize("chat", [False, True])
def test_times_are_those_of_the_events(chat: bool) -> None:
    async def run() -> tuple[list[Answer], Scripted]:
        server = Scripted(chat)
        async with server as url, aiohttp.ClientSession() as session:
            route = "/v1/chat/completions" if chat else "/v1/completions"
            target = Target(url + route, "m", chat, {})
            ask = Ask("a", 1, 8)
            return [await send(session, target, ask, target.body(ask)) for _ in range(7)], server

    answers, server = asyncio.run(run())
    assert all(a.ok and a.output_len == 8 and a.prompt_len == 3 and a.cached == 1 for a in answers)
    assert all(len(a.itl) == len(GAPS) - 1 and a.text == "x" * len(GAPS) for a in answers)
    # The server's own clock is the closed form: what the machine's load adds to its sleeps is known. What it adds to
    # the way of an event is not, so the least of each kind counts: a client that is wrong is wrong in all of them.
    ttft = [abs(a.start + a.ttft - sent[0]) for a, sent in zip(answers, server.sent, strict=True)]
    gaps = [
        abs(seen - (later - earlier))
        for a, sent in zip(answers, server.sent, strict=True)
        for seen, earlier, later in zip(a.itl, sent, sent[1:], strict=False)
    ]
    latency = [abs(a.start + a.latency - sent[-1]) for a, sent in zip(answers, server.sent, strict=True)]
    for differences in (ttft, gaps, latency):
        assert min(differences) < 0.002
    for answer in answers:
        assert answer.tpot == pytest.approx((answer.latency - answer.ttft) / 7)


def test_a_whole_run_reports_what_the_server_did() -> None:
    async def run() -> tuple[dict[str, Any], Scripted]:
        server = Scripted(fail_every=5)
        async with server as url:
            config = BenchConfig(
                base_url=url, num_prompts=10, random_input_len=4, random_output_len=8, max_concurrency=5,
                num_warmups=2, ignore_eos=True, goodput=("ttft:10000",), extra_body='{"top_k": 1}', save_detailed=True,
                percentile_metrics=("ttft", "e2el"),
            )  # fmt: skip
            return await measured(config), server

    found, server = asyncio.run(run())
    assert (found["completed"], found["failed"]) == (8, 2)
    assert found["total_output_tokens"] == 8 * 8 and found["total_input_tokens"] == 8 * 3
    assert found["output_throughput"] == pytest.approx(64 / found["duration"])
    assert found["request_goodput"] == pytest.approx(8 / found["duration"])
    assert found["tokens_per_event"] == 2.0 and found["cached_share"] == pytest.approx(1 / 3)
    assert 1 < found["max_concurrent_requests"] <= 10
    assert found["fastlayers"]["distinct_prompts"] and len(found["ttfts"]) == 10
    sent = server.bodies[-1]
    assert sent["stream"] and sent["stream_options"] == {"include_usage": True} and sent["top_k"] == 1
    assert sent["ignore_eos"] and sent["max_tokens"] == 8 and len(sent["prompt"]) == 4 and sent["temperature"] == 0
    shown = text(found, ("ttft", "e2el"), (99.0,))
    for words in ("Successful requests:                     8", "Failed requests:                         2",
                  "Maximum request concurrency:", "Peak output token throughput (tok/s):", "Mean TTFT (ms):",
                  "P99 E2EL (ms):", "Request goodput (req/s):"):  # fmt: skip
        assert words in shown
    assert shown.startswith("=" * 12 + " Serving Benchmark Result ")


@pytest.mark.parametrize("how", ["serve", "throughput"])
@pytest.mark.parametrize("lag", [60.0, -1.0])
@pytest.mark.parametrize("as_json", [False, True])
def test_figures_of_a_client_that_was_too_slow_are_a_failure(
    how: str, lag: float, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fastlayers_server.bench.serve.MAX_LAG", lag)
    server, loop = Scripted(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    url = asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(60)
    arguments = ["--base-url", url, "--num-prompts", "2", "--input-len", "3", "--num-warmups", "0", "--ignore-eos"]
    try:
        code = command.COMMANDS[how]([*arguments, *["--json"] * as_json])
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
    said = capsys.readouterr()
    assert code == (lag < 0)
    assert said.err.count("INVALID: this client was late by") == said.err.count("\n") == (lag < 0), said.err
    assert not as_json or isinstance(json.loads(said.out), dict)


def test_figures_are_the_closed_form() -> None:
    answers = [Answer(10, 5, 0, start=float(i), ttft=0.1 * (i + 1), latency=1.0, itl=[0.2] * 4) for i in range(3)]
    found = figures([*answers, Answer(error="x")], 4.0, percentiles=(50.0, 99.0))
    assert found["mean_ttft_ms"] == pytest.approx(200) and found["median_ttft_ms"] == pytest.approx(200)
    assert found["std_ttft_ms"] == pytest.approx(np.std([100, 200, 300]))
    assert found["p50_ttft_ms"] == pytest.approx(200) and found["p99_ttft_ms"] == pytest.approx(298)
    assert found["mean_tpot_ms"] == pytest.approx(np.mean([900, 800, 700]) / 4)
    assert found["mean_itl_ms"] == pytest.approx(200) and found["mean_e2el_ms"] == pytest.approx(1000)
    assert found["total_token_throughput"] == pytest.approx(45 / 4) and found["failed"] == 1
    assert figures([], 1.0)["mean_ttft_ms"] == 0.0


def test_arrivals() -> None:
    burst = arrivals(BenchConfig(), 5)
    assert burst == [0.0] * 5
    poisson = arrivals(BenchConfig(request_rate=10.0, seed=1), 2000)
    gaps = np.diff(poisson)
    assert poisson[0] == 0.0 and poisson[-1] == pytest.approx(200, rel=0.01)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1.0, abs=0.1)
    even = np.diff(arrivals(BenchConfig(request_rate=10.0, burstiness=100.0), 2000))
    assert np.std(even) / np.mean(even) < 0.2
    ramp = np.diff(arrivals(BenchConfig(ramp_up_strategy="linear", ramp_up_start_rps=1, ramp_up_end_rps=100), 1000))
    assert np.mean(ramp[:100]) > 3 * np.mean(ramp[-100:])
    assert arrivals(BenchConfig(request_rate=3.0), 9) == arrivals(BenchConfig(request_rate=3.0), 9)


def test_prompts(tmp_path: Path) -> None:
    asks = datasets.random_asks(20, 100, 50, 1000, 7, range_ratio=0.2, prefix_len=5)
    assert asks == datasets.random_asks(20, 100, 50, 1000, 7, range_ratio=0.2, prefix_len=5)
    assert datasets.distinct(asks) and len({tuple(a.prompt[:5]) for a in asks}) == 1
    assert all(len(a.prompt) == a.prompt_len and 85 <= a.prompt_len <= 125 and 40 <= a.output_len <= 60 for a in asks)
    inner = asks[3].prompt[5:]
    assert [(b - a) % 1000 for a, b in itertools.pairwise(inner)] == [1] * (len(inner) - 1)
    chats = datasets.chat_like(4000, 1000, 0)
    assert 180 < np.mean([a.prompt_len for a in chats]) < 260 and 150 < np.mean([a.output_len for a in chats]) < 230
    shared = datasets.shared_prefixes(8, 2, 30, 10, 5, 1000, 0)
    assert len({tuple(a.prompt[:30]) for a in shared}) == 2 and datasets.distinct(shared)
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "ab", "output_len": 3}\n{"prompt": [1, 2, 3]}\n')
    assert datasets.from_file(path, 2, 9, len) == [Ask("ab", 2, 3), Ask([1, 2, 3], 3, 9)]
    with pytest.raises(ValueError, match="2 prompts, not 3"):
        datasets.from_file(path, 3, 9, len)
    assert datasets.digest_of(asks) != datasets.digest_of(asks[:-1])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--frobnicate", "1"], "unrecognized arguments"),
        (["--hf-name", "x"], "no data set is downloaded"),
        (["--dataset-name", "sonnet"], "invalid choice"),
        (["--trust-remote-code"], "no code"),
    ],
)
def test_flags_that_we_lack_are_refused(arguments: list[str], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        command.bench_serve(arguments)


FLOATS = ("request-rate", "burstiness", "random-range-ratio", "ramp-up-start-rps")


@pytest.mark.parametrize(
    ("name", "value"),
    [("num-prompts", "0"), ("num-runs", "0"), ("request-rate", "0"), ("request-rate", "nan"), ("burstiness", "-1"),
     ("random-output-len", "0"), ("random-range-ratio", "2"), ("max-concurrency", "-1"), ("ramp-up-start-rps", "0"),
     ("prefix-groups", "0")],
)  # fmt: skip
def test_numbers_that_no_load_has_are_refused(name: str, value: str) -> None:
    with pytest.raises(
        ArgumentError,
        match=rf"bench serve: --{name} is {float(value) if name in FLOATS else value}; accepted: [\d.e-]+ to",
    ):
        command.bench_serve([f"--{name}", value, "--ready-timeout", "0.1"])
    if name == "num-prompts":
        with pytest.raises(ArgumentError, match="bench startup: --iters is 0; accepted: 1 to"):
            command.bench_startup(["--iters", "0", "--command", "true"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--extra-body", "[1]"], r"--extra-body is '\[1\]'; accepted: a JSON object"),
        (["--extra-body", "{x"], "--extra-body is '{x'"),
        (["--goodput", "ttft"], r"--goodput is \('ttft',\); accepted: NAME:MS"),
        (["--goodput", "itl:5"], "of ttft, tpot, e2el"),
        (["--percentile-metrics", "ttft,x"], "--percentile-metrics is .*; accepted: ttft, tpot, itl, e2el"),
        (["--metric-percentiles", "101"], "numbers from 0 to 100"),
        (["--tokenizer", "/none"], "--tokenizer is '/none'; accepted: a folder with a tokenizer.json"),
        (["--dataset-name", "file", "--dataset-path", "/none"], "--dataset-path is '/none'; accepted: a JSONL file"),
    ],
)
def test_values_that_cannot_be_read_are_refused_by_name(arguments: list[str], says: str) -> None:
    with pytest.raises(ArgumentError, match=f"^bench: {says}|^bench: .*{says}$"):
        command.bench_serve([*arguments, "--ready-timeout", "0.1"])


def test_a_server_that_is_not_there_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fastlayers_server.bench.serve.SILENT_SECONDS", 0.05)
    with monkeypatch.context() as clock:  # a try takes a few looks at it, whatever else the machine does
        looks = itertools.count(0.0, 0.02)
        clock.setattr("fastlayers_server.bench.serve.time", SimpleNamespace(monotonic=lambda: next(looks)))
        with pytest.raises(ArgumentError, match=r"not ready after 0\.3 s: ClientConnectorError"):
            command.bench_serve(["--port", "9", "--ready-timeout", "0.3"])
    said = capsys.readouterr().err
    assert said.startswith("waiting for http://127.0.0.1:9, 0.3 s at most: ClientConnectorError"), said
    assert said.count("waiting") == 1
    begin = time.monotonic()
    with pytest.raises(ArgumentError, match=r"no server listens at http://127.0.0.1:9, waited 0\.2 s \(--connect-time"):
        command.bench_serve(["--port", "9", "--connect-timeout", "0.2"])
    assert time.monotonic() - begin < 60.0  # ten minutes are the default of a server that starts


def test_a_server_that_starts_is_waited_for() -> None:
    asked: list[float] = []

    async def ready(_: web.Request) -> web.Response:
        asked.append(time.monotonic())
        phase = "weights" if len(asked) < 4 else "serving"
        return web.json_response({"phase": phase}, status=503 if phase == "weights" else 200)

    async def run() -> str:
        async with Scripted(routes={"/ready": ready}) as url, aiohttp.ClientSession() as session:
            return await _when_ready(session, BenchConfig(base_url=url, connect_timeout=0.1, ready_timeout=300.0))

    assert asyncio.run(run()) == "scripted" and len(asked) == 4
    assert asked[-1] - asked[0] > 0.1, "who listens is waited for longer than who does not"


def test_the_client_imports_no_torch() -> None:
    names = "client, datasets, report"
    code = f"import sys; from fastlayers_server.bench import {names}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_startup_tells_the_phases(capsys: pytest.CaptureFixture[str]) -> None:
    held, port = _held_port()
    script = (
        "from aiohttp import web; asked = []\n"
        "def ready(q): asked.append(q); up = len(asked) > 3; "  # however long each of them takes
        "return web.json_response({'phase': 'serving' if up else 'weights'}, status=200 if up else 503)\n"
        "async def r(q): return ready(q)\n"
        "async def m(q): return web.json_response({'data': [{'id': 'x'}]})\n"
        "async def c(q): return web.json_response({})\n"
        "app = web.Application(); app.router.add_get('/ready', r); app.router.add_get('/v1/models', m); "
        "app.router.add_post('/v1/completions', c)\n"
        f"web.run_app(app, host='127.0.0.1', port={port}, print=None, reuse_port=True)"
    )
    import shlex

    start = shlex.join([sys.executable, "-c", script])
    url = f"http://127.0.0.1:{port}"
    assert command.bench_startup(["--command", start, "--base-url", url, "--iters", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["median_s"]
    held.close()
    assert found["listens"] <= found["phase weights"] < found["ready"] <= found["first token"]
    with pytest.raises(ArgumentError, match="no program 'no-such-thing' is found on PATH"):
        command.bench_startup(["--command", "no-such-thing --port 1"])
    with pytest.raises(ArgumentError, match="exit code 3"):
        command.bench_startup(["--command", f"{sys.executable} -c 'raise SystemExit(3)'", "--base-url", url])


def _held_port() -> tuple[socket.socket, int]:
    """Return a port that nobody else is given as long as the socket is open, and at which a server may listen."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", 0))
    return made, int(made.getsockname()[1])
