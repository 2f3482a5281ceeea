"""Simulate steps on more GPUs than two, and write what comes out to benchmarks/results and docs/distributed.md.

``python tools/simulate_splits.py [--check]``. What is measured comes from benchmarks/results/two_gpus_*; the simulation
is fastlayers.testing.overlap_sim. Nothing is measured here, and each sentence it writes says "simulated" or "measured".
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fastlayers.moe.placement.planner import EplbConfig
from fastlayers.testing.overlap_sim import (
    MODELS,
    Calibration,
    ModelSize,
    Split,
    calibrate,
    link_us,
    memory_bytes,
    splits_of,
    step_ms,
    varied,
)

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FILE, PAGE = RESULTS / "simulated_splits.json", ROOT / "docs" / "distributed.md"
DECODE, ROWS = "two_gpus_decode_h200.jsonl", "two_gpus_rows_h200.jsonl"
SLICES, MANY = "two_gpus_slice_h200.jsonl", 64
COPY, EXPERTS = "performance/patch_qwen3_30b.jsonl", "performance/fused_moe.jsonl"
CONTEXTS, BATCHES, GPUS = (88, 4096), (1, 16, 64, 256), (1, 2, 4, 8)
# DeepEP's low-latency combine, 128 tokens of 7168 in bf16, top 8 (its README): not measured here.
PUBLISHED = {16: 195.0, 32: 273.0, 64: 314.0}
# GPUs, redundant experts; where 256 experts do not divide, the slots without a plan hold them in turn.
BALANCED = ((8, 32), (16, 32), (32, 32), (64, 64), (72, 32))


def read(name: str) -> list[dict[str, Any]]:
    """Return the rows of a committed result."""
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines() if line.strip()]


def calibrated() -> Calibration:
    """Return what committed results say of one and two GPUs."""
    rate = next(row["copy_tb_s"] for row in read(COPY) if "copy_tb_s" in row) * 1e12
    best = {1: 0.0, 2: 0.0}
    for row in read(EXPERTS):
        width = 1 if "quant='fp8_block'" in row.get("key", "") else 2 if "quant='none'" in row.get("key", "") else 0
        if width and not row.get("peer") and "tflops" in row:
            best[width] = max(best[width], row["tflops"] * 1e12)
    return calibrate(read(DECODE), read(ROWS), rate, best)


def accepted(found: Calibration) -> list[dict[str, Any]]:
    """Return every measured step of two GPUs beside its simulation; ``used``: the calibration has seen it."""
    made = []
    for row in read(DECODE):
        if row.get("what") == "decode" and row["ranks"] > 1:
            split, batch, ms = Split(row["ranks"], nccl=row["seam"] == "nccl"), row["batch"], row["device_ms"]
            used = bool(row.get("early"))
        elif row.get("what") == "decode_groups":
            split, batch, ms = Split(row["ranks"] // row["dp"], row["dp"], row["ep"]), row["requests"], row["tpot_ms"]
            used = batch == row["dp"]
        else:
            continue
        simulated = step_ms(MODELS[row["model"]], split, batch, found)
        made.append({
            "model": row["model"], "split": str(split), "links": "NCCL" if split.nccl else "symmetric memory",
            "batch": batch, "measured_ms": ms, "simulated_ms": round(simulated, 3),
            "error": round(simulated / ms - 1, 4), "used": used,
        })  # fmt: skip
    return made


def sliced(found: Calibration) -> list[dict[str, Any]]:
    """Return every measured step of eight layers of DeepSeek-V3 beside its simulation; the calibration saw none."""
    made, model = [], replace(MODELS["deepseek_v3"], layers=8, dense_layers=0)
    for row in read(SLICES):
        if row.get("what") == "decode":
            split, batch, ms = Split(row["ranks"], nccl=row["seam"] == "nccl"), row["batch"], row["device_ms"]
        elif row.get("what") == "decode_groups":
            split, batch, ms = Split(row["ranks"] // row["dp"], row["dp"], row["ep"]), row["requests"], row["tpot_ms"]
        else:
            continue
        context = CONTEXTS[0] if row["prompt"] < CONTEXTS[0] else row["prompt"]
        simulated = step_ms(model, split, batch, found, context=context)
        made.append({
            "split": str(split), "links": "NCCL" if split.nccl else "symmetric memory", "batch": batch,
            "context": context, "measured_ms": ms, "simulated_ms": round(simulated, 3),
            "error": round(simulated / ms - 1, 4),
        })  # fmt: skip
    return made


def best_splits(found: Calibration, others: Sequence[Calibration]) -> list[dict[str, Any]]:
    """Return the quickest split for each model, context, batch and number of GPUs that holds it."""
    made = []
    for name, model in MODELS.items():
        for context in CONTEXTS:
            for batch in BATCHES:
                for gpus in GPUS:
                    each = [
                        split for split in splits_of(model, gpus)
                        if memory_bytes(model, split, batch, context) <= found.assumed.memory
                    ]  # fmt: skip
                    row: dict[str, Any] = {"model": name, "context": context, "batch": batch, "gpus": gpus}
                    if each:
                        ms = {split: step_ms(model, split, batch, found, context=context) for split in each}
                        best = min(each, key=lambda split: ms[split])
                        spread = [step_ms(model, best, batch, other, context=context) for other in others]
                        row |= {
                            "split": str(best), "ms": round(ms[best], 2),
                            "range_ms": [round(min(spread), 2), round(max(spread), 2)],
                        }  # fmt: skip
                    made.append(row)
    return made


def _ratio(found: Calibration, others: Sequence[Calibration], ms: Callable[[Calibration, bool], float]) -> Any:
    """Return by how much a step with it is quicker than without, and the range over other calibrations."""
    gains = [ms(each, False) / ms(each, True) - 1 for each in (found, *others)]
    return {"gain": round(gains[0], 3), "range": [round(min(gains), 3), round(max(gains), 3)]}


def balanced(found: Calibration, others: Sequence[Calibration], model: ModelSize) -> list[dict[str, Any]]:
    """Return what expert placement gains with 128 requests a GPU."""
    made = []
    for gpus, spare in BALANCED:
        split, plain = Split(1, gpus, gpus, "all_to_all"), 256 % gpus == 0
        never = None if plain else EplbConfig(num_redundant_experts=spare, min_gain=1e9)
        for zipf in (0.0, 0.5, 1.0):

            def ms(each: Calibration, on: bool, zipf: float = zipf, split: Split = split, spare: int = spare,
                   never: EplbConfig | None = never) -> float:  # fmt: skip
                eplb = EplbConfig(num_redundant_experts=spare) if on else never
                return step_ms(model, split, 128 * split.dp, each, context=4096, zipf=zipf, eplb=eplb)

            made.append({"gpus": gpus, "redundant": spare, "zipf": zipf, **_ratio(found, others, ms)})
    return made


def overlapped(found: Calibration, others: Sequence[Calibration], model: ModelSize) -> list[dict[str, Any]]:
    """Return what two batches that overlap gain."""
    made = []
    for gpus in (8, 16, 32, 64):
        split = Split(1, gpus, gpus, "all_to_all")
        for rows in (32, 128, 256):

            def ms(each: Calibration, on: bool, rows: int = rows, split: Split = split) -> float:
                return step_ms(model, split, rows * split.dp, each, context=4096, overlap=on)

            made.append({"gpus": gpus, "requests_of_a_gpu": rows, **_ratio(found, others, ms)})
    return made


def simulate() -> dict[str, Any]:
    """Return the result file."""
    found = calibrated()
    others, model = varied(found), MODELS["deepseek_v3"]
    return {
        "what": "simulated steps; measured are two GPUs only",
        "command": "python tools/simulate_splits.py",
        "from": [DECODE, ROWS, COPY, EXPERTS, SLICES],
        "calibration": asdict(found),
        "accepted": accepted(found),
        "slices": sliced(found),
        "published_combine": [
            {"gpus": n, "published_us": us, "simulated_us": round(link_us(found, "combine", 7168, 128, n), 1)}
            for n, us in PUBLISHED.items()
        ],
        "splits": best_splits(found, others),
        "placement": balanced(found, others, model),
        "overlap": overlapped(found, others, model),
    }


# ---- the page --------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def page(result: dict[str, Any]) -> str:
    """Return the section of docs/distributed.md."""
    errors = [row["error"] for row in result["accepted"]]
    unseen = [row["error"] for row in result["accepted"] if not row["used"]]
    many, few = ([row["error"] for row in result["slices"] if (row["batch"] >= MANY) == each] for each in (True, False))
    measured = {
        (row["model"], row["batch"]): row for row in result["accepted"]
        if row["links"] == "symmetric memory" and row["split"] == "tp=2" and row["used"]
    }  # fmt: skip
    single = {(r["model"], r["batch"]): r["device_ms"] for r in read(DECODE) if r.get("ranks") == 1 and "batch" in r}
    parts = [
        "`python tools/simulate_splits.py` simulated what follows (`fastlayers.testing.overlap_sim`, "
        "`benchmarks/results/simulated_splits.json`): the stages of each layer on every rank's compute unit and "
        f"link, with what one and two H200s took. Of {len(errors)} steps that were measured on two GPUs the "
        f"simulated times differ by {max(map(abs, errors)):.1%} at most, and of the {len(unseen)} that the "
        f"calibration has not seen the simulated times differ by {max(map(abs, unseen)):.1%}; all of these are "
        f"Qwen3's. Eight layers of DeepSeek-V3 in FP8 (`{SLICES}`), of which it has seen none, are simulated with "
        f"{min(many):+.1%} to {max(many):+.1%} from {MANY} requests on, but with {min(few):+.1%} to {max(few):+.1%} of "
        "fewer, where launches wait for each other in ways that are not simulated: DeepSeek-V3's times of 1 and of 16 "
        "requests are simulated too short. What lies beyond "
        "eight GPUs of one host is simulated with constants of a network that nobody measured here; combines of 128 "
        "tokens over 16 to 64 GPUs, simulated, take "
        + ", ".join(f"{r['simulated_us']:.0f}" for r in result["published_combine"])
        + " µs where DeepEP publishes "
        + ", ".join(f"{r['published_us']:.0f}" for r in result["published_combine"])
        + ". Exchange of tokens inside a model was never measured, and overlap on two GPUs only, which the calibration "
        "has not seen: both are simulated here.",
        "Milliseconds of a decode step of so many requests in all, by the quickest split; simulated, but for those "
        "marked *measured*. In brackets: simulated again with each parameter 20 % up and down.",
    ]
    for context in CONTEXTS:
        rows = []
        for name, model in MODELS.items():
            for batch in BATCHES:
                cells = []
                for gpus in GPUS:
                    row = next(
                        r for r in result["splits"]
                        if (r["model"], r["context"], r["batch"], r["gpus"]) == (name, context, batch, gpus)
                    )  # fmt: skip
                    seen = single.get((name, batch)) if gpus == 1 else None
                    if gpus == 2 and row.get("split") == "tp=2" and (name, batch) in measured:
                        seen = measured[name, batch]["measured_ms"]
                    words = "" if gpus == 1 else f"{row.get('split')}: "
                    if "ms" not in row:
                        cells.append("does not fit")
                    elif seen is not None and context == CONTEXTS[0]:
                        cells.append(f"{words}{seen:.2f} *measured*")
                    else:
                        cells.append(f"{words}{row['ms']:.2f} ({row['range_ms'][0]:.2f}–{row['range_ms'][1]:.2f})")
                rows.append([model.name, batch, *cells])
        parts.append(f"{context} tokens of context, simulated unless marked:")
        parts.append(_table(["model", "batch", *(f"{n} GPU{'s' * (n > 1)}" for n in GPUS)], rows))
    parts.append(
        "Expert placement (`fl.EplbConfig`), simulated for DeepSeek-V3 with 128 requests a GPU, `dp` = `ep` = GPUs, "
        "exchange of tokens, 4096 tokens of context, and experts chosen alike or by Zipf's law of exponent 0.5 or 1: a "
        "simulated step is quicker (or, with a minus, slower) by"
    )
    kept = {(r["gpus"], r["zipf"]): r for r in result["placement"]}
    rows = [[gpus, spare, *(_gain(kept[gpus, zipf]) for zipf in (0.0, 0.5, 1.0))] for gpus, spare in BALANCED]
    parts.append(_table(["GPUs", "redundant experts", "alike", "Zipf 0.5", "Zipf 1"], rows))
    parts.append(
        "Every redundant expert of a simulated decode step is read by one rank more, so placement pays, simulated, "
        "from 16 or 32 GPUs on and with skewed loads only; it is off unless it is asked for."
    )
    parts.append(
        "Two batches that overlap, simulated for the same split: a simulated step is quicker (or, with a minus, "
        "slower) by"
    )
    laps = {(r["gpus"], r["requests_of_a_gpu"]): r for r in result["overlap"]}
    sizes = sorted({rows for _, rows in laps})
    rows = [[n, *(_gain(laps[n, size]) for size in sizes)] for n in sorted({n for n, _ in laps})]
    tail = "Within one host of eight GPUs overlap loses in every simulated case, so it is off unless it is asked for."
    parts.append(_table(["GPUs", *(f"{size} requests a GPU" for size in sizes)], rows))
    parts.append(tail)
    return "\n\n".join(parts)


def _gain(row: dict[str, Any]) -> str:
    low, high = row["range"]
    return f"{row['gain']:+.1%} ({low:+.1%} to {high:+.1%})".replace("-", "−")


def fill(text: str, result: dict[str, Any]) -> str:
    """Return the page's text with the section renewed."""
    pattern = re.compile(r"(<!-- simulated -->\n).*?(<!-- /simulated -->)", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"{PAGE.name}: {len(pattern.findall(text))} places marked simulated; expected one")
    return pattern.sub(lambda match: f"{match[1]}{page(result)}\n{match[2]}", text)


def main(given: Sequence[str] | None = None) -> None:
    """Renew the result and the page, or with ``--check`` fail if one is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is stale")
    options = parser.parse_args(given)
    made = json.dumps(simulate(), indent=1) + "\n"
    text = fill(PAGE.read_text(), json.loads(made))
    if options.check:
        stale = not FILE.is_file() or FILE.read_text() != made or PAGE.read_text() != text
        raise SystemExit("simulated results are stale; run: python tools/simulate_splits.py" if stale else 0)
    FILE.write_text(made)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
