"""What a client of the generation routes sees, on an engine that says what the test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from fastlayers_server.front.generation import sibling_seed

from .harness import ScriptedEngine, Server, script_of, serving, tokens_of

TEXT = "Hello world, ünïcode 🙂."
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    tokens = tokens_of()
    with serving(script_of(tokens, TEXT), tokens=tokens) as it:
        yield it


def chat(server: Server, **fields: Any) -> Any:
    return server.post("/v1/chat/completions", {"model": "tiny", "messages": USER} | fields)


def complete(server: Server, **fields: Any) -> Any:
    return server.post("/v1/completions", {"model": "tiny", "prompt": "a b"} | fields)


def events(text: str) -> list[Any]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_chat_answer_is_what_openais_client_reads(server: Server) -> None:
    response = chat(server)
    answer = ChatCompletion.model_validate(response.json(), strict=True)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    # Every token of the text, and the end token.
    assert answer.usage.completion_tokens == len(server.front.tokens.encode(TEXT, False)) + 1
    assert answer.usage.prompt_tokens == 5 and answer.usage.total_tokens == 5 + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens == 0
    assert int(response.headers["x-fastlayers-seed"]) >= 0


def test_a_chat_stream_has_the_role_the_text_the_reason_and_the_usage(server: Server) -> None:
    response = chat(server, stream=True, n=2, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    chunks = [ChatCompletionChunk.model_validate(e, strict=True) for e in events(response.text)]
    assert len({(c.id, c.created) for c in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 5
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert "".join(c.delta.content or "" for c in mine) == TEXT
        assert [c.finish_reason for c in mine if c.finish_reason] == ["stop"]
        assert mine[-1].delta.content is None
        assert all(c.delta.content for c in mine[1:-1]), "an event without text"


def test_completions_take_text_ids_and_lists_of_both(server: Server) -> None:
    for prompt, choices in (("a b", 1), ([5, 6], 1), (["a", "b"], 2), ([[5], [6, 7], [8]], 3)):
        answer = Completion.model_validate(complete(server, prompt=prompt).json(), strict=True)
        assert [c.text for c in answer.choices] == [TEXT] * choices
        assert [c.index for c in answer.choices] == list(range(choices))
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens == 4, "ids are taken as they are"


def test_a_completions_stream_is_the_whole_answer_in_parts(server: Server) -> None:
    found = events(complete(server, stream=True, stream_options={"include_usage": True}).text)
    reasons = [c["finish_reason"] for e in found for c in e["choices"]]
    assert reasons[-1] == "stop" and not any(reasons[:-1])
    for each in found:
        for choice in each["choices"]:
            # OpenAI's type has no null here, though OpenAI sends it; its client does not check.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
    parts = [Completion.model_validate(e, strict=True) for e in found]
    assert "".join(p.choices[0].text for p in parts[:-1]) == TEXT
    assert parts[-1].choices == [] and parts[-1].usage is not None
    assert {p.object for p in parts} == {"text_completion"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "include", "text"),
    [
        ("ïco", False, "Hello world, ün"),
        ("ïco", True, "Hello world, ünïco"),
        (["zzz", "world, "], False, "Hello "),
        ([" world", "o"], False, "Hell"),
        (["never"], False, TEXT),
        ("🙂", False, "Hello world, ünïcode "),
    ],
)
def test_stop_strings_cut_at_the_same_place_streamed_or_not(
    server: Server, stream: bool, stop: Any, include: bool, text: str
) -> None:
    response = complete(server, stop=stop, stream=stream, include_stop_str_in_output=include)
    choices = [e["choices"][0] for e in events(response.text)] if stream else response.json()["choices"]
    assert "".join(c["text"] for c in choices) == text
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_counts_behind_min_tokens(server: Server, stream: bool) -> None:
    ids = server.front.tokens.encode(TEXT, False)
    until = next(n for n in range(len(ids)) if "o w" in server.front.tokens.decode(ids[:n]))
    for least, text in ((0, "Hell"), (until, "Hello w")):
        answer = complete(server, stop="o", min_tokens=least, stream=stream)
        choices = [e["choices"][0] for e in events(answer.text)] if stream else answer.json()["choices"]
        found = "".join(c["text"] for c in choices)
        assert found.startswith(text) and choices[-1]["finish_reason"] == "stop" and TEXT[len(found)] == "o", found


def test_tokens_after_a_stop_string_are_not_counted(server: Server) -> None:
    usage = complete(server, stop="world").json()["usage"]
    assert usage["completion_tokens"] == len(server.front.tokens.encode("Hello world", False))


def test_a_stop_id_ends_the_answer_and_is_not_shown(server: Server) -> None:
    ids = server.front.tokens.encode(TEXT, False)
    answer = complete(server, stop_token_ids=[ids[3]], return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == ids[:4]
    assert answer["choices"][0]["text"] == server.front.tokens.decode(ids[:3])
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 4


def test_max_tokens_ends_with_length(server: Server) -> None:
    answer = complete(server, max_tokens=3).json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 3
    assert chat(server, max_completion_tokens=2).json()["usage"]["completion_tokens"] == 2
    assert chat(server, max_completion_tokens=2, max_tokens=2).status_code == 200


def test_logprobs_of_a_chat_join_to_the_text(server: Server) -> None:
    for stream in (False, True):
        response = chat(server, logprobs=True, top_logprobs=2, stream=stream)
        if stream:
            chunks = [ChatCompletionChunk.model_validate(e, strict=True).choices[0] for e in events(response.text)]
            entries = [e for c in chunks if c.logprobs for e in c.logprobs.content or ()]
        else:
            choice = ChatCompletion.model_validate(response.json(), strict=True).choices[0]
            assert choice.logprobs is not None
            entries = list(choice.logprobs.content or ())
        assert b"".join(bytes(e.bytes or ()) for e in entries).decode() == TEXT
        assert all(len(e.top_logprobs) == 2 for e in entries)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("include", "text"), [(False, "Hello"), (True, "Hello world")])
def test_what_a_stop_string_cuts_has_no_logprobs(server: Server, stream: bool, include: bool, text: str) -> None:
    fields = {"stop": " world", "include_stop_str_in_output": include, "logprobs": True, "stream": stream}
    told = chat(server, **fields)
    documents = events(told.text) if stream else [told.json()]
    entries = [e for d in documents for c in d["choices"] for e in (c["logprobs"] or {"content": []})["content"]]
    assert "".join(e["token"] for e in entries) == text


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_characters_of_several_tokens_once(server: Server, stream: bool) -> None:
    answer = complete(server, logprobs=0, stream=stream)
    choices = [e["choices"][0] for e in events(answer.text)] if stream else answer.json()["choices"]
    text = "".join(c["text"] for c in choices)
    told = [c["logprobs"] for c in choices if c["logprobs"]]
    offsets = [o for t in told for o in t["text_offset"]]
    tokens = [token for t in told for token in t["tokens"]]
    assert text == TEXT and offsets == sorted(offsets)
    for place, (token, at) in enumerate(zip(tokens, offsets, strict=True)):
        if "\ufffd" not in token:
            assert text[at : at + len(token)] == token, (place, token)
    assert {offsets[at] for at, token in enumerate(tokens) if "\ufffd" in token} == {
        at for at, character in enumerate(text) if not character.isascii()
    }


def test_logprobs_of_a_completion_have_offsets_into_its_text(server: Server) -> None:
    choice = complete(server, logprobs=1, prompt="Hi", echo=False, max_tokens=4).json()["choices"][0]
    told = choice["logprobs"]
    assert [choice["text"][o:].startswith(t) for o, t in zip(told["text_offset"], told["tokens"], strict=True)] == [True] * 4  # fmt: skip  # noqa: E501
    assert len(told["token_logprobs"]) == len(told["top_logprobs"]) == 4


def test_echo_brings_the_prompt_back(server: Server) -> None:
    choice = complete(server, prompt=server.front.tokens.encode("One two", False), echo=True, max_tokens=2)
    assert choice.json()["choices"][0]["text"].startswith("One two")


def test_siblings_have_seeds_of_their_own_and_wait_for_the_first() -> None:
    seen = []

    class Recording(ScriptedEngine):
        def submit(self, request: Any) -> None:
            seen.append(request)
            super().submit(request)

    with serving(engine=Recording(tick_seconds=0.0)) as server:
        answers = [complete(server, seed=7, n=3, max_tokens=4, cache_salt="s").json() for _ in range(2)]
    texts = [[c["text"] for c in a["choices"]] for a in answers]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3
    assert [r.sampling.seed for r in seen[:3]] == [7, sibling_seed(7, 1), sibling_seed(7, 2)]
    assert [r.group for r in seen[:3]] == [0, seen[0].rid, seen[0].rid]
    assert len(seen[0].namespace) == 16


def test_what_the_request_says_reaches_the_engine() -> None:
    seen = []

    class Recording(ScriptedEngine):
        def submit(self, request: Any) -> None:
            seen.append(request)
            super().submit(request)

    engine = Recording(tick_seconds=0.0)
    with serving(engine=engine, request_timeout=5.0) as server:
        complete(
            server, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, frequency_penalty=1.0, presence_penalty=-1.0,
            repetition_penalty=1.5, logit_bias={"9": -5}, ignore_eos=True, min_tokens=2, max_tokens=3, logprobs=2,
        )  # fmt: skip
        complete(server, max_tokens=1)
    request, plain = seen
    drawn = request.sampling
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.min_p) == (0.5, 0.9, 7, 0.1)
    assert (drawn.frequency_penalty, drawn.presence_penalty, drawn.repetition_penalty) == (1.0, -1.0, 1.5)
    assert drawn.logit_bias == ((9, -5.0),)
    assert (request.ignore_eos, request.min_new_tokens, request.max_new_tokens, request.logprobs) == (True, 2, 3, 2)
    assert request.deadline == pytest.approx(request.arrival + 5.0)
    # The checkpoint's generation_config.json says do_sample: false.
    assert plain.sampling.temperature == 0.0


def test_generation_config_none_is_openais_default() -> None:
    seen = []

    class Recording(ScriptedEngine):
        def submit(self, request: Any) -> None:
            seen.append(request)
            super().submit(request)

    with serving(engine=Recording(tick_seconds=0.0), generation_config="none") as server:
        complete(server, max_tokens=1)
    assert seen[0].sampling.temperature == 1.0
