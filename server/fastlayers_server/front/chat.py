"""``POST /v1/chat/completions``: conversations through the model's template; text, reasoning and tool calls back."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from fastlayers_server.engine.protocol import EngineInfo, TokenLogprobs
from fastlayers_server.front.answers import Writer, answer, event
from fastlayers_server.front.completions import finite, spelled
from fastlayers_server.front.errors import bad
from fastlayers_server.front.generation import INLINE_CHARACTERS, Front, Wanted, launch, too_long
from fastlayers_server.front.grammars import constraint_of
from fastlayers_server.front.rows import Delta, Job, Row, Told
from fastlayers_server.front.schemas import ChatPrompt, ChatRequest, Message

INLINE_MESSAGES = 32  # longer conversations are rendered on a thread
# What a client may not set through chat_template_kwargs: we do, or nobody does.
OURS = ("chat_template", "tokenize", "messages", "conversation", "tools", "add_generation_prompt", "documents",
        "continue_final_message", "return_dict", "return_tensors", "padding", "truncation", "max_length")  # fmt: skip


async def chat(request: Request, front: Front, body: ChatRequest) -> Response:
    """Serve the route."""
    info = front.link.check_ready()
    prompt = await prompt_of(front, body, info, body.tool_choice != "none")
    job = await start(front, body, "chatcmpl-", prompt, request)
    return await answer(request, front, job, bool(body.stream), ChatWriter(front, body))


async def start(front: Front, body: ChatRequest, kind: str, prompt: list[int], request: Request) -> Job:
    """Submit a conversation whose prompt is known."""
    tools = bool(body.tools) and body.tool_choice != "none"
    logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    parser = front.formats.parser(front.tokens, tools, body.skip_special_tokens is False, body.forced)
    grammar = await constraint_of(body, front, prompt)
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    names |= {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    wanted = Wanted(kind, limit, logprobs, -1, grammar, parser, names)
    return launch(front, body, [prompt], wanted, request)


async def prompt_of(front: Front, body: ChatPrompt, info: EngineInfo, with_tools: bool = True) -> list[int]:
    """Return the ids of a conversation."""
    tools = [t.model_dump(exclude_none=True) for t in body.tools or ()] if with_tools else []
    if tools and front.formats.tools == "none":
        raise bad("tools", "this model has no tool parser; --tool-call-parser names one", "unsupported_parameter")
    if tools and not front.tokens.reads("tools"):
        raise bad("tools", "the chat template of this model does not show tools to it", "unsupported_parameter")
    options = dict(body.chat_template_kwargs or {})
    for name in options:
        if name in OURS or not name.isidentifier():
            raise bad("chat_template_kwargs", f"{name[:40]!r} cannot be set by a request", "unsupported_parameter")
        if not front.tokens.reads(name):
            raise bad("chat_template_kwargs", f"the template does not know {name[:40]!r}", "unsupported_parameter")
    own = {"reasoning_effort": body.reasoning_effort, "add_generation_prompt": body.add_generation_prompt is not False}
    for name, value in own.items():
        if value not in (None, True) and not front.tokens.reads(name):
            raise bad(name, "the model's template does not know it", "unsupported_parameter")
    options |= {name: value for name, value in own.items() if value is not None}
    messages = [_plain(m, front.tokens.model_type) for m in body.messages or ()]
    most = front.tokens.longest_token * info.max_model_len
    said = sum(len(m["content"]) for m in messages)
    if said > most:
        raise too_long("messages", f"a conversation of {said} characters", info)

    def encode() -> list[int]:
        text = front.tokens.render(messages, tools or None, options)
        if len(text) > most:
            raise too_long("messages", f"a conversation of {len(text)} characters", info)
        return front.tokens.encode(text, body.add_special_tokens is True)

    # What has tools, calls or thoughts may be long without content.
    short = said <= INLINE_CHARACTERS and len(messages) <= INLINE_MESSAGES
    bare = not tools and all(m.keys() <= {"role", "content"} for m in messages)
    return encode() if short and bare else await asyncio.to_thread(encode)


def _plain(message: Message, model_type: str) -> dict[str, Any]:
    """Return a turn as templates expect it."""
    turn = message.model_dump(exclude_none=True, exclude={"annotations", "refusal", "reasoning"})
    if message.role == "developer" and model_type != "gpt_oss":
        turn["role"] = "system"
    if message.content is None:
        turn["content"] = message.refusal or ""
    if message.reasoning and not message.reasoning_content:
        turn["reasoning_content"] = message.reasoning
    for call in turn.get("tool_calls", ()):
        # Templates print arguments as JSON, so they are given values where the text is one.
        with suppress(ValueError, RecursionError):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return turn


class ChatWriter(Writer):
    """Writes the answers of one conversation."""

    kind = "chat.completion.chunk"

    def __init__(self, front: Front, body: ChatRequest) -> None:
        super().__init__(front, body)
        self._call_ids: dict[tuple[int, int], str] = {}
        field = front.config.reasoning_field
        self._reasoning = {"both": ("reasoning_content", "reasoning"), "none": ()}.get(field, (field,))

    def whole(self, job: Job) -> dict[str, Any]:
        """Return the document of a job that has ended."""
        choices = []
        for row in job.rows:
            deltas, logprobs, ids = row.take()
            message = self.message(row, deltas)
            choices.append(self._choice(row, "message", message, logprobs, ids, reason_of(row)))
        return self._document(job, choices, True, **self._prompt(job)) | {"object": "chat.completion"}

    def message(self, row: Row, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the message of a choice that has ended."""
        content = "".join(d.text for d in deltas if d.kind == "content")
        thought = "".join(d.text for d in deltas if d.kind == "reasoning")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if thought:
            message |= dict.fromkeys(self._reasoning, thought)
        calls: dict[int, dict[str, str]] = {}
        for delta in deltas:
            if delta.kind == "tool":
                call = calls.setdefault(delta.index, {"name": delta.name, "arguments": ""})
                call["arguments"] += delta.text
        if calls:
            message["tool_calls"] = [
                {"id": self._call_id(row, i), "type": "function", "function": call} for i, call in calls.items()
            ]
        if not content and (calls or (thought and self._reasoning)):
            message["content"] = None
        return message

    def begin(self, job: Job) -> Iterator[bytes]:
        """Yield who speaks."""
        for row in job.rows:
            role = self._choice(row, "delta", {"role": "assistant", "content": ""}, [], [], None)
            yield event(self._document(job, [role], False, **self._prompt(job)))

    def _prompt(self, job: Job) -> dict[str, Any]:
        return {"prompt_token_ids": job.prompts[0]} if self._body.return_token_ids else {}

    def _news(self, job: Job, row: Row) -> Iterator[bytes]:
        """Yield events of a choice, the last of which says why it ended."""
        deltas, logprobs, ids = row.take()
        for delta in deltas:
            yield self._chunk(job, self._choice(row, "delta", self._delta(row, delta), logprobs, ids, None))
            logprobs, ids = [], []
        if row.finish:
            yield self._chunk(job, self._choice(row, "delta", {}, logprobs, ids, reason_of(row)))

    def _delta(self, row: Row, delta: Delta) -> dict[str, Any]:
        if delta.kind == "content":
            return {"content": delta.text}
        if delta.kind == "reasoning":
            return dict.fromkeys(self._reasoning, delta.text)
        call: dict[str, Any] = {"index": delta.index, "function": {"arguments": delta.text}}
        if delta.name:
            call |= {"id": self._call_id(row, delta.index), "type": "function"}
            call["function"] = {"name": delta.name, "arguments": delta.text}
        return {"tool_calls": [call]}

    def _call_id(self, row: Row, index: int) -> str:
        return self._call_ids.setdefault((row.index, index), f"call_{secrets.token_hex(12)}")

    def _choice(
        self, row: Row, field: str, content: Any, logprobs: Told, ids: list[int], reason: str | None
    ) -> dict[str, Any]:
        told = None
        if self._body.logprobs and (logprobs or field == "message"):
            told = {"content": [self._logprob(i, e) for i, e in logprobs], "refusal": None}
        choice = {"index": row.index, field: content, "logprobs": told, "finish_reason": reason}
        return choice | ({"token_ids": ids} if self._body.return_token_ids else {})

    def _logprob(self, token: int, entry: TokenLogprobs) -> dict[str, Any]:
        tokens = self._front.tokens

        def one(i: int, p: float) -> dict[str, Any]:
            return {"token": spelled(tokens, i), "logprob": finite(p), "bytes": list(tokens.token_bytes(i))}

        return one(token, entry.chosen) | {"top_logprobs": [one(i, p) for i, p in entry.top]}


def reason_of(row: Row) -> str:
    """Return why a choice ended, in the API's words."""
    return "tool_calls" if row.calls and row.finish == "stop" else row.finish
