"""Write what docs/systems.md says from results: its tables of the ablation and of figures, and states that follow."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in ("models", "server"))]
from systems_figures import OFF_BY_DEFAULT  # noqa: E402
from systems_items import FIGURES  # noqa: E402

from fastlayers_server.ablation import SWITCHES  # noqa: E402

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "systems.md"
RESULTS = ROOT / "benchmarks" / "results" / "ablation_h200.jsonl"
MISSING = "not measured yet"
# Why a ratio is below what its source quotes, which is for a whole model on eight GPUs or four, at other widths.
REASONS = {
    "q_a and kv_a in one product": "all experts and heads are on one GPU here: their weights take most of a step",
    "RoPE and the cache's write in one launch": "as above; GPT-OSS at 32 requests is within the spread",
    "router in one kernel": "at 32 requests reading the experts' weights takes most of a step",
    "dependent launches": "layers of full width wait for their weights, not for launches",
    "captured steps": "at 32 requests the GPU works longer, and the host's time is the same",
    "sinks inside attention": "both ways the sink costs nothing, which is what it is for",
    "norms of q and latent on two streams": "no gain that could be measured: both norms take a microsecond",
    "routed factor in the sum over experts": "no gain that could be measured",
    "padding kept out of the experts, half of the rows": "GPT-OSS: 16 rows draw 28 of 32 experts: as good as all",
    "tuned experts": "the rule's own choice is within a percent of the table's at these sizes",
    "activation that writes FP8 rows": "no gain that could be measured",
    **OFF_BY_DEFAULT,
    "tuned FP8 products": "without packages the ladder holds our own kernels only",
}
# Lines whose way "with" is another step than the others': timed from the host, of fewer rows, or off by default.
OTHER_STEPS = {
    "captured steps", "padding kept out of the experts, half of the rows", "shared expert among the routed",
    *OFF_BY_DEFAULT,
}  # fmt: skip


def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the runs' descriptions and their rows, each with the place of its run among them."""
    runs, found = list[dict[str, Any]](), list[dict[str, Any]]()
    for line in map(json.loads, filter(None, RESULTS.read_text().splitlines())):
        if "what" in line:
            found.append(line | {"run": len(runs) - 1})
        else:
            runs.append(line)
    return runs, found


def table() -> str:
    """Return the table: an optimisation a line, each model and batch a column."""
    runs, found = rows()
    used = set[int]()
    columns = list(dict.fromkeys((row["model"], row["batch"]) for row in found))
    names = [f"{model.split('/')[1]}, {batch}" for model, batch in columns]
    out = [f"| items | optimisation | quoted | {' | '.join(names)} | where it is less |"]
    out.append("|---|---|---|" + "---|" * (len(columns) + 1))
    for what in dict.fromkeys(row["what"] for row in found):
        cells, first = [], next(row for row in found if row["what"] == what)
        for column in columns:
            # A run of an earlier commit has no row of a switch that came since.
            # Of several runs the last counts.
            row = next((r for r in found[::-1] if r["what"] == what and (r["model"], r["batch"]) == column), {})
            cells.append(f"{row['ratio']:.3f}" if "ratio" in row else "")
            used |= {row["run"]} if "ratio" in row else set()
        out.append(f"| {first['items']} | {what} | {first['quoted']} | {' | '.join(cells)} | {REASONS.get(what, '')} |")
    measured = {row["what"] for row in found}
    for switch in SWITCHES:
        if switch.what not in measured:
            blank = " | ".join([""] * len(columns))
            out.append(f"| {switch.items} | {switch.what} | {switch.quoted} | {blank} | {MISSING} |")
    sources = ", ".join(f"`{runs[each]['command']}` at {runs[each]['commit']}" for each in sorted(used))
    apart = [f"{name}: {far}" for name, column in zip(names, columns, strict=True) if (far := _apart(found, *column))]
    told = "Each line captures both ways anew, and captures of one step differ. The step with everything on took, in "
    told += f"µs, {'; '.join(apart)}. A ratio nearer to 1 than that says nothing."
    return "\n".join(out) + f"\n\n{told}\n\nMade by {sources}, on {runs[0]['device']}, torch {runs[0]['torch']}.\n"


def _apart(found: list[dict[str, Any]], model: str, batch: int) -> str:
    """Return between which times captures of the same step lay, one a line of the table; empty: nothing was timed."""
    own = [row for row in found if (row["model"], row["batch"]) == (model, batch) and "on_us" in row]
    times = sorted(row["on_us"] for row in own if row["what"] not in OTHER_STEPS)
    return f"{times[0]:.1f} to {times[-1]:.1f} ({times[-1] / times[0] - 1:.1%})" if times else ""


def figures() -> tuple[str, dict[int, tuple[str, str]]]:
    """Return the table of figures, and of items with all of theirs (evidence, state)."""
    out, states = ["| # | figure | measured | what falls short |", "|---|---|---|---|"], {}
    for item in sorted({figure.item for figure in FIGURES}):
        own = [(figure, figure.find()) for figure in FIGURES if figure.item == item]
        for figure, found in own:
            measured, *lacks = found or (MISSING, "")
            out.append(f"| {item} | {figure.what} | {measured} | {'; '.join(filter(None, lacks))} |")
        if all(found is not None for _, found in own):
            short = "; ".join(found.missing for _, found in own if found is not None and found.missing)
            evidence = " ".join(f"`{figure.evidence}`" for figure, _ in own)
            states[item] = evidence, f"not done: {short}" if short else "done"
    return "\n".join(out) + "\n", states


def stated(text: str, states: dict[int, tuple[str, str]]) -> str:
    """Return the page with the evidence and the states that follow from figures."""
    systems, ablation, rest = text.partition("\n## Ablation")
    lines = systems.split("\n")
    for index, line in enumerate(lines):
        if (found := re.match(r"\| (\d+) \|", line)) is None or int(found[1]) not in states:
            continue
        *cells, evidence, _ = line.removesuffix(" |").split(" | ")
        figure, state = states[int(found[1])]
        before = "" if evidence.startswith("none:") else evidence
        new = [each for each in re.findall(r"`[^`]+`", figure) if each not in before]
        lines[index] = " | ".join([*cells, " ".join(filter(None, [before, *new])), state]) + " |"
    return "\n".join(lines) + ablation + rest


def written(text: str) -> str:
    """Return the page with its tables and states as they should be."""
    made, states = figures()
    for name, told in (("ablation", table()), ("figures", made)):
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + told + end + rest.partition(end)[2]
    return stated(text, states)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
