"""Read the committed results that docs/performance.md is made of, and what vLLM took."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "performance"
DEVICE = "H200"
Row = dict[str, Any]
# What vLLM 0.22.1 took on an H200: the lines that benchmarks/peers/bench_vllm.py printed, by model and case.
PEERS = {
    (row["model"].replace("-", "_").removesuffix("_mxfp4"), row["case"]): row
    for row in map(json.loads, (ROOT / "benchmarks/peers/vllm-0.22.1-h200.jsonl").read_text().splitlines())
}
# Milliseconds per output token, by model and batch.
VLLM = {
    (model, batch): round(PEERS[model, case]["tpot_ms"], 2)
    for model in ("qwen3_30b_a3b", "qwen3_8b", "gpt_oss_20b") for case, batch in (("bs1", 1), ("c32", 32))
}  # fmt: skip
MISSING = "not measured yet"
# Backends whose kernels are this project's; triton_kernels is a package.
OURS = ("triton", "triton_swizzled", "gluon", "wgmma")
# Parts whose points are single calls of layers.
CALLS = ("fp8_linear", "fused_moe", "mla", "gqa", "small_ops")


def read(part: str) -> list[Row]:
    """Return the rows of a part, ``[]`` if it was not measured; of several runs of a point the last counts, whole.

    A line that names a device heads those below it, the first one those above it, too: what another device than the
    page's measured is left out.
    """
    path = RESULTS / f"{part}.jsonl"
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    kept: list[Row] = []
    heads = [run if isinstance(run := row.get("run", row), dict) else {} for row in rows]
    named = [head.get("device", head.get("gpu")) for head in heads]
    device = next(filter(None, named), "")
    for row, name in zip(rows, named, strict=True):
        device = name or device
        if device.removeprefix("NVIDIA ").split(" ")[0] != DEVICE:
            continue
        kept.append(row)
    return last_runs(kept)


def last_runs(rows: Iterable[Row]) -> list[Row]:
    """Return rows without those of points that a later run has, whose backends and configurations may be others."""
    numbered, last, run = list[tuple[int, Row]](), dict[str, int](), 0
    for row in rows:
        run += "run" in row
        numbered.append((run, row))
        if "key" in row:
            last[row["key"]] = run
    kept: dict[Any, Row] = {}
    for index, (run, row) in enumerate(numbered):
        if "key" not in row:
            kept[index] = row
        elif last[row["key"]] == run:
            kept[row["key"], row["backend"], json.dumps(row["config"])] = row
    return list(kept.values())


def points(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the measured rows by point (shape, tokens, context)."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if "key" in row:
            found[row["key"]].append(row)
    return dict(found)


def lines_of(part: str) -> list[Row]:
    """Return all rows of a part's file, ``[]`` if it was not measured."""
    path = RESULTS / f"{part}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.is_file() else []


def files() -> list[Path]:
    """Return the parts' files."""
    return sorted(RESULTS.glob("*.jsonl"))
