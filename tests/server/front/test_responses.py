"""/v1/responses: whole and streamed, as OpenAI's client reads it, and what it does not keep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from fastlayers_server.front.responses import ResponsesRequest, as_chat

from .harness import Server, script_of, serving
from .test_constraints import GRAMMAR, Compiler, Recording
from .test_reasoning_and_tools import CALLS, WEATHER, qwen  # noqa: F401
from .wire import on_the_wire

TOOLS = [{"type": "function", **WEATHER["function"]}]  # type: ignore[dict-item]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def server(qwen: Any) -> Iterator[Server]:  # noqa: F811
    with serving(script_of(qwen, "hm, so.</think>Yes. " + CALLS), tokens=qwen, vocab_size=520) as it:
        yield it


def post(server: Server, **fields: Any) -> Any:
    return server.post("/v1/responses", {"model": "tiny", "input": "hi"} | fields)


def test_a_whole_response(server: Server) -> None:
    answer = Response.model_validate(post(server, tools=TOOLS).json())
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output_text == "Yes. " and answer.status == "completed"
    call: Any = answer.output[2]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": 'Bonn "}'})
    assert answer.output[0].content[0].text == "hm, so."  # type: ignore[union-attr,index]
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens > 0
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    short = Response.model_validate(post(server, max_output_tokens=2).json())
    assert short.status == "incomplete" and short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in short.output] == ["incomplete"]  # type: ignore[union-attr]
    cut = Response.model_validate(post(server, tools=TOOLS, max_output_tokens=24).json())
    assert [item.status for item in cut.output] == ["completed"] * (len(cut.output) - 1) + ["incomplete"]  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_is_an_incomplete_item(qwen: Any, stream: bool) -> None:  # noqa: F811
    forced: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "function", "name": "weather"}}
    options: dict[str, Any] = {"features": GRAMMAR, "grammars": Compiler(), "tokens": qwen, "vocab_size": 520}
    with serving(script_of(qwen, "</think>" + CALLS), **options) as it:
        Recording(it)
        for begun, arguments in ("", ""), (CALLS.partition("Bonn")[0], '{"city": "'):
            most = 2 + len(qwen.encode(begun, False))
            answer = post(it, **forced, max_output_tokens=most, stream=stream)
            told = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            found = Response.model_validate(told[-1]["response"] if stream else answer.json())
            call: Any = found.output[-1]
            assert found.status == "incomplete" and [item.type for item in found.output] == ["function_call"]
            assert (call.name, call.status) == ("weather", "incomplete") and call.arguments.startswith(arguments)


def test_a_stream_tells_what_the_whole_response_says(server: Server) -> None:
    text = post(server, tools=TOOLS, stream=True).text
    blocks = [b.split("\n") for b in text.split("\n\n") if b.startswith("event: ")]
    events = [EVENT.validate_json(data.removeprefix("data: ")) for _, data in blocks]
    assert [e.type for e in events] == [name.removeprefix("event: ") for name, _ in blocks]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert (events[0].type, events[1].type, events[-1].type) == ("response.created", "response.in_progress", "response.completed")  # fmt: skip  # noqa: E501
    final = events[-1].response
    said = {"response.output_text.delta": "", "response.reasoning_text.delta": "", "response.function_call_arguments.delta": ""}  # fmt: skip  # noqa: E501
    for event in events:
        if event.type in said:
            said[event.type] += event.delta
    assert list(said.values()) == [final.output_text, "hm, so.", '{"city": "Bonn \\"}"}{}']
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert [i.id for i in done] == [i.id for i in final.output]


def test_what_does_not_fit_is_named_as_it_was_given(server: Server) -> None:
    error = post(server, max_output_tokens=5000).json()["error"]
    assert "max_output_tokens = 5000" in error["message"] and error["code"] == "context_length_exceeded"


def test_an_operator_ends_a_response_by_the_id_that_its_client_has(qwen: Any) -> None:  # noqa: F811
    with on_the_wire(lambda *given: 5, tokens=qwen, vocab_size=520, open_admin=True, tick_seconds=0.02) as wire:
        client = openai.OpenAI(base_url=f"{wire.url}/v1", api_key="x")
        events = iter(client.responses.create(model="tiny", input="hi", stream=True))
        created: Any = next(events)
        told = httpx.post(f"{wire.url}/abort", json={"ids": [created.response.id]}, timeout=60)
        assert told.status_code == 200 and created.response.id.startswith("resp_")
        last: Any = list(events)[-1]
        assert (last.type, last.code) == ("error", "aborted")


def test_conversations_come_as_items(server: Server) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
        {"type": "message", "role": "user", "content": "b"},
    ]
    assert post(server, input=items, instructions="be kind", tools=TOOLS).status_code == 200


def test_items_come_back_as_openais_client_dumps_them(server: Server) -> None:
    """With all the fields that its types have, null where we said nothing."""
    first = Response.model_validate(post(server, input="hi", tools=TOOLS, tool_choice="auto").json())
    assert {item.type for item in first.output} == {"reasoning", "message", "function_call"}
    items = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in first.output)]
    assert None in items[-1].values()
    assert post(server, input=items, tools=TOOLS).status_code == 200
    assert post(server, input=[items[0] | {"size": 1}]).json()["error"]["param"] == "input.0.size"


def test_one_turn_is_one_message() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "id": "rs", "content": [{"type": "reasoning_text", "text": text}], "status": None}

    def said(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "output_text", "text": text, "annotations": []}], "id": "m"}

    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "o"}
    user = {"role": "user", "content": "q"}
    made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for items, turns in (
        ([user, thought("t"), said("a"), user], [("t", "a", [])]),
        ([thought("t"), said("a"), call, call, output], [("t", "a", [made, made])]),
        ([thought("t"), call, output, thought("u"), said("b")], [("t", "", [made]), ("u", "b", [])]),
        ([said("a"), thought("t"), said("b")], [(None, "a", []), ("t", "b", [])]),
        ([call, said("a")], [(None, "", [made]), (None, "a", [])]),
    ):
        chat = as_chat(ResponsesRequest.model_validate({"model": "tiny", "input": items}))
        found = [m.model_dump(exclude_none=True) for m in chat.messages if m.role == "assistant"]
        assert [(m.get("reasoning_content"), m["content"], m.get("tool_calls", [])) for m in found] == turns
        assert [m.role for m in chat.messages if m.role != "assistant"] == [
            "user" if item is user else "tool" for item in items if item in (user, output)
        ]


def test_an_answer_can_be_sent_back(server: Server) -> None:
    first = post(server, tools=TOOLS).json()
    outputs = [{"type": "function_call_output", "call_id": i["call_id"], "output": "o"} for i in first["output"] if i["type"] == "function_call"]  # fmt: skip  # noqa: E501
    items = [{"role": "user", "content": "hi"}, *first["output"], *outputs]
    assert len(outputs) == 2 and post(server, input=items, tools=TOOLS).status_code == 200


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"store": True}, "unsupported_parameter", "store"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools"),
        ({"truncation": "auto"}, "invalid_value", "truncation"),
        ({"include": ["x"]}, "unsupported_parameter", "include"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [{"type": "image_generation_call"}]}, "unsupported_content", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "unsupported_content", "content"),
        ({"input": [{"role": "user"}]}, "missing_parameter", "input.0.content"),
        ({"input": [{"content": "x"}]}, "missing_parameter", "input.0.role"),
        ({"input": [{"role": "user", "content": "x", "x": 1}]}, "unknown_parameter", "input.0.x"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "invalid_value", "input.0.content"),
        ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": 5}]}]}, "invalid_value",
         "input.0.content.0.text"),
        ({"input": [{"type": ["a"]}]}, "unsupported_content", "input"),
        ({"input": [5]}, "invalid_value", "input.0"),
        ({"input": [{"content": "x"}, {"type": "function_call"}]}, "missing_parameter", "input.0.role"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "invalid_value", "text.format"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "invalid_value", "text.format"),
        ({"max_output_tokens": 5000}, "context_length_exceeded", "input"),
        ({"frequency_penalty": 1}, "unknown_parameter", "frequency_penalty"),
        ({"model": "other"}, "model_not_found", "model"),
    ],
)  # fmt: skip
def test_what_is_refused(server: Server, fields: Any, code: str, param: str) -> None:
    response = post(server, **fields)
    error = response.json()["error"]
    assert response.status_code in (400, 404) and (error["code"], error["param"]) == (code, param)


def test_an_output_names_a_call_before_it(server: Server) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c2", "output": "rain"}
    for items, accepted in ([call, output], "ids of calls before it: ['c1']"), ([output, call], "none, there is no"):
        error = post(server, input=items, tools=TOOLS).json()["error"]
        assert error["param"] == "input" and f"call_id 'c2' is unknown; accepted: {accepted}" in error["message"]
        assert "tool_call_id" not in error["message"], "the client's own name"
    assert post(server, input=[call, output | {"call_id": "c1"}], tools=TOOLS).status_code == 200


def test_every_field_of_openai_has_a_verdict() -> None:
    from openai.types.responses.response_create_params import ResponseCreateParamsBase as Theirs

    from fastlayers_server.front.responses import STATEFUL

    lacking = set(Theirs.__annotations__) - set(ResponsesRequest.model_fields) - set(STATEFUL)
    # Of these, OpenAI's names for what chats refuse too, an unknown_parameter says enough.
    assert lacking <= {"prompt_cache_retention", "prompt_cache_options", "stream_options", "moderation"}, lacking


def test_openais_client(qwen: Any) -> None:  # noqa: F811
    with on_the_wire(script_of(qwen, "</think>fine"), tokens=qwen, vocab_size=520) as wire:
        client = openai.OpenAI(base_url=f"{wire.url}/v1", api_key="x")
        assert client.responses.create(model="tiny", input="hi").output_text == "fine"
        with client.responses.stream(model="tiny", input="hi") as stream:
            for _ in stream:
                pass
            assert stream.get_final_response().output_text == "fine"
