"""Simulate steps on more GPUs than two, and write what comes out to benchmarks/results and docs/distributed.md.

``python tools/simulate_splits.py [--check]``. What is measured comes from benchmarks/results/two_gpus_*; the simulation
is fastlayers.testing.overlap_sim. Nothing is measured here, and each sentence it writes says "simulated" or "measured".
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fastlayers.moe.placement.planner import EplbConfig
from fastlayers.testing.overlap_sim import (
    MODELS,
    SLICE,
    Calibration,
    ModelSize,
    Split,
    calibrate,
    interpolate,
    layer_stages,
    link_us,
    memory_bytes,
    narrow_of,
    splits_of,
    step_ms,
    varied,
)

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FILE, PAGE = RESULTS / "simulated_splits.json", ROOT / "docs" / "distributed.md"
DECODE, ROWS = "two_gpus_decode_h200.jsonl", "two_gpus_rows_h200.jsonl"
SLICES, EIGHTH = "two_gpus_slice_h200.jsonl", "performance/tp8_layer_alone.jsonl"
COPY = "performance/patch_qwen3_30b.jsonl"
PARTS = "slice_parts_h200.jsonl"  # experts and attention by themselves, as they were when the slices were measured
ACCEPTED = 0.1  # by how much a simulated step may differ from a measured one
CONTEXTS, BATCHES, GPUS = (88, 4096), (1, 16, 64, 256), (1, 2, 4, 8)
# DeepEP's low-latency combine, 128 tokens of 7168 in bf16, top 8 (its README): not measured here.
PUBLISHED = {16: 195.0, 32: 273.0, 64: 314.0}
# LMSYS, May 2025: output tokens a second of each host of eight H100s, 72 of which decode with two batches that overlap
# and 32 redundant experts, 256 requests each, behind prompts of 2000 tokens; its reads are slower by the data sheets.
NODE_TOKENS, NODE_GPUS, NODE_ROWS, NODE_CONTEXT, NODE_RATE = 22_300, 72, 256, 2000, 3.35 / 4.8
# GPUs, redundant experts; where 256 experts do not divide, the slots without a plan hold them in turn.
BALANCED = ((8, 32), (16, 32), (32, 32), (64, 64), (72, 32))


def read(name: str) -> list[dict[str, Any]]:
    """Return the rows of a committed result."""
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines() if line.strip()]


def calibrated() -> Calibration:
    """Return what committed results say of one and two GPUs."""
    rate = next(row["copy_tb_s"] for row in read(COPY) if "copy_tb_s" in row) * 1e12
    best = {1: 0.0, 2: 0.0}
    for row in read(PARTS):
        width = 1 if "quant='fp8_block'" in row.get("key", "") else 2 if "quant='none'" in row.get("key", "") else 0
        if width and not row.get("peer") and "tflops" in row:
            best[width] = max(best[width], row["tflops"] * 1e12)
    return calibrate(
        read(DECODE),
        read(ROWS),
        rate,
        best,
        slices=read(SLICES),
        attention_flops=attention_flops(),
        narrow=narrow_fp8(),
    )


def attention_flops() -> float:
    """Return the operations a second of decode attention with all heads of DeepSeek-V3, by the kernel of the slices."""
    us = {
        row["tokens"]: row["us"] for row in read(PARTS)
        if row.get("backend") == "triton" and row.get("model") == "deepseek-ai/DeepSeek-V3 tp1"
        and "kv_dtype=torch.bfloat16, phase='decode', context=4096, fp8_math=False, lse=False" in row.get("key", "")
        and "ragged" not in row["key"]
    }  # fmt: skip
    return max(us) * 4096 * MODELS["deepseek_v3"].cache_operations / us[max(us)] * 1e6


def narrow_fp8() -> float:
    """Return by how much FP8 experts read slower for each halving of their width, from one GPU's times."""
    times: dict[str, dict[int, float]] = {"tp1": {}, "tp8": {}}
    for row in read(PARTS):
        model, _, tp = row.get("model", "").rpartition(" ")
        fp8 = model == "deepseek-ai/DeepSeek-V3" and "quant='fp8_block'" in row["key"]
        if fp8 and row.get("auto") and row["tokens"] <= 128:
            times[tp][row["tokens"]] = row["us"]
    return narrow_of(times["tp1"], times["tp8"], 8)


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
    """Return every measured step of eight layers of DeepSeek-V3 beside its simulation; ``used``: those of one GPU."""
    made = []
    for row in read(SLICES):
        if row.get("what") == "decode":
            split, batch, ms = Split(row["ranks"], nccl=row["seam"] == "nccl"), row["batch"], row["device_ms"]
        elif row.get("what") == "decode_groups":
            split, batch, ms = Split(row["ranks"] // row["dp"], row["dp"], row["ep"]), row["requests"], row["tpot_ms"]
        else:
            continue
        context = CONTEXTS[0] if row["prompt"] < CONTEXTS[0] else row["prompt"]
        simulated = step_ms(SLICE, split, batch, found, context=context)
        made.append({
            "split": str(split), "links": "NCCL" if split.nccl else "symmetric memory", "batch": batch,
            "context": context, "measured_ms": ms, "simulated_ms": round(simulated, 3),
            "error": round(simulated / ms - 1, 4), "used": row["ranks"] == 1,
        })  # fmt: skip
    return made


def eighths(found: Calibration) -> list[dict[str, Any]]:
    """Return a rank's eighth of a MoE layer of DeepSeek-V3, timed alone on one GPU, beside its simulation."""
    made, model = [], MODELS["deepseek_v3"]
    for row in read(EIGHTH):
        if row.get("what") == "decode":
            stages = layer_stages(model, Split(8), row["batch"], row["context"], found, dense=False)
            us = sum(stage.us[0] for stage in stages if stage.unit == "compute")
            us += 2 * interpolate(found.norm, model.hidden, row["batch"] * model.hidden * 2)
            made.append({
                "batch": row["batch"], "context": row["context"], "measured_us": row["us"],
                "simulated_us": round(us, 1), "error": round(us / row["us"] - 1, 4),
            })  # fmt: skip
    return made


def node_tokens(found: Calibration) -> float:
    """Return the output tokens a second of a host as LMSYS published them, simulated."""
    split, slower = Split(1, NODE_GPUS, NODE_GPUS, "all_to_all"), replace(found, rate=found.rate * NODE_RATE)
    ms = step_ms(
        MODELS["deepseek_v3"], split, NODE_ROWS * NODE_GPUS, slower, context=NODE_CONTEXT, overlap=True,
        eplb=EplbConfig(num_redundant_experts=32),
    )  # fmt: skip
    return found.assumed.host * NODE_ROWS / ms * 1e3


def best_splits(found: Calibration, others: Sequence[Calibration]) -> list[dict[str, Any]]:
    """Return the quickest split for each model, context, batch and number of GPUs that holds it.

    Experts are whole on ranks only where that is quicker by more than the simulation is accepted at.
    """
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
                        if ms.get(replace(best, ep=1), math.inf) <= (1 + ACCEPTED) * ms[best]:
                            best = replace(best, ep=1)
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
        "from": [DECODE, ROWS, COPY, PARTS, SLICES, EIGHTH],
        "calibration": asdict(found),
        "accepted": accepted(found),
        "slices": sliced(found),
        "published_combine": [
            {"gpus": n, "published_us": us, "simulated_us": round(link_us(found, "combine", 7168, 128, n), 1)}
            for n, us in PUBLISHED.items()
        ],
        "published_node_tokens": {"published": NODE_TOKENS, "simulated": round(node_tokens(found))},
        "eighths": eighths(found),
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
    steps = result["accepted"] + result["slices"]
    unseen = [row for row in result["accepted"] if not row["used"]]
    layers = [row for row in result["slices"] if not row["used"]]
    old = [row["error"] for row in steps if row["used"]]
    worst = max(layers, key=lambda row: abs(row["error"]))
    us, node = result["calibration"]["launch_us"], result["published_node_tokens"]
    measured = {
        (row["model"], row["batch"]): row for row in result["accepted"]
        if row["links"] == "symmetric memory" and row["split"] == "tp=2" and row["used"]
    }  # fmt: skip
    single = {(r["model"], r["batch"]): r["device_ms"] for r in read(DECODE) if r.get("ranks") == 1 and "batch" in r}
    parts = [
        "`python tools/simulate_splits.py` simulated what follows (`fastlayers.testing.overlap_sim`, "
        "`benchmarks/results/simulated_splits.json`): the stages of each layer on every rank's compute unit and "
        "link, with what one and two H200s took.",
        "What the simulated times are calibrated with: a copy in HBM, experts' arithmetic and decode attention on one "
        f"GPU; exchanges between two GPUs (`{ROWS}`); steps of Qwen3-8B, Qwen3-30B-A3B and eight layers of DeepSeek-V3 "
        f"in FP8 on one GPU (`{DECODE}`, `{SLICES}`), which give the simulated cost of a launch that waits for the one "
        f"in front: {us['qwen3_8b']:.1f}, {us['qwen3_30b_a3b']:.1f} and {us['deepseek_v3']:.1f} µs; Qwen3's steps of "
        "two GPUs over symmetric memory with early starts and of two groups of one request. By how much FP8 weights of "
        "half the width read slower when simulated comes from experts on one GPU, whole and of one rank of eight "
        f"(`{PARTS}`): {result['calibration']['narrow']['deepseek_v3']:.1%}; of bf16 weights from those steps of "
        f"Qwen3: {result['calibration']['narrow']['qwen3_8b']:.1%}.",
        f"What the simulated times are accepted by, within {ACCEPTED:.0%} each: the other {len(unseen)} steps of Qwen3 "
        f"on two GPUs, simulated with {_span(row['error'] for row in unseen)}, and the {len(layers)} steps of "
        "DeepSeek-V3's layers on two GPUs, 1 to 128 requests of 88 and 4,096 tokens, none of which the calibration has "
        f"seen, simulated with {_span(row['error'] for row in layers)}. The {len(old)} that it has seen are simulated "
        f"with {_span(old)}. Which terms are simulated was chosen with these errors in view, but no number was fitted "
        f"to them; the largest, {worst['error']:+.1%}, is of {worst['batch']} requests of {worst['context']:,} tokens, "
        f"{worst['split']}.",
        f"Those layers took {SLICE.launches[1] + 2} launches each, and today's take "
        f"{MODELS['deepseek_v3'].launches[1] + 2}: so many are simulated in what follows. One rank's eighth of such a "
        f"layer, alone on one GPU (`{EIGHTH}`), is simulated with "
        + ", ".join(f"{r['error']:+.1%} for {r['batch']}" for r in result["eighths"])
        + " requests: for few requests of DeepSeek-V3 the simulated times below are too long, since today's launches "
        "are also quicker.",
        "What lies beyond eight GPUs of one host is simulated with constants of a network that nobody measured here; "
        "combines of 128 tokens over 16 to 64 GPUs, simulated, take "
        + ", ".join(f"{r['simulated_us']:.0f}" for r in result["published_combine"])
        + " µs where DeepEP publishes "
        + ", ".join(f"{r['published_us']:.0f}" for r in result["published_combine"])
        + f". LMSYS published {node['published'] / 1e3:.1f} thousand output tokens a second of each host for "
        f"{NODE_GPUS} H100s that decode DeepSeek-V3, {NODE_ROWS} requests a GPU behind {NODE_CONTEXT:,} tokens; "
        f"simulated with this library's attention they are {node['simulated'] / 1e3:.1f} thousand "
        f"({node['simulated'] / node['published'] - 1:+.0%}). What LMSYS published of prompts is not compared, since "
        "decode steps alone are simulated. Exchange of tokens inside a model was never measured, and overlap on two "
        "GPUs only, which the calibration has not seen: both are simulated here.",
        "Milliseconds of a decode step of so many requests in all, by the quickest split; simulated, but for those "
        "marked *measured*. In brackets: simulated again with each parameter 20 % up and down. "
        f"Experts are whole on ranks (`ep`) where that is simulated more than {ACCEPTED:.0%} quicker.",
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


def _span(errors: Iterable[float]) -> str:
    kept = list(errors)
    return f"{min(kept):+.1%} to {max(kept):+.1%}"


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
