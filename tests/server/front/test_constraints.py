"""From fields to grammar sources: limits, what is refused by path, and that a source is compiled once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from fastlayers_server.front.parsers import STYLES

from .harness import Server, script_of, serving, tokens_of
from .test_reasoning_and_tools import WEATHER, gpt_oss, messages, qwen  # noqa: F401

GRAMMAR = ("logprobs", "grammar")


class Compiler:
    """Notes what it is asked, and answers as a worker would."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[str] = []
        self.error = error

    async def compile(self, source: str) -> str:
        self.asked.append(source)
        await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        return "{}"


class Xgrammar(Compiler):
    """Fails over what xgrammar does not compile, as a worker does."""

    async def compile(self, source: str) -> str:
        import xgrammar

        try:
            xgrammar.Grammar.from_structural_tag(source)
        except RuntimeError as error:
            self.asked.append(source)
            raise ValueError(str(error)) from error
        return await super().compile(source)


class Recording:
    """Takes the place of an engine's submit and send, and answers everything with one token."""

    def __init__(self, server: Server) -> None:
        self.sent: list[Any] = []
        client = server.front.link.client
        submit, send = client.submit, client.send
        import msgspec

        def strip(request: Any) -> None:
            self.sent.append(request)
            submit(msgspec.structs.replace(request, grammar=""))

        def pass_on(message: Any) -> None:
            if type(message).__name__ == "Grammar":
                self.sent.append(message)
            else:
                send(message)

        client.submit, client.send = strip, pass_on  # type: ignore[method-assign]


def asked_for(fields: dict[str, Any], compiler: Compiler, chat: bool = True, **options: Any) -> Any:
    tokens = options.pop("tokens", None) or tokens_of()
    size = options.pop("vocab_size", 512)
    options |= {"features": GRAMMAR, "grammars": compiler, "vocab_size": size}
    with serving(script_of(tokens, "x"), tokens=tokens, **options) as server:
        recording = Recording(server)
        body = {"model": "tiny"} | ({"messages": messages()} if chat else {"prompt": "a"}) | fields
        response = server.post("/v1/chat/completions" if chat else "/v1/completions", body)
        return response, recording.sent


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


JSON = {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 24}
CHOICE = [{"type": "const_string", "value": "yes"}, {"type": "const_string", "value": "no"}]


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_object"}}, JSON | {"json_schema": {"type": "object"}}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, JSON),
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"guided_json": json.dumps(SCHEMA)}, JSON),
        ({"json_schema": SCHEMA}, JSON),
        ({"guided_regex": "a{1,3}"}, {"type": "regex", "pattern": "a{1,3}"}),
        ({"regex": "[ab]+"}, {"type": "regex", "pattern": "[ab]+"}),
        ({"ebnf": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}),
        ({"guided_choice": ["yes", "no"]}, {"type": "or", "elements": CHOICE}),
        ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}}, {"type": "any_text"}),
        ({"response_format": {"type": "structural_tag", "format": {}}}, {}),
    ],
)  # fmt: skip
def test_each_way_to_ask_becomes_one_source(fields: Any, form: Any) -> None:
    compiler = Compiler()
    response, sent = asked_for(fields, compiler)
    assert response.status_code == 200, response.text
    (source,) = compiler.asked
    assert json.loads(source) == {"type": "structural_tag", "format": form}
    grammar, request = sent[0], sent[1]
    assert grammar.key == request.grammar and len(grammar.key) == 40


def test_a_source_is_compiled_and_sent_once() -> None:
    compiler = Compiler()
    with serving(features=GRAMMAR, grammars=compiler) as server:
        recording = Recording(server)
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "regex": "a"}

        async def together() -> list[int]:
            async with server.client() as client:
                answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(2)))
            return [answer.status_code for answer in answers]

        assert server.do(together()) == [200, 200] and server.post("/v1/completions", body).status_code == 200
        kinds = [type(m).__name__ for m in recording.sent]
        assert len(compiler.asked) == 1 and kinds.count("Grammar") == 1 and kinds.count("Submit") == 3

        # Who needs nothing compiled waits for nobody's grammar.
        async def beside() -> int:
            async with server.front.compiling, server.client() as client:
                return (await asyncio.wait_for(client.post("/v1/completions", json=body), 60)).status_code

        assert server.do(beside()) == 200


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, "properties.a.not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "http://example.org/x"}, "$ref"),
        ({"$ref": "file:///etc/passwd"}, "$ref"),
        ({"type": "string", "maxLength": 10_001}, "maxLength"),
        ({"type": "array", "minItems": -1}, "minItems"),
        ({"type": "string", "format": "binary"}, "format"),
        ({"type": "string", "format": ["date"]}, "format"),
        ({"anyOf": [{"type": "string"}, {"if": {}}]}, "anyOf.1.if"),
        ({"type": "string", "pattern": "a{20000}"}, "response_format"),
        ({"properties": []}, "properties"),
        # What xgrammar does not look at, without a word.
        ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "maximum": 3}, "response_format.maximum"),
        ({"$defs": {"n": {}}, "$ref": "#/$defs/n", "type": "integer"}, "response_format.type"),
        ({"type": "object", "properties": {"a": {"$ref": "#n"}}}, "properties.a.$ref"),
        ({"anyOf": [{"required": ["a"]}], "properties": {"a": {}}, "type": "object"}, "anyOf.0.required"),
        ({"oneOf": [SCHEMA], "properties": {"b": {}}, "type": "object"}, "response_format.properties"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "type": "string"}, "response_format.type"),
        ({"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}, "response_format.allOf"),
        ({"enum": [1, 7], "maximum": 5}, "response_format.maximum"),
        ({"enum": ["a", 1], "type": "string"}, "response_format.type"),
        ({"const": True, "type": "integer"}, "response_format.type"),
        ({"maximum": 3}, "response_format.maximum"),
        ({"required": ["a"]}, "response_format.required"),
        ({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}, "response_format.required"),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "response_format.maxLength"),
        ({"type": "string", "format": "date", "minLength": 3}, "response_format.minLength"),
        ({"type": "string", "format": "date", "pattern": "a"}, "response_format.format"),
        ({"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "b"}}, "response_format.properties"),
        ({"type": "object", "propertyNames": {"pattern": "b"}, "additionalProperties": False}, "additionalProperties"),
        ({"type": "object", "propertyNames": {}, "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"$defs": {"n": {"type": "integer"}}, "type": "object", "propertyNames": {"$ref": "#/$defs/n"}}, "Names.type"),
        ({"type": "object", "propertyNames": {"type": ["string", "null"], "minLength": 1}}, "propertyNames.type"),
        ({"$defs": {"n": {"enum": ["a", 1]}}, "$ref": "#/$defs/n", "type": "string"}, "response_format.type"),
        ({"$ref": "#/$defs/n", "type": "string"}, "response_format.type"),
        ({"anyOf": [{"type": "number"}], "type": "integer"}, "response_format.type"),
        ({"anyOf": [{"type": ["string", "null"]}], "type": "string"}, "response_format.type"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}], "type": "string"}, "response_format.type"),
        ({"type": "string", "pattern": "(?=a)b"}, "lookahead"),
        ({"type": "string", "pattern": r"C:\\.*"}, "a backslash"),
        ({"type": "string", "pattern": r'"a\x22'}, "a quote"),
    ],
)
def test_keywords_that_would_be_dropped_are_refused_with_their_path(schema: Any, path: str) -> None:
    compiler = Compiler()
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    response, _ = asked_for({"response_format": form}, compiler)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_grammar")
    assert path in error["message"] and error["param"] == "response_format"
    assert not compiler.asked


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "enum": ["a", "b"], "description": "one of two"},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"const": 1, "type": "number"},
        {"$defs": {"n": SCHEMA}, "$ref": "#/$defs/n", "title": "n", "default": None},
        {"type": "object", "oneOf": [SCHEMA, {"type": "object"}], "discriminator": {"propertyName": "a"}},
        {"allOf": [SCHEMA], "description": "as pydantic writes it"},
        {"type": "object", "propertyNames": {"pattern": "^a"}, "minProperties": 1},
        {"items": {"type": "integer"}, "minItems": 2},
        {"properties": {"a": {}, "required": {"type": "null"}}, "required": ["a"]},
        {"type": "string", "pattern": r'^[^"\\\n]+\.\s(?:a|b)$'},
        {
            "$defs": {"C": {"enum": ["r", "g"], "type": "string"}},
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/C"},
            "additionalProperties": {"type": "integer"},
        },
        {"$defs": {"A": SCHEMA}, "type": "object", "$ref": "#/$defs/A"},
        {
            "$defs": {"A": SCHEMA, "B": {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}},
            "type": "object",
            "anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        },
        {"type": "number", "anyOf": [{"type": "integer"}, {"const": 1.5}]},
        {"type": ["null", "string"], "anyOf": [{"type": ["string", "null"]}, {"type": "string"}]},
    ],
)
def test_what_is_enforced_as_it_stands_is_compiled(schema: Any) -> None:
    compiler = Xgrammar()
    response, _ = asked_for({"guided_json": schema}, compiler)
    assert response.status_code == 200, response.text
    assert json.loads(compiler.asked[0])["format"]["json_schema"] == schema


def test_grammar_bombs_are_refused_before_they_are_compiled() -> None:
    deep: Any = {"type": "string"}
    for _ in range(40):
        deep = {"anyOf": [deep]}
    for fields in (
        {"regex": "a" * 70_000}, {"regex": "(" * 40 + ")" * 40}, {"regex": "a{1,99999}"},
        {"ebnf": 'root ::= "a"{30000}'}, {"guided_json": {"anyOf": [{"enum": ["x" * 70_000]}]}},
    ):  # fmt: skip
        compiler = Compiler()
        response, _ = asked_for(fields, compiler)
        assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_grammar", fields
        assert not compiler.asked
    for given in (deep, "[1]", '"object"'):
        compiler = Compiler()
        response, _ = asked_for({"guided_json": given}, compiler)
        assert response.status_code == 400 and not compiler.asked


@pytest.mark.parametrize("error", [ValueError("no such rule"), TimeoutError()])
def test_what_cannot_be_compiled_is_the_clients_error(error: Exception) -> None:
    response, sent = asked_for({"regex": "a"}, Compiler(error))
    found = response.json()["error"]
    assert (response.status_code, found["code"], found["param"]) == (400, "invalid_grammar", "regex")
    assert not sent


ELSEWHERE, NOWHERE = {"$ref": "other.json"}, {"type": "array", "items": {"$ref": "#/$defs/missing"}}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"regex": "("}, "regex", "regex: "), ({"guided_regex": "a{1,99999}"}, "guided_regex", "guided_regex: "),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "structured_outputs.regex: "),
        ({"ebnf": "root ::= ("}, "ebnf", "ebnf: "), ({"guided_grammar": "x"}, "guided_grammar", "guided_grammar: "),
        ({"guided_json": ELSEWHERE}, "guided_json", "guided_json.$ref: "),
        ({"json_schema": json.dumps(ELSEWHERE)}, "json_schema", "json_schema.$ref: "),
        ({"guided_json": NOWHERE}, "guided_json", "guided_json: "),
        ({"structured_outputs": {"json": ELSEWHERE}}, "structured_outputs.json", "structured_outputs.json.$ref: "),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": ELSEWHERE}}}, "response_format",
         "response_format.$ref: "),
        ({"guided_json": "{"}, "guided_json", "guided_json: it is no JSON"),
        ({"regex": 5}, "regex", "regex: "), ({"guided_choice": []}, "guided_choice", "guided_choice: "),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "regex: response_format is given too"),
    ],
)  # fmt: skip
def test_a_constraint_that_is_refused_is_named_as_it_was_sent(fields: Any, param: str, says: str) -> None:
    for chat in (True, False):
        response, _ = asked_for(fields, Xgrammar(), chat)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param) and error["message"].startswith(says)


def test_an_engine_without_grammars_says_so_of_the_field_that_was_sent() -> None:
    with serving() as server:
        for fields, param in (({"ebnf": "x"}, "ebnf"), ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice")):  # fmt: skip  # noqa: E501
            error = server.post("/v1/completions", {"model": "tiny", "prompt": "a"} | fields).json()["error"]
            assert (error["code"], error["param"]) == ("unsupported_parameter", param)


def test_a_process_that_does_not_start_is_the_servers_own_fault(caplog: pytest.LogCaptureFixture) -> None:
    response, sent = asked_for({"regex": "a"}, Compiler(RuntimeError("none starts with the tokenizer of /srv/model")))
    error = response.json()["error"]
    assert response.status_code == 503 and int(response.headers["retry-after"]) > 0 and not sent
    assert (error["type"], error["code"]) == ("server_error", "not_ready")
    assert "process that compiles grammars does not start" in error["message"] and "/srv" not in error["message"]
    assert "none starts with the tokenizer of /srv/model" in caplog.text


def test_a_constrained_answer_may_not_ignore_its_end() -> None:
    for fields in ({"ignore_eos": True}, {"min_tokens": 3}):
        response, _ = asked_for({"regex": "a"} | fields, Compiler())
        assert response.status_code == 400 and response.json()["error"]["param"] in fields


@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function", "function": {"name": "weather"}}])
def test_calls_are_constrained_behind_the_thought(qwen: Any, choice: Any) -> None:  # noqa: F811
    compiler = Compiler()
    fields = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    response, _ = asked_for(fields, compiler, tokens=qwen, vocab_size=520)
    assert response.status_code == 200, response.text
    told = json.loads(compiler.asked[0])
    thought, _, calls = told["format"]["elements"]
    assert told["type"] == "structural_tag" and thought["end"] == "</think>"
    if choice == "auto":
        assert calls["type"] == "triggered_tags" and calls["triggers"] == ["<tool_call>"]
    else:
        assert calls["type"] == "tags_with_separator" and calls["at_least_one"]
    assert calls["stop_after_first"]
    assert calls["tags"][0]["content"]["json_schema"] == WEATHER["function"]["parameters"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("choice", "strict", "held"), [("auto", None, False), ("auto", True, True), ("required", None, True)]
)
def test_a_tool_that_promises_nothing_may_have_any_schema(qwen: Any, choice: str, strict: Any, held: bool) -> None:  # noqa: F811
    """What tools' servers write, addresses with a length among it, fails no request that may do without a call."""
    link = {"type": "string", "format": "uri", "maxLength": 2083}
    function = {"name": "f", "strict": strict, "parameters": {"type": "object", "properties": {"link": link}}}
    tools, compiler = [WEATHER, {"type": "function", "function": function}], Compiler()
    response, _ = asked_for({"tools": tools, "tool_choice": choice}, compiler, tokens=qwen, vocab_size=520)
    if held:
        assert response.status_code == 400
        assert "tools.f.parameters.properties.link.maxLength" in response.json()["error"]["message"]
        return
    assert response.status_code == 200, response.text
    tags = json.loads(compiler.asked[0])["format"]["elements"][2]["tags"]
    wanted = [WEATHER["function"]["parameters"], {"type": "object"}]  # type: ignore[index]
    assert [tag["content"]["json_schema"] for tag in tags] == wanted


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "any"}, {"type": "string", "pattern": r"\bfoo"}, {"type": "string", "pattern": "(?<=a)b"},
        {"type": "integer", "minimum": 0.5}, {"enum": []}, {"$ref": "#/$defs/missing"},
    ],
)  # fmt: skip
def test_what_xgrammar_refuses_fails_no_tool_that_promises_nothing(schema: Any) -> None:
    """Of those that are strict, and of the answer, the rest is enforced."""
    parameters = {"type": "object", "properties": {"a": schema}}

    def asked(strict: bool, **fields: Any) -> tuple[Any, Compiler]:
        compiler = Xgrammar()
        function = {"name": "f", "parameters": parameters, "strict": strict}
        kept = {"type": "function", "function": WEATHER["function"] | {"strict": True}}  # type: ignore[operator]
        tools = {"tools": [kept, {"type": "function", "function": function}]}
        return asked_for(tools | fields, compiler, tool_call_parser="hermes")[0], compiler

    response, compiler = asked(False)
    assert response.status_code == 200, response.text
    tags = json.loads(compiler.asked[-1])["format"]["tags"]
    wanted = [WEATHER["function"]["parameters"], {"type": "object"}]  # type: ignore[index]
    assert [tag["content"]["json_schema"] for tag in tags] == wanted
    response, compiler = asked(False, guided_json=SCHEMA)
    assert response.status_code == 200, response.text
    assert json.loads(compiler.asked[-1])["format"]["elements"][1] == JSON
    for response, _ in (asked(True), asked(False, tool_choice="required"), asked(False, guided_json=parameters)):
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_grammar")


def test_every_source_that_we_make_is_one_that_xgrammar_compiles(qwen: Any) -> None:  # noqa: F811
    import xgrammar

    fields: list[dict[str, Any]] = [
        {"tools": [WEATHER], "tool_choice": "required"}, {"tools": [WEATHER]}, {"guided_choice": ["yes", "no"]},
        {"guided_choice": ["yes", "no"], "chat_template_kwargs": {"enable_thinking": False}},
        {"response_format": {"type": "json_object"}}, {"regex": "[0-9]+"}, {"ebnf": 'root ::= "a"'},
    ]  # fmt: skip
    for each in fields:
        compiler = Compiler()
        response, _ = asked_for(each, compiler, tokens=qwen, vocab_size=520)
        assert response.status_code == 200, response.text
        assert json.loads(compiler.asked[0])["type"] == "structural_tag"
        xgrammar.Grammar.from_structural_tag(compiler.asked[0])


@pytest.mark.parametrize("style", ["hermes", "deepseek_v3", "deepseek_v31"])
def test_who_must_call_says_nothing_else(style: str) -> None:
    import xgrammar

    form = STYLES[style]
    call = form.begins_with_name.replace("NAME", "weather") + '{"city": "a"}' + form.closes
    compiler = Compiler()
    fields = {"tools": [WEATHER], "tool_choice": "required"}
    response, _ = asked_for(fields, compiler, tool_call_parser=style)
    assert response.status_code == 200, response.text
    info = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)], stop_token_ids=[0])
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(compiler.asked[0])

    def goes_on(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return matcher.accept_string(text)

    assert goes_on(call) and goes_on(call + form.separator + call)
    assert not goes_on(call + "So ") and not goes_on(call + "\n\n") and not goes_on("So")
    matcher = xgrammar.GrammarMatcher(compiled)
    assert not matcher.accept_token(0), "no call at all"
    matcher.accept_string(call + form.separator + call)
    assert matcher.accept_token(0)


@pytest.mark.parametrize(("choice", "says"), [("auto", True), (None, True), ("required", False)])
def test_beside_tools_an_answer_is_calls_or_what_the_format_says(choice: str | None, says: bool) -> None:
    import xgrammar

    compiler = Compiler()
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA | {"additionalProperties": False}}}
    fields = {"tools": [WEATHER], "tool_choice": choice, "response_format": form}
    response, _ = asked_for(fields, compiler, tool_call_parser="hermes")
    assert response.status_code == 200, response.text
    info = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)], stop_token_ids=[0])
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(compiler.asked[0])

    def whole(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return matcher.accept_string(text) and matcher.accept_token(0)

    call = STYLES["hermes"].begins_with_name.replace("NAME", "weather") + '{"city": "a"}' + STYLES["hermes"].closes
    assert whole(call) and whole(call + STYLES["hermes"].separator + call)
    assert whole('{"a": 1}') == says
    assert not any(map(whole, ("", "So", '{"b": 1}', call + '{"a": 1}', '{"a": 1}' + call)))
    wrong = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}
    if says:
        error = asked_for(fields | {"response_format": wrong}, Compiler())[0].json()["error"]
        assert (error["code"], error["param"]) == ("invalid_grammar", "response_format")


def test_a_grammar_that_is_compiled_is_not_waited_for_until_the_deadline() -> None:
    """The first one after a start takes a process that has to import and to read; nobody was busy."""

    class Starting(Compiler):
        async def compile(self, source: str) -> str:
            await asyncio.sleep(1.2)
            return await super().compile(source)

    response, (grammar, _) = asked_for({"guided_choice": ["yes"]}, Starting(), request_timeout=1.0)
    assert response.status_code == 200 and grammar.serialized == "{}", response.text


JSON_FORMAT = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("fields", "told"),
    [(JSON_FORMAT, []), (JSON_FORMAT | {"tool_choice": "auto"}, []), ({"guided_json": {"type": "object"}}, []),
     ({"guided_regex": "<tool.*"}, ["<tool_call>\n"]), ({}, ["<tool_call>\n"])],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_place_of_json_that_is_cut_is_no_content(qwen: Any, fields: Any, told: Any, stream: bool) -> None:  # noqa: F811
    """An answer by a pattern, or a free one, may begin as a call does: of these all is told."""
    tools = [WEATHER, {"type": "function", "function": {"name": "f"}}]
    text = "<tool_call>\n"
    options: dict[str, Any] = {"features": GRAMMAR, "grammars": Compiler(), "tokens": qwen, "vocab_size": 520}
    with serving(script_of(qwen, "</think>" + text + "{"), **options) as server:
        Recording(server)
        most = 1 + len(qwen.encode(text, False))
        body = {"model": "tiny", "messages": messages(), "tools": tools, "max_tokens": most, "stream": stream}
        said = server.post("/v1/chat/completions", body | fields)
    assert said.status_code == 200, said.text
    chunks = [json.loads(line[6:]) for line in said.text.splitlines() if line.startswith("data: {")] or [said.json()]
    parts = [choice.get("message") or choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert [part["content"] for part in parts if part.get("content")] == told
    assert not any(part.get("tool_calls") for part in parts)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


THOUGHT = '<|channel|>analysis<|message|>hm {"x"}<|end|><|start|>assistant'
SAID, CALLED = "<|channel|>final<|message|>", "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
FORCED = {"tools": [WEATHER, {"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}
ONE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("fields", "taken", "refused"),
    [
        ({"guided_json": ONE}, [SAID + '{"a": 1}', THOUGHT + SAID + '{"a": 1}', THOUGHT * 2 + SAID + '{"a": 1}'],
         ['{"a"', SAID + '{"b', THOUGHT + "<|channel|>commentary", THOUGHT + CALLED,
          "<|channel|>analysis<|message|><|call|>"]),
        (FORCED, [CALLED + '{"city": "a"}', THOUGHT + CALLED + "{}", CALLED.replace("weather", "f") + "{}"],
         [SAID, THOUGHT + SAID, CALLED + "{}" + "<|start|>", CALLED.replace("weather", "g"), CALLED + "[", "<"]),
        (FORCED | {"tool_choice": {"type": "function", "function": {"name": "f"}}},
         [CALLED.replace("weather", "f") + "{}"], [CALLED]),
        ({"tools": [WEATHER], "guided_json": ONE},
         [SAID + '{"a": 1}', THOUGHT + SAID + '{"a": 1}', CALLED + "{}", THOUGHT + CALLED + "{}"],
         ["So", SAID + "So", SAID + '{"b', THOUGHT + SAID + "So", CALLED.replace("weather", "g")]),
    ],
)  # fmt: skip
def test_harmonys_channels_are_constrained_behind_the_thought(
    gpt_oss: Any,  # noqa: F811
    fields: Any,
    taken: Any,
    refused: Any,
) -> None:
    import xgrammar

    from fastlayers_server.engine.grammar import tokenizer_info

    compiler = Compiler()
    response, _ = asked_for(fields, compiler, tokens=gpt_oss, vocab_size=520)
    assert response.status_code == 200, response.text
    ends = [gpt_oss.id_of(marker) for marker in ("<|return|>", "<|call|>")]
    info = tokenizer_info(Path(gpt_oss.hf.name_or_path), gpt_oss.vocab_size, ends)
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(compiler.asked[0])

    def accepted(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return all(matcher.accept_token(i) for i in gpt_oss.encode(text, False)) and matcher.accept_token(ends[0])

    def begins(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return all(matcher.accept_token(i) for i in gpt_oss.encode(text, False))

    assert all(map(accepted, taken)) and not any(map(begins, refused))


def test_one_call_at_most_is_promised_where_it_is_kept(qwen: Any, gpt_oss: Any) -> None:  # noqa: F811
    body = {"model": "tiny", "messages": messages(), "tools": [WEATHER], "parallel_tool_calls": False}
    for tokens, status in ((qwen, 400), (gpt_oss, 200)):
        with serving(script_of(tokens, "x"), tokens=tokens, features=("logprobs",), vocab_size=520) as server:
            response = server.post("/v1/chat/completions", body)
            assert response.status_code == status, response.text
            assert status == 200 or response.json()["error"]["param"] == "parallel_tool_calls"
