"""Reasoning, tool calls and constraints: what models write comes out in parts, and loses no character."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import AddedToken, Tokenizer

from fastlayers_server.front.parsers import STYLES, Call, Formats, Harmony, JsonValue, Marked
from fastlayers_server.front.rows import Delta
from fastlayers_server.front.tokens import Detokenizer, TokenText, variables_of

from .harness import TINY, Server, script_of, serving

TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' + m['content'] }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}"
    "<|assistant|>{% if enable_thinking is not defined or enable_thinking %}<think>{% else %}<think></think>{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALLS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn \\"}"}}\n</tool_call>\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'  # noqa: E501


def folder_with(path: Path, markers: Sequence[str], model_type: str) -> Path:
    """A model's folder whose tokenizer knows these markers as single tokens."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(m, special=False, normalized=False) for m in markers])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (path / "tokenizer_config.json").write_text((TINY / "tokenizer_config.json").read_text())
    return path


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> TokenText:
    path = tmp_path_factory.mktemp("qwen")
    markers = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    return TokenText(folder_with(path, markers, "qwen3"), TEMPLATE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TokenText:
    return TokenText(folder_with(tmp_path_factory.mktemp("plain"), [], "qwen3"), TEMPLATE)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> TokenText:
    return TokenText(folder_with(tmp_path_factory.mktemp("gpt"), Harmony.MARKERS, "gpt_oss"), TEMPLATE)


def parts_of(tokens: TokenText, parser: Any, text: str) -> list[Delta]:
    """What a parser makes of a model's text, token by token; neighbours of one kind joined."""
    detokenizer, found = Detokenizer(tokens, [], False), []
    for token in tokens.encode(text, False):
        found += parser.feed(token, detokenizer.feed(token))
    found += parser.finish(detokenizer.flush())
    joined: list[Delta] = []
    for delta in found:
        last = joined[-1] if joined else None
        if last and not delta.name and (last.kind, last.index) == (delta.kind, delta.index):
            last.text += delta.text
        else:
            joined.append(delta)
    return joined


def said(deltas: Sequence[Delta]) -> list[tuple[str, str, str]]:
    return [(d.kind, d.name, d.text) for d in deltas if d.text or d.name]


BOTH = pytest.mark.parametrize("which", ["qwen", "plain"])


@BOTH
def test_reasoning_begins_where_the_prompt_says(which: str, request: pytest.FixtureRequest) -> None:
    tokens: TokenText = request.getfixturevalue(which)
    for prompt, text, expected in (
        ("a<think>\n", "hm</think>\n\nyes", [("reasoning", "", "hm"), ("content", "", "\n\nyes")]),
        ("a<think>\n\n</think>\n\n", "yes", [("content", "", "yes")]),
        ("a", "<think>hm</think>yes", [("reasoning", "", "hm"), ("content", "", "yes")]),
        ("a<think>", "never ends", [("reasoning", "", "never ends")]),
        ("a <think><|assistant|>", "yes", [("content", "", "yes")]),  # said by the user, not by the template
        ("a", "no thought </thin", [("content", "", "no thought </thin")]),
    ):
        parser = Marked(tokens, tokens.encode(prompt, False), True, None)
        assert said(parts_of(tokens, parser, text)) == expected


@BOTH
def test_tool_calls_come_in_order_with_their_arguments(which: str, request: pytest.FixtureRequest) -> None:
    tokens: TokenText = request.getfixturevalue(which)
    parser = Marked(tokens, [], True, STYLES["hermes"])
    assert said(parts_of(tokens, parser, "Let me see. " + CALLS)) == [
        ("content", "", "Let me see. "),
        ("tool", "weather", '{"city": "Bonn \\"}"}'),
        ("tool", "time", "{}"),
    ]


@BOTH
def test_a_forced_call_that_is_cut_is_a_call(which: str, request: pytest.FixtureRequest) -> None:
    """Wherever it is cut, and never content; of its name nothing is said while it may be another one."""
    tokens: TokenText = request.getfixturevalue(which)
    for forced, calls in (["weather"], CALLS.partition("\n<")[0]), (["weather", "time"], CALLS):
        told, whole = set(), tokens.encode(calls, False)
        for count in range(1, len(whole)):
            text = tokens.decode(whole[:count])
            parts = said(parts_of(tokens, Marked(tokens, [], True, STYLES["hermes"], forced=forced), text))
            assert {kind for kind, _, _ in parts} <= {"tool"}, (text, parts)
            assert CALLS.startswith(text) and (parts or (len(forced) > 1 and "weather" not in text)), text
            told |= {name for _, name, _ in parts}
        assert told == set(forced)


@BOTH
def test_an_answer_where_a_call_may_stand_is_content(which: str, request: pytest.FixtureRequest) -> None:
    tokens: TokenText = request.getfixturevalue(which)
    for text in ('{"a": "<tool_call>', '{"a": "<tool_call>\n{"name": "w', '{"a": 1}', " [", "", '"<to', "\n<tool_cow>"):
        parser = Marked(tokens, [], True, STYLES["hermes"], forced=["weather", "time"])
        assert said(parts_of(tokens, parser, text)) == [("content", "", text)][: len(text)]


@BOTH
@pytest.mark.parametrize("body", ["no json", '{"nome": 1}', "", '{"name": 3, "arguments": {}}', "[" * 2000])
def test_what_is_no_call_is_content(which: str, body: str, request: pytest.FixtureRequest) -> None:
    tokens: TokenText = request.getfixturevalue(which)
    parser = Marked(tokens, [], False, STYLES["hermes"])
    text = f"<tool_call>{body}</tool_call>"
    assert said(parts_of(tokens, parser, text)) == [("content", "", text)]


def test_arguments_before_the_name_are_a_call_too(qwen: TokenText) -> None:
    parser = Marked(qwen, [], False, STYLES["hermes"])
    text = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'
    assert said(parts_of(qwen, parser, text)) == [("tool", "f", '{"a": 1}')]


@pytest.mark.parametrize("style", ["deepseek_v3", "deepseek_v31"])
def test_deepseeks_calls(plain: TokenText, style: str) -> None:
    form = STYLES[style]
    one = form.begins_with_name.replace("NAME", "f") + '{"a": [1, "}"]}' + form.closes
    text = "ok" + form.wrappers[0] + one + one + form.wrappers[1]
    found = said(parts_of(plain, Marked(plain, [], False, form), text))
    assert found == [("content", "", "ok"), ("tool", "f", '{"a": [1, "}"]}'), ("tool", "f", '{"a": [1, "}"]}')]


def test_harmony_channels(gpt_oss: TokenText) -> None:
    text = (
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}<|call|><|start|>assistant<|channel|>final<|message|>done<|return|>'
    )
    prompt = gpt_oss.encode("<|start|>assistant", False)
    assert said(parts_of(gpt_oss, Harmony(gpt_oss, prompt), text)) == [
        ("reasoning", "", "think"),
        ("tool", "f", '{"a": 1}'),
        ("content", "", "done"),
    ]
    assert said(parts_of(gpt_oss, Harmony(gpt_oss, prompt), "no channels")) == [("content", "", "no channels")]


PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"x": 1}}', "ab", "ü🙂",
          "\n", "<", "</", "<tool", '"', "}", "{", "<|user|>", "<|channel|>", "<|message|>", "final"]  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(PIECES), max_size=14))
def test_parsers_never_raise_and_lose_nothing(pieces: list[str]) -> None:
    tokens = _KEPT["qwen"]
    text = "".join(pieces)
    for style in (None, STYLES["hermes"]):
        found = parts_of(tokens, Marked(tokens, [], True, style, keep_special=True), text)
        bare = text.replace("<think>", "").replace("</think>", "")
        shown = "".join(d.text for d in found).replace("<think>", "").replace("</think>", "")
        if style is None:
            assert shown == bare
        elif not any(d.name for d in found):
            assert shown.replace("\n", "") == bare.replace("\n", "") or "<tool_call>" in bare or "</tool_call>" in bare
    parts_of(tokens, Harmony(tokens, [], keep_special=True), text)


_KEPT: dict[str, TokenText] = {}


@pytest.fixture(autouse=True, scope="module")
def _keep(qwen: TokenText) -> None:
    _KEPT["qwen"] = qwen


@given(st.text(alphabet='{}[]":, a\\1', max_size=30), st.data())
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_a_call_is_the_same_however_it_is_cut(text: str, data: st.DataObject) -> None:
    whole, cut = (Call(re.compile(STYLES["hermes"].header), 0) for _ in range(2))
    text = '{"name": "f", "arguments": ' + text
    at = data.draw(st.integers(0, len(text)))
    first = whole.feed(text) + (whole.finish() or [])
    second = cut.feed(text[:at]) + cut.feed(text[at:]) + (cut.finish() or [])
    assert "".join(d.text for d in first) == "".join(d.text for d in second)
    assert [d.name for d in first if d.name] == [d.name for d in second if d.name]


def test_text_behind_a_call_keeps_its_blanks_however_it_is_cut() -> None:
    """A model may go on after a call, and says most blanks as tokens of their own."""
    tokens = _KEPT["qwen"]
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    for behind, content in (
        ("\n", ""), ("\nSo it is. \n Yes. ", "\nSo it is. \n Yes. "), (f"\n \n{call}\n", ""),
        (f" a b\n{call}\n\nc d", " a b\n\n\nc d"), ("\n</think>\n x", "\n</think>\n x"),
        ("\n<tool_call>\nno call</tool_call>", "\n<tool_call>\nno call</tool_call>"),
    ):  # fmt: skip
        cut = Marked(tokens, [], True, STYLES["hermes"])
        pieces = [piece for piece in re.split(r"(</?tool_call>|</think>|\s)", call + behind) if piece]
        ids = [tokens.id_of(piece) if piece.startswith("<") else -1 for piece in pieces]
        found = [d for i, piece in zip(ids, pieces, strict=True) for d in cut.feed(-1 if i is None else i, piece)]
        found += cut.finish("")
        whole = parts_of(tokens, Marked(tokens, [], True, STYLES["hermes"]), call + behind)
        for deltas in (found, whole):
            assert "".join(d.text for d in deltas if d.kind == "content") == content, (behind, deltas)
            assert "".join(d.text for d in deltas if d.kind == "tool") == '{"x": 1}' * (1 + behind.count('"f"'))


def test_json_values_end_where_they_end() -> None:
    for value in ('{"a": "}"}', '[1, {"b": "\\"]"}]', "{}"):
        assert JsonValue().feed(value + "} tail") == value
        scanner = JsonValue()
        assert "".join(scanner.feed(c) for c in value + "}}") == value


# --- over HTTP ------------------------------------------------------------------------------------------


def messages() -> list[dict[str, str]]:
    return [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def thinking(qwen: TokenText) -> Iterator[Server]:
    with serving(script_of(qwen, "hm, so.</think>" + CALLS), tokens=qwen, vocab_size=qwen.vocab_size) as server:
        yield server


def test_a_tool_call_over_http_streamed_or_not(thinking: Server) -> None:
    body = {"model": "tiny", "messages": messages(), "tools": [WEATHER]}
    whole = ChatCompletion.model_validate(thinking.post("/v1/chat/completions", body).json(), strict=True)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning"] == choice.message.model_extra["reasoning_content"] == "hm, so."
    calls = choice.message.tool_calls or []
    assert [(c.function.name, c.function.arguments) for c in calls] == [("weather", '{"city": "Bonn \\"}"}'), ("time", "{}")]  # type: ignore[union-attr]  # fmt: skip  # noqa: E501
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    assert 0 < (whole.usage.completion_tokens_details.reasoning_tokens or 0) < whole.usage.completion_tokens
    response = thinking.post("/v1/chat/completions", body | {"stream": True})
    lines = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: {")]
    chunks = [ChatCompletionChunk.model_validate_json(line, strict=True).choices[0] for line in lines]
    told: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        for call in chunk.delta.tool_calls or ():
            one = told.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
            assert call.function is not None
            assert not (one["id"] and call.id), "an id comes once"
            one["id"] += call.id or ""
            one["name"] += call.function.name or ""
            one["arguments"] += call.function.arguments or ""
    assert [(c["name"], c["arguments"]) for c in told.values()] == [
        ("weather", '{"city": "Bonn \\"}"}'),
        ("time", "{}"),
    ]
    assert chunks[-1].finish_reason == "tool_calls"
    assert "".join((c.delta.model_extra or {}).get("reasoning", "") for c in chunks) == "hm, so."


def test_without_tools_the_same_text_is_content(thinking: Server) -> None:
    for extra in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        answer = thinking.post("/v1/chat/completions", {"model": "tiny", "messages": messages()} | extra).json()
        assert answer["choices"][0]["message"]["content"] == CALLS
        assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(("parser", "template"), [("none", None), ("hermes", "{% for m in messages %}a{% endfor %}")])
def test_tools_need_a_parser_and_a_template(parser: str, template: str | None) -> None:
    with serving(tokens=TokenText(TINY, template), tool_call_parser=parser) as server:
        body = {"model": "tiny", "messages": messages(), "tools": [WEATHER]}
        answer = server.post("/v1/chat/completions", body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "tools", "unsupported_parameter")
        assert ("--tool-call-parser" if parser == "none" else "chat template") in error["message"]


def test_a_template_that_always_lets_the_assistant_speak_cannot_be_told_not_to(thinking: Server) -> None:
    body = {"model": "tiny", "messages": messages(), "add_generation_prompt": False}
    answer = thinking.post("/v1/chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "add_generation_prompt")
    assert thinking.post("/v1/chat/completions", body | {"add_generation_prompt": True}).status_code == 200


@pytest.mark.parametrize("tools", [{}, {"tools": [WEATHER]}])
@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_hidden_whether_tools_are_given_or_not(qwen: TokenText, tools: Any, skip: bool) -> None:
    script = script_of(qwen, "a<|user|>b")
    with serving(script, tokens=qwen, vocab_size=520, reasoning_parser="none", tool_call_parser="hermes") as server:
        body = {"model": "tiny", "messages": messages(), "skip_special_tokens": skip} | tools
        message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        assert message["content"] == ("ab" if skip else "a<|user|>b")


def test_chat_template_kwargs_reach_the_template(thinking: Server) -> None:
    body = {"model": "tiny", "messages": messages(), "chat_template_kwargs": {"enable_thinking": False}}
    answer = thinking.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"].startswith("hm, so.")


def test_stop_strings_look_at_the_answer_not_at_the_thought(thinking: Server) -> None:
    body = {"model": "tiny", "messages": messages(), "stop": ["so", "weather"]}
    message = thinking.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["reasoning"] == "hm, so." and message["content"] == '<tool_call>\n{"name": "'


def test_an_unfinished_thought_has_no_content(thinking: Server) -> None:
    body = {"model": "tiny", "messages": messages(), "max_tokens": 2}
    choice = thinking.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "length"


@pytest.mark.parametrize("field", ["both", "reasoning", "none"])
def test_an_unfinished_thought_may_be_sent_back(qwen: TokenText, field: str) -> None:
    with serving(script_of(qwen, "hm, so"), tokens=qwen, vocab_size=520, reasoning_field=field) as server:
        body = {"model": "tiny", "messages": messages()}
        answer = server.post("/v1/chat/completions", body | {"max_tokens": 2}).json()["choices"][0]
        assert answer["finish_reason"] == "length"
        again = body | {"messages": [*messages(), answer["message"], {"role": "user", "content": "go on"}]}
        assert server.post("/v1/chat/completions", again).status_code == 200, answer["message"]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "none"])
def test_the_name_of_reasoning_is_the_operators(qwen: TokenText, field: str) -> None:
    with serving(script_of(qwen, "hm</think>ok"), tokens=qwen, vocab_size=520, reasoning_field=field) as server:
        body = {"model": "tiny", "messages": messages()}
        message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        assert {"reasoning", "reasoning_content"} & set(message) == ({field} - {"none"})
        streamed = server.post("/v1/chat/completions", body | {"stream": True}).text
        assert ('"reasoning":"' in streamed) == (field == "reasoning")


def test_arguments_that_are_no_json_are_told_and_counted(qwen: TokenText) -> None:
    text = '</think><tool_call>{"name": "f", "arguments": {oops}}</tool_call>'
    with serving(script_of(qwen, text), tokens=qwen, vocab_size=520) as server:
        body = {"model": "tiny", "messages": messages(), "tools": [WEATHER]}
        call = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["tool_calls"][0]
        assert call["function"] == {"name": "f", "arguments": "{oops}"}
        assert "fastlayers_tool_parse_failures_total 1.0" in server.get("/metrics").text
        server.post("/v1/chat/completions", body | {"stream": True})
        assert "fastlayers_tool_parse_failures_total 2.0" in server.get("/metrics").text
        items = {"model": "tiny", "input": "hi", "tools": [{"type": "function", "name": "f"}]}
        server.post("/v1/responses", items | {"stream": True})
        assert "fastlayers_tool_parse_failures_total 3.0" in server.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
@BOTH
def test_only_tokens_of_the_content_have_logprobs(which: str, stream: bool, request: pytest.FixtureRequest) -> None:
    tokens: TokenText = request.getfixturevalue(which)
    content, thought = "ü 🙂 so", "hm 🙂"
    text = f"{thought}</think>{content}{CALLS}"
    with serving(script_of(tokens, text), tokens=tokens, vocab_size=520) as server:
        body = {"model": "tiny", "messages": messages(), "tools": [WEATHER], "logprobs": True, "stream": stream}
        told = server.post(
            "/v1/chat/completions", body | {"stream_options": {"include_usage": True}} if stream else body
        )
        parts = [line.removeprefix("data: ") for line in told.text.split("\n\n") if line]
        documents = [json.loads(part) for part in parts if part != "[DONE]"]
        entries = [e for d in documents for c in d["choices"] for e in (c["logprobs"] or {"content": []})["content"]]
        assert b"".join(bytes(e["bytes"]) for e in entries).decode() == content
        details = documents[-1]["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == len(tokens.encode(thought, False))


@pytest.mark.parametrize("stream", [False, True])
def test_a_beginning_of_a_stop_string_stays_before_the_call_behind_it(qwen: TokenText, stream: bool) -> None:
    with serving(script_of(qwen, "</think>I see\n" + CALLS + "\nDone"), tokens=qwen, vocab_size=520) as server:
        body = {"model": "tiny", "messages": messages(), "tools": [WEATHER], "stop": "\nno", "stream": stream}
        told = server.post("/v1/chat/completions", body)
        if not stream:
            assert told.json()["choices"][0]["message"]["content"] == "I see\n\nDone"
            return
        documents = [json.loads(line[6:]) for line in told.text.split("\n\n") if line.startswith("data: {")]
        deltas = [d["choices"][0]["delta"] for d in documents]
        begun = next(at for at, delta in enumerate(deltas) if delta.get("tool_calls"))
        assert "".join(d.get("content") or "" for d in deltas[:begun]) == "I see\n"


def test_formats_are_recognised(qwen: TokenText, plain: TokenText, gpt_oss: TokenText) -> None:
    from fastlayers_server.front.parsers import formats_of

    assert formats_of(qwen, "auto", "auto") == Formats("qwen3", "hermes")
    assert formats_of(qwen, "none", "auto") == Formats("none", "hermes")
    assert formats_of(gpt_oss, "auto", "auto") == Formats("harmony", "harmony")
    for template, style in (
        (None, "hermes"), ("{{ messages }}", "none"), ("<｜tool▁call▁begin｜>", "deepseek_v31"),
        ("<｜tool▁call▁begin｜>```json", "deepseek_v3"),
    ):  # fmt: skip
        assert formats_of(TokenText(TINY, template), "auto", "auto") == Formats("none", style)


def test_an_option_is_a_variable_of_the_template_not_a_part_of_its_text(thinking: Server) -> None:
    """Of "enable_thinking" the name "thinking" is a part: it would have no effect, which is not said by a 200."""
    body = {"model": "tiny", "messages": messages()}
    for name in ("thinking", "enable", "assistant", "a"):
        error = thinking.post("/v1/chat/completions", body | {"chat_template_kwargs": {name: False}})
        assert error.status_code == 400, name
        assert error.json()["error"]["message"].endswith(f"the template does not know {name!r}")


@pytest.mark.parametrize(
    ("template", "has"),
    [
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}", {"thinking"}),
        ("{% macro f() %}{% if effort is not defined %}{% set effort = 'low' %}{% endif %}{{ effort }}{% endmacro %}"
         "{{ f() }}", {"effort"}),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
         "{% set ns = namespace(found=false) %}{{ ns.found }}{{ other | tojson }}", {"messages", "other"}),
    ],
)  # fmt: skip
def test_variables_of_templates(template: str, has: set[str]) -> None:
    assert variables_of([template]) == has


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", "{", "config.json: cannot be read"),
        ("generation_config.json", "{", "generation_config.json: cannot be read"),
        ("tokenizer_config.json", "{", "the tokenizer cannot be read: .*tokenizer_config.json"),
        ("tokenizer.json", '{"a": 1}', "the tokenizer cannot be read: .*tokenizer.json"),
        ("chat_template.jinja", "x\n{% if %}", "the chat template .--chat-template.*line 2"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_before_anything_is_served(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    folder = shutil.copytree(TINY, tmp_path / "model")
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        TokenText(folder)
