"""Write what docs/systems.md says from results: its tables of the ablation and of figures, and states that follow."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in ("models", "server"))]
from ablation_rows import Column, Row, noise, of_last_commit, ratio_of, rows  # noqa: E402
from result_origins import listed  # noqa: E402
from systems_figures import OFF_BY_DEFAULT  # noqa: E402
from systems_items import FIGURES  # noqa: E402

from fastlayers_server.ablation import SWITCHES, undecided  # noqa: E402

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "systems.md"
RESULTS = ROOT / "benchmarks" / "results" / "ablation_h200.jsonl"
MISSING = "not measured yet"
# Why a ratio is below what its source quotes, which is for a whole model on eight GPUs or four, at other widths.
REASONS = {
    "q_a and kv_a in one product": "all experts and heads are on one GPU here: their weights take most of a step",
    "RoPE and the cache's write in one launch": "as above",
    "router in one kernel": "at 32 requests reading the experts' weights takes most of a step",
    "dependent launches": "layers of full width wait for their weights, not for launches",
    "captured steps": "at 32 requests the GPU works longer, and the host's time is the same",
    "sinks inside attention": "without: no sink at all, so that this is what a sink costs",
    "norms of q and latent on two streams": "both norms take a microsecond",
    "padding kept out of the experts, half of the rows": "GPT-OSS: 16 rows draw 28 of 32 experts: as good as all",
    "tuned experts": "quoted at 512 tokens, which no run here has; at 1 and 32 the rule's own choice is nearly "
    "the table's",
    **OFF_BY_DEFAULT,
    "tuned FP8 products": "without packages the ladder holds our own kernels only",
}


def table() -> str:
    """Return the table: an optimisation a line, each model and batch a column."""
    runs, found = rows(RESULTS)
    used = set[int]()
    columns = list(dict.fromkeys((row["model"], row["batch"]) for row in found))
    names = [f"{model.split('/')[1]}, {batch}" for model, batch in columns]
    out = [f"| items | optimisation | quoted | {' | '.join(names)} | where it is less |"]
    out.append("|---|---|---|" + "---|" * (len(columns) + 1))
    apart = {column: noise(runs, found, column) for column in columns}
    for what in dict.fromkeys(row["what"] for row in found):
        cells, first = [], next(row for row in found if row["what"] == what)
        measured = {column: of_last_commit(runs, found, what, column) for column in columns}
        for column, own in measured.items():  # a run of an earlier commit has no row of a switch that came since
            far = f" ± {apart[column][2]:.1%}" if apart[column][2] else ""
            cells.append(f"{ratio_of(own):.3f}{far}" if own else "")
            used |= {row["run"] for row in own}
        reason = "; ".join(filter(None, [_within(measured, apart), REASONS.get(what, "")]))
        out.append(f"| {first['items']} | {what} | {first['quoted']} | {' | '.join(cells)} | {reason} |")
    known = {row["what"] for row in found}
    for switch in SWITCHES:
        if switch.what not in known:
            blank = " | ".join([""] * len(columns))
            out.append(f"| {switch.items} | {switch.what} | {switch.quoted} | {blank} | {MISSING} |")
    sources = ", ".join(f"`{runs[each]['command']}` at {runs[each]['commit']}" for each in sorted(used))
    spans = [
        f"{name}: {low:.1f} to {high:.1f} µs, {far:.1%}"
        for name, (low, high, far) in zip(names, apart.values(), strict=True) if high
    ]  # fmt: skip
    told = '"An image": the source shows the ratio in a picture. Of several runs at one commit the median counts.'
    if spans:
        told += " Each line captures both ways anew, and captures of one step differ: the step with everything on lay "
        told += (
            f"between these, and captures of any one step so far apart: {'; '.join(spans)}. That stands behind each "
        )
        told += 'ratio ("±"), also of lines that were steadier; one that is no further from 1 decides nothing.'
    return "\n".join(out) + f"\n\n{told}\n\nMade by {sources}, on {runs[0]['device']}, torch {runs[0]['torch']}.\n"


def _within(measured: dict[Column, list[Row]], apart: dict[Column, tuple[float, float, float]]) -> str:
    """Return of which columns a line's ratio is nearer to 1 than captures of one step are to each other, or below."""
    found: dict[str, list[str]] = {"decides nothing": [], "slower with it": []}
    for (model, batch), own in measured.items():
        far = apart[model, batch][2]
        within = bool(own) and undecided(ratio_of(own), far)
        if within or (far and own and ratio_of(own) < 1):
            found["decides nothing" if within else "slower with it"].append(f"{model.split('/')[1]} {batch}")
    return "; ".join(f"{words}: {', '.join(names)}" for words, names in found.items() if names)


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
    text = stated(text, states)
    if origins := listed(text):
        made += f"\n{origins}\n"
    for name, told in (("ablation", table()), ("figures", made)):
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + told + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
