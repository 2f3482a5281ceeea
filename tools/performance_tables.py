"""Write docs/performance.md's tables and plots from committed results.

``python tools/performance_tables.py [--check]``. A table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``;
plots go to docs/plots. Parts without a result file say so. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import marked
import page_since
import slower_points
from limit_targets import limits
from performance_rows import (
    CALLS,
    DEVICE,
    MISSING,
    OURS,
    PEERS,
    RESULTS,
    ROOT,
    VLLM,
    Row,
    files,
    lines_of,
    points,
    read,
)
from result_origins import unsaid
from serving_tables import serving
from svg_plots import Plot, svg

from fastlayers.tuning import rung_at

PAGE = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "plots"
# "Never slower" is a median of at most this times the other's.
NEVER_SLOWER = 1.03
# The pipeline that target 2 names and that is no backend (benchmarks/peers.py).
PEER = "sglang"


def ratio(rows: list[Row]) -> float | None:
    """Return the time of ``auto`` over that of the best peer: a backend that is not ours; ``None`` without one."""
    peers = [row["us"] for row in rows if row["backend"] not in OURS]
    own = [row["us"] for row in rows if row["auto"]]
    return own[0] / min(peers) if own and peers else None


def never_slower(part: str) -> str:
    """Return how many points of a part are not slower than the best peer, whose kernels ran there, and the worst."""
    measured = points(read(part))
    found = {key: r for key, rows in measured.items() if (r := ratio(rows)) is not None}
    if not found:
        return MISSING
    good = sum(r <= NEVER_SLOWER for r in found.values())
    own = sum(any(row["auto"] and row["backend"] in OURS for row in measured[key]) for key in found)
    worst = max(found, key=lambda key: found[key])
    shape = measured[worst][0]
    place = f"{shape['layer']}, {shape['model']}, T={shape['tokens']}"
    median = statistics.median(found.values())
    whose = f"{own} by our kernels, {len(found) - own} by a package's or torch's"
    told = f"{good} of {len(found)} points; median {median:.2f} ×, worst {found[worst]:.2f} × ({place}); {whose}"
    lost = Counter((rows[0]["layer"], name) for rows in measured.values() for name in rows[0].get("failed", {}))
    return told + "".join(f"; {name} failed at {count} of {layer}" for (layer, name), count in sorted(lost.items()))


def when_tuned(layer: str) -> str:
    """Return the same of the measurements that the shipped tables were made from: their ladder against the packages."""
    found: list[float | None] = []
    for path in (ROOT / "src" / "fastlayers" / "tuned" / layer).glob(f"*device_name={DEVICE}.json"):
        table = json.loads(path.read_text())
        measured = json.loads((ROOT / "benchmarks" / "results" / "tuned" / layer / path.name).read_text())["measured"]
        here: dict[int, list[Row]] = defaultdict(list)
        for row in measured:
            here[row["tokens"]].append(row)
        for tokens, rows in here.items():
            rung = rung_at(table["ladder"], tokens)
            chosen = rung["backend"], rung.get("config", {})
            found.append(ratio([row | {"auto": (row["backend"], row.get("config", {})) == chosen} for row in rows]))
    ratios = [each for each in found if each is not None]
    if not ratios:
        return ""
    good = sum(each <= NEVER_SLOWER for each in ratios)
    return f"; when tuned {good} of {len(ratios)}, worst {max(ratios):.2f} ×"


def compared(part: str) -> str:
    """Return at how many points of a part another project's pipeline (no backend) was timed as well."""
    found = points(read(part))
    names = {row["backend"] for rows in found.values() for row in rows if row.get("peer")}
    if not names:
        failed = [row["failed"][PEER] for rows in found.values() for row in rows if PEER in row.get("failed", {})]
        return f"{PEER} not compared: {failed[0]}" if failed else f"{PEER} not installed: not compared"
    counts = [(name, sum(any(r["backend"] == name for r in rows) for rows in found.values())) for name in sorted(names)]
    return "; ".join(f"{name} timed at {count} of {len(found)} points" for name, count in counts)


def experts() -> str:
    """Return target 2's verdict: against the other backends and, where it was installed, sglang's pipeline."""
    found = never_slower("fused_moe")
    return found if found == MISSING else f"{found}; {compared('fused_moe')}"


def best_tflops() -> str:
    """Return the TFLOP/s at DeepSeek-V3's largest weight with 4096 tokens."""
    rows = [r for r in read("fp8_linear") if "key" in r and "out_features=36864" in r["cfg"] and r["tokens"] == 4096]
    own = [row for row in rows if row["auto"]]
    return f"{own[0]['tflops']:,.0f} TFLOP/s by {own[0]['backend']}" if own else MISSING


def bandwidth() -> str:
    """Return how many operators that move data reach 85 % of a copy of their bytes, at 4096 tokens or more."""
    rows = [row for row in read("small_ops") if row.get("auto") and row["tokens"] >= 4096 and "copy_us" in row]
    if not rows:
        return MISSING
    shares = [(row["copy_us"] / row["us"], row["layer"], row["tokens"]) for row in rows]
    share, layer, tokens = min(shares)
    good = sum(each[0] >= 0.85 for each in shares)
    return f"{good} of {len(shares)} points; lowest {share:.0%} by {layer} at T={tokens}"


def patched(model: str, batch: int) -> str:
    """Return a patched model's step against stock's default and stock's best."""
    rows = [r for r in read(f"patch_{model}") if r.get("model") == model and r.get("batch") == batch]
    if not rows:
        return MISSING
    ms = rows[-1]["ms"]
    parts = [f"{ms['graph']:.2f} ms a step"]
    for name, words in (("stock", "stock"), ("stock_best", "stock's best")):
        if name in ms:
            parts.append(f"{ms[name] / ms['graph']:.2f} × {words} ({ms[name]:.2f} ms)")
    return ", ".join(parts)


def generated(model: str, batch: int) -> str:
    """Return the milliseconds per token of fastlayers_models.generate."""
    rows = [r for r in read("generate") if r.get("model") == model and r.get("batch") == batch and "tpot_ms" in r]
    if not rows:
        return MISSING
    row = rows[-1]
    return f"{row['tpot_ms']:.2f} ms (replay {row['device_ms']:.2f}, floor {row['floor_ms']:.2f})"


def captured() -> str:
    """Return the seconds to capture all buckets, with and without the frozen collector."""
    rows = [row for row in read("capture") if "capture_s" in row]
    if not rows:
        return MISSING
    last = {(row["frozen"], row["force_cudagraph_gc"]): row for row in rows}
    words = {(True, False): "frozen", (False, False): "not frozen", (True, True): "frozen, forced collections",
             (False, True): "not frozen, forced collections"}  # fmt: skip
    return "; ".join(f"{words[key]}: {row['capture_s']:.1f} s" for key, row in last.items())


def first_token() -> str:
    """Return the seconds from import to the first token with warm caches: the part's second run, or a later process."""
    measured = read("first_token") or read("capture")
    rows = [row for row in measured if "import_to_first_token_s" in row]
    return f"{rows[-1]['import_to_first_token_s']:.1f} s" if rows else MISSING


def targets() -> str:
    """The eight targets and what was measured."""
    rows = [
        ("1", "fp8_linear, weights of DeepSeek-V3 and Qwen3-30B-A3B", "never slower than the best peer",
         never_slower("fp8_linear") + when_tuned("fp8_linear")),
        ("", "fp8_linear, 36864×7168, M = 4096", "≥ 1,250 TFLOP/s", best_tflops()),
        ("2", "fused_moe, whole layer", "never slower", experts() + when_tuned("fused_moe")),
        ("3", "MLA decode and ragged prefill", "never slower", never_slower("mla") + when_tuned("mla")),
        ("", "GQA decode and prefill, with and without sinks", "never slower", never_slower("gqa") + when_tuned("gqa")),
        ("4", "small operators", "never slower", never_slower("small_ops")),
        ("", "small operators that move data, T ≥ 4096", "≥ 85 % of a copy of the same bytes", bandwidth()),
        ("5", "patch, Qwen3-30B-A3B, batch 1", "≥ 9.5 × stock, ≥ 1.7 × its best", patched("qwen3_30b", 1)),
        ("", "patch, Qwen3-30B-A3B, batch 16", "≥ 4.5 × stock", patched("qwen3_30b", 16)),
        ("", "patch, Qwen3-8B, batch 1", "≥ 1.35 × stock's best", patched("qwen3_8b", 1)),
        *generation(),
        ("7", "capture of 48 layers, all buckets", "≤ 15 s; ≥ 2 × with forced collections", captured()),
        ("8", "import to first token, Qwen3-30B-A3B", "≤ 25 s (vLLM 79 s)", first_token()),
    ]  # fmt: skip
    lines = ["| # | work | target | measured |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), "", *sources()])


def generation() -> list[tuple[str, str, str, str]]:
    """The rows of target 6: batch 1 against a limit below vLLM's time, batch 32 against vLLM's."""
    models = (
        ("qwen3_30b_a3b", "Qwen3-30B-A3B", 4.0),
        ("qwen3_8b", "Qwen3-8B", 5.0),
        ("gpt_oss_20b", "GPT-OSS-20B", 2.8),
    )
    single = [
        ("", f"generate, {name}, batch 1", f"≤ {limit} ms (vLLM {VLLM[model, 1]})", generated(model, 1))
        for model, name, limit in models
    ]
    many = [
        ("", f"generate, batch 32: {name}", f"≤ {VLLM[model, 32]} ms (vLLM)", generated(model, 32))
        for model, name, _ in models
    ]
    return [("6", *single[0][1:]), *single[1:], *many]


# What tables of the page are made of besides the files of its folder.
BESIDE = (
    "untuned_shapes_h200.jsonl", "speculation_h200.jsonl", "deterministic_h200.jsonl", "soak_h200.json",
)  # fmt: skip


def sources() -> list[str]:
    """Return a line for each command that made a result file: commit, versions."""
    lines: dict[str, None] = {}
    for path in files():
        heads = (run if isinstance(run := row.get("run"), dict) else row for row in lines_of(path.stem))
        rows = [row for row in heads if "command" in row]
        own = [row for row in rows if not row["command"].startswith("performance.py")]
        for run in own or rows:
            lines[_made(path.name, run)] = None
    for name in BESIDE:
        text = (RESULTS.parent / name).read_text()
        whole = [json.loads(text)] if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]
        for run in (row.get("run", row) for row in whole):
            if isinstance(run, dict) and "commit" in run:
                lines[_made(name, run)] = None
    return list(lines)


def _made(name: str, run: Row) -> str:
    """Return a line for what a run's description says of it."""
    told = [f"`{run['command']}`" if "command" in run else unsaid(run)]
    ladders = f", ladders of {', '.join(run['tables'])}" if "tables" in run else ""
    told.append(f"commit {run['commit']}{ladders}")
    told += [f"torch {run['torch']}"] if "torch" in run else []
    told += [str(run[key]) for key in ("device", "gpu") if key in run][:1]
    return f"- `{name}`: {', '.join(told)}"


def _cores(row: Row) -> str:
    """Return of what a figure is the median, and those of all cores that were measured."""
    of_all = sorted(row["by_core_ms"])
    own = f"{row['own_rounds']} of {row['rounds']} rounds" if "rounds" in row else f"{row['own_cores']} cores"
    return f" ({own} that nobody shared; all {len(of_all)} cores: {of_all[0]} to {of_all[-1]})"


def latencies() -> str:
    """What a person waits for around the captured decode step: uncaptured steps, first tokens, patched first tokens."""
    lines = ["| what | measured | of the device | target |", "|---|---|---|---|"]
    limits = {"qwen3_8b": 9, "qwen3_30b_a3b": 14, "gpt_oss_20b": 8}
    for row in lines_of("host_time"):
        if "wall_ms" in row:
            lines.append(
                f"| {row['model']}, forward of 16 tokens, not captured | {row['wall_ms']} ms{_cores(row)}, "
                f"{row['calls_in_a_layer']} calls a layer | {row['device_ms']} ms | {limits[row['model']]} ms |"
            )
        elif "stock_ms" in row:
            lines.append(
                f"| {row['model']}, patched without graphs, decode step | {row['patched_ms']} ms, "
                f"{row['ratio']} × stock's {row['stock_ms']} | | 0.8 × |"
            )
    limits = {"qwen3_8b": 20, "qwen3_30b_a3b": 25}
    for row in lines_of("cold_start"):
        if row.get("what") == "cold":
            took, first = row["import_to_first_token_s"], row["first_token_s"]
            lines.append(
                f"| {row['model']}, caches empty: import to first token of 512 | {took} s, {first} of them after the "
                f"model is built | | {limits[row['model']]} s |"
            )
        elif row.get("what") == "after warm-up":
            lines.append(
                f"| {row['model']}, {row['prompts']} sizes up to {row['largest_batch']} prompts or {row['longest']} "
                f"tokens after `fl.warmup` | {row['with_compiles']} compiled something | | 0 |"
            )
    firsts = {"qwen3_8b": 7, "qwen3_30b_a3b": 10, "gpt_oss_20b": 7}
    for row in lines_of("time_to_first_token"):
        if "captured_ms" not in row:
            continue
        case = {(1, 128): "bs1", (32, 512): "c32"}.get((row["batch"], row["prompt"]))
        peer = 1000 * PEERS[row["model"], case]["t_out1_best_s"] if case else None
        wanted = f"{firsts[row['model']]} ms" if case == "bs1" else "vLLM's" if case else ""
        least = f", least {row['captured_least_ms']:.1f}" if case and "captured_least_ms" in row else ""
        beside = f" (vLLM's best run {peer:.1f})" if peer is not None else ""
        replayed = row.get("captured_replayed", True)
        other = f"not captured {row['uncaptured_ms']:.1f}" if replayed else "of a size without a graph"
        lines.append(
            f"| {row['model']}, first token of {row['batch']} × {row['prompt']} | {row['captured_ms']:.1f} ms{least}, "
            f"{other}{beside} | {row['captured_device_ms']:.1f} ms | {wanted} |"
        )
    for row in lines_of("patch_first_token"):
        if "graph_ms" in row:
            share = row["graph_ms"] / row["stock_ms"]
            wanted = "0.5 ×" if row["prompt"] <= 512 and row["batch"] == 1 else "never slower"
            other = f"without graphs {row['patched_ms']:.1f}" if row["graph_replayed"] else "of a size without a graph"
            lines.append(
                f"| {row['model']}, patched `generate(max_new_tokens=1)`, {row['batch']} × {row['prompt']} | "
                f"{row['graph_ms']:.1f} ms, {share:.2f} × stock's {row['stock_ms']:.1f}; {other} | | {wanted} |"
            )
    lines += untuned()
    return "\n".join(lines) if len(lines) > 2 else MISSING


def untuned() -> list[str]:
    """Return how near to the best backend shapes without a table are, once a warm-up has timed them."""
    rows = [row for row in lines_of("../untuned_shapes_h200") if row.get("kind") == "probed"]
    layers = dict.fromkeys(row["layer"] for row in rows)
    found = {layer: [row["ratio"] for row in rows if row["layer"] == layer] for layer in layers}
    found |= {", ".join(layers): [row["ratio"] for row in rows]} if len(layers) > 1 else {}
    return [
        f"| {name}: shapes without a table, probed; {len(each)} points with several backends | "
        f"{sum(ratio <= 1.15 for ratio in each) / len(each):.1%} within 1.15 × of the best, the worst {max(each):.2f} "
        "× | | 97%, 1.5 × |"
        for name, each in found.items()
    ]


def since() -> str:
    """What was measured behind the page's commit: steps, first tokens behind a cached prefix, a layer."""
    lines = ["| what | before | now | by |", "|---|---|---|---|"]
    for row in lines_of("../patch_bf12_h200"):
        if "ms" in row:
            ms = row["ms"]
            now = f"overlapping steps {ms['overlap']:.2f}, and with `bf12` {ms['bf12']:.2f} ms"
            what = f"{row['model']}, patched, captured steps, batch {row['batch']}"
            lines.append(f"| {what} | {ms['graph']:.2f} ms | {now} | {_by(row)} |")
    for file, how in (
        ("generate_bf12_h200", ", `bf12`"), ("generate_wgmma_h200", ""), ("generate_ladders_h200", ", newer ladders"),
    ):  # fmt: skip
        for head, row in described(file):
            # Its ladders of one row were mended since: notes/linear.md.
            mended = (file, row.get("model"), row.get("batch")) == ("generate_ladders_h200", "qwen3_8b", 1)
            if "tpot_ms" in row and not mended:
                what = f"{row['model']}, generate, batch {row['batch']}{how}"
                before = generated(row["model"], row["batch"])
                lines.append(f"| {what} | {before} | {row['tpot_ms']:.2f} ms | {_by(head)} |")
    lines += layer_since()
    rows = lines_of("../prefix_first_token_h200")
    ways = {row["way"]: row for row in rows if "way" in row}
    if len(ways) == 3:
        one = ways["one shot"]
        what = (
            f"{one['layers']} layers of DeepSeek-V3, first token of {one['new']} behind {one['prefix']} cached tokens"
        )
        now = f"expanded in one shot {one['ms']}, in two chunks {ways['two chunks']['ms']} ms"
        lines.append(f"| {what} | latents, captured: {ways['latents']['ms']} ms | {now} | {_by(rows[0])} |")
    return "\n".join(lines)


def described(result: str) -> Iterator[tuple[Row, Row]]:
    """Yield the rows of a result that no part of the page has, each behind what describes its run."""
    head: Row = {}
    for row in lines_of(f"../{result}"):
        head = row if "command" in row else head
        yield head, row


def layer_since() -> list[str]:
    """A line each: what a layer of DeepSeek-V3 takes by a newer run, which ended before its last rows."""
    found = []
    for head, row in described("tp8_layer_gathered_h200"):
        if row.get("what") in ("decode", "prefill") and "us" in row:
            name = "batch" if row["what"] == "decode" else "tokens"
            same = [each for each in lines_of("tp8_layer") if all(each.get(key) == row[key] for key in ("what", name))]
            what = f"a layer of DeepSeek-V3 of one rank of eight, {row['what']}, {name} {row[name]:,}"
            before = ", ".join(f"{each['us']:,.0f} µs" for each in same[-1:])
            found.append(f"| {what} | {before} | {row['us']:,.0f} µs | {_by(head)}, `tp8_layer_gathered_h200.jsonl` |")
    return found


def _by(run: Row) -> str:
    """Return what made a row, in short."""
    return f"`{run['command'].removeprefix('python benchmarks/')}`, commit {run['commit']}"


def layer_table(part: str) -> str:
    """A line a point: tokens, auto's time and backend, the best peer, ratio, fractions of the floors."""
    found = points(read(part))
    if not found:
        return f"{MISSING}: `python benchmarks/performance.py --part {part}`"
    lines = [
        "| shape | tokens | context | auto | µs | best peer | µs | ratio | of arithmetic | of memory | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for rows in found.values():
        own = next((row for row in rows if row["auto"]), None)
        if own is None:
            continue
        others = [row for row in rows if row["backend"] not in OURS] or rows
        peer, times = min(others, key=lambda row: row["us"]), ratio(rows)
        context = str(own["context"]) if own["layer"] in ("mla", "gqa") and "decode" in own["cfg"] else ""
        cells = [
            shape_of(own), str(own["tokens"]), context, own["backend"], f"{own['us']:.1f}", peer["backend"],
            f"{peer['us']:.1f}", f"{times:.2f}" if times is not None else "", f"{own['of_arithmetic']:.0%}",
            f"{own['of_memory']:.0%}", f"{own['error']:.1g}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    if part == "fused_moe":
        lines += ["", f"Peers that are no backends: {compared(part)}."]
    drawn = sorted(name for name in plots() if name.startswith(f"{part}_") and name != f"{part}_roofline.svg")
    links = ", ".join(f"[{name.removeprefix(f'{part}_').removesuffix('.svg')}](plots/{name})" for name in drawn)
    lines += ["", f"![Roofline of {part}](plots/{part}_roofline.svg)", "", f"µs over tokens, per backend: {links}"]
    return "\n".join(lines)


def shape_of(row: Row) -> str:
    """Return a short name of a row's shape."""
    inside = dict(re.findall(r"(\w+)=([^,()]+(?:\([^)]*\))?)", row["cfg"]))
    words = {
        "out_features": "N", "in_features": "K", "num_experts": "E", "hidden_size": "D", "intermediate_size": "I",
        "num_heads": "H", "num_kv_heads": "Hkv", "head_dim": "d", "window": "window", "quant": "", "kv_dtype": "",
        "phase": "", "sinks": "sinks", "page_size": "page", "fp8_math": "fp8_math",
    }  # fmt: skip
    parts = []
    for name, short in words.items():
        value = inside.get(name, "").strip("'").removeprefix("torch.")
        if value and value not in ("None", "False") and (name, value) != ("page_size", "64"):
            parts.append(f"{short}{value}" if short != name else f"{short} {value}")
    return f"{row['layer']} {' '.join(parts)}{' drawn lengths' if row.get('ragged') else ''}"


def nearest() -> str:
    """What a shape without a table would lose with the nearest one's ladder: from the shipped tables, each left out."""
    sys.path.insert(0, str(ROOT / "src"))
    from fastlayers import tuning
    from fastlayers.device import DESCRIBED
    from fastlayers.registry import LAYERS as ALL

    lines = []
    for layer in ALL:
        ratios = tuning.borrowed_ratios(layer, DESCRIBED[DEVICE], whole=True)
        if ratios:
            medians = {key: statistics.median(found) for key, found in ratios.items()}
            worst = max(medians, key=lambda key: medians[key])
            within = sum(ratio <= 1.15 for found in ratios.values() for ratio in found)
            total = sum(map(len, ratios.values()))
            middle = statistics.median(medians.values())
            row = (layer, str(len(ratios)), f"{middle:.2f}", f"{medians[worst]:.2f} ({worst})", f"{within} of {total}")
            lines.append(f"| {' | '.join(row)} |")
    head = "| layer | shapes | median | worst shape's median | points within 1.15 × |\n|---|---|---|---|---|"
    return "\n".join([head, *lines]) if lines else MISSING


TABLES: dict[str, Callable[[], str]] = {
    "targets": targets,
    "slower": lambda: slower_points.table(False, NEVER_SLOWER, shape_of),
    "own_rows": lambda: slower_points.table(True, slower_points.BEATEN, shape_of),
    "changed": page_since.changed,
    "limits": limits,
    "nearest": nearest,
    "latencies": latencies,
    "since": since,
    "serving": serving,
    **{part: partial(layer_table, part) for part in CALLS},
}


def plots() -> dict[str, str]:
    """Return SVG documents by file name: µs over tokens for each shape, and a roofline for each layer."""
    found = {}
    for part in CALLS:
        rows = [row for row in read(part) if "key" in row]
        by_shape: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            by_shape[f"{shape_of(row)} {row['context'] if row['layer'] in ('mla', 'gqa') else ''}".strip()].append(row)
        for shape, own in by_shape.items():
            if len({row["tokens"] for row in own}) > 2:
                found[file_name(part, shape)] = svg(times_plot(shape, own))
        if rows:
            found[f"{part}_roofline.svg"] = svg(roofline(part, rows))
    return found


def file_name(part: str, shape: str) -> str:
    """Return a file name for a shape's plot."""
    return f"{part}_{re.sub(r'[^A-Za-z0-9]+', '_', shape).strip('_')}.svg"


def times_plot(shape: str, rows: list[Row]) -> Plot:
    """Return µs over tokens, a line per backend: of several configurations the fastest."""
    best: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        line = best[row["backend"]]
        line[row["tokens"]] = min(row["us"], line.get(row["tokens"], float("inf")))
    floor = {row["tokens"]: max(row["arithmetic_floor_us"], row["memory_floor_us"]) for row in rows}
    series = {name: sorted(line.items()) for name, line in sorted(best.items())}
    return Plot(shape, "tokens", "µs", series, {"floor": sorted(floor.items())})


def roofline(part: str, rows: list[Row]) -> Plot:
    """Return TFLOP/s over operations per byte of what "auto" runs, under the lines of the two floors."""
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    roof: dict[float, float] = {}
    for row in rows:
        if not row["auto"] or not row["tflops"] or not row["gb_per_s"]:
            continue
        intensity = row["tflops"] * 1e3 / row["gb_per_s"]
        series[row["model"].split("/")[-1] if part != "small_ops" else row["layer"]].append((intensity, row["tflops"]))
        floor = max(row["arithmetic_floor_us"], row["memory_floor_us"])
        if floor:  # of the smallest calls it is rounded to nothing
            roof[intensity] = row["tflops"] * row["us"] / floor
    return Plot(f"{part}: roofline of auto", "operations per byte", "TFLOP/s", series, {"floor": sorted(roof.items())})


def fill(text: str) -> str:
    """Return the page's text with every table renewed."""
    return marked.fill(text, PAGE.name, TABLES)


def main(given: Sequence[str] | None = None) -> None:
    """Renew tables and plots, or with ``--check`` fail if they are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is stale")
    options = parser.parse_args(given)
    before, drawn = PAGE.read_text(), plots()
    after = fill(before)
    there = {path.name: path.read_text() for path in PLOTS.glob("*.svg")}
    if options.check:
        stale = before != after or there != drawn
        raise SystemExit("docs/performance.md is stale; run: python tools/performance_tables.py" if stale else 0)
    PAGE.write_text(after)
    PLOTS.mkdir(exist_ok=True)
    for name in there.keys() - drawn.keys():
        (PLOTS / name).unlink()
    for name, text in drawn.items():
        (PLOTS / name).write_text(text)


if __name__ == "__main__":
    main()
