"""Write how near the hardware's limit ten pieces of work are: a table of docs/performance.md, from committed results.

What a piece of work must take, and what is aimed at, is written here; what was measured is read, with its commit. A
target is met where each of its figures is at most what it must be.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from performance_rows import DEVICE, MISSING, OURS, Row, lines_of

from fastlayers.tuning import rung_at

TUNED = Path(__file__).parents[1] / "src/fastlayers/tuned"
# Without packages a step may take so many times what it takes with them.
ALONE, ALONE_WORDS = 1.05, "torch and Triton alone"
# A run that ended before its last rows, and so is none of the page's: where it has a figure that is the newer one.
# It counts for as long as the page's own rows are of this commit.
SINCE = {"tp8_layer": ("../tp8_layer_gathered_h200", "e95c4025")}
MODELS = {"qwen3_30b_a3b": "Qwen3-30B-A3B", "qwen3_8b": "Qwen3-8B", "gpt_oss_20b": "GPT-OSS-20B"}


@dataclass(frozen=True)
class Figure:
    """A figure, the commit that was measured, and what is to be said of it."""

    value: float
    commit: str
    remark: str = ""


def runs(part: str) -> Iterator[tuple[Row, str]]:
    """Yield the rows of a part that the page's device measured, each with the commit of its run."""
    device = commit = ""
    rows = lines_of(part)
    newer, until = SINCE.get(part, ("", ""))
    if newer and {row["commit"] for row in rows if "command" in row} == {until}:
        rows += lines_of(newer)
    for row in rows:
        head = run if isinstance(run := row.get("run"), dict) else row
        device = head.get("device", head.get("gpu")) or device
        commit = head.get("commit", commit)
        if device.removeprefix("NVIDIA ").split(" ")[0] == DEVICE:
            yield row, commit


def last(part: str, value: Callable[[Row], float | None], remark: str = "") -> Figure | None:
    """Return the last figure that a part's rows have, ``None`` if none has it."""
    found = [(number, commit) for row, commit in runs(part) if (number := value(row)) is not None]
    return Figure(*found[-1], remark) if found else None


def generated(model: str, batch: int, part: str = "generate") -> Figure | None:
    """Return the milliseconds of a token."""
    return last(
        part, lambda row: row.get("tpot_ms") if (row.get("model"), row.get("batch")) == (model, batch) else None
    )


def layer(what: str, count: int, part: str = "") -> Figure | None:
    """Return the microseconds of DeepSeek's layer; without ``part`` with packages, or else without them."""
    if not part:
        alone = layer(what, count, "tp8_layer_alone")
        beside = None if alone is None else Figure(alone.value, alone.commit, ALONE_WORDS)
        return layer(what, count, "tp8_layer") or beside
    name = "tokens" if what == "prefill" else "batch"
    return last(part, lambda row: row["us"] if (row.get("what"), row.get(name)) == (what, count) else None)


def automatic(part: str, model: str, tokens: int, context: int | None = None, *words: str) -> Figure | None:
    """Return the microseconds of what ``auto`` runs at a point; ``words``: of its configuration.

    Where that is a kernel of ours, a run without packages times the same call: its figure then, if there is one.
    """

    def is_it(row: Row) -> bool:
        point = row.get("model"), row.get("tokens"), row.get("context") if context is not None else None
        wanted = row.get("auto") and point == (model, tokens, context) and not row.get("ragged")
        return bool(wanted) and all(word in row["cfg"] for word in words)

    backends = [row["backend"] for row, _ in runs(part) if is_it(row)]
    own = not backends or backends[-1] in OURS
    alone = last(f"{part}_alone", lambda row: row["us"] if is_it(row) else None, ALONE_WORDS) if own else None
    return alone or last(part, lambda row: row["us"] if is_it(row) else None)


def tuned(layer: str, key: str, tokens: int) -> Figure | None:
    """Return the microseconds of what a shipped table takes, as the tuner timed it: for what no run of the page has."""
    path = TUNED / layer / f"{key},device_name={DEVICE}.json"
    if not path.is_file():
        return None
    table = json.loads(path.read_text())
    rung = rung_at(table["ladder"], tokens)
    us = table["times"][rung["backend"]][table["tokens"].index(tokens)]
    return Figure(us, table["metadata"]["commit"], "when tuned")


def patched(model: str) -> Figure | None:
    """Return the milliseconds of a patched model's step, host included."""

    def value(row: Row) -> float | None:
        return row["ms"]["graph"] if (row.get("model"), row.get("batch")) == (model, 1) else None

    return last(f"patch_{model}", value)


@dataclass(frozen=True)
class Target:
    """One row: what each figure must be and what is aimed at, in one unit."""

    work: str
    unit: str
    must: tuple[float, ...]
    aim: tuple[float, ...]
    figures: tuple[Figure | None, ...]

    def measured(self) -> tuple[str, str, bool]:
        """Return what was measured and by which commits, that over what it must be, and whether the target is met."""
        there = [figure for figure in self.figures if figure is not None]
        if not there:
            return MISSING, "", False
        values = " / ".join(MISSING if each is None else number(each.value) for each in self.figures)
        told = dict.fromkeys(", ".join(filter(None, (each.commit, each.remark))) for each in there)
        pairs = list(zip(self.figures, self.must, strict=True))
        ratios = " / ".join("–" if each is None else f"{each.value / must:.2f}" for each, must in pairs)
        met = all(each is not None and each.value <= must for each, must in pairs)
        return f"{values} {self.unit} ({'; '.join(told)})", f"{ratios} ×{', met' * met}", met


def number(value: float) -> str:
    """Return a figure as the table shows it."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 20 else f"{value:.2f}"


def whole_steps() -> list[tuple[str, Figure, Figure]]:
    """Return the whole steps and layers that were timed without packages and with all: what, without, with."""
    found = []
    for model, name in MODELS.items():
        for batch in sorted({row["batch"] for row, _ in runs("generate_alone") if "tpot_ms" in row}):
            pair = generated(model, batch, "generate_alone"), generated(model, batch)
            found.append((f"{name}, batch {batch}", *pair))
    for what, count in (("decode", 1), ("decode", 64), ("decode", 128), ("prefill", 4096)):
        pair = layer(what, count, "tp8_layer_alone"), layer(what, count, "tp8_layer")
        found.append((f"DeepSeek-V3's layer, {what} of {count:,}", *pair))
    return [(what, a, b) for what, a, b in found if a is not None and b is not None]


def single_calls(part: str) -> list[tuple[str, Figure, Figure]]:
    """Return the same of a layer's points."""
    both: list[dict[str, Figure]] = []
    for name in (f"{part}_alone", part):
        rows = ((row, commit) for row, commit in runs(name) if row.get("auto"))
        both.append({row["key"]: Figure(row["us"], commit) for row, commit in rows})
    return [(key, figure, both[1][key]) for key, figure in both[0].items() if key in both[1]]


def within(pairs: Sequence[tuple[str, Figure, Figure]], named: bool) -> str:
    """Return how many are within the bound, and the worst."""
    ratios = {what: a.value / b.value for what, a, b in pairs}
    worst = max(ratios, key=lambda what: ratios[what])
    good = sum(ratio <= ALONE for ratio in ratios.values())
    return f"{good} of {len(ratios)}, worst {ratios[worst]:.2f} ×" + (f" ({worst})" if named else "")


def alone() -> tuple[str, str, bool]:
    """Return the last row's figures: counted are whole steps; calls by themselves stand beside them."""
    steps = whole_steps()
    parts = [f"whole steps: {within(steps, True)}"] if steps else []
    calls = {part: found for part in ("mla", "gqa", "fused_moe") if (found := single_calls(part))}
    parts += [f"calls of {part}: {within(found, False)}" for part, found in calls.items()]
    if not parts:
        return MISSING, "", False
    every = [*steps, *(each for found in calls.values() for each in found)]
    pairs = [(a, b) for _, a, b in every]
    without, beside = (", ".join(dict.fromkeys(pair[i].commit for pair in pairs)) for i in (0, 1))
    text = f"{'; '.join(parts)} (without {without}; with {beside})"
    if not steps:
        return f"{text}; whole steps {MISSING}", "", False
    most = max(a.value / b.value for _, a, b in steps)
    met = most <= ALONE
    return text, f"{most / ALONE:.2f} ×{', met' * met}", met


def rows() -> list[Target]:
    """Return all targets that are times, in their order."""
    oss, tp8, qwen = "openai/gpt-oss-20b tp1", "deepseek-ai/DeepSeek-V3 tp8", "Qwen/Qwen3-30B-A3B-FP8 tp1"
    e4m3 = "kv_dtype=torch.float8_e4m3fn", "fp8_math=False", "page_size=64", "phase='decode'"
    steps = {model: (generated(model, 1), generated(model, 32)) for model in MODELS}
    decode = tuple(layer("decode", batch) for batch in (1, 64, 128))
    experts = (
        automatic("fused_moe", oss, 1),
        automatic("fused_moe", oss, 32) or tuned("fused_moe", "E=32,k=4,D=2880,I=2880,mxfp4,swiglu_oai", 32),
        automatic("fused_moe", tp8, 1, None, "num_shared=0"),
    )  # fmt: skip
    many = automatic("fused_moe", qwen, 4096), automatic("fused_moe", tp8, 4096, None, "num_shared=0")
    attention = layer("attention", 1), automatic("mla", tp8, 128, 4096, *e4m3)
    return [
        Target("generate, Qwen3-30B-A3B bf16, batch 1 / 32", "ms", (1.95, 13.8), (1.9, 13.4), steps["qwen3_30b_a3b"]),
        Target("generate, Qwen3-8B bf16, batch 1 / 32", "ms", (3.75, 4.95), (3.65, 4.7), steps["qwen3_8b"]),
        Target("generate, GPT-OSS-20B MXFP4, batch 1 / 32", "ms", (1.35, 4.3), (1.2, 4.1), steps["gpt_oss_20b"]),
        Target("a layer of DeepSeek-V3 of one rank of eight, 4,096 cached tokens in bf16, batch 1 / 64 / 128", "µs",
               (60, 420, 550), (52, 405, 530), decode),
        Target("the same, a prompt of 4,096", "µs", (1600,), (1450,), (layer("prefill", 4096),)),
        Target("experts: MXFP4 of GPT-OSS-20B, 1 / 32 tokens; FP8 of DeepSeek-V3 of one rank of eight, 1 token", "µs",
               (28, 125, 16), (24, 115, 15), experts),
        Target("MLA decode, 16 heads, 4,096 cached tokens: bf16, batch 1, in a chain; e4m3, batch 128", "µs",
               (9.5, 200), (8, 155), attention),
        Target("FP8 experts, 4,096 tokens: Qwen3-30B-A3B / DeepSeek-V3 of one rank of eight", "µs", (450, 900),
               (430, 850), many),
        Target("patched Hugging Face, batch 1: Qwen3-30B-A3B / Qwen3-8B", "ms", (2.45, 4.05), (2.3, 3.95),
               (patched("qwen3_30b"), patched("qwen3_8b"))),
    ]  # fmt: skip


def limits() -> str:
    """Return the table, and how many targets are met."""
    lines, met = ["| # | work | must | aim | measured | of must |", "|---|---|---|---|---|---|"], []
    targets = rows()
    for index, target in enumerate(targets, 1):
        measured, of_must, good = target.measured()
        must, aim = (" / ".join(f"{each:,g}" for each in given) for given in (target.must, target.aim))
        lines.append(
            f"| {index} | {target.work} | {must} {target.unit} | {aim} {target.unit} | {measured} | {of_must} |"
        )
        met += [index] * good
    measured, of_must, good = alone()
    work = "torch and Triton alone against all packages"
    lines.append(f"| {len(targets) + 1} | {work} | {ALONE} × | 1.0 × | {measured} | {of_must} |")
    met += [len(targets) + 1] * good
    count = f"{len(met)} of {len(targets) + 1} are met" + (f": {', '.join(map(str, met))}" if met else "")
    return "\n".join([*lines, "", f"{count}."])
