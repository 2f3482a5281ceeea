"""Rows of ``benchmarks/whole_steps.py`` from an experiment's run: ``python tools/steps_of_experiment.py``.

``benchmarks/results/qwen3_8b_steps_h200.jsonl`` timed whole decode steps of Qwen3-8B with choices exchanged, one at a
time and some together. What of it the library's kernels can run becomes the rows that ladders are made of, until the
program itself has been run and takes their place (they bear the name of its part).

Of a count of rows that variant is chosen, of single exchanges and those put together, that gained most; of those
within ``GAIN`` of a step from it, the one that exchanges fewest. Only shapes that it exchanges get a row. ``us_more``
is a single exchange's, the others as installed: together they gain less than their sum, by how much each was not
measured. A rung reaches down to the next count that has a row: where the run timed its option as slower, there is one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from step_ladders import RESULT
from tuned_tables import git

from fastlayers.tuning import rung_at
from fastlayers.tuning.samples import Option
from fastlayers.tuning.sources import Sources

MODEL, PART = "qwen3_8b", "whole_steps.qwen3_8b"
RUN = RESULT.with_name("qwen3_8b_steps_h200.jsonl")
# As in benchmarks/whole_steps.py; what an exchange had to gain by itself to be timed with others, microseconds.
GAIN, SINGLE = 0.003, 4.0
TOGETHER = "best without asking ahead"
CALLS = 36
SHAPES = {
    "qkv": ("linear", "N=6144,K=4096,bfloat16_bfloat16"),
    "o": ("linear", "N=4096,K=4096,bfloat16_bfloat16"),
    "gate_up": ("linear", "N=24576,K=4096,bfloat16_bfloat16"),
    "down": ("linear", "N=4096,K=12288,bfloat16_bfloat16"),
    "attention": ("gqa", "H=32,Hkv=8,D=128,page=64,bfloat16_bfloat16,decode,ctx=1024"),
}
TARGETS = {
    "linear": {"torch": "linear.dense.torch:TorchLinear", "triton": "linear.dense.triton:TritonLinear"},
    "gqa": {"triton": "attention.gqa.triton:TritonGQA"},
}
SPLITS = {"qkv": 2, "o": 4, "gate_up": 1, "down": 4}


def _option(backend: str, **config: int) -> Option:
    return Option(backend, tuple(sorted(config.items())))


def tile(rows: int, splits: int) -> Option:
    """Return the run's tiles of 64 outputs by 128."""
    sizes = {"BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": 128, "SPLITS": splits}
    return _option("triton", VECTOR=0, **sizes, num_warps=4, num_stages=4)


def exchanges(rows: int) -> dict[str, tuple[str, Option]]:
    """Return what the run exchanged by itself and the library can run: by its name there the product and the option."""
    own = 16 if rows <= 16 else 32
    found = {f"{part} torch": (part, Option("torch")) for part in SPLITS}
    found |= {f"{part} tile": (part, tile(own, splits)) for part, splits in SPLITS.items()}
    found["qkv tile s2"] = ("qkv", tile(own, 2))
    found["down 64x64 s2 (old table)"] = ("down", tile(64, 2))
    found["o vector"] = ("o", _option("triton", VECTOR=1, BLOCK_N=4, BLOCK_K=512, AHEAD=1, num_warps=4))
    for n, warps, stages in ((64, 4, 4), (64, 2, 4), (32, 2, 6), (64, 4, 6)):
        keys = {"BLOCK_N": n, "PROGRAMS": 132, "MIN_KEYS": 2048, "MAX_KEYS": 2048}
        name = f"attention {n} {warps} warps {stages} stages"
        found[name] = ("attention", _option("triton", **keys, num_warps=warps, num_stages=stages))
    return found


def chosen_of(rows: int, alone: Mapping[str, Any], together: Mapping[str, Any]) -> tuple[dict[str, str], float, float]:
    """Return by product the exchange that is chosen, and what a step took as installed and with them."""
    known = {name: part for name, (part, _) in exchanges(rows).items() if name in alone["us"]}
    gains = {name: alone["us"][name][1] for name in known}
    best: dict[str, str] = {}  # what the run took together: of each product the exchange that gained most
    for name in sorted(known, key=lambda name: gains[name]):
        if gains[name] > SINGLE:
            best[known[name]] = name
    variants = [({known[n]: n}, alone["base_us"], alone["us"][n][0]) for n in known]
    variants.append((best, together["base_us"], together["us"][TOGETHER][0]))
    top = max(before - after for _, before, after in variants)
    least = top - GAIN * alone["base_us"]
    return min((v for v in variants if v[1] - v[2] >= least), key=lambda v: (len(v[0]), v[2] - v[1]))


def installed_of(commit: str, layer: str, key: str, rows: int) -> Option:
    """Return what the shape's table chose at a commit."""
    path = f"src/fastlayers/tuned/{layer}/{key},device_name=H200.json"
    ladder = json.loads(git("show", f"{commit}:{path}"))["ladder"]
    return Option.of(rung_at(ladder, rows))


def hashes_of(commit: str) -> dict[str, dict[str, str]]:
    """Return the hashes of a commit's kernels."""
    names = set(git("ls-tree", "-r", "--name-only", commit, "src").splitlines())

    def read(name: str) -> tuple[str, bool] | None:
        base = "src/" + name.replace(".", "/")
        for path, package in ((f"{base}/__init__.py", True), (f"{base}.py", False)):
            if path in names:
                return git("show", f"{commit}:{path}"), package
        return None

    sources = Sources(read)
    return {
        layer: {name: sources.kernel_hash(f"fastlayers.{target}") for name, target in targets.items()}
        for layer, targets in TARGETS.items()
    }


def _row(rows: int, part: str, hashes: Mapping[str, Any], gains: Mapping[Option, float], best: float) -> dict[str, Any]:
    layer, key = SHAPES[part]
    told = [
        {"backend": o.backend, "us_more": round((best - gain) / CALLS, 3)}
        | ({"config": dict(o.config)} if o.config else {})
        for o, gain in gains.items()
    ]
    kernels = {name: hashes[layer][name] for name in sorted({o.backend for o in gains})}
    about = {"model": MODEL, "rows": rows, "layer": layer, "key": key, "calls": CALLS}
    return about | {"options": told, "kernels": kernels}


def of_rows(
    rows: int, commit: str, hashes: Mapping[str, Any], stages: Mapping[Any, Any], above: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield what the run says of one count of rows; ``above``: what was chosen at the next more."""
    alone, together = stages["decode", rows], stages["decode together", rows]
    chosen, before, after = chosen_of(rows, alone, together)
    if before - after < GAIN * before:
        return
    for part, name in chosen.items():
        layer, key = SHAPES[part]
        installed = installed_of(commit, layer, key, rows)
        gains: dict[Any, float] = {}
        for other, (place, option) in exchanges(rows).items():
            if place == part and other in alone["us"] and option != installed:
                gains.setdefault(option, alone["us"][other][1])
        option, gain = exchanges(rows)[name][1], alone["us"][name][1]
        more = {option: gain, installed: 0.0, **gains}
        yield _row(rows, part, hashes, more, gain)
    for part, name in above.items():
        if part not in chosen and (cost := -alone["us"].get(name, (0, 0))[1]) > GAIN * alone["base_us"]:
            layer, key = SHAPES[part]
            more = {installed_of(commit, layer, key, rows): 0.0, exchanges(rows)[name][1]: -cost}
            yield _row(rows, part, hashes, more, 0.0)
    yield {"model": MODEL, "rows": rows, "installed_us": before, "chosen_us": after}


def converted(run: Path = RUN) -> list[dict[str, Any]]:
    """Return the rows, behind a head that says which run they are of."""
    head, *lines = (json.loads(line) for line in run.read_text().splitlines())
    stages = {(line["stage"], line["rows"]): line for line in lines if "rows" in line and "us" in line}
    told = {name: head[name] for name in ("commit", "sources", "torch", "device")}
    about = f"an experiment's run, {run.name}, by tools/{Path(__file__).name}; us_more by single exchanges"
    found = [{"command": "python products.py --seconds 195", **told, "part": PART, "about": about}]
    hashes = hashes_of(head["commit"])
    above: dict[str, str] = {}
    for rows in sorted({rows for stage, rows in stages if stage == "decode together"}, reverse=True):
        found += of_rows(rows, head["commit"], hashes, stages, above)
        above = chosen_of(rows, stages["decode", rows], stages["decode together", rows])[0]
    return found


def main() -> None:
    """Write them; rows of a run of the program itself are not replaced."""
    lines = [json.loads(line) for line in RESULT.read_text().splitlines()] if RESULT.is_file() else []
    if any("about" not in line for line in lines if line.get("part") == PART):
        raise SystemExit(f"{RESULT.name} holds a run of benchmarks/whole_steps.py: {PART}")
    if any(line.get("part") != PART for line in lines if "part" in line):
        raise SystemExit(f"{RESULT.name} holds other parts, too: they would be lost")
    RESULT.write_text("".join(json.dumps(row) + "\n" for row in converted()))


if __name__ == "__main__":
    main()
