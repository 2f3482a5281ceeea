"""``POST /v1/responses``, the part that keeps no state: each request brings its whole conversation."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import Response

from fastlayers_server.front import schemas
from fastlayers_server.front.answers import Writer, answer
from fastlayers_server.front.chat import prompt_of, start
from fastlayers_server.front.errors import ApiError, bad, of_validation
from fastlayers_server.front.generation import Front
from fastlayers_server.front.rows import Delta, Job, Row
from fastlayers_server.front.schemas import Model, refuse

# What only a server that keeps responses, or tools of its own, could do.
STATEFUL: Mapping[str, str] = {
    "previous_response_id": "this server keeps no responses; send the conversation as input",
    "conversation": "this server keeps no conversations; send it as input",
    "background": "this server keeps no responses; stream instead",
    "prompt": "this server keeps no prompts",
    "include": "there is nothing to include",
    "max_tool_calls": "the server calls no tools",
    "context_management": "a prompt is never cut silently",
    "top_logprobs": "/v1/chat/completions has them",
}
# Fields of a chat, as which a request is served, and what its client gave.
GIVEN = {
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "tool_call_id": "call_id",
}


class Reasoning(Model):
    """How hard the model thinks."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: None = None


class TextFormat(Model):
    """What the answer's text must be; the schema is not nested here."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _whole(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise bad("text.format", "type 'json_schema' and 'schema' go together")
        return self


class TextOptions(Model):
    """Options of the answer's text."""

    format: TextFormat | None = None


class FunctionTool(schemas.FunctionDef):
    """A function, not nested here."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _function(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") != "function":
            raise refuse("tools", f"a tool of type {data.get('type')!r}; accepted: function")
        return data


class NamedChoice(Model):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class FromHere(Model):
    """An item of the input; clients send answers back as they came, with what we said of them."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class Said(FromHere):
    """A turn."""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: schemas.Content


class Call(FromHere):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutput(FromHere):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: schemas.Content


class ThoughtPart(Model):
    """Text of a thought."""

    type: Literal["reasoning_text"]
    text: str


class Thought(FromHere):
    """What the assistant thought."""

    type: Literal["reasoning"]
    summary: list[Any] = Field(default_factory=list, max_length=0)
    content: list[ThoughtPart] | None = None
    encrypted_content: None = None


ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _known(item: Any) -> Any:
    """Refuse what is no conversation; without a type an item is a message, and null is nothing, of any field."""
    if not isinstance(item, dict):
        return item
    kind = item.get("type", "message")
    if kind not in ITEMS:
        raise refuse("input", f"an item of type {kind!r}; accepted: {', '.join(ITEMS)}", "unsupported_content")
    return {name: value for name, value in item.items() if value is not None} | {"type": kind}


Item = Annotated[Said | Call | CallOutput | Thought, Field(discriminator="type"), BeforeValidator(_known)]


class ResponsesRequest(schemas.Asked):
    """``POST /v1/responses``."""

    input: schemas.TextPart | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    refused = STATEFUL
    idle = (None, False, "", [], {})


def as_chat(body: ResponsesRequest) -> schemas.ChatRequest:
    """Return the conversation that a request describes, under the names of a chat."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for item in body.input:
            _add(messages, item)
    fields: dict[str, Any] = {
        "model": body.model, "messages": messages, "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature, "top_p": body.top_p, "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None, "stream": body.stream,
        "tool_choice": body.tool_choice,
    }  # fmt: skip
    if body.tools:
        named = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in body.tools]
        fields["tools"] = [{"type": "function", "function": tool} for tool in named]
    if isinstance(body.tool_choice, NamedChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    form = body.text.format if body.text else None
    if form is not None and form.type != "text":
        schema = {"name": form.name or "", "schema": form.schema_} if form.type == "json_schema" else None
        fields["response_format"] = {"type": form.type, "json_schema": schema}
    try:
        return schemas.ChatRequest.model_validate({k: v for k, v in fields.items() if v is not None})
    except ValidationError as error:
        raise of_validation(error, fields) from error


def _add(messages: list[dict[str, Any]], item: Item) -> None:
    """Add an item of the input to the conversation; thought, text and calls of one turn share a message."""
    if isinstance(item, CallOutput):
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        return
    if isinstance(item, Said) and item.role != "assistant":
        messages.append({"role": item.role, "content": item.content})
        return
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if last is None or not (isinstance(item, Call) or last.keys() == {"role", "content", "reasoning_content"}):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if isinstance(item, Call):
        call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
        last.setdefault("tool_calls", []).append(call)
    elif isinstance(item, Thought):
        last["reasoning_content"] = "".join(part.text for part in item.content or ())
    else:
        last["content"] = item.content


async def responses(request: Request, front: Front, body: ResponsesRequest) -> Response:
    """Serve the route."""
    info = front.link.check_ready()
    try:
        chat = as_chat(body)
        prompt = await prompt_of(front, chat, info, chat.tool_choice != "none")
        job = await start(front, chat, "resp_", prompt, request)
    except ApiError as error:
        for name, given in GIVEN.items():
            error.message = error.message.replace(name, given)
        error.param = GIVEN.get(error.param or "", error.param)
        raise
    return await answer(request, front, job, bool(body.stream), _Writer(front, body))


class _Writer(Writer):
    """Makes items of deltas, and tells each step as an event."""

    def __init__(self, front: Front, body: ResponsesRequest) -> None:
        super().__init__(front, body)
        self._items: list[dict[str, Any]] = []
        self._open: tuple[str, int] | None = None
        self._number = -1

    def _response(self, job: Job, status: str) -> dict[str, Any]:
        body = self._body
        row = job.rows[0]
        usage = None
        if row.done:
            told = job.usage()
            usage = {
                "input_tokens": told["prompt_tokens"], "output_tokens": told["completion_tokens"],
                "total_tokens": told["total_tokens"],
                "input_tokens_details": told["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": row.reasoning_tokens},
            }  # fmt: skip
        choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedChoice) else body.tool_choice
        return {
            "id": job.id, "object": "response", "created_at": job.created, "status": status, "model": body.model,
            "output": self._items, "error": None, "instructions": body.instructions, "metadata": body.metadata or {},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "max_output_tokens": body.max_output_tokens, "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature, "top_p": body.top_p, "tool_choice": choice or "auto",
            "tools": [{"strict": None, "parameters": None} | t.model_dump() for t in body.tools or ()],
            "text": (body.text or TextOptions(format=TextFormat())).model_dump(by_alias=True, exclude_none=True),
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "truncation": "disabled", "store": False, "background": False, "usage": usage,
        }  # fmt: skip

    def whole(self, job: Job) -> dict[str, Any]:
        """Return the document of a job that has ended."""
        for _ in (*self.news(job), *self.end(job)):
            pass  # nobody is told how it came to be
        return self._response(job, self._status(job))

    def _status(self, job: Job) -> str:
        return "incomplete" if job.rows[0].finish == "length" else "completed"

    def begin(self, job: Job) -> Iterator[bytes]:
        """Yield that there is a response."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response(job, "in_progress"))

    def end(self, job: Job) -> Iterator[bytes]:
        """Yield the whole response."""
        status = self._status(job)
        yield from self._close(status)
        yield self._event(f"response.{status}", response=self._response(job, status))

    def failed(self, error: ApiError) -> bytes:
        """Return an error as this API has them."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        told = {"type": kind, "sequence_number": self._number, **fields}
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(told) + b"\n\n"

    def _place(self) -> dict[str, Any]:
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return place | ({"content_index": 0} if "content" in item else {})

    def _news(self, job: Job, row: Row) -> Iterator[bytes]:
        for delta in row.take()[0]:
            if self._open != (delta.kind, delta.index):
                yield from self._close()
                yield from self._begin(delta)
            if not delta.text:
                continue
            item = self._items[-1]
            if delta.kind == "tool":
                item["arguments"] += delta.text
                yield self._event("response.function_call_arguments.delta", **self._place(), delta=delta.text)
            else:
                part = item["content"][0]
                part["text"] += delta.text
                yield self._event(f"response.{part['type']}.delta", **self._place(), delta=delta.text, **_empty(part))

    def _begin(self, delta: Delta) -> Iterator[bytes]:
        self._open = (delta.kind, delta.index)
        name = secrets.token_hex(12)
        part: dict[str, Any] | None = None
        if delta.kind == "tool":
            item: dict[str, Any] = {"id": f"fc_{name}", "type": "function_call", "call_id": f"call_{name}", "name": delta.name, "arguments": ""}  # fmt: skip  # noqa: E501
        elif delta.kind == "reasoning":
            item = {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": f"msg_{name}", "type": "message", "role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items.append(item | {"status": "in_progress"})
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])
        if part is not None:
            self._items[-1]["content"].append(part)
            yield self._event("response.content_part.added", **self._place(), part=part)

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        if self._open is None:
            return
        self._open, item = None, self._items[-1]
        item["status"] = status
        if "content" in item:
            part = item["content"][0]
            yield self._event(f"response.{part['type']}.done", **self._place(), text=part["text"], **_empty(part))
            yield self._event("response.content_part.done", **self._place(), part=part)
        else:
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **self._place(), **told)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)


def _empty(part: dict[str, Any]) -> dict[str, Any]:
    """Return the log-probabilities that events of an answer's text, not of a thought's, must have."""
    return {"logprobs": []} if part["type"] == "output_text" else {}
