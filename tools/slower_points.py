"""Points of docs/performance.md at which something that was timed beat what ``auto`` took: packages', and our own."""

from __future__ import annotations

import json
from collections.abc import Callable

from performance_rows import CALLS, OURS, Row, points, read

# By how much another of our own rows must be faster: less is what runs of one call differ by.
BEATEN = 1.05


def pairs(part: str, own: bool) -> list[tuple[float, Row, Row]]:
    """Return for each point of a part: the ratio, what ``auto`` took, and the fastest other, of ours or not."""
    found = []
    for rows in points(read(part)).values():
        taken = next((row for row in rows if row["auto"]), None)
        others = [row for row in rows if (row["backend"] in OURS) == own and not (own and row is taken)]
        if taken is not None and others:
            best = min(others, key=lambda row: row["us"])
            found.append((taken["us"] / best["us"], taken, best))
    return found


def how(row: Row) -> str:
    """Return a row's backend and configuration."""
    if row["config"]:
        told = json.dumps(row["config"]).strip("{}").replace('"', "")
        return f"{row['backend']} ({told})"
    return f"{row['backend']} (by its rule)" if row["backend"] in OURS else str(row["backend"])


def table(own: bool, most: float, shape_of: Callable[[Row], str]) -> str:
    """A line a point at which ``auto`` took more than ``most`` times the fastest other, the worst first."""
    every = [each for part in CALLS for each in pairs(part, own)]
    lines = ["| shape | tokens | context | auto | µs | faster | µs | ratio |", "|---|---|---|---|---|---|---|---|"]
    slower = sorted((each for each in every if each[0] > most), key=lambda each: -each[0])
    for ratio, taken, best in slower:
        context = str(taken["context"]) if taken["layer"] in ("mla", "gqa") and "decode" in taken["cfg"] else ""
        cells = [shape_of(taken), str(taken["tokens"]), context, how(taken), f"{taken['us']:.1f}", how(best),
                 f"{best['us']:.1f}", f"{ratio:.2f}"]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    whose = "where another of our own rows was timed" if own else "with a peer"
    told = f"{len(slower)} of {len(every)} points {whose}."
    return "\n".join([*lines, "", told]) if slower else told
