"""Which results that a page names do not say how they were made: no command, or one of a program that is not here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# What begins a command that is no program of this tree.
KNOWN = ("fastlayers", "pytest", "torchrun", "make")


def heads(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what a result says of each of its runs: a row, or what stands in it as ``run`` or ``metadata``."""
    text = path.read_text()
    rows = [json.loads(text)] if path.suffix == ".json" else map(json.loads, filter(str.strip, text.splitlines()))
    for row in rows:
        run = row.get("run", row.get("metadata", row))
        if isinstance(run, dict) and ("command" in run or "commit" in run):
            yield run


def program_of(command: str) -> str | None:
    """Return the program that a command runs, ``None`` where one of this tree or an installed one does."""
    words = command.removeprefix("python ").split()
    first = words[0] if words else ""
    places = (ROOT, ROOT / "benchmarks", ROOT / "tools")
    return None if first in KNOWN or any((place / first).is_file() for place in places) else first


def unsaid(run: dict[str, Any]) -> str:
    """Return in words that a run does not say its command, and which part of ``renew.py`` has one."""
    return "no command" + (f" (part `{run['part']}` of `benchmarks/renew.py`)" if "part" in run else "")


def unknown(path: Path) -> str:
    """Return what a result lacks to be made again, in words; nothing where each of its runs says it."""
    told: dict[str, None] = {}
    for run in heads(path):
        if "command" not in run:
            told[unsaid(run)] = None
        elif (program := program_of(run["command"])) is not None:
            is_file = re.fullmatch(r"[\w/]+\.py", program) is not None
            told[f"`{program}`, which is not in the tree" if is_file else "words instead of a command"] = None
    return ", ".join(told)


def listed(page: str) -> str:
    """Return the results that a page names and that lack that, in a sentence."""
    names = {name.partition("#")[0] for name in re.findall(r"`([^`|]+\.jsonl?(?:#[^`]*)?)`", page)}
    lacking = [(name, unknown(RESULTS / name)) for name in sorted(names) if (RESULTS / name).is_file()]
    told = "; ".join(f"`{name}`: {what}" for name, what in lacking if what)
    return f"Results named on this page that do not say how they were made: {told}." if told else ""
