"""No field is accepted and ignored: each changes what the engine is asked or what is answered, or is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from fastlayers_server.engine.protocol import Submit
from fastlayers_server.front.responses import ResponsesRequest
from fastlayers_server.front.schemas import WITHOUT_EFFECT, ChatRequest, CompletionRequest, StreamOptions

from .harness import EOS, ScriptedEngine, Server, saying, serving, tokens_of

TOOLS = [{"type": "function", "function": {"name": "f"}}]
# Of each field: a value, and what else is said with it and without it.
COMMON: dict[str, tuple[Any, dict[str, Any]]] = {
    "model": ("other", {}), "temperature": (0.5, {}), "top_p": (0.5, {}), "stream": (True, {}), "max_tokens": (2, {}),
    "top_k": (3, {}), "min_p": (0.1, {}), "n": (2, {}), "seed": (5, {}), "stop": ("wor", {}),
    "stop_token_ids": ([7], {}), "include_stop_str_in_output": (True, {"stop": "wor"}),
    "stream_options": ({"include_usage": True}, {"stream": True}), "frequency_penalty": (1.0, {}),
    "presence_penalty": (1.0, {}), "repetition_penalty": (1.5, {}), "logit_bias": ({"5": 1}, {}),
    "response_format": ({"type": "json_object"}, {}), "structured_outputs": ({"regex": "a"}, {}),
    "skip_special_tokens": (False, {}), "ignore_eos": (True, {"max_tokens": 20}), "min_tokens": (2, {}),
    "priority": (3, {}), "cache_salt": ("s", {}), "request_id": ("mine", {}), "return_token_ids": (True, {}),
    "guided_json": ({}, {}), "json_schema": ({}, {}), "guided_regex": ("a", {}), "regex": ("a", {}),
    "guided_grammar": ("a", {}), "ebnf": ("a", {}), "guided_choice": (["a"], {}),
}  # fmt: skip
COMPLETION = COMMON | {
    "prompt": ("b", {}), "best_of": (2, {}), "echo": (True, {}), "logprobs": (1, {}), "prompt_logprobs": (1, {}),
    "add_special_tokens": (False, {}),
}  # fmt: skip
CHAT = COMMON | {
    "messages": ([{"role": "user", "content": "b"}], {}), "max_completion_tokens": (2, {}), "logprobs": (True, {}),
    "top_logprobs": (2, {"logprobs": True}), "tools": (TOOLS, {}), "tool_choice": ("required", {}),
    "reasoning_effort": ("low", {}), "chat_template_kwargs": ({"enable_thinking": True}, {}),
    "add_generation_prompt": (False, {}), "add_special_tokens": (True, {}),
    "parallel_tool_calls": (False, {"tools": TOOLS}),  # refused with the tools; test_constraints.py has it with them
}  # fmt: skip
FORM = {"format": {"type": "json_object"}}
RESPONSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "model": ("other", {}), "temperature": (0.5, {}), "top_p": (0.5, {}), "stream": (True, {}), "input": ("b", {}),
    "instructions": ("b", {}), "max_output_tokens": (2, {}), "tools": ([{"type": "function", "name": "f"}], {}),
    "tool_choice": ("required", {}), "text": (FORM, {}), "reasoning": ({"effort": "low"}, {}),
    "truncation": ("auto", {}),  # what it may be is what is done anyway
    "parallel_tool_calls": (False, {"tools": [{"type": "function", "name": "f"}]}),
}  # fmt: skip
ROUTES: dict[str, tuple[Any, dict[str, tuple[Any, dict[str, Any]]]]] = {
    "completions": (CompletionRequest, COMPLETION),
    "chat/completions": (ChatRequest, CHAT),
    "responses": (ResponsesRequest, RESPONSES),
}
CASES = [(route, field) for route, (_, table) in ROUTES.items() for field in table]
EXEMPT = {("chat/completions", "parallel_tool_calls"), ("responses", "parallel_tool_calls")}
# What a response says of itself; the rest of it repeats what was asked, whether that had an effect or not.
TOLD = ("status", "error", "incomplete_details", "usage")


class Recording(ScriptedEngine):
    """Remembers what it was asked."""

    seen: list[Submit]

    def submit(self, request: Submit) -> None:
        self.seen.append(request)
        super().submit(request)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    tokens = tokens_of()
    special = next(i for i in tokens.special if i > EOS)
    ids = [*tokens.encode("Hello", False), special, *tokens.encode(" world", False)]
    engine = Recording(saying(ids, EOS), tick_seconds=0.0)
    engine.seen = []
    with serving(engine=engine, tokens=tokens, enable_priority=True) as it:
        yield it


def outcome(server: Server, route: str, fields: dict[str, Any]) -> Any:
    """Return what the engine was asked, and the answer; of both only what a request may change."""
    given: dict[str, Any] = {"seed": 1}
    if route == "responses":
        given = {"input": "a"}
    else:
        given |= {"prompt": "a"} if route == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    engine: Any = server.front.link.client
    engine.seen.clear()
    response = server.post(f"/v1/{route}", {"model": "tiny"} | given | fields)
    first = engine.seen[0].rid if engine.seen else 0
    asked = [msgspec.structs.replace(s, rid=s.rid - first, arrival=0.0, group=0) for s in engine.seen]
    if route == "responses":
        unseeded = [msgspec.structs.replace(s, sampling=msgspec.structs.replace(s.sampling, seed=0)) for s in asked]
        if "text/event-stream" in response.headers["content-type"]:
            return 200, unseeded, response.text.count("event: ")
        said = response.json()
        items = [item.get("content") for item in said.get("output", ())]
        return response.status_code, unseeded, [{name: said.get(name) for name in TOLD}, items]
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    told = [json.loads(line) if line != "[DONE]" else line for line in lines]
    for each in told:
        if isinstance(each, dict):
            each["id"], each["created"] = "mine" in each.get("id", ""), 0
    return response.status_code, asked, told


@pytest.mark.parametrize(("route", "field"), CASES)
def test_a_field_has_an_effect(server: Server, route: str, field: str) -> None:
    value, beside = ROUTES[route][1][field]
    without, given = (outcome(server, route, beside | said) for said in ({}, {field: value}))
    assert without != given or (route, field) in EXEMPT, "accepted and ignored"
    if given[0] != 200:
        error = given[2][0]["error"]
        assert field in (error["param"].split(".")[0], "parallel_tool_calls"), error
        assert error["message"].startswith(("the model 'other'", error["param"])), error


def test_every_field_is_tried() -> None:
    for schema, table in ROUTES.values():
        assert set(table) == set(schema.model_fields) - set(WITHOUT_EFFECT)
    assert set(StreamOptions.model_fields) == {"include_usage", "continuous_usage_stats"}


@pytest.mark.parametrize("route", [route for route in ROUTES if route != "responses"])
def test_a_stream_tells_the_usage_of_each_event_if_asked(server: Server, route: str) -> None:
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    told = [each for each in outcome(server, route, options)[2] if isinstance(each, dict)]
    counts = [each["usage"]["completion_tokens"] for each in told if each.get("usage")]
    assert counts == sorted(counts) and counts[-1] > 5 and len(counts) >= len(told) - 1, counts


def test_of_a_key_that_is_given_twice_the_last_value_counts(server: Server) -> None:
    body = '{"model": "nobody", "model": "tiny", "prompt": "a", "max_tokens": 9, "max_tokens": 2, "ignore_eos": true}'
    answer = server.request("POST", "/v1/completions", {"content-type": "application/json"}, content=body)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2, answer.text
