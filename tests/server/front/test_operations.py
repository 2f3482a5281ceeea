"""What an operator asks: metrics, health, tokens, admin controls, traces."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from importlib import metadata
from typing import Any

import pytest
from openai.types import Model
from prometheus_client.parser import text_string_to_metric_families

from fastlayers import __version__
from fastlayers_server.engine.protocol import (
    COUNTERS,
    HISTOGRAMS,
    Abort,
    Beat,
    Died,
    EngineInfo,
    Output,
    StepOut,
    Submit,
)
from fastlayers_server.front import link as link_module
from fastlayers_server.front.app import ADMIN
from fastlayers_server.front.gate import Gate
from fastlayers_server.front.metrics import ALIASES

from .harness import ScriptedEngine, serving

ASK = {"model": "tiny", "prompt": "ab", "max_tokens": 5, "ignore_eos": True}
# What dashboards read: a name that is missing here has been renamed, which breaks them.
NAMES = (
    {f"fastlayers_{name.removesuffix('_total')}" for name in COUNTERS}
    | {f"fastlayers_{name}" for name in HISTOGRAMS}
    | {f"fastlayers_{name}" for name in (
        "ttft_seconds", "itl_seconds", "tpot_seconds", "e2e_seconds", "grammar_compile_seconds", "gc_pause_seconds",
        "prompt_length", "output_length", "aborts", "http_errors", "ignored_fields", "tool_parse_failures",
        "front_tokens", "ready", "engine_info", "startup_seconds", "requests_running", "requests_waiting",
        "waiting_tokens",
        "pages", "kv_usage_ratio", "front_stalls",
    )}
)  # fmt: skip


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families(text).values() for s in f.samples}


def test_metrics_are_prometheus_text_under_names_that_stay() -> None:
    with serving() as server:
        for _ in range(3):
            assert server.post("/v1/completions", ASK).status_code == 200
        server.post("/v1/completions", ASK | {"n": 99})
        response = server.get("/metrics")
    found = families(response.text)
    assert set(found) == NAMES, set(found) ^ NAMES
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    told = values(response.text)
    # The engine's ledger and the front's agree, to the token.
    assert told["fastlayers_generation_tokens_total", ()] == told["fastlayers_front_tokens_total", ()] == 15
    assert told["fastlayers_requests_total", (("finish", "length"),)] == 3
    assert told["fastlayers_http_errors_total", (("code", "invalid_value"),)] == 1
    assert told["fastlayers_ttft_seconds_count", ()] == 3 and told["fastlayers_itl_seconds_count", ()] == 12
    assert told["fastlayers_output_length_sum", ()] == 15 and told["fastlayers_prompt_length_sum", ()] == 9
    assert told["fastlayers_ready", ()] == 1


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    import json
    import re
    from pathlib import Path

    board = json.loads((Path(__file__).parents[3] / "docs" / "grafana.json").read_text())
    asked = {t["expr"] for p in board["panels"] for t in p["targets"]}
    names = {n for expr in asked for n in re.findall(r"fastlayers_\w+", expr)}
    assert names and {re.sub("_(total|bucket|sum)$", "", n) for n in names} <= NAMES


def test_peers_names_stand_beside_ours() -> None:
    with serving(metrics_compat="both") as server:
        server.post("/v1/completions", ASK)
        text = server.get("/metrics").text
    told = values(text)
    expected = {f"{p}:{t}" for pair in ALIASES.values() for t, p in zip(pair, ("vllm", "sglang"), strict=True) if t}
    assert {name for name in families(text) if ":" in name} == expected
    labels = (("engine", "0"), ("model_name", "tiny"))
    assert told["vllm:generation_tokens_total", labels] == 5
    assert told["vllm:request_success_total", (("engine", "0"), ("finished_reason", "length"), ("model_name", "tiny"))] == 1  # fmt: skip  # noqa: E501
    assert told["sglang:num_running_reqs", (("model_name", "tiny"),)] == 0
    assert told["vllm:time_to_first_token_seconds_bucket", (("engine", "0"), ("le", "+Inf"), ("model_name", "tiny"))] == 1  # fmt: skip  # noqa: E501


def test_models_tokenize_detokenize_version() -> None:
    with serving(served_model_name=("tiny", "org/other")) as server:
        listed = server.get("/v1/models").json()
        assert [Model.model_validate(m).id for m in listed["data"]] == ["tiny", "org/other"]
        assert server.get("/v1/models/org/other").json()["max_model_len"] == 4096
        found = server.post("/tokenize", {"model": "tiny", "prompt": "hi there"}).json()
        assert found["count"] == len(found["tokens"]) > 1 and found["tokens"][0] == 0
        bare = server.post("/tokenize", {"prompt": "hi there", "add_special_tokens": False, "return_token_strs": True})
        assert bare.json()["tokens"] == found["tokens"][1:] and len(bare.json()["token_strs"]) == bare.json()["count"]
        assert server.post("/detokenize", {"tokens": bare.json()["tokens"]}).json() == {"prompt": "hi there"}
        for field in ({"add_generation_prompt": True}, {"tools": []}, {"chat_template_kwargs": {}}):
            error = server.post("/tokenize", {"prompt": "hi"} | field).json()["error"]
            assert error["param"] in field and error["message"].startswith(f"{error['param']}: it belongs to messages")
        chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
        assert (
            server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"] == "<|bos|><|user|>hi<|assistant|>"
        )
        twice = {"messages": [{"role": "user", "content": "hi"}], "add_special_tokens": True}
        assert server.post("/tokenize", twice).json()["tokens"] == [0, *chat["tokens"]]
        assert server.post("/tokenize", {"prompt": "a", "messages": []}).status_code == 400
        assert server.post("/detokenize", {"tokens": [512]}).status_code == 400
        assert server.get("/version").json()["version"]
        assert server.get("/health_generate").json() == {"status": "ok"}


def test_a_checkout_that_is_not_installed_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.distribution

    def distribution(name: str) -> metadata.Distribution:
        if name == "fastlayers":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    with serving(enable_openapi=True) as server:
        told = server.get("/version").json()["version"]
        assert told == __version__ == server.get("/server_info").json()["version"]
        assert server.get("/openapi.json").json()["info"]["version"] == told


def test_health_tells_a_hung_step_a_silent_engine_and_bad_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Starting()  # says nothing by itself: a beat of its own would take the place of these
    with serving(engine=engine, wait=False, watchdog_timeout=3.0) as server:
        link = server.front.link
        engine._deliver_to(EngineInfo(1, 512, 4096, (1,), 16, 9, 4, 8, 20, ()))

        def reason() -> str:
            response = server.get("/health")
            assert (response.status_code == 503) == bool(response.json()["reason"])
            return str(response.json()["reason"])

        assert reason() == ""
        with monkeypatch.context() as no_patience:
            no_patience.setattr(link_module, "BEAT_SECONDS", -1.0)
            assert "no sign of life" in reason(), "of an engine that said nothing but that it is there"
        engine._deliver_to(Beat(1, "serving", 5, 4.0))
        assert "tick runs for 4" in reason()
        link._beat = (time.monotonic() - 6.0, 0.0)
        assert "no sign of life" in reason()
        link._beat = None
        for _ in range(3):
            server.loop.call_soon_threadsafe(link._nonfinite.append, time.monotonic())
        server.get("/ready")
        assert "degraded: 3 requests" in reason()


class Starting(ScriptedEngine):
    """Is started, but not ready."""

    def start(self, deliver: Any) -> None:
        self._deliver_to = deliver
        self.phase = "weights"

    def shutdown(self, timeout: float = 0.0) -> None:
        """Nothing runs."""


def test_ready_tells_the_phase_and_requests_wait_outside() -> None:
    engine = Starting()
    with serving(engine=engine, wait=False) as server:
        assert server.get("/ready").json() == {"phase": "weights"} and server.get("/ready").status_code == 503
        assert server.get("/health").status_code == 200
        refused = server.post("/v1/completions", ASK)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert refused.headers["retry-after"] and server.get("/v1/models").status_code == 200
        info = EngineInfo(1, 512, 4096, (1,), 16, 9, 4, 8, 20, ())
        engine._deliver_to(info)
        assert server.get("/ready").json() == {"phase": "serving"}
        engine._deliver_to(Died(1, "killed", True))
        assert server.get("/ready").json() == {"phase": "restarting"}
        refused = server.post("/v1/completions", ASK)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_restarting")
        engine._deliver_to(info)
        assert server.get("/ready").json() == {"phase": "serving"}
        engine._deliver_to(Died(2, "killed again", False))
        assert "killed again" in server.get("/health").json()["reason"]


@pytest.mark.parametrize(("restarting", "code"), [(True, "engine_restarting"), (False, "draining")])
def test_a_dead_engine_ends_its_requests_and_its_controls(restarting: bool, code: str) -> None:
    engine = Starting()
    asked: list[Any] = []
    engine.submit = engine.send = asked.append  # type: ignore[method-assign]
    with serving(engine=engine, wait=False) as server:
        engine._deliver_to(EngineInfo(1, 512, 4096, (1,), 16, 9, 4, 8, 20, ()))

        async def both() -> list[Any]:
            async with server.client() as client:
                work = [client.post("/v1/completions", json=ASK), client.get("/explain")]
                tasks = [asyncio.ensure_future(each) for each in work]
                while len(asked) < 2:
                    await asyncio.sleep(0.01)
                engine._deliver_to(Died(1, "killed", restarting))
                return await asyncio.gather(*tasks)

        for response in server.do(both()):
            assert (response.status_code, response.json()["error"]["code"]) == (503, code)
            assert response.headers["retry-after"] == ("10" if restarting else "5")
        assert server.front.link.live == 0 and not server.front.jobs


def test_an_engine_that_does_not_answer_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server, monkeypatch.context() as patched:
        patched.setattr(server.front.link.client, "send", lambda message: None)
        control, waited = link_module.Link.control, []

        async def noted(link: Any, what: str, timeout: float = 0.1) -> Any:
            waited.append(timeout)
            return await control(link, what, timeout)

        patched.setattr(link_module.Link, "control", noted)
        response = server.get("/explain")
        assert (response.status_code, response.json()["error"]["code"]) == (504, "engine_timeout")
        assert server.get("/metrics").status_code == 200
    assert waited == [0.1, 0.5]  # who scrapes does not wait for ten seconds, as others do


def test_admin_controls() -> None:
    with serving(open_admin=True, tick_seconds=0.01) as server:
        frozen = server.request("POST", "/freeze_gc").json()
        assert frozen["front"]["frozen"] > 0 and len(frozen["front"]["before"]) == 3 and frozen["engine"]["frozen"] > 0
        server.post("/v1/completions", ASK | {"prompt": [5] * 64})
        assert server.request("POST", "/flush_cache").json()["value"]["pages"] > 0
        profile = server.request("POST", "/start_profile")
        assert (profile.status_code, profile.json()["error"]["code"]) == (409, "refused_by_engine")

        async def aborted() -> tuple[int, Any, Any]:
            async with server.client() as client:
                long = client.post("/v1/completions", json=ASK | {"max_tokens": 4000, "request_id": "mine"})
                running = asyncio.ensure_future(long)
                while not server.front.jobs:
                    await asyncio.sleep(0.01)
                wrong = await client.post("/abort", json={"ids": ["mine", "other"]})
                done = await client.post("/abort", json={"ids": ["cmpl-mine"]})
                return wrong.status_code, done.json(), await running

        wrong, done, ended = server.do(aborted())
        assert wrong == 404 and done == {"aborted": ["cmpl-mine"]}
        assert (ended.status_code, ended.json()["error"]["code"]) == (503, "aborted")
        assert server.request("POST", "/drain").status_code == 200
        refused = server.post("/v1/completions", ASK)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert server.get("/ready").json() == {"phase": "draining"}
        server.front.link.client.phase = "draining"  # as of a beat, of which the next one comes later than what follows
        assert server.request("POST", "/resume").status_code == 200
        assert server.post("/v1/completions", ASK).status_code == 200


def test_one_request_whose_text_breaks_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers_server.front.tokens import Detokenizer

    feed = Detokenizer.feed
    broken: list[Any] = []

    def fails(self: Detokenizer, token: int) -> str:
        broken.append(self)
        if self is broken[0]:
            raise ZeroDivisionError("planted")
        return feed(self, token)

    monkeypatch.setattr(Detokenizer, "feed", fails)
    with serving() as server:

        async def three() -> list[int]:
            async with server.client() as client:
                work = [client.post("/v1/completions", json=ASK) for _ in range(3)]
                return sorted(r.status_code for r in await asyncio.gather(*work))

        assert server.do(three()) == [200, 200, 500]
        assert server.front.link.live == 0


def test_events_wait_for_whole_characters_and_carry_all_of_a_tick() -> None:
    engine = Starting()
    submitted: list[Submit] = []
    engine.submit = submitted.append  # type: ignore[method-assign]
    with serving(engine=engine, wait=False) as server:
        engine._deliver_to(EngineInfo(1, 512, 4096, (1,), 16, 9, 4, 8, 20, ()))
        ids = server.front.tokens.encode("🙂ab", False)

        async def run() -> str:
            async with server.client() as client:
                task = asyncio.ensure_future(client.post("/v1/completions", json=ASK | {"stream": True}))
                while not submitted:
                    await asyncio.sleep(0.01)
                for part, finish in ((ids[:2], ""), (ids[2:], ""), ((), "length")):
                    engine._deliver_to(StepOut((Output(submitted[0].rid, tuple(part), finish),)))
                    for _ in range(50):  # until it has left, in turns of the loop
                        await asyncio.sleep(0)
                return (await task).text

        text = server.do(run())
    assert text.count("data: {") == 2 and '"text":"🙂ab"' in text


@pytest.mark.parametrize("ask", [ASK, {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}])
def test_a_silent_stream_is_kept_alive(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers_server.front import answers

    assert answers.KEEP_ALIVE_SECONDS == 15.0, "proxies close what is silent for half a minute"
    monkeypatch.setattr(answers, "KEEP_ALIVE_SECONDS", 0.01)
    monkeypatch.setattr(answers, "FIRST_NEWS_SECONDS", 0.01)
    engine = Starting()
    submitted: list[Submit] = []
    engine.submit = submitted.append  # type: ignore[method-assign]
    with serving(engine=engine, wait=False) as server:
        engine._deliver_to(EngineInfo(1, 512, 4096, (1,), 16, 9, 4, 8, 20, ()))

        app, kept = server.app, []

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            async def sending(message: Any) -> None:
                kept.append(b": keep-alive" in message.get("body", b""))
                await send(message)

            await app(scope, receive, sending)

        async def run() -> str:
            server.app = watched
            async with server.client() as client, asyncio.timeout(60):
                path = "/v1/completions" if "prompt" in ask else "/v1/chat/completions"
                task = asyncio.ensure_future(client.post(path, json=ask | {"stream": True}))
                while not submitted or sum(kept) < 2:
                    await asyncio.sleep(0.01)
                engine._deliver_to(StepOut((Output(submitted[0].rid, (5,), "length"),)))
                return (await task).text

        text = server.do(run())
    assert text.count(": keep-alive\n\n") >= 2 and text.endswith("data: [DONE]\n\n")


def test_an_engine_without_a_token_is_told_by_health_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers_server.front import ops

    assert ops.GENERATE_SECONDS == 10.0
    monkeypatch.setattr(ops, "GENERATE_SECONDS", 0.05)
    engine = Starting()
    asked: list[Any] = []
    engine.submit = engine.send = asked.append  # type: ignore[method-assign]
    with serving(engine=engine, wait=False) as server:
        engine._deliver_to(EngineInfo(1, 512, 4096, (1,), 16, 9, 4, 8, 20, ()))
        response = server.get("/health_generate")
    assert (response.status_code, response.json()["error"]["code"]) == (504, "engine_timeout")
    assert asked[1] == Abort((asked[0].rid,)), "nobody waits for it any more"


def test_a_front_collects_its_garbage_before_it_is_ready() -> None:
    class Late(ScriptedEngine):
        """Is there when the test says so."""

        def start(self, deliver: Any) -> None:
            frozen.append(gc.get_freeze_count())

    frozen: list[int] = []
    with serving(engine=Late(), no_freeze_gc=False, wait=False) as server:
        assert frozen == [0] and gc.get_freeze_count() > 10_000
        assert server.get("/ready").status_code == 503


def test_a_front_that_stood_says_where() -> None:
    with serving() as server:
        began = server.get("/explain").json()["front"]["stalls"]
        assert all(each["where"] == "loop" and each["ms"] > 100 for each in began), began  # none, but of a busy machine
        server.loop.call_soon_threadsafe(time.sleep, 0.2)
        server.front.metrics.collected(2, 0.3)
        server.front.link.client._deliver_to(StepOut((), time.monotonic() - 0.4))  # type: ignore[attr-defined]
        end, told = time.monotonic() + 60, dict[str, list[Any]]()
        while not {"loop", "news"} <= set(told) and time.monotonic() < end:
            time.sleep(0.01)
            seen = server.get("/explain").json()["front"]["stalls"][len(began) :]
            told = {where: [e for e in seen if e["where"] == where] for where in {e["where"] for e in seen}}
        counted = values(server.get("/metrics").text)
    # A machine that is busy makes these longer, and its loops late more often; nothing makes them shorter.
    assert set(told) == {"loop", "collector", "news"}, told
    assert 170 <= max(each["ms"] for each in told["loop"]) < 100_000, told["loop"]
    (news,), collector = told["news"], next(each for each in told["collector"] if each["ms"] == 300.0)
    assert 400 <= news["ms"] < 100_000
    assert collector["generation"] == 2 and {"user_ms", "system_ms", "faults"} <= set(told["loop"][0])
    for where, each in told.items():
        assert counted["fastlayers_front_stalls_total", (("where", where),)] >= len(each), where
    assert counted["fastlayers_front_stalls_total", (("where", "news"),)] == 1.0


def test_probes_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fastlayers.access"), serving() as server:
        for path in ("/health", "/metrics", "/v1/models"):
            assert server.get(path).status_code == 200
    told = {r.facts["path"]: r.levelname for r in caplog.records if r.name == "fastlayers.access"}  # type: ignore[attr-defined]
    assert told == {"/health": "DEBUG", "/metrics": "DEBUG", "/v1/models": "INFO"}


def test_requests_are_traced_where_a_tracer_is() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
    from opentelemetry import propagate
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import SpanKind

    from fastlayers_server.front.trace import spans_of, tracing

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving() as server:
        span = spans_of(provider.get_tracer("t"), propagate.extract, SpanKind.SERVER)
        server.app = Gate(server.app.app, server.front.config, server.front.metrics, ADMIN, span=span)
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        server.post("/v1/completions", ASK, traceparent=parent)
    (found,) = exporter.get_finished_spans()
    assert found.name == "POST /v1/completions" and found.attributes["http.response.status_code"] == 200
    assert f"{found.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match="--otlp-endpoint needs"):
            tracing("http://127.0.0.1:9")
