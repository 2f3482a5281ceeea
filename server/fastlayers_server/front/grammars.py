"""What constrains an answer: from a request's fields to one grammar source, its limits, and its compiled form."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fastlayers_server.front.errors import ApiError, bad
from fastlayers_server.front.generation import Front
from fastlayers_server.front.parsers import STYLES, UNTHINK, Harmony, thinks
from fastlayers_server.front.schemas import ChatRequest, Common, FunctionDef, NamedTool

if TYPE_CHECKING:
    from fastlayers_server.engine.grammar import GrammarWorker

log = logging.getLogger("fastlayers.front")

MAX_SOURCE, MAX_DEPTH, MAX_COUNT = 65_536, 32, 10_000
# Characters between two tokens of JSON: enough to indent, and a model cannot lose itself in it.
WHITESPACE = 24
# Of Harmony's messages: how a thought begins, what is between it and the next one, an answer, and a call's arguments.
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
ANALYSIS, NEXT = (CHANNEL, "analysis", MESSAGE), ("<|end|>", "<|start|>", "assistant")
FINAL, JSON_BODY = (CHANNEL, "final", MESSAGE), ("<|constrain|>", "json", MESSAGE)
# Keywords of a schema that the grammar enforces, by what they have: counts, a schema, several, named ones, or else; and
# those that only describe.
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
ONE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
LISTED, NAMED = ("anyOf", "oneOf", "allOf", "prefixItems"), ("properties", "$defs", "definitions", "patternProperties")
OTHERS = ("type", "required", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "const",
          "$ref", "format")  # fmt: skip
DESCRIBING = ("title", "description", "default", "examples", "example", "$schema", "$id", "$comment", "deprecated",
              "readOnly", "writeOnly", "discriminator")  # fmt: skip
KNOWN = frozenset((*COUNTS, *ONE, *LISTED, *NAMED, *OTHERS, *DESCRIBING))
# xgrammar looks at the first of these that a schema has, and at nothing beside it.
ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
BESIDE = frozenset((*DESCRIBING, "$defs", "definitions", "type"))
# Without a type it takes a schema with these for an object's or an array's, and any other for one that all fits.
TYPING = frozenset((*ONE, "properties", "prefixItems")) - {"propertyNames"}
# What it does not enforce beside the first ones.
LENGTHS = frozenset(("minLength", "maxLength"))
APART = (
    ("pattern", LENGTHS | {"format"}), ("format", LENGTHS), ("patternProperties", frozenset(("properties",))),
    ("propertyNames", frozenset(("properties", "patternProperties"))),
    ("additionalProperties", frozenset(("unevaluatedProperties",))), ("items", frozenset(("unevaluatedItems",))),
)  # fmt: skip
TYPES: dict[type, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", dict: "object", list: "array",
}  # fmt: skip
# The parts of a pattern, a class being one; and those that xgrammar writes as they are, where JSON has an escape.
PARTS = re.compile(r"\[(?:\\.|[^\]\\])*\]|\\x..|\\u....|\\.|\(\?[=!]|.", re.DOTALL)
UNSPELLED = re.compile(r"\\?[\x00-\x1f\"]|\\[\\nrtfv0]|\\(x|u00)([01].|22|5[cC])")
FORMATS = frozenset(
    ("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference",
     "uri-template", "json-pointer", "relative-json-pointer")
)  # fmt: skip


async def constraint_of(body: Common, front: Front, prompt: Sequence[int] = ()) -> str:
    """Return the key of the compiled grammar that a request asks for, or ""; the engine has it then.

    Raises
    ------
    ApiError
        400 for a source that is refused or cannot be compiled; 503 if there is nothing that compiles.
    """
    try:
        return await _known(source_of(body, front, prompt), front)
    except ApiError as error:
        if error.code != "invalid_grammar" or not _promises_less(body):
            raise
        key = await _known(source_of(body, front, prompt, promised_only=True), front)
        log.info("arguments of tools that are not strict are any object: %s", error)
        return key


async def _known(found: tuple[str, str] | None, front: Front) -> str:
    if found is None:
        return ""
    source, param = found
    info = front.link.check_ready()
    if front.grammars is None or "grammar" not in info.features:
        raise bad(param, "this engine has no grammars", "unsupported_parameter")
    key = hashlib.sha256(source.encode()).hexdigest()[:40]
    if key not in front.link.grammar_keys:
        async with front.compiling:  # the worker compiles one after the other: who waited may find that it did
            if key not in front.link.grammar_keys:
                front.link.grammar(key, await _compiled(front, front.grammars, source, param))
    return key


async def _compiled(front: Front, worker: GrammarWorker, source: str, param: str) -> str:
    begin = time.monotonic()
    try:
        serialized = await worker.compile(source)
    except ValueError as error:
        raise bad(param, str(error), "invalid_grammar") from error
    except TimeoutError as error:
        raise bad(param, "the grammar took too long to compile", "invalid_grammar") from error
    except RuntimeError as error:  # no process that compiles: whatever was asked for is not to blame
        log.error("%s", error, exc_info=error)
        raise ApiError(503, f"{param}: the process that compiles grammars does not start", "not_ready") from error
    front.metrics.grammar_compile.observe(time.monotonic() - begin)
    return serialized


def source_of(body: Common, front: Front, prompt: Sequence[int], promised_only: bool = False) -> tuple[str, str] | None:
    """Return a structural tag and the field of the request, checked against the limits, or None for free text.

    With `promised_only` the arguments of tools that promise nothing of them are any object.
    """
    form, param = _plain(body)
    if isinstance(body, ChatRequest) and body.tools and body.tool_choice != "none":
        free = body.tool_choice in (None, "auto")
        if free and form is None:
            if front.formats.harmony:
                return None  # the channels are the model's own, and a call ends its turn: there is one at most
            if "grammar" not in front.link.check_ready().features:
                if body.parallel_tool_calls is False:
                    raise bad("parallel_tool_calls", "this engine has no grammars", "unsupported_parameter")
                return None
        calls = _tools(body, front, free and form is None, promised_only)
        if free and form is not None:  # calls, or the answer as it must be
            form = {"type": "or", "elements": [calls, _answer(form, front)]}
        else:
            form, param = calls, "tools"
    elif form is not None:
        form = _answer(form, front)
    if form is None:
        return None
    _check_tag(form, param)
    if front.formats.harmony:
        form = _in_channels(form)
    elif front.formats.reasoning != "none" and thinks(front.tokens, prompt):
        form = _after_thinking(form)
    source = json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
    if len(source.encode()) > MAX_SOURCE:
        raise bad(param, f"a grammar of more than {MAX_SOURCE} bytes", "invalid_grammar")
    return source, param


def _answer(form: dict[str, Any], front: Front) -> dict[str, Any]:
    return _sequence(*map(_harmony, FINAL), form) if front.formats.harmony else form


def _plain(body: Common) -> tuple[dict[str, Any] | None, str]:
    """Return what a request says of its text, as a part of a structural tag, and the field that says it."""
    form = body.response_format
    if form is not None and form.type != "text":
        if form.format is not None:
            return form.format, "response_format"
        return _json_of(form.json_schema.schema_ if form.json_schema else {"type": "object"}), "response_format"
    for name, kind, value in body.constraints:
        if kind == "regex":
            return {"type": "regex", "pattern": value}, name
        if kind == "grammar":
            return {"type": "grammar", "grammar": value}, name
        if kind == "choice":
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in value]}, name
        try:
            return _json_of(json.loads(value) if isinstance(value, str) else value), name
        except (ValueError, RecursionError) as error:
            raise bad(name, f"it is no JSON: {error}", "invalid_grammar") from error
    return None, ""


def _json_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": WHITESPACE}


def _after_thinking(form: dict[str, Any]) -> dict[str, Any]:
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": UNTHINK}
    return _sequence(thought, {"type": "regex", "pattern": r"\n{0,2}"}, form)


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _harmony(text: str) -> dict[str, Any]:
    """Return a marker of Harmony's, which is one token, or the text between two."""
    return {"type": "token", "token": text} if text in Harmony.MARKERS else {"type": "const_string", "value": text}


def _in_channels(form: dict[str, Any]) -> dict[str, Any]:
    """Return what the model may think before it says something; the end of that is an end token."""
    thought = {"type": "any_tokens", "exclude_tokens": list(Harmony.MARKERS)}
    thoughts = {"type": "star", "content": _sequence(*map(_harmony, ANALYSIS), thought, *map(_harmony, NEXT))}
    return _sequence(thoughts, form)


def _promises_less(body: Common) -> bool:
    """Return whether there are tools of whose arguments nothing is promised, though they say something of them."""
    if not isinstance(body, ChatRequest) or body.tool_choice not in (None, "auto"):
        return False
    return any(tool.function.parameters and not tool.function.strict for tool in body.tools or ())


def _tools(body: ChatRequest, front: Front, beside_text: bool, promised_only: bool) -> dict[str, Any]:
    choice = body.tool_choice
    wanted = [t.function for t in body.tools or ()]
    if isinstance(choice, NamedTool):
        wanted = [f for f in wanted if f.name == choice.function.name]
    left = choice in (None, "auto")
    contents = {f.name: _arguments(f, bool(f.strict) or not left, promised_only) for f in wanted}
    if front.formats.harmony:
        headers = {name: (CHANNEL, f"commentary to=functions.{name} ", *JSON_BODY) for name in contents}
        calls = [_sequence(*map(_harmony, headers[name]), _json_of(schema)) for name, schema in contents.items()]
        return {"type": "or", "elements": calls}
    style, tags = STYLES[front.formats.tools], []
    for name, schema in contents.items():
        begin = style.begins_with_name.replace("NAME", name)
        tags.append({"type": "tag", "begin": begin, "content": _json_of(schema), "end": style.closes})
    once = body.parallel_tool_calls is False or isinstance(choice, NamedTool)
    if beside_text:
        return {"type": "triggered_tags", "triggers": [style.begin], "tags": tags, "stop_after_first": once}
    # Calls and nothing else: a model that was made to call would talk on behind them.
    return {
        "type": "tags_with_separator", "tags": tags, "separator": style.separator, "at_least_one": True,
        "stop_after_first": once,
    }  # fmt: skip


def _arguments(function: FunctionDef, promised: bool, promised_only: bool) -> dict[str, Any]:
    """Return the schema of a function's arguments; where nothing is promised of them, an object if it is refused."""
    schema = function.parameters or {"type": "object"}
    if promised_only and not promised:
        return {"type": "object"}
    try:
        check_schema(schema, f"tools.{function.name}.parameters", "tools")
    except ApiError as error:
        if promised:
            raise
        log.info("arguments of a tool that is not strict are any object: %s", error)
        return {"type": "object"}
    return schema


def _check_counts(source: str, param: str) -> None:
    counts = [int(n[:9]) for pair in re.findall(r"\{\s*(\d+)?\s*,?\s*(\d+)?\s*\}", source) for n in pair if n]
    if max(counts, default=0) > MAX_COUNT:
        raise bad(param, f"it repeats more than {MAX_COUNT} times", "invalid_grammar")
    nested = max_nesting(source)
    if nested > MAX_DEPTH:
        raise bad(param, f"groups nested deeper than {MAX_DEPTH}", "invalid_grammar")


def max_nesting(source: str) -> int:
    """Return how deep the brackets of a pattern nest, escaped ones not counted."""
    depth = most = 0
    for character in re.sub(r"\\.", "", source):
        depth += (character in "([") - (character in ")]")
        most = max(most, depth)
    return most


def _check_tag(value: Any, param: str, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise bad(param, f"nested deeper than {MAX_DEPTH}", "invalid_grammar")
    if isinstance(value, list):
        for each in value:
            _check_tag(each, param, depth + 1)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name == "json_schema":
                check_schema(each, param, param)
            elif name in ("pattern", "grammar") and isinstance(each, str):
                _check_counts(each, param)
            else:
                _check_tag(each, param, depth + 1)


class _Types:
    """Tells whether schemas allow some types only, with the references of their document.

    Before it says no, what was told of a reference is not asked again: a document takes time in proportion to itself.
    """

    def __init__(self, document: Any) -> None:
        self._document = document
        self._seen: set[tuple[str, tuple[str, ...]]] = set()

    def only(self, schema: Any, kinds: Any) -> bool:
        """Return whether all that a schema allows is of the types in a list, so far as xgrammar looks at it."""
        wanted = tuple(t for t in TYPES.values() if t in kinds or (t == "integer" and "number" in kinds))
        left = [schema]
        while left:
            each = left.pop()
            each = each if isinstance(each, dict) else {}
            first = next((name for name in ALONE if name in each), "type")
            value = each.get(first)
            if first == "$ref":
                if (str(value), wanted) not in self._seen:
                    self._seen.add((str(value), wanted))
                    left.append(self._at(str(value)))
            elif first in LISTED:
                left += value if isinstance(value, list) else [None]
            else:
                given = value if isinstance(value, list) and first != "const" else [value]
                told = given if first == "type" else [TYPES.get(type(each)) for each in given]
                if not told or not all(kind in wanted for kind in told):
                    return False
        return True

    def _at(self, reference: str) -> Any:
        found = self._document
        for name in reference.split("/")[1:]:  # xgrammar knows no escapes, and no places in lists
            found = found.get(name) if isinstance(found, dict) else None
        return found


def check_schema(schema: Any, path: str, param: str, depth: int = 0, types: _Types | None = None) -> None:
    """Raise 400, with its path, for what a grammar made of the schema would not enforce or could not bear."""

    def refuse(where: str, why: str) -> ApiError:
        return ApiError(400, f"{where}: {why}", "invalid_grammar", param)

    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise refuse(path, f"a schema is an object, not {type(schema).__name__}")
    if depth > MAX_DEPTH:
        raise refuse(path, f"nested deeper than {MAX_DEPTH}")
    types = types or _Types(schema)
    for name, value in schema.items():
        where = f"{path}.{name}"
        if name not in KNOWN:
            raise refuse(where, "this keyword is not supported, and constraints are never dropped")
        if name == "$ref" and value != "#" and not str(value).startswith("#/"):
            raise refuse(where, "only local references (#/…) are resolved")
        if name == "format" and str(value) not in FORMATS:
            raise refuse(where, f"format {value!r} is not supported; accepted: {', '.join(sorted(FORMATS))}")
        if name in COUNTS and (not isinstance(value, int) or not 0 <= value <= MAX_COUNT):
            raise refuse(where, f"given {value!r}; accepted: 0 to {MAX_COUNT}")
        if name == "pattern":
            _check_counts(str(value), param)
            if "(?=" in (parts := PARTS.findall(str(value))) or "(?!" in parts:
                raise refuse(where, "lookahead is not enforced, and constraints are never dropped")
            if any(UNSPELLED.fullmatch(part) for part in parts):
                raise refuse(
                    where, "it asks for a quote, a backslash or a control character as no string of JSON has it"
                )
        elif name in NAMED or name in LISTED:
            if not isinstance(value, dict if name in NAMED else list):
                raise refuse(where, "it maps names to schemas" if name in NAMED else "it is a list of schemas")
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                check_schema(inner, f"{where}.{key}", param, depth + 1, types)
        elif name in ONE:
            if name == "propertyNames" and isinstance(value, dict):  # names have a type without being told
                if value.get("type", "string") != "string":
                    raise refuse(f"{where}.type", "names are strings")
                value = value | {"type": "string"}
            check_schema(value, where, param, depth + 1, types)
    for name, why in _dropped(schema, types):
        raise refuse(f"{path}.{name}", f"{why}, and constraints are never dropped")


def _dropped(schema: dict[str, Any], types: _Types) -> Iterator[tuple[str, str]]:
    """Yield the keywords that a grammar made of the schema would not enforce, each with the reason."""
    kind = schema.get("type")
    for first in [name for name in ALONE if name in schema][:1]:
        yield from ((name, f"it is not enforced beside {first!r}") for name in schema if name not in {first, *BESIDE})
        if kind is not None and not types.only(schema, kind if isinstance(kind, list) else [kind]):
            yield "type", f"it is not enforced beside {first!r}, and not all of that has this type"
        if first == "allOf" and len(schema[first]) != 1:
            yield first, "it is enforced of one schema only"
        return
    if not kind and not schema.keys() & TYPING:
        yield from ((name, "it is enforced beside a type only") for name in schema if name not in BESIDE - {"type"})
    for name, others in APART:
        apart = sorted(others & schema.keys()) if name in schema else ()
        yield from ((other, f"it is not enforced beside {name!r}") for other in apart)
    for name in ("additionalProperties", "unevaluatedProperties"):
        if schema.get(name) is False and "propertyNames" in schema:
            yield name, "false is not enforced beside 'propertyNames'"
    required = schema.get("required")
    if isinstance(required, list) and not all(name in schema.get("properties", ()) for name in map(str, required)):
        yield "required", "it is enforced of names among the properties only"
