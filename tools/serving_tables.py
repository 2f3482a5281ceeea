"""The table of what a client of ``fastlayers serve`` sees, in docs/performance.md, from committed results."""

from __future__ import annotations

import json
import statistics

import performance_rows as measured

SERVED = {
    "Qwen/Qwen3-8B": ("qwen3_8b", 3700, 6850), "Qwen/Qwen3-30B-A3B": ("qwen3_30b_a3b", 1900, 7400),
    "openai/gpt-oss-20b": ("gpt_oss_20b", 4200, 9600),
}  # fmt: skip


def serving() -> str:
    """What a client of ``fastlayers serve`` sees, model by model; the last run of a row counts."""
    found = {(row["model"], row["row"], row.get("prompts")): row for row in measured.lines_of("serve") if "row" in row}
    lines = ["| what | measured | target |", "|---|---|---|"]
    for (model, what, prompts), row in found.items():
        name, few, many = SERVED[model]
        if what == "start":
            lines.append(f"| {name}, process start to `/ready` | {row['ready_s']} s | 20 s |")
        elif what == "at once" and "runs" in row:
            case, least = ("c32", few) if prompts == 32 else ("c256", many)
            peer = measured.PEERS[name, case]["total_out_tok_s"]
            runs = ", ".join(f"{run:,.0f}" for run in row["runs"])
            lines.append(
                f"| {name}, {prompts} prompts of 512 at once, 128 out | {row['output_throughput']:,.0f} tokens/s "
                f"(runs {runs}; vLLM offline {peer:,.0f}); first token {row['median_ttft_ms']:.0f} ms | {least:,} |"
            )
        elif what == "one" and "median_tpot_ms" in row:
            own = next((r for r in measured.lines_of("generate") if r.get("batch") == 1 and r["model"] == name), None)
            wanted = f"`generate`'s {own['tpot_ms']:.2f} + 0.15 ms" if own else ""
            lines.append(f"| {name}, one request, a token | {row['median_tpot_ms']:.2f} ms | {wanted} |")
        elif what == "prefix" and "ttft_ratio" in row:
            shares = f"{row['cached_share']:.1%} of the prompts' tokens cached"
            lines.append(
                f"| {name}, 64 prompts sharing 2,048 tokens | {row['ttft_ratio']} × without; {shares} | 0.25 × |"
            )
        elif what == "arrivals" and "p99_itl_ms" in row:
            gaps = f"between tokens {row['median_itl_ms']:.1f} / {row['p99_itl_ms']:.1f} / {row['p100_itl_ms']:.0f} ms"
            lines.append(
                f"| {name}, {row['requests']} arrivals at {row['rate']:.0f}/s | {gaps} (median, 99 %, most); first "
                f"token {row['median_ttft_ms']:.0f} / {row['p99_ttft_ms']:.0f} ms | 99 % ≤ 40 ms and 3 × median, "
                "most ≤ 200; first ≤ 60 / 250 ms |"
            )
    loads = {(row["model"], row["switch"], row["load"]): row for row in measured.lines_of("serve") if "load" in row}
    lines += [*map(switched, loads.values()), *drafted(), *repeated(), *soaked()]
    return "\n".join(lines) if len(lines) > 2 else measured.MISSING


def drafted() -> list[str]:
    """Return what drafts cost and save where each place's is right as often as scripted."""
    rows = measured.lines_of("../speculation_h200")
    if not rows:
        return []
    run, lines = rows[0]["run"], []
    for row in rows:
        if "tokens_per_step" in row:
            what = f"{run['k']} drafts a step, each right at {run['rate']:.0%}, batch {row['batch']}"
            told = f"{row['with_drafts']:.2f} ms, {row['ratio']:.2f} × without"
            lines.append(f"| {SERVED[run['model']][0]}, {what}, a token | {told} | 0.65 × |")
        elif "verify_ms" in row and "tree" not in row:
            what = f"a step that verifies {run['k'] + 1} rows behind {row['context']:,} tokens"
            told = f"{row['verify_ms']:.2f} ms, {row['ratio']:.2f} × a decode step"
            lines.append(f"| {SERVED[run['model']][0]}, {what} | {told} | 1.15 × |")
    return lines


def repeated() -> list[str]:
    """Return what ``--deterministic`` costs."""
    return [
        f"| {SERVED[row['model']][0]}, 4 layers, 32 requests with `--deterministic` / without | "
        f"{row['tokens_per_s']['deterministic']:,.0f} / {row['tokens_per_s']['without']:,.0f} tokens/s; equal bytes in "
        f"{min(row['equal_of_12'].values())} of 12 requests | its cost; 12 of 12 |"
        for row in measured.lines_of("../deterministic_h200")
        if "tokens_per_s" in row
    ]


def soaked() -> list[str]:
    """Return what a day's abuse in a minute left behind."""
    path = measured.RESULTS.parent / "soak_h200.json"
    if not path.is_file():
        return []
    row = json.loads(path.read_text())
    ends = f"{len(row['wrong'])} wrong answers, {len(row['left'])} things left behind"
    most = max(row["grown_mib"].values())
    what = f"{row['requests']:,} requests, 256 at a time, aborted, malformed and with grammars among them"
    return [f"| {what} | {ends}; {row['seconds']:.0f} s; a process grew by {most:.0f} MiB at most | none, none |"]


# Switches of serve_rows.py that are off by default.
ADDED = ("lookup",)
# What a load of serve_rows.py --switches tells: the figure that a switch is for, in words.
LOADS = {
    "at once": ("64 prompts at once", "output_throughput", "{:,.0f} tokens/s", "more"),
    "one": ("one request, a token", "median_tpot_ms", "{:.2f} ms", "less"),
    "shared prefix": ("64 prompts sharing 2,048 tokens, first token", "median_ttft_ms", "{:,.0f} ms", "less"),
    "arrivals": ("arrivals, 99 % of gaps between tokens", "p99_itl_ms", "{:.1f} ms", "less"),
}


def switched(row: measured.Row) -> str:
    """A line of what something is worth; of what is off by default, what it costs."""
    words, name, form, better = LOADS[row["load"]]
    apart = ""
    if row["switch"] in ADDED and (mean := name.replace("median", "mean")) != name and mean in row["on"]:
        words, name = f"{words} (mean)", mean
        pairs = zip(*(side["of"][mean] for side in (row["on"], row["off"])), strict=True)
        more = [on - off for on, off in pairs]  # of the same prompts
        apart = f"; {len(more)} pairs: {statistics.mean(more):+.1f} ± {statistics.stdev(more) / len(more) ** 0.5:.1f}"
    told = [form.format(side[name]) if name in side else measured.MISSING for side in (row["on"], row["off"])]
    wanted = (
        f"no {better} off" if row["switch"] not in ADDED else f"at most 2 % {'less' if better == 'more' else 'more'} on"
    )
    return f"| {SERVED[row['model']][0]}, {row['switch']} on / off, {words} | {' / '.join(told)}{apart} | {wanted} |"
