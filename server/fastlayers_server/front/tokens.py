"""Between text and token ids: encoding, templates, streaming back to text, stop strings, the bytes of a token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from fastlayers_server.front.errors import ApiError

# Of a prompt so many tokens are context enough for how the first new one is spelled.
CONTEXT = 6


class TokenText:
    """A tokenizer and the chat template of a model's folder.

    Parameters
    ----------
    folder : Path
    chat_template : str, optional
        Instead of the folder's.
    invent : bool
        Where the folder has no tokenizer, and its weights are random anyway: each id is a word of its own.
    config : mapping, optional
        Of a model that is known by name, and has no folder.

    Raises
    ------
    ValueError
        No fast tokenizer in the folder, or one of its files, or the chat template, cannot be read.
    """

    def __init__(
        self, folder: Path, chat_template: str | None = None, invent: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        config = _json(folder / "config.json") if config is None else config
        # Not at import: it takes seconds, and most of the front does without. "from transformers import" fails while a
        # thread of an engine in this process imports it first.
        made: Any = import_module("transformers").PreTrainedTokenizerFast
        if (folder / "tokenizer.json").is_file():
            try:
                self.hf = made.from_pretrained(folder, local_files_only=True)
            except Exception as error:  # transformers and tokenizers raise whatever they stumble over
                said = f"the tokenizer cannot be read: {type(error).__name__}: {error}"
                raise ValueError(f"{folder}: {said} (tokenizer.json, tokenizer_config.json)") from error
        elif invent:
            self.hf = made(tokenizer_object=_numbers(int(config["vocab_size"])))
            self.hf.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
        else:
            raise ValueError(f"{folder} holds no tokenizer.json; a server needs the model's fast tokenizer")
        if chat_template is not None:
            self.hf.chat_template = chat_template
        self.fast = self.hf.backend_tokenizer
        self.vocab_size = len(self.hf)
        self.special = {i for i, t in self.hf.added_tokens_decoder.items() if t.special}
        self._added = {i: t.content for i, t in self.hf.added_tokens_decoder.items()}
        kind = json.loads(self.fast.to_str()).get("decoder") or {}
        parts = {kind.get("type"), *(d.get("type") for d in kind.get("decoders", ()))}
        self._byte_level = _byte_table() if "ByteLevel" in parts else None
        vocabulary = self.hf.get_vocab()
        self.longest_token = max(map(len, vocabulary), default=1)
        self.defaults = _json(folder / "generation_config.json")
        self.model_type = str(config.get("model_type", ""))
        template = self.hf.chat_template or {}
        self._options = variables_of(template.values() if isinstance(template, dict) else [template])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        return self.fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token that is one in the vocabulary, as ``</think>`` may be."""
        found = self.fast.token_to_id(token)
        return None if found is None else int(found)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, options: Mapping[str, Any]) -> str:
        """Return the prompt of a conversation.

        Raises
        ------
        ApiError
            The model has no template, or its template refuses the conversation.
        """
        if not self.hf.chat_template:
            raise ApiError(400, "this model has no chat template; use /v1/completions, or start with --chat-template", "invalid_prompt", "messages")  # fmt: skip  # noqa: E501
        try:
            text = self.hf.apply_chat_template(list(messages), tools=tools, tokenize=False, **options)
        except Exception as error:  # what a template does with what it is given, it may raise
            raise ApiError(400, f"the chat template refuses the messages: {error}", "invalid_prompt", "messages") from error  # fmt: skip  # noqa: E501
        return str(text)

    def mentions(self, text: str) -> bool:
        """Return whether the chat template has this text somewhere."""
        return text in str(self.hf.chat_template or "")

    def reads(self, option: str) -> bool:
        """Return whether the chat template reads a variable of this name."""
        return option in self._options

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for; those of a text's tokens, joined, are the text's."""
        if token in self._added:
            return self._added[token].encode()
        piece = self.fast.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level is not None:
            return bytes(self._byte_level[c] for c in piece if c in self._byte_level)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("▁", " ").encode()


def variables_of(templates: Iterable[str]) -> frozenset[str]:
    """Return what chat templates read of what they are given; raises ``ValueError`` for one that cannot be parsed."""
    # Not at import, as transformers, which renders them.
    from jinja2 import Environment, TemplateSyntaxError, meta, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """The tag of transformers' own around what the assistant says."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=["jinja2.ext.loopcontrols", Generation])
    found: set[str] = set()
    for template in templates:
        try:
            found |= meta.find_undeclared_variables(environment.parse(template))
        except TemplateSyntaxError as error:
            place = f"the chat template (--chat-template names another), line {error.lineno}"
            raise ValueError(f"{place}: {error.message}") from error
    return frozenset(found)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _numbers(vocab_size: int) -> Tokenizer:
    made = Tokenizer(WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    made.pre_tokenizer = WhitespaceSplit()
    return made


def _byte_table() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


class Detokenizer:
    """Ids of one output, one by one, to text; nothing is said while a character is incomplete."""

    def __init__(self, tokens: TokenText, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokens, self._skip = tokens, skip_special_tokens
        self._stream = DecodeStream(ids=list(prompt[-CONTEXT:]), skip_special_tokens=skip_special_tokens)
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        """Return the text that this token completes."""
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokens.fast, token)
        except Exception as error:  # the library raises a bare Exception where bytes cannot follow each other
            if "prefix" not in str(error).lower():
                raise
            text = self.flush()
            self._stream = DecodeStream(skip_special_tokens=self._skip)
            return text
        if text is None:
            return ""
        self._pending.clear()
        return text

    def flush(self) -> str:
        """Return what is left at the end: an incomplete character becomes U+FFFD."""
        text = self._tokens.decode(self._pending, self._skip)
        self._pending = []
        return text


class StopStrings:
    """Finds the stop string that is complete first, and holds back text that may be the beginning of one.

    Parameters
    ----------
    stops : str or sequence of str
    include : bool
        The text ends behind it, not before.
    after : int
        So many tokens are drawn before the search begins.
    """

    def __init__(self, stops: str | Sequence[str], include: bool, after: int = 0) -> None:
        self._stops, self.include, self.after = (stops,) if isinstance(stops, str) else tuple(stops), include, after
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that may be shown now, and whether a stop string ended it."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, begin = min(found)
            self._held = ""
            return text[: end if self.include else begin], True
        shown, self._held = held_back(text, self._stops)
        return shown, False

    def flush(self) -> str:
        """Return what was held back, at the end."""
        held, self._held = self._held, ""
        return held


def held_back(text: str, markers: Sequence[str]) -> tuple[str, str]:
    """Return a text, and apart from it as much of its end as may be the beginning of a marker."""
    for size in range(min(len(text), max(map(len, markers), default=1) - 1), 0, -1):
        if any(len(marker) > size and text.endswith(marker[:size]) for marker in markers):
            return text[:-size], text[-size:]
    return text, ""
