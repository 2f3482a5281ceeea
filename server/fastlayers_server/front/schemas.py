"""The bodies of requests. What a schema does not name is refused; so is, with its reason, what we know and lack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fastlayers_server.front.errors import ApiError, bad

# Why there is an error instead of silence -> fields that clients of other servers send.
LACKING = {
    "templates come from the model's folder or --chat-template, never from a request": "chat_template",
    "it is not served here": "suffix prediction web_search_options use_beam_search lora lora_path verbosity moderation",
    "no code comes from a request": "logit_processors logits_processors custom_logit_processor",
    "text is all that is served": "audio modalities",
    "its new name is tools": "functions",
    "its new name is tool_choice": "function_call",
    "it belongs to beam search, which is not served here": "length_penalty early_stopping",
    "a prompt is never cut silently": "truncate_prompt_tokens",
    "prefixes of a prompt are cached by themselves": "prompt_cache_options",
    "the prefix cache keeps what is used, for no fixed time": "prompt_cache_retention",
    "the grammar backend is the server's": "guided_decoding_backend",
}
REFUSED: Mapping[str, str] = {name: why for why, names in LACKING.items() for name in names.split()}
# Of a response only the neutral value is accepted.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {"store": (False,), "service_tier": ("auto", "default")}
# Accepted without effect: they tell a provider who asks, or what to file it under.
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


def refuse(param: str, why: str, code: str = "unsupported_parameter") -> ApiError:
    """Return the error that names a field which is known and not served, or has a value that is not."""
    return ApiError(400, f"{param} is not supported: {why}", code, param)


class Model(BaseModel):
    """Strict types, no unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    refused: ClassVar[Mapping[str, str]] = REFUSED
    idle: ClassVar[tuple[Any, ...]] = (None,)  # with which a refused field asks for nothing


TextPart = Annotated[str, Field(max_length=4_000_000)]
ShortText = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
SEVERAL = Field(min_length=1, max_length=64)


def _plain(value: Any) -> Any:
    """Return content as one string: a string, or text parts, which are joined."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise refuse("content", f"a part of type {kind!r}; accepted: text", "unsupported_content")
        text = part.get("refusal" if kind == "refusal" else "text")
        extra = set(part) - {"type", "text", "refusal", "annotations", "logprobs"}
        if extra or not isinstance(text, str):
            raise refuse("content", f"a text part has 'type' and 'text', not {sorted(part)}", "unsupported_content")
        texts.append(text)
    return "".join(texts)


Content = Annotated[TextPart, BeforeValidator(_plain, json_schema_input_type=str | list[dict[str, str]])]


class Called(Model):
    """The function of a tool call."""

    name: str
    arguments: str


class ToolCall(Model):
    """A call that the assistant made in an earlier turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: Called
    index: int | None = None


class Message(Model):
    """A turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    # Clients send answers back as they came; of these fields only null has been sent by us.
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None

    @model_validator(mode="after")
    def _complete(self) -> Message:
        said = self.tool_calls or self.refusal or self.reasoning_content or self.reasoning
        if self.content is None and not (self.role == "assistant" and said):
            raise bad("messages", f"a message of role {self.role!r} without content")
        if self.role != "assistant" and self.tool_calls:
            raise bad("messages", f"tool_calls belong to role 'assistant', not {self.role!r}")
        return self


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096)]


class FunctionDef(Model):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Model):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDef


class NamedFunction(Model):
    """The name within a named tool choice."""

    name: str


class NamedTool(Model):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Model):
    """The schema of ``response_format``."""

    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool | None = None


class ResponseFormat(Model):
    """What the answer's text must be."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        for kind, field in (("json_schema", "json_schema"), ("structural_tag", "format")):
            if (self.type == kind) != (getattr(self, field) is not None):
                raise bad("response_format", f"type {kind!r} and {field!r} go together")
        return self


Choices = Annotated[list[str], Field(min_length=1, max_length=1024)]


class StructuredOutputs(Model):
    """Constraints under vLLM's names; exactly one."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    grammar: str | None = None
    choice: Choices | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if sum(v is not None for v in (self.json_, self.regex, self.grammar, self.choice)) != 1:
            raise bad("structured_outputs", "exactly one of json, regex, grammar, choice is given")
        return self


# vLLM's names before 0.12, and SGLang's -> what structured_outputs calls it.
CONSTRAINTS: Mapping[str, str] = {
    "guided_json": "json", "json_schema": "json", "guided_regex": "regex", "regex": "regex",
    "guided_grammar": "grammar", "ebnf": "grammar", "guided_choice": "choice",
}  # fmt: skip


class StreamOptions(Model):
    """What a stream tells beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Asked(Model):
    """Fields of every route that generates; the last ones have no effect."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, why in cls.refused.items():
            if data.get(name) not in cls.idle:
                raise refuse(name, why)
        for name, accepted in NEUTRAL.items():
            if data.get(name) is not None and data[name] not in accepted:
                raise refuse(name, f"given {data[name]!r}; accepted: {', '.join(map(repr, accepted))}")
        return {name: value for name, value in data.items() if name not in cls.refused}


class Common(Asked):
    """Fields of completions and chats."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: ShortText | Annotated[list[ShortText], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=300)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: ShortText | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    return_token_ids: bool | None = None
    guided_json: dict[str, Any] | str | None = None
    json_schema: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    regex: str | None = None
    guided_grammar: str | None = None
    ebnf: str | None = None
    guided_choice: Choices | None = None

    @property
    def constraints(self) -> list[tuple[str, str, Any]]:
        """What constrains the answer beside ``response_format``, one at most: the field as sent, its kind and value."""
        named = [(name, kind, getattr(self, name)) for name, kind in CONSTRAINTS.items()]
        nested = [(kind.strip("_"), value) for kind, value in self.structured_outputs or ()]
        given = [*named, *((f"structured_outputs.{kind}", kind, value) for kind, value in nested)]
        return [each for each in given if each[2] is not None]

    @model_validator(mode="after")
    def _agree(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options", "it needs stream=true")
        given = [name for name, _, _ in self.constraints]
        if len(given) > 1:
            raise bad(given[0], "one constraint is given, not several")
        if given and self.response_format and self.response_format.type != "text":
            raise bad(given[0], "response_format is given too")
        return self


class CompletionRequest(Common):
    """``POST /v1/completions``."""

    prompt: TextPart | TokenIds | Annotated[list[TextPart], SEVERAL] | Annotated[list[TokenIds], SEVERAL]
    best_of: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _best(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise refuse("best_of", f"given {self.best_of}; accepted: the same as n, {self.n or 1}")
        return self


class ChatPrompt(Model):
    """What a chat template is given."""

    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None  # beside those of the template, which are there anyway

    @model_validator(mode="after")
    def _answers_calls(self) -> ChatPrompt:
        called: set[str] = set()
        for message in self.messages or ():
            called.update(call.id for call in message.tool_calls or ())
            given = message.tool_call_id
            if given is not None and given not in called:
                accepted = f"ids of calls before it: {sorted(called)}" if called else "none, there is no call before it"
                raise bad("messages", f"tool_call_id {given[:80]!r} is unknown; accepted: {accepted[:400]}")
        return self


class ChatRequest(Common, ChatPrompt):
    """``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def forced(self) -> list[str]:
        """Names of the functions of which the answer calls one, if it must, or else is JSON, which begins otherwise."""
        if isinstance(self.tool_choice, NamedTool):
            return [self.tool_choice.function.name]
        kinds = {kind for _, kind, _ in self.constraints} | {self.response_format.type if self.response_format else ""}
        json = bool(kinds & {"json", "json_object", "json_schema"})
        must = self.tool_choice == "required" or (json and self.tool_choice != "none")
        return [tool.function.name for tool in self.tools or ()] if must else []

    @model_validator(mode="after")
    def _chat(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad("max_tokens", f"given {self.max_tokens}, and max_completion_tokens {self.max_completion_tokens}")
        if self.top_logprobs and not self.logprobs:
            raise bad("top_logprobs", "it needs logprobs=true")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise bad("tools", "two functions have the same name")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise bad("tool_choice", "there are no tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            accepted = ", ".join(names)
            raise bad("tool_choice", f"{self.tool_choice.function.name!r} is not a tool; given are {accepted}")
        return self


class TokenizeRequest(ChatPrompt):
    """``POST /tokenize``: a prompt, or messages."""

    model: str | None = None
    prompt: TextPart | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise bad("prompt", "exactly one of prompt and messages is given")
        for name in ("tools", "reasoning_effort", "chat_template_kwargs", "add_generation_prompt"):
            if self.prompt is not None and getattr(self, name) is not None:
                raise bad(name, "it belongs to messages, and a prompt is given")
        return self


class DetokenizeRequest(Model):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=2**20)]


class AbortRequest(Model):
    """``POST /abort``: ids of responses."""

    ids: Annotated[list[str], Field(min_length=1, max_length=4096)]
