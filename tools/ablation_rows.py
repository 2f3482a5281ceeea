"""What the ablation's result says: ratios of its last commit, and how far captures of one step lie apart."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

ABSORBED_CODES = "absorbed products of FP8 codes, not of a bf16 copy"
# Lines whose way "with" is another step than the others': timed from the host, or of other rows or weights.
OTHER_STEPS = (
    "captured steps", "padding kept out of the experts, half of the rows", "shared expert among the routed",
    ABSORBED_CODES,
)  # fmt: skip
Row = dict[str, Any]
Column = tuple[str, int]  # a model and a batch


def rows(path: Path) -> tuple[list[Row], list[Row]]:
    """Return the runs' descriptions and their rows, each with the place of its run among them."""
    runs, found = list[Row](), list[Row]()
    lines = path.read_text().splitlines() if path.is_file() else []
    for line in map(json.loads, filter(None, lines)):
        if "what" in line:
            found.append(line | {"run": len(runs) - 1})
        else:
            runs.append(line)
    return runs, found


def of_last_commit(runs: list[Row], found: list[Row], what: str, column: Column) -> list[Row]:
    """Return the rows of a line and column that have a ratio, of all runs at the commit that measured it last."""
    own = [row for row in found if row["what"] == what and (row["model"], row["batch"]) == column and "ratio" in row]
    commits = [runs[row["run"]]["commit"] if runs else "" for row in own]
    return [row for row, commit in zip(own, commits, strict=True) if commit == commits[-1]]


def ratio_of(measured: list[Row]) -> float:
    """Return the ratio that counts of several runs."""
    return float(statistics.median(row["ratio"] for row in measured))


def noise(runs: list[Row], found: list[Row], column: Column) -> tuple[float, float, float]:
    """Return between which microseconds captures of the step with everything on lie, and how far any such lie apart.

    The last is a share: over the lines that time one step, and over the runs of each line that times another one.
    """
    groups: dict[str, list[float]] = {}
    for what in dict.fromkeys(row["what"] for row in found):
        group = what if what in OTHER_STEPS else ""
        own = of_last_commit(runs, found, what, column)
        groups.setdefault(group, []).extend(row["on_us"] for row in own if "on_us" in row)
    common = groups.get("", [])
    apart = max((max(times) / min(times) - 1 for times in groups.values() if times), default=0.0)
    return (min(common), max(common), apart) if common else (0.0, 0.0, apart)
