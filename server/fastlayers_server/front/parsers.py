"""Splitting what a model says into reasoning, content and tool calls. Nothing here raises on what a model writes.

A marker that is one token of the vocabulary is recognised by its id; any other by its text, of which the beginning of
a possible marker is held back.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fastlayers_server.front.rows import Delta, Parser
from fastlayers_server.front.tokens import TokenText, held_back

THINK, UNTHINK = "<think>", "</think>"


@dataclass(frozen=True)
class Style:
    """How a model marks its tool calls.

    Parameters
    ----------
    begin, end : str
        Around one call.
    wrappers : sequence of str
        Markers around several, which say nothing.
    header : str
        Pattern of what a call's body has before its arguments, with the group ``name``.
    begins_with_name : str
        How a constrained call begins, "NAME" standing for the function's.
    closes : str
        What follows the arguments of a constrained call.
    separator : str
        What is between two of them.
    """

    begin: str
    end: str
    wrappers: tuple[str, ...]
    header: str
    begins_with_name: str
    closes: str
    separator: str = "\n"


_JSON_HEADER = r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
_DS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
STYLES = {
    "hermes": Style(
        "<tool_call>", "</tool_call>", (), _JSON_HEADER,
        '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>",
    ),
    "deepseek_v3": Style(
        "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _DS,
        r"\s*function<｜tool▁sep｜>(?P<name>[^\n]{1,64})\n```json\n",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>",
    ),
    "deepseek_v31": Style(
        "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _DS, r"(?P<name>[^<{\n]{1,64})<｜tool▁sep｜>",
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "",
    ),
}  # fmt: skip


class Splitter(Parser, ABC):
    """Cuts a stream of tokens at markers; what is made of them and of the text between is its subclass's."""

    def __init__(self, tokens: TokenText, markers: Sequence[str], keep_special: bool) -> None:
        ids = {marker: tokens.id_of(marker) for marker in markers}
        self._ids = {i: marker for marker, i in ids.items() if i is not None}
        self._texts = [marker for marker, i in ids.items() if i is None]
        self._hidden = frozenset() if keep_special else frozenset(tokens.special) - set(self._ids)
        self._tokens = tokens
        self._held = ""

    @abstractmethod
    def _piece(self, marker: str, text: str) -> list[Delta]:
        """Return what a marker, or a text, adds; the other one is empty."""

    def feed(self, token: int, text: str) -> list[Delta]:
        """Take a token."""
        if token in self._hidden:
            text = text.removesuffix(self._tokens.decode([token]))
        marker = self._ids.get(token, "")
        if not marker:
            return self._read(text)
        return [*self._flush(text.removesuffix(marker)), *self._piece(marker, "")]

    def finish(self, text: str) -> list[Delta]:
        """Take the rest."""
        return self._flush(text)

    def _flush(self, text: str) -> list[Delta]:
        """Take a text behind which no marker that began can end."""
        deltas = self._read(text)
        held, self._held = self._held, ""
        return [*deltas, *(self._piece("", held) if held else [])]

    def _read(self, text: str) -> list[Delta]:
        return [delta for piece in self._cut(self._held + text) for delta in self._piece(*piece)]

    def _cut(self, text: str) -> Iterator[tuple[str, str]]:
        while found := [(at, m) for m in self._texts if (at := text.find(m)) >= 0]:
            at, marker = min(found)
            if at:
                yield "", text[:at]
            yield marker, ""
            text = text[at + len(marker) :]
        shown, self._held = held_back(text, self._texts)
        if shown:
            yield "", shown


class Call:
    """The body of one tool call: a name as soon as it is known, then arguments as they come."""

    def __init__(self, header: re.Pattern[str], index: int) -> None:
        self._header, self.index = header, index
        self.raw, self._known, self._arguments = "", False, JsonValue()

    def feed(self, text: str) -> list[Delta]:
        """Take text of the body."""
        self.raw += text
        if self._known:
            return self._more(text)
        match = self._header.match(self.raw)
        if match is None or match.end() == len(self.raw):
            return []
        self._known = True
        return [Delta("tool", "", self.index, match["name"].strip()), *self._more(self.raw[match.end() :])]

    def _more(self, text: str) -> list[Delta]:
        taken = self._arguments.feed(text)
        return [Delta("tool", taken, self.index)] if taken else []

    def finish(self) -> list[Delta] | None:
        """Return what the end adds, or None if this was no call."""
        if self._known:
            return []
        try:
            found = json.loads(self.raw)
            name, arguments = found["name"], found.get("arguments", found.get("parameters", {}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        if not isinstance(name, str):
            return None
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return [Delta("tool", "", self.index, name), Delta("tool", text, self.index)]


class JsonValue:
    """Passes the text of one JSON object or array on, and nothing after it."""

    def __init__(self) -> None:
        self._depth, self._string, self._escape, self._over = 0, False, False, False

    def feed(self, text: str) -> str:
        """Return the part of the text that belongs to the value."""
        if self._over:
            return ""
        for at, character in enumerate(text):
            if self._string:
                self._string = self._escape or character != '"'
                self._escape = character == "\\" and not self._escape
            elif character == '"':
                self._string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._over = True
                    return text[: at + 1]
        return text


def thinks(tokens: TokenText, prompt: Sequence[int]) -> bool:
    """Return whether a prompt's end leaves a thought open, in which the answer then begins."""
    return tokens.decode(prompt[-16:]).rstrip().endswith(THINK)


class Marked(Splitter):
    """Reasoning between <think> and </think>, and calls between the markers of a style.

    Parameters
    ----------
    tokens : TokenText
    prompt : sequence of int
        Whether reasoning has begun is read off its end, not assumed.
    reasoning : bool
    style : Style, optional
    keep_special : bool
    forced : sequence of str
        Functions of which the answer calls one, if what begins as a call can be nothing else.
    """

    def __init__(
        self, tokens: TokenText, prompt: Sequence[int], reasoning: bool, style: Style | None,
        keep_special: bool = False, forced: Sequence[str] = (),
    ) -> None:  # fmt: skip
        markers = [THINK, UNTHINK] * reasoning
        if style is not None:
            markers += [style.begin, style.end, *style.wrappers]
        super().__init__(tokens, markers, keep_special)
        self._style, self._forced = style, forced
        self._header = re.compile(style.header) if style else re.compile("")
        self._thinking = reasoning and thinks(tokens, prompt)
        self._call: Call | None = None
        self._calls, self._said = 0, False
        # Blanks behind a call: no content where another call or the end follows, and part of what else follows.
        self._gap: str | None = None

    @property
    def part(self) -> str:
        """Of what the text is that comes now."""
        return "tool" if self._call is not None else "reasoning" if self._thinking else "content"

    def finish(self, text: str) -> list[Delta]:
        """Take the rest; where only a call begins as one, that is one that was cut, told as soon as it can be but one.

        Whatever does not begin as one is content, as an answer is that a request's format allows beside calls.
        """
        said, deltas = self._said, [*super().finish(text), *self._close("")]
        begun = "".join(delta.text for delta in deltas if delta.kind == "content").lstrip()
        begins = self._style.begins_with_name if self._style and begun else ""
        fit = [name for name in self._forced if begins.replace("NAME", name).startswith(begun)]
        if said or not begins or not fit:
            return deltas
        cut = [Delta("tool", "", self._calls, fit[0])] if len(fit) == 1 else []
        return [*(delta for delta in deltas if delta.kind != "content"), *cut]

    def _piece(self, marker: str, text: str) -> list[Delta]:
        style = self._style
        if not marker:
            if self._call is not None:
                return self._call.feed(text)
            return [Delta("reasoning", text)] if self._thinking else self._content(text)
        if self._thinking:
            self._thinking = marker != UNTHINK
            return [] if marker == UNTHINK else [Delta("reasoning", marker)]
        if style is not None and self._call is not None:
            return self._close(marker) if marker == style.end else self._call.feed(marker)
        if marker == THINK:
            self._thinking = True
            return []
        if style is not None and marker == style.begin:
            self._call = Call(self._header, self._calls)
            return []
        return [] if style is not None and marker in style.wrappers else self._content(marker)

    def _content(self, text: str) -> list[Delta]:
        if self._gap is not None:
            text = self._gap + text
            self._gap = None if text.strip() else text
        self._said = self._said or bool(text.strip())
        return [] if self._gap is not None else [Delta("content", text)]

    def _close(self, marker: str) -> list[Delta]:
        call, self._call = self._call, None
        if call is None:
            return []
        deltas = call.finish()
        if deltas is None:
            assert self._style is not None
            return self._content(self._style.begin + call.raw + marker)
        self._calls += 1
        self._gap = ""
        return deltas


class Harmony(Splitter):
    """The channels of gpt-oss: analysis is reasoning, final is content, what has a recipient is a call."""

    MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")

    def __init__(self, tokens: TokenText, prompt: Sequence[int], keep_special: bool = False) -> None:
        super().__init__(tokens, self.MARKERS, keep_special)
        # A prompt that ends within a message is continued there.
        tail = tokens.decode(prompt[-256:])
        self._header: str | None = None if tail.endswith("<|message|>") else ""
        self._kind, self._calls, self._said = "content", 0, False
        if self._header is None:
            self._open(tail[tail.rfind("<|start|>") :])

    @property
    def part(self) -> str:
        """Of what the text is that comes now."""
        return self._kind if self._header is None else "header"

    def finish(self, text: str) -> list[Delta]:
        """Take the rest; a header without a message is text after all."""
        deltas = super().finish(text)
        if self._header and not self._said and not deltas and "<|channel|>" not in self._header:
            deltas.append(Delta("content", self._header))
        return deltas

    def _piece(self, marker: str, text: str) -> list[Delta]:
        if self._header is not None:
            if marker == "<|message|>":
                return self._open(self._header)
            self._header += marker + text
            return []
        if marker in ("<|start|>", "<|end|>", "<|call|>", "<|return|>"):
            self._header = ""
            return []
        return [Delta(self._kind, marker + text, max(0, self._calls - 1))]

    def _open(self, header: str) -> list[Delta]:
        self._header, self._said = None, True
        to = re.search(r"to=(?:functions\.)?([A-Za-z0-9_.-]{1,64})", header)
        if to is not None:
            self._kind = "tool"
            self._calls += 1
            return [Delta("tool", "", self._calls - 1, to[1])]
        self._kind = "reasoning" if re.search(r"<\|channel\|>\s*analysis", header) else "content"
        return []


@dataclass(frozen=True)
class Formats:
    """Which parsers a model's answers need."""

    reasoning: str
    tools: str

    @property
    def harmony(self) -> bool:
        """Whether answers come in Harmony's channels; calls then do, too."""
        return "harmony" in (self.reasoning, self.tools)

    def parser(
        self, tokens: TokenText, wants_tools: bool, keep_special: bool, forced: Sequence[str] = ()
    ) -> Callable[[Sequence[int]], Parser] | None:
        """Return what makes the parser of an answer to a prompt, or None where all of it is content.

        ``forced``: functions of which the answer calls one, if what begins as a call can be nothing else.
        """
        if self.harmony:
            return lambda prompt: Harmony(tokens, prompt, keep_special)
        style = STYLES.get(self.tools) if wants_tools else None
        thinks = self.reasoning != "none"
        if not thinks and style is None:
            return None
        return lambda prompt: Marked(tokens, prompt, thinks, style, keep_special, forced)


def formats_of(tokens: TokenText, reasoning: str, tools: str) -> Formats:
    """Return the formats of a model: as named, or as its template and vocabulary have the markers."""
    kind, thought, style = tokens.model_type, "none", _style_of(tokens)
    if kind == "gpt_oss" and tokens.id_of("<|channel|>") is not None:
        thought = style = "harmony"
    elif kind.startswith("qwen") and (tokens.id_of(UNTHINK) is not None or tokens.mentions(UNTHINK)):
        thought = "qwen3"
    elif kind.startswith("deepseek") and tokens.id_of(UNTHINK) is not None:
        thought = "deepseek_r1"
    return Formats(thought if reasoning == "auto" else reasoning, style if tools == "auto" else tools)


def _style_of(tokens: TokenText) -> str:
    """Return the style whose calls the chat template shows; of DeepSeek's two the older one fences the arguments."""
    if tokens.mentions(STYLES["hermes"].begin):
        return "hermes"
    if not tokens.mentions(STYLES["deepseek_v3"].begin):
        return "none"
    return "deepseek_v3" if tokens.mentions("```json") else "deepseek_v31"
