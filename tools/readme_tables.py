"""Write the tables of README.md from committed result files: ``python tools/readme_tables.py [--check]``.

A table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; nothing else is touched.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def read(name: str) -> Any:
    """Return one result file."""
    return json.loads((RESULTS / name).read_text())


def accuracy() -> str:
    """Accuracy and perplexity of the shipped checkpoint, each way to run it."""
    found = read("eval_tiny_cpu.json")
    run = found["run"]
    lines = ["| run | exact match | perplexity | answers that differ |", "|---|---|---|---|"]
    names = {name: row["description"] for name, row in found["variants"].items()}
    for row in found["variants"].values():
        flips = "" if row["flips"] is None else f"{row['flips']} of {row['problems']} against {names[row['baseline']]}"
        lines.append(f"| {row['description']} | {100 * row['exact_match']:.1f}% | {row['perplexity']:.4f} | {flips} |")
    command = run["command"].split(" --out")[0]
    lines += ["", f"`{command}`, commit {run['commit']}, {run['device']}, torch {run['torch']},"]
    lines.append(f"transformers {run['transformers']}: `benchmarks/results/eval_tiny_cpu.json`.")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {"accuracy": accuracy}


def fill(text: str) -> str:
    """Return the README's text with every table renewed."""
    for name, table in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        found = pattern.findall(text)
        if len(found) != 1:
            raise SystemExit(f"README.md: {len(found)} places marked {name}; expected one")
        head, tail = found[0]
        start = text.index(head) + len(head)
        text = f"{text[:start]}{table()}\n{text[text.index(tail, start) :]}"
    return text


def main() -> None:
    """Renew the tables, or with ``--check`` fail if they are stale."""
    readme = ROOT / "README.md"
    before = readme.read_text()
    after = fill(before)
    if "--check" in sys.argv:
        raise SystemExit(0 if before == after else "README.md: tables are stale; run: python tools/readme_tables.py")
    readme.write_text(after)


if __name__ == "__main__":
    main()
