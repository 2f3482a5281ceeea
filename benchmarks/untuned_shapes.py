"""Shapes that no table holds: how far from the best backend is what ``auto`` takes, before and after a warm-up's probe?

    python benchmarks/untuned_shapes.py [--layers linear,gqa] [--shapes 16] [--rules] [--out FILE]

Shapes are drawn, always the same, from ranges of real models; each is timed at twelve odd token counts (attention's
decode: requests). A row a shape and count: the ratio of what ``auto`` takes to the best backend's own rule, with the
nearest shape's ladder ("nearest") and with the probed one ("probed"). ``--rules`` needs no GPU: it compares rules for
shapes that are not probed, on the measurements of the shipped tables, each table left out in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fastlayers import tuning
from fastlayers.attention.gqa.config import GQAConfig
from fastlayers.device import DESCRIBED, as_device
from fastlayers.linear.dense.layer import LinearConfig
from fastlayers.linear.fp8_block.layer import FP8LinearConfig
from fastlayers.moe.fused_moe.layer import FusedMoEConfig
from fastlayers.registry import registry
from fastlayers.tuning.bench import describe_run
from fastlayers.tuning.clock import CudaClock
from fastlayers.tuning.probe_shapes import probe_shape
from fastlayers.tuning.samples import Option
from fastlayers.tuning.search import Bench
from fastlayers.tuning.sweep import case_at
from fastlayers.tuning.table import tables_by_key

ODD = (3, 5, 11, 24, 40, 96, 150, 300, 700, 1200, 3000, 5000)
ODD_BATCHES = (1, 2, 3, 5, 6, 11, 24, 40, 52, 75, 96, 120)
NEAR, FAR = 1.15, 1.5


def drawn(layer: str, count: int) -> list[Any]:
    """Return configurations of a layer, between the smallest and the largest of real models, in their usual steps."""
    draw = random.Random(layer)

    def step(low: int, high: int, of: int) -> int:
        return of * round(math.exp(draw.uniform(math.log(low), math.log(high))) / of)

    def one() -> Any:
        if layer == "linear":
            return LinearConfig(step(1024, 16384, 64), step(512, 40960, 64))
        if layer == "fp8_linear":
            return FP8LinearConfig(step(512, 18432, 128), step(512, 36864, 128))
        if layer == "gqa":
            heads, dim = draw.choice((1, 2, 4, 8)), draw.choice((64, 128))
            group, phase = draw.choice((1, 2, 4, 5, 7, 8, 16)), draw.choice(("decode", "extend"))
            context = draw.choice((1024, 4096))
            return GQAConfig(heads * group, heads, dim, dim**-0.5, page_size=64, phase=phase, context=context)
        experts = draw.choice((16, 32, 60, 64, 128))
        return FusedMoEConfig(step(1024, 6144, 128), step(256, 3072, 128), experts, draw.choice((2, 4, 6, 8)))

    found: dict[Any, None] = {}
    while len(found) < count:
        found[one()] = None
    return list(found)


def ratios(bench: Bench, kind: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each token count."""
    choice = registry(bench.layer).choose(bench.cfg, bench.device)
    decode = getattr(bench.cfg, "phase", "") == "decode"
    for tokens in ODD_BATCHES if decode else ODD:
        rung = choice.rung_for(tokens)
        taken = Option(rung.backend.name, rung.config)
        others = [Option(b.name) for b in bench.able() if not choice.refused.get(b.name)]
        timed = bench.ready(case_at(bench.layer, bench.cfg, tokens), list(dict.fromkeys([taken, *others])))
        times = bench.clock.measure({str(option): each for option, each in timed.items()}, 11)
        if str(taken) in times and len(times) > 1:
            best = min(times, key=lambda name: times[name].us)
            row = {"layer": bench.layer, "cfg": repr(bench.cfg), "tokens": tokens, "kind": kind, "taken": str(taken)}
            yield row | {"best": best, "ratio": round(times[str(taken)].us / times[best].us, 4)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many points are near the best, and the worst."""
    found = [row["ratio"] for row in rows]
    worst = max(rows, key=lambda row: row["ratio"])
    return {
        "points": len(found), "near": sum(r <= NEAR for r in found) / len(found), "far": sum(r > FAR for r in found),
        "median": statistics.median(found), "worst": worst["ratio"], "where": f"{worst['cfg']} at {worst['tokens']}",
    }  # fmt: skip


# ---- rules for shapes that are not probed ----------------------------------------------------------------------


def rules(layer: str, neighbours: int = 3) -> dict[str, list[dict[str, Any]]]:
    """Return, by rule, the ratios to the best of each table's points when its shape is served by the other tables."""
    device = DESCRIBED["H200"]
    known = {key: tuning.read_whole(path, layer, device) for key, path in tables_by_key(layer, device)}
    rows: dict[str, list[dict[str, Any]]] = {"nearest ladder": [], "best worst case": []}
    for key, table in known.items():
        far = {other: tuning.distance(key, other) for other in known if other != key}
        near = sorted((d, other) for other, d in far.items() if d is not None)[:neighbours]
        for tokens in table["tokens"] if near else ():
            here = {_option(row): row["us"] for row in table["measured"] if row["tokens"] == tokens}
            rung = tuning.rung_at(known[near[0][1]]["ladder"], tokens)
            worst = _worst_cases([known[other] for _, other in near], tokens)
            steady = min((name for name in worst if (name, "{}") in here), key=lambda name: worst[name])
            for rule, option in (("nearest ladder", _option(rung)), ("best worst case", (steady, "{}"))):
                plain = here.get((option[0], "{}"))
                us = here.get(option, max(tuning.KEPT_WITHIN * min(here.values()), plain) if plain else None)
                if us is not None:
                    row = {"layer": layer, "cfg": key, "tokens": tokens, "ratio": us / min(here.values())}
                    rows[rule].append(row)
    return rows


def _option(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["backend"], json.dumps(row.get("config", {}), sort_keys=True)


def _worst_cases(tables: list[dict[str, Any]], tokens: int) -> dict[str, float]:
    """Return each backend's largest ratio to the best among tables, where all of them timed it."""
    found: dict[str, list[float]] = {}
    for table in tables:
        at = min(range(len(table["tokens"])), key=lambda i: abs(math.log(table["tokens"][i] / tokens)))
        here = {name: us[at] for name, us in table["times"].items() if us[at] is not None}
        for name, us in here.items():
            found.setdefault(name, []).append(us / min(here.values()))
    return {name: max(each) for name, each in found.items() if len(each) == len(tables)}


def main() -> None:
    """Print a line of JSON a row, and a summary of each layer and kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="linear,fp8_linear,gqa,fused_moe")
    parser.add_argument("--shapes", type=int, default=16)
    parser.add_argument("--rules", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines: list[dict[str, Any]] = [describe_run("cpu" if options.rules else "cuda")]
    for layer in options.layers.split(","):
        groups: dict[str, list[dict[str, Any]]] = {}
        if options.rules:
            groups = rules(layer)
        else:
            device, place = as_device("cuda"), torch.device("cuda", 0)
            held = {key for key, _ in tables_by_key(layer, device)}
            for cfg in [cfg for cfg in drawn(layer, options.shapes) if tuning.key_of(cfg) not in held]:
                bench = Bench(layer, cfg, place, CudaClock(place))
                # Probes of earlier runs are not what is asked about.
                tuning.path_of(tuning.probed_dir(), layer, str(tuning.key_of(cfg)), device).unlink(missing_ok=True)
                groups.setdefault("nearest", []).extend(ratios(bench, "nearest"))
                probe_shape(bench, registry(layer).choose(cfg, device), build=False)
                groups.setdefault("probed", []).extend(ratios(bench, "probed"))
        for kind, rows in groups.items():
            lines += [] if options.rules else rows
            if rows:
                lines.append({"summary": f"{layer}, {kind}"} | summary(rows))
                print(json.dumps(lines[-1]), flush=True)
    if options.out is not None:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
