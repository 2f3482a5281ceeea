"""Command lines made from frozen dataclasses: each field is a flag, in our spelling and in those of peers."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from fastlayers.errors import ArgumentError

T = TypeVar("T")


def flag(
    default: Any, text: str, *aliases: str, choices: Sequence[str] = (), within: tuple[float, float] | None = None,
    secret: bool = False, words: Mapping[str, str] | None = None,
) -> Any:  # fmt: skip
    """Return a field that is a flag; a tuple is repeatable or comma separated, a secret is never shown.

    ``words``: what peers say for some of the choices.
    """
    facts = {
        "help": text, "aliases": aliases, "choices": tuple(choices), "within": within, "secret": secret,
        "words": dict(words or {}),
    }  # fmt: skip
    return dataclasses.field(default=default, repr=not secret, metadata=facts)


def flags_of(kind: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are flags, by name."""
    return {field.name: field for field in dataclasses.fields(kind) if field.metadata}


def spellings(field: Any) -> tuple[str, ...]:
    """Return how a field's flag may be written: our spelling first, then peers'."""
    return ("--" + field.name.replace("_", "-"), *field.metadata["aliases"])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        given = f"not understood ({message})"
        raise ArgumentError(self.prog, "the command line", given, f"what '{self.prog} --help' lists")


def parser_of(kind: type, prog: str, description: str, positional: str = "") -> argparse.ArgumentParser:
    """Return a command line of a dataclass's fields; ``positional`` names one argument without a flag."""
    made = _Parser(prog=prog, allow_abbrev=False, description=description)
    if positional:
        made.add_argument(positional, nargs="?", default=None, help="the same as --" + positional.lower())
    for name, field in flags_of(kind).items():
        facts = field.metadata
        spelled = spellings(field)
        if isinstance(field.default, bool):
            made.add_argument(*spelled, dest=name, action="store_true", default=None, help=facts["help"])
            continue
        default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
        shown = "" if facts["secret"] or default == "" else f" (default: {default})"
        repeat: dict[str, Any] = {"action": "append"} if isinstance(field.default, tuple) else {}
        choices = facts["choices"] or None
        read: Any = str if repeat else type(field.default)
        if facts["words"]:
            read = partial(_ours, facts["words"])
        made.add_argument(
            *spelled, dest=name, type=read, default=None, choices=choices,
            metavar=None if choices else name.rpartition("_")[2].upper(),
            help=(facts["help"] + shown).replace("%", "%%"), **repeat,
        )  # fmt: skip
    return made


def _ours(words: Mapping[str, str], text: str) -> str:
    return words.get(text, text)


def given_values(
    parser: argparse.ArgumentParser, arguments: Sequence[str], never: Mapping[str, str], positional: str = ""
) -> dict[str, Any]:
    """Return what a command line gives; the positional argument under the name of its field.

    Raises
    ------
    ArgumentError
        A flag of peers that we lack, and ``never`` says why; or values that contradict each other.
    """
    for flag_given in (argument.partition("=")[0] for argument in arguments):
        if flag_given in never:
            who = parser.prog.removeprefix("fastlayers ")
            raise ArgumentError(who, flag_given, "given", f"nothing: {never[flag_given]}")
    given = vars(parser.parse_args(list(arguments)))
    name, alone = positional.lower(), given.pop(positional, None)
    values = {key: value for key, value in given.items() if value is not None}
    if alone is not None:
        if name in values and values[name] != alone:
            raise ArgumentError(parser.prog, f"--{name}", repr(values[name]), f"the same as {positional}, {alone!r}")
        values[name] = alone
    return values


def typed(kind: type[T], who: str, values: Mapping[str, Any]) -> T:
    """Return the dataclass of these values, after checking their types, choices and bounds."""
    fields = flags_of(kind)
    return kind(**{name: _typed(fields[name], who, value) for name, value in values.items()})


def _typed(field: Any, who: str, value: Any) -> Any:
    spelled = "--" + field.name.replace("_", "-")
    if isinstance(field.default, tuple):
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise ArgumentError(who, spelled, f"a {type(value).__name__}", "a text, or a list of them")
        found = tuple(text for part in parts for text in str(part).split(",") if text)
        if parts and not found:  # as of a variable that is not set: to take it for none would be to guess
            raise ArgumentError(who, spelled, "''", "at least one; or leave it out")
        return found
    if isinstance(field.default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not type(field.default):
        raise ArgumentError(who, spelled, repr(value), f"a {type(field.default).__name__}")
    choices, within = field.metadata["choices"], field.metadata["within"]
    if isinstance(value, str):
        value = _ours(field.metadata["words"], value)
    if choices and value not in choices:
        raise ArgumentError(who, spelled, repr(value), ", ".join(choices))
    if within and not within[0] <= value <= within[1]:
        raise ArgumentError(who, spelled, value, f"{within[0]} to {within[1]}")
    return value
