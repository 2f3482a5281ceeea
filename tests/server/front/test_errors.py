"""Bodies of errors, and that nothing is accepted and ignored."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fastlayers_server.engine.protocol import Output, Submit
from fastlayers_server.front.app import ROUTES
from fastlayers_server.front.schemas import NEUTRAL, REFUSED, WITHOUT_EFFECT, ChatRequest, CompletionRequest

from .harness import ScriptedEngine, Server, serving

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(features=("logprobs",)) as it:
        yield it


def error_of(response: Any, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code, body
    return dict(body["error"])


BAD = [
    ({"model": "x"}, 404, "model_not_found", "model"),
    ({"foo": 1}, 400, "unknown_parameter", "foo"),
    ({"model": None}, 400, "invalid_value", "model"),
    ({"temperature": 2.1}, 400, "invalid_value", "temperature"),
    ({"temperature": "0.5"}, 400, "invalid_value", "temperature"),
    ({"top_p": 0}, 400, "invalid_value", "top_p"),
    ({"top_k": -2}, 400, "invalid_value", "top_k"),
    ({"min_p": 1.5}, 400, "invalid_value", "min_p"),
    ({"n": 0}, 400, "invalid_value", "n"),
    ({"n": True}, 400, "invalid_value", "n"),
    ({"n": 9}, 400, "invalid_value", "n"),
    ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    ({"max_tokens": 4096}, 400, "context_length_exceeded", None),
    ({"logit_bias": {"9" * 5000: 1}}, 400, "invalid_value", "logit_bias"),
    ({"min_tokens": 9, "max_tokens": 3}, 400, "invalid_value", "min_tokens"),
    ({"seed": 2**63}, 400, "invalid_value", "seed"),
    ({"stop": ""}, 400, "invalid_value", None),
    ({"stop": ["x"] * 17}, 400, "invalid_value", None),
    ({"stop_token_ids": [512]}, 400, "invalid_value", "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, 400, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, 400, "unknown_parameter", "stream_options.x"),
    ({"frequency_penalty": 0.5}, 400, "unsupported_parameter", "frequency_penalty"),
    ({"repetition_penalty": 1.1}, 400, "unsupported_parameter", "repetition_penalty"),
    ({"logit_bias": {"5": 1}}, 400, "unsupported_parameter", "logit_bias"),
    ({"logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias"),
    ({"logit_bias": {"512": 1}}, 400, "invalid_value", "logit_bias"),
    ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format"),
    ({"response_format": {"type": "xml"}}, 400, "invalid_value", "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, 400, "invalid_value", "response_format"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, 400, "invalid_value", "guided_regex"),
    ({"structured_outputs": {"json": 3}}, 400, "invalid_value", "structured_outputs.json"),
    ({"stop": [1]}, 400, "invalid_value", "stop.0"),
    ({"priority": 1}, 400, "unsupported_parameter", "priority"),
    ({"cache_salt": ""}, 400, "invalid_value", "cache_salt"),
    ({"request_id": "a b"}, 400, "invalid_value", "request_id"),
    ({"store": True}, 400, "unsupported_parameter", "store"),
    ({"service_tier": "flex"}, 400, "unsupported_parameter", "service_tier"),
]  # fmt: skip
BAD_CHAT = [
    ({"messages": []}, 400, "invalid_value", "messages"),
    ({"messages": USER * 4097}, 400, "invalid_value", "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "invalid_value", "messages.0.role"),
    ({"messages": [{"role": "user"}]}, 400, "invalid_value", "messages"),
    ({"messages": [{"role": "user", "content": "x", "size": 1}]}, 400, "unknown_parameter", "messages.0.size"),
    ({"messages": [*USER, {"role": "tool", "tool_call_id": "c", "content": "x"}]}, 400, "invalid_value", "messages"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "invalid_value", "max_tokens"),
    ({"top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "invalid_value", "top_logprobs"),
    ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 4096}, 400, "context_length_exceeded", "messages"),
    ({"tool_choice": "required"}, 400, "invalid_value", "tool_choice"),
    # Members of unions are ours, not fields.
    ({"tool_choice": "any"}, 400, "invalid_value", "tool_choice"),
    ({"tool_choice": {"type": "function"}}, 400, "missing_parameter", "tool_choice.function"),
    ({"tool_choice": {"type": "x", "function": {"name": "f"}}}, 400, "invalid_value", "tool_choice.type"),
    ({"reasoning_effort": "high"}, 400, "unsupported_parameter", "reasoning_effort"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, 400, "unsupported_parameter", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "unsupported_parameter", "chat_template_kwargs"),
    *[
        ({"messages": [{"role": "user", "content": [part]}]}, 400, "unsupported_content", "content")
        for part in (
            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
            {"type": "input_audio", "input_audio": {}},
            {"type": "file", "file": {}},
            "text",
        )
    ],
]
BAD_COMPLETION = [
    ({"prompt": []}, 400, "invalid_value", "prompt"),
    ({"prompt": [[]]}, 400, "invalid_value", None),
    ({"prompt": ["x"] * 65}, 400, "invalid_value", "prompt"),
    ({"prompt": ["x"] * 33, "n": 2}, 400, "invalid_value", "n"),
    ({"prompt": [512]}, 400, "invalid_prompt", "prompt"),
    ({"prompt": [-1]}, 400, "invalid_value", None),
    ({"prompt": [5] * 4096}, 400, "context_length_exceeded", "prompt"),
    ({"prompt": "x" * 200_000}, 400, "context_length_exceeded", "prompt"),
    ({"prompt": {"a": 1}}, 400, "invalid_value", None),
    ({"logprobs": 21}, 400, "invalid_value", "logprobs"),
    ({"prompt_logprobs": 1}, 400, "unsupported_parameter", "prompt_logprobs"),
    ({"best_of": 2}, 400, "unsupported_parameter", "best_of"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "status", "code", "param"), BAD + BAD_CHAT)
def test_bad_fields_of_a_chat(server: Server, fields: Any, status: int, code: str, param: str | None) -> None:
    body = {"model": "tiny", "messages": USER} | fields
    error = error_of(server.post("/v1/chat/completions", body), status, code)
    assert param is None or error["param"] == param
    assert error["type"] == "invalid_request_error" and error["message"]


@pytest.mark.parametrize(("fields", "status", "code", "param"), BAD + BAD_COMPLETION)
def test_bad_fields_of_a_completion(server: Server, fields: Any, status: int, code: str, param: str | None) -> None:
    body = {"model": "tiny", "prompt": "a"} | fields
    error = error_of(server.post("/v1/completions", body), status, code)
    assert param is None or error["param"] == param


@pytest.mark.parametrize(
    "given", [{"prompt": "x" * 200_000}, {"messages": [{"role": "user", "content": "x" * 200_000}]}]
)
def test_what_cannot_fit_is_not_tokenised(given: Any) -> None:
    path = "/v1/completions" if "prompt" in given else "/v1/chat/completions"
    with serving() as server:
        server.front.tokens.encode = server.front.tokens.render = None  # type: ignore[method-assign,assignment]
        error_of(server.post(path, {"model": "tiny"} | given), 400, "context_length_exceeded")


def test_long_conversations_are_rendered_on_a_thread() -> None:
    """On the event loop they would hold up everybody's streams, whichever field is long."""
    call = {"type": "function", "function": {"name": "f", "arguments": "x" * 3000}}
    with serving() as server:
        render, on = server.front.tokens.render, []

        def watched(*given: Any) -> str:
            on.append(threading.current_thread().name)
            return render(*given)

        server.front.tokens.render = watched  # type: ignore[method-assign]
        for more, short in (
            ([], True),
            ([{"role": "user", "content": "x" * 3000}], False),
            ([{"role": "user", "content": ""}] * 100, False),
            ([{"role": "assistant", "tool_calls": [call]}], False),
            ([{"role": "assistant", "content": "", "reasoning": "x" * 3000}], False),
        ):  # fmt: skip
            on.clear()
            answer = server.post("/tokenize", {"messages": [*USER, *more]})
            assert answer.status_code == 200 and len(on) == 1, answer.text
            assert ("asyncio" not in on[0]) == short, (more, on)


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_fields_that_we_know_and_lack_are_refused_by_name(server: Server, field: str) -> None:
    body = {"model": "tiny", "messages": USER, field: "x"}
    error = error_of(server.post("/v1/chat/completions", body), 400, "unsupported_parameter")
    assert error["param"] == field and REFUSED[field] in error["message"]
    assert server.post("/v1/chat/completions", body | {field: None, "max_tokens": 1}).status_code == 200


def test_every_field_of_openai_has_a_verdict() -> None:
    """Supported, without effect, or refused with a reason: none is merely unknown."""
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat
    from openai.types.completion_create_params import CompletionCreateParamsBase as Text

    for theirs, ours in ((Chat, ChatRequest), (Text, CompletionRequest)):
        known = set(ours.model_fields) | set(REFUSED) | {"stream"}
        assert set(theirs.__annotations__) <= known, set(theirs.__annotations__) - known
        assert not set(ours.model_fields) & set(REFUSED)
        assert set(WITHOUT_EFFECT) <= set(ours.model_fields) and set(NEUTRAL) <= set(WITHOUT_EFFECT)


def test_fields_without_effect_are_accepted(server: Server) -> None:
    body = {
        "model": "tiny", "messages": USER, "max_tokens": 1, "user": "u", "metadata": {"a": "b"}, "store": False,
        "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k",
    }  # fmt: skip
    assert server.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "invalid_json"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "invalid_json"),
        (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', "invalid_json"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b"null", "invalid_value"),
        (b'"x"', "invalid_value"),
    ],
)
def test_bodies_that_are_no_request(server: Server, raw: bytes, code: str) -> None:
    headers = {"content-type": "application/json"}
    error_of(server.request("POST", "/v1/completions", headers, content=raw), 400, code)


def test_content_types(server: Server) -> None:
    raw = b'{"model": "tiny", "prompt": "a", "max_tokens": 1}'
    error_of(server.request("POST", "/v1/completions", {"content-type": "text/xml"}, content=raw), 400, "invalid_content_type")  # fmt: skip  # noqa: E501
    for kind in ("application/json; charset=utf-8", "application/vnd.x+json"):
        assert server.request("POST", "/v1/completions", {"content-type": kind}, content=raw).status_code == 200
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    refused = server.request("POST", "/v1/completions", headers, content=gzip.compress(raw))
    assert "'gzip'" in error_of(refused, 400, "invalid_content_encoding")["message"]


def test_unknown_paths_and_methods(server: Server) -> None:
    error = error_of(server.get("/v1/embeddings"), 404, "not_found")
    assert "not served; served are" in error["message"]
    listed = error["message"].partition("served are ")[2].split(", ")
    assert len(listed) < 10 and set(listed) <= {route.path for route in ROUTES}
    error_of(server.request("DELETE", "/v1/completions"), 405, "method_not_allowed")
    error_of(server.get("/v1/completions/"), 404, "not_found")
    error_of(server.get("/v1/models/nope"), 404, "model_not_found")
    error_of(server.get("/docs"), 404, "not_found")
    error_of(server.get("/openapi.json"), 404, "not_found")


class Refusing(ScriptedEngine):
    """Ends every request with one error, at once or after some tokens."""

    code, after = "queue_full", 0

    def submit(self, request: Submit) -> None:
        if self.after:
            self._deliver_step(Output(request.rid, (5,), cached_tokens=0))
        self._deliver_step(Output(request.rid, finish="error", code=self.code, message="why", retry_after=3.0))

    def _deliver_step(self, output: Output) -> None:
        from fastlayers_server.engine.protocol import StepOut

        self._deliver_to(StepOut((output,)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("queue_full", 429, "rate_limit_error"),
        ("request_timeout", 408, "timeout"),
        ("nonfinite_logits", 500, "server_error"),
        ("internal_error", 500, "server_error"),
        ("engine_restarting", 503, "server_error"),
        ("draining", 503, "server_error"),
        ("invalid_prompt", 400, "invalid_request_error"),
    ],
)
def test_errors_of_the_engine(code: str, status: int, kind: str, stream: bool) -> None:
    engine = Refusing(tick_seconds=0.0)
    engine.code = code
    with serving(engine=engine) as server:
        response = server.post("/v1/completions", {"model": "tiny", "prompt": "a", "stream": stream})
        error = error_of(response, status, code)
        assert error["type"] == kind and error["message"] == "why"
        assert response.headers.get("retry-after") == "3"


def test_a_full_queue_and_a_deadline_that_passed() -> None:
    engine = ScriptedEngine(tick_seconds=0.05, max_running=1, max_queued_requests=1)
    ask = {"model": "tiny", "prompt": [5, 6], "max_tokens": 120, "ignore_eos": True}
    with serving(engine=engine, request_timeout=1.5) as server:

        async def three() -> list[Any]:
            async with server.client() as client:
                scheduler, tasks = engine._engine.scheduler, []  # type: ignore[union-attr]
                for there in (lambda: scheduler.running.requests, lambda: scheduler.queue.count):
                    tasks.append(asyncio.ensure_future(client.post("/v1/completions", json=ask)))
                    while not there():
                        await asyncio.sleep(0.001)
                return [await client.post("/v1/completions", json=ask), *await asyncio.gather(*tasks)]

        full, first, late = server.do(three())
    assert error_of(full, 429, "queue_full")["type"] == "rate_limit_error" and int(full.headers["retry-after"]) >= 1
    assert first.status_code == 200 and first.json()["usage"]["completion_tokens"] == 120
    assert error_of(late, 408, "request_timeout")["type"] == "timeout"


def test_more_choices_than_may_wait_are_no_full_queue() -> None:
    engine = ScriptedEngine(tick_seconds=0.0, max_running=1, max_queued_requests=2)
    with serving(engine=engine) as server:
        ask = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        refused = server.post("/v1/completions", ask | {"n": 4})
        assert (
            "accepted: 3 in all (--max-queued-requests and --max-running-requests)"
            in error_of(refused, 400, "invalid_value")["message"]
        )
        assert server.post("/v1/completions", ask | {"n": 3}).status_code == 200


def test_an_error_after_the_first_byte_ends_the_stream_without_a_reason() -> None:
    engine = Refusing(tick_seconds=0.0)
    engine.code, engine.after = "engine_restarting", 1

    def say(request: Submit) -> None:
        engine._deliver_step(Output(request.rid, (5,), cached_tokens=0))
        import threading

        failed = Output(request.rid, finish="error", code="engine_restarting", message="gone")
        threading.Timer(0.2, engine._deliver_step, (failed,)).start()

    engine.submit = say  # type: ignore[method-assign]
    with serving(engine=engine) as server:
        response = server.post("/v1/completions", {"model": "tiny", "prompt": "a", "stream": True})
    assert response.status_code == 200
    lines = [line for line in response.text.split("\n\n") if line]
    assert (
        lines[-1] == "data: [DONE]" and '"engine_restarting"' in lines[-2] and lines[-2].startswith('data: {"error":')
    )
    assert '"finish_reason":"' not in response.text


def test_a_fault_of_ours_is_a_500_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        monkeypatch.setattr(server.front.tokens, "encode", lambda *_: 1 / 0)
        error = error_of(server.post("/v1/completions", {"model": "tiny", "prompt": "a"}), 500, "internal_error")
        assert "ZeroDivision" not in error["message"] and "request id" in error["message"]
        monkeypatch.undo()
        assert server.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("fields", [{"x" * 100_000: 1}, {"model": "x" * 100_000}, {"max_tokens": "x" * 100_000}])
def test_an_error_does_not_repeat_what_is_long(server: Server, fields: dict[str, Any]) -> None:
    response = server.post("/v1/chat/completions", {"model": "tiny", "messages": USER} | fields)
    assert response.status_code in (400, 404) and len(response.text) < 1000


def test_lenient_fields_are_counted_and_not_labelled_by_clients() -> None:
    with serving(lenient_fields=True) as server:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "wild_idea": 1}
        assert server.post("/v1/completions", body).status_code == 200
        text = server.get("/metrics").text
        assert 'fastlayers_ignored_fields_total{field="other"} 1.0' in text and "wild_idea" not in text
        assert server.post("/v1/completions", body | {"suffix": "x"}).status_code == 400
        body = {"model": "tiny", "input": "a", "max_output_tokens": 1, "wild_idea": 1}
        assert server.post("/v1/responses", body).status_code == 200
        error = error_of(
            server.post("/v1/responses", body | {"previous_response_id": "x"}), 400, "unsupported_parameter"
        )
        assert error["param"] == "previous_response_id"  # to ignore it would be to answer without the conversation


def test_a_request_id_is_unique_among_live_requests() -> None:
    refused = threading.Event()

    def script(prompt: Any, seed: int, position: int) -> int:
        """Go on behind the first token when one of them has been answered."""
        assert position == 0 or refused.wait(60)
        return 5

    with serving(script) as server:

        async def both() -> list[int]:
            body = {"model": "tiny", "prompt": "a", "max_tokens": 5, "request_id": "mine", "ignore_eos": True}
            async with server.client() as client:
                asked = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(2)]
                await asyncio.wait(asked, timeout=30, return_when=asyncio.FIRST_COMPLETED)
                refused.set()
                answers = await asyncio.gather(*asked)
                again = await client.post("/v1/completions", json=body)
            return [*sorted(a.status_code for a in answers), again.status_code]

        assert server.do(both()) == [200, 409, 200]
