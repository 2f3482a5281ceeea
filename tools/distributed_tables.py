"""Write docs/distributed.md's measured tables from committed results.

``python tools/distributed_tables.py [--check]``. A table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; of
several runs of a point the last counts. Nothing is measured here; what is simulated is tools/simulate_splits.py's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import marked

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "distributed.md"
Row = dict[str, Any]
MISSING = "not measured yet"
MODELS = {
    "qwen3_8b": "Qwen3-8B", "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "deepseek_v3_slice": "8 MoE layers of DeepSeek-V3, FP8",
}  # fmt: skip
NEVER_SLOWER = 1.03  # of medians
ROWS, MOST = (1, 16, 64, 256, 1024), 16384
# Issue 14: microseconds of sum_norm by rows, then of the moves of 16,384 rows.
SUM_NORM = (5.0, 5.6, 7.7, 16.0, 55.0)
TIMES = {1: (1.45, 1.18, 1.4), 64: (1.4, 1.5, 1.75)}  # of one GPU's, by batch and model
FILES = ("decode", "slice", "prefill", "exchange", "peer", "start", "serve")


def lines_of(name: str) -> list[Row]:
    """Return the rows of a result file, each with the command that heads it; ``[]`` where there is no such file."""
    path = RESULTS / f"two_gpus_{name}_h200.jsonl"
    head: Row = {}
    found = []
    for row in map(json.loads, path.read_text().splitlines()) if path.is_file() else ():
        head = row if "command" in row else head
        found.append(row | {"head": head})
    return found


def last(rows: Iterable[Row], /, **wanted: Any) -> Row | None:
    """Return the last row with these values."""
    found = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    return found[-1] if found else None


def decode(model: str, batch: int, ranks: int, seam: str = "") -> float | None:
    """Return milliseconds a token; ``seam``: how the backend between ranks begins."""
    rows = [row for row in lines_of("slice" if "slice" in model else "decode") if row.get("what") == "decode"]
    fits = [row for row in rows if row["seam"].startswith(seam) and (row["model"], row["ranks"]) == (model, ranks)]
    early = [row for row in fits if row.get("early")]  # as a model is, not as it would be without
    row = last(early or fits, batch=batch, prompt=64)
    return None if row is None else row["tpot_ms"]


def shown(value: float | None, digits: int = 2) -> str:
    """Return a number, or nothing where there is none."""
    return "" if value is None else f"{value:,.{digits}f}"


def ratio(one: float | None, other: float | None) -> float | None:
    """Return how many times the one is the other."""
    return None if one is None or other is None else one / other


def verdict(good: bool | None, text: str) -> str:
    """Return what was measured, and whether that is enough."""
    return MISSING if good is None else f"{text}: {'met' if good else '**missed**'}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---- targets -----------------------------------------------------------------------------------------------------


def sums() -> str:
    """Target 1."""
    rows = [last(lines_of("exchange"), what="sum_norm_time", hidden=7168, rows=count) for count in ROWS]
    if None in rows:
        return MISSING
    ours, theirs = ([row[name] for row in rows if row] for name in ("sum_norm_us", "nccl_norm_us"))
    good = all(us <= most for us, most in zip(ours, SUM_NORM, strict=True)) and all(map(float.__lt__, ours, theirs))
    took = " / ".join(shown(us) for us in ours), " / ".join(shown(us) for us in theirs)
    return verdict(good and peer()[0], f"{took[0]} µs (NCCL and norm {took[1]}; {peer()[1]})")


def peer() -> tuple[bool, str]:
    """Return whether no sum takes longer than FlashInfer's of the same run, and FlashInfer's times."""
    found = [last(lines_of("peer"), what="peer_time", hidden=7168, rows=count) for count in ROWS]
    rows = [row for row in found if row and row.get("flashinfer_us") is not None]
    if not rows:
        return True, "FlashInfer's kernel was not timed"
    good = all(row["sum_norm_us"] <= NEVER_SLOWER * row["flashinfer_us"] for row in rows if row["right"])
    good &= all(row.get("ours_right", True) for row in rows)
    took = " / ".join(shown(row["flashinfer_us"]) + ("" if row["right"] else " (wrong)") for row in rows)
    some = "" if len(rows) == len(ROWS) else f" for {', '.join(str(row['rows']) for row in rows)} rows"
    return good, f"FlashInfer's kernel{some} {took}, ours beside it {' / '.join(shown(r['sum_norm_us']) for r in rows)}"


def start() -> str:
    """Target 2."""
    row = last(lines_of("start"), what="workspace", turn="first")
    if row is None:
        return MISSING
    calls, before = row["first sum"] + row["first exchange"], last(lines_of("start"), what="before") or {}
    triton = sum(seconds for seconds in before.values() if isinstance(seconds, float))
    text = f"{row['seconds']:.3f} s, first calls {calls:.3f} s (Triton's and NCCL's own start before it {triton:.2f} s)"
    return verdict(row["seconds"] + calls <= 0.5, text)


def moves() -> str:
    """Target 3."""
    row = last(lines_of("exchange"), what="exchange_time", hidden=7168, rows=MOST)
    if row is None:
        return MISSING
    plain, coded = (row["scatter_us"], row["gather_us"]), row["norm_gather_fp8_us"]
    text = (
        f"{' / '.join(map(shown, plain))} µs / {shown(coded)} µs behind residual and norm (codes alone, with scales in "
        f"columns, {shown(row['gather_fp8_us'])} µs)"
    )
    return verdict(max(plain) <= 370 and coded <= 200, text)


def faster(batch: int) -> str:
    """Targets 4 and 5."""
    found = [ratio(decode(m, batch, 1), decode(m, batch, 2, "triton")) for m in MODELS]
    if any(each is None for each in found):
        return MISSING
    good = all(each is not None and each >= least for each, least in zip(found, TIMES[batch], strict=True))
    return verdict(good, " / ".join(f"{shown(each)} ×" for each in found))


def served(row: str) -> tuple[Row | None, Row | None]:
    """Return a server's row of one GPU, and of ``--tp 2``."""
    rows = [each for each in lines_of("serve") if each.get("row") == row and each.get("prompts") in (None, 256)]
    alone = [each for each in rows if "tp" not in each and "attn_dp_size" not in each]
    return last(alone), last(rows, tp=2)


def grouped(requests: int, dp: int) -> Row | None:
    """Return the row of so many requests of 4,096 tokens, in so many attention groups."""
    return last(
        lines_of("slice"), what="decode_groups", model="deepseek_v3_slice", dp=dp, requests=requests, prompt=4096
    )  # fmt: skip


def groups() -> str:
    """Target 6."""
    two, one = grouped(128, 2), grouped(128, 1)
    if two is None or one is None:
        return MISSING
    quicker = two["tokens_per_s"] / one["tokens_per_s"]
    more = two["cache_tokens"] / one["cache_tokens"]
    crossed = [n for n in (2, 16, 64, 128) if (a := grouped(n, 2)) and (b := grouped(n, 1))
               and a["tokens_per_s"] > b["tokens_per_s"]]  # fmt: skip
    where = f"quicker from {crossed[0]} requests on" if crossed else "nowhere quicker"
    text = f"{quicker:.2f} × tokens/s, {more:.2f} × tokens in the cache; {where}"
    return verdict(quicker >= 1.15 and more >= 1.9, text)


def server() -> str:
    """Target 7."""
    one, two = served("at once")
    if one is None or two is None:
        return MISSING
    times = two["output_throughput"] / one["output_throughput"]
    text = f"{times:.2f} × ({two['output_throughput']:,.0f} against {one['output_throughput']:,.0f} tokens/s)"
    return verdict(times >= 1.5, text)


def exchange() -> str:
    """Target 8."""
    row = last(lines_of("exchange"), what="host_exchange")
    if row is None:
        return MISSING
    return verdict(row["board_median_us"] <= 60, f"{row['board_median_us']} µs (99%: {row['board_p99_us']}), no launch")


def targets() -> str:
    """Return what was asked for and what came."""
    rows = (
        ("1", "`sum_norm`, hidden size 7168, 1 / 16 / 64 / 256 / 1,024 rows",
         " / ".join(map(str, SUM_NORM)) + " µs, and never slower than NCCL and the norm or FlashInfer", sums()),
        ("2", "a workspace, kernels cached", "0.5 s", start()),
        ("3", "16,384 rows: reduce-scatter / all-gather / all-gather in FP8", "370 / 370 / 200 µs", moves()),
        *((number, f"`tp=2` against one GPU, batch {batch}: {' / '.join(MODELS.values())}",
           " / ".join(f"{least} ×" for least in TIMES[batch]), faster(batch))
          for number, batch in (("4", 1), ("5", 64))),
        ("6", "`dp=2, ep=2` against `tp=2`: the layers of DeepSeek-V3, 64 requests a rank, 4,096 tokens of context",
         "1.15 × tokens/s, 1.9 × tokens in the cache", groups()),
        ("7", "server, Qwen3-30B-A3B, `--tp 2`, 256 prompts of 512 in, 128 out", "1.5 × one GPU", server()),
        ("8", "exchange between ranks before a step", "60 µs of the host", exchange()),
    )  # fmt: skip
    return "\n".join([table(("#", "work", "target", "measured"), rows), "", *sources()])


def sources() -> list[str]:
    """Return a line for each command whose figures are shown."""
    lines: dict[str, None] = {}
    for name in FILES:
        for row in lines_of(name):
            head = row["head"]
            if row is not head and head:
                lines[f"- `two_gpus_{name}_h200.jsonl`: `{head['command']}`, commit {head['commit']}"] = None
    return list(lines)


# ---- tables ------------------------------------------------------------------------------------------------------


def decoding() -> str:
    """Return the decode table."""
    rows = []
    for model, name in MODELS.items():
        for batch in (1, 64, 128):
            one, nccl = decode(model, batch, 1), decode(model, batch, 2, "nccl")
            ours = decode(model, batch, 2, "triton")
            if ours is not None:
                times = ratio(one, ours)
                rows.append((name, str(batch), shown(one, 3), shown(nccl, 3), shown(ours, 3),
                             "" if times is None else f"{times:.2f} ×"))  # fmt: skip
    head = ("model", "batch", "one GPU", "two, NCCL", "two, symmetric memory", "two against one")
    return table(head, rows)


def splits() -> str:
    """Return the same requests by groups and by ``tp``."""
    rows = []
    for requests in (2, 16, 64, 128):
        two, one = grouped(requests, 2), grouped(requests, 1)
        if two is not None and one is not None:
            rows.append((str(requests), shown(one["tpot_ms"], 3), shown(two["tpot_ms"], 3),
                         f"{two['tokens_per_s'] / one['tokens_per_s']:.2f} ×"))  # fmt: skip
    return table(("requests in all", "`tp=2`, ms a token", "`dp=2, ep=2`, ms a token", "tokens/s of groups"), rows)


def prompts() -> str:
    """Return steps of prompts, whole and spread, of which both gave the same tokens."""
    found = [row for row in lines_of("prefill") if row.get("what") == "prefill" and row["same_tokens"]]
    points = {(row["model"], row["tokens"]): row for row in found}
    rows = [
        (MODELS[model], f"{tokens:,}", *(shown(row.get(name)) for name in ("whole_ms", "spread_ms", "spread_fp8_ms")))
        for (model, tokens), row in points.items()
    ]
    return table(("model", "tokens", "whole", "spread", "spread, rows in FP8"), rows)


def halves() -> str:
    """Return decode steps of groups, whole and in two halves that take turns."""
    rows = [
        (MODELS[row["model"]], f"dp {row['dp']}, ep {row['ep']}", str(row["requests"]),
         f"`{row['overlap']}`", shown(row["tpot_ms"]), shown(row["prompts_ms"], 0))
        for row in lines_of("overlap")
        if row.get("what") == "decode_groups"
    ]  # fmt: skip
    return table(("model", "split", "requests in all", "overlap", "ms a token", "its prompts, ms"), rows)


def serving() -> str:
    """Return the servers' table."""
    rows = []
    for row in lines_of("serve"):
        if row.get("row") == "at once":
            split = f"`--tp {row['tp']}`" if "tp" in row else "one GPU"
            split = f"`--attn-dp-size {row['attn_dp_size']} --ep 2`" if "attn_dp_size" in row else split
            times = shown(row["median_ttft_ms"], 0), shown(row["median_tpot_ms"])
            rows.append((split, str(row["prompts"]), f"{row['output_throughput']:,.0f}", *times))
    return table(("server", "prompts at once", "tokens/s out", "first token, ms", "ms a token"), rows)


def crossing() -> str:
    """Return the tables of sums, moves and tokens."""
    rows = lines_of("exchange")
    summed = [last(rows, what="sum_norm_time", hidden=7168, rows=count) for count in ROWS]
    names = ("nccl_norm_us", "sum_norm_us", "nccl_sum_us", "sum_us")
    first = table(
        ("rows", "sum, residual, norm: NCCL + norm", "`sum_norm`", "sum alone: NCCL", "`all_reduce`"),
        [(str(row["rows"]), *(shown(row[name]) for name in names)) for row in summed if row],
    )
    moved = [last(rows, what="exchange_time", hidden=7168, rows=count) for count in (256, 1024, 2048, MOST)]
    each = (
        "nccl_scatter_us", "scatter_us", "nccl_gather_us", "gather_us", "norm_gather_fp8_us", "scatter_norm_gather_us"
    )  # fmt: skip
    second = table(
        ("rows of all ranks", "reduce-scatter: NCCL", "`scatter_rows`", "all-gather: NCCL", "`gather_rows`",
         "in FP8, behind residual and norm", "scatter, norm, gather"),
        [(str(row["rows"]), *(shown(row[name]) for name in each)) for row in moved if row],
    )  # fmt: skip
    sent = [last(rows, what="tokens", route="any", tokens=count) for count in (128, 512)]
    names = ("nccl_dispatch_us", "dispatch_us", "nccl_combine_us", "combine_us")
    third = table(
        ("tokens of each rank, top 8 of 256 experts", "dispatch: NCCL", "`expert_exchange`", "combine: NCCL",
         "`expert_exchange`"),
        [(str(row["tokens"]), *(shown(row[name]) for name in names)) for row in sent if row],
    )  # fmt: skip
    return f"{first}\n\n{second}\n\n{third}"


TABLES: dict[str, Callable[[], str]] = {
    "targets": targets, "decode": decoding, "splits": splits, "prefill": prompts, "halves": halves, "serving": serving,
    "rows": crossing,
}  # fmt: skip


def fill(text: str) -> str:
    """Return the page's text with every table renewed."""
    return marked.fill(text, PAGE.name, TABLES)


def main(given: Sequence[str] | None = None) -> None:
    """Renew the tables, or with ``--check`` fail if they are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is stale")
    options = parser.parse_args(given)
    before = PAGE.read_text()
    after = fill(before)
    if options.check:
        stale = before != after
        raise SystemExit("docs/distributed.md is stale; run: python tools/distributed_tables.py" if stale else 0)
    PAGE.write_text(after)


if __name__ == "__main__":
    main()
