"""Write the ablation's table of docs/systems.md from benchmarks/results/ablation_h200.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "systems.md"
RESULTS = ROOT / "benchmarks" / "results" / "ablation_h200.jsonl"
BEGIN, END = "<!-- ablation -->\n", "<!-- /ablation -->"
# Why a ratio is below what its source quotes, which is for a whole model on eight GPUs or four, at other widths.
REASONS = {
    "q_a and kv_a in one product": "all experts and heads are on one GPU here: their weights take most of a step",
    "RoPE and the cache's write in one launch": "as above; GPT-OSS at 32 requests is within the spread",
    "router in one kernel": "at 32 requests reading the experts' weights takes most of a step",
    "dependent launches": "layers of full width wait for their weights, not for launches",
    "captured steps": "at 32 requests the GPU works longer, and the host's time is the same",
    "sinks inside attention": "both ways the sink costs nothing, which is what it is for",
    "norms of q and latent on two streams": "no gain: both norms take less than the spread",
    "routed factor in the sum over experts": "no gain that could be measured",
    "padding kept out of the experts, half of the rows": "GPT-OSS: 16 rows draw 28 of 32 experts: as good as all",
    "tuned experts": "the rule's own choice is within a percent of the table's at these sizes",
    "tuned FP8 products": "without packages the ladder holds our own kernels only",
}


def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the runs' descriptions and their rows."""
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines() if line]
    return [line for line in lines if "what" not in line], [line for line in lines if "what" in line]


def table() -> str:
    """Return the table: an optimisation a line, each model and batch a column."""
    runs, found = rows()
    columns = list(dict.fromkeys((row["model"], row["batch"]) for row in found))
    names = [f"{model.split('/')[1]}, {batch}" for model, batch in columns]
    out = [f"| items | optimisation | quoted | {' | '.join(names)} | where it is less |"]
    out.append("|---|---|---|" + "---|" * (len(columns) + 1))
    for what in dict.fromkeys(row["what"] for row in found):
        cells, first = [], next(row for row in found if row["what"] == what)
        for column in columns:
            row = next(r for r in found if r["what"] == what and (r["model"], r["batch"]) == column)
            cells.append(f"{row['ratio']:.3f}" if "ratio" in row else "")
        out.append(f"| {first['items']} | {what} | {first['quoted']} | {' | '.join(cells)} | {REASONS.get(what, '')} |")
    sources = ", ".join(sorted({f"`{run['command']}`" for run in runs}))
    return "\n".join(out) + f"\n\nMade by {sources}, on {runs[0]['device']}, torch {runs[0]['torch']}.\n"


def written(text: str) -> str:
    """Return the page with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
