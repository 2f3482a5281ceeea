"""Write the tables of README.md from committed result files.

A table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; nothing else is touched.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import marked
from performance_rows import VLLM
from performance_rows import read as performance

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def read(name: str) -> Any:
    """Return one result file."""
    return json.loads((RESULTS / name).read_text())


CHECKPOINTS = {
    "tiny_deepseek_v3": "eval_tiny_cpu.json",
    "tiny_qwen3_moe": "eval_tiny_qwen3_moe_cpu.json",
    "tiny_gpt_oss": "eval_tiny_gpt_oss_cpu.json",
    "SmolLM2-135M-Instruct": "eval_smollm2_cpu.json",
}
# Never taught the problems, so that how many it solves says nothing of how it was run.
UNTAUGHT = ("SmolLM2-135M-Instruct",)


def accuracy() -> str:
    """Accuracy and distance from fp32 of the tiny checkpoints and of a real one, each way to run them."""
    lines = [
        "| checkpoint | run | exact match | hard set | perplexity | KL mean (may be) | KL p99 (may be) | top-1 | "
        "answers that differ |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    sources: list[str] = []
    machines: dict[str, None] = {}
    for name, file in CHECKPOINTS.items():
        found = read(file)
        for row in found["variants"].values():
            against = found["variants"].get(row["baseline"], {}).get("description")
            flips = "" if row["flips"] is None else f"{row['flips']} of {row['problems']} against {against}"
            right = (None, None) if name in UNTAUGHT else (row["exact_match"], row["hard_exact_match"])
            scores = " | ".join([*map(_percent, right), f"{row['perplexity']:.4f}"])
            far = f"{_bounded(row, 'kl_mean')} | {_bounded(row, 'kl_p99')} | {100 * row['top1_agreement']:.2f}%"
            lines.append(f"| {name} | {row['description']} | {scores} | {far} | {flips} |")
        run = found["run"]
        command = run["command"].split(" --out")[0]
        sources.append(f"`{command}` (commit {run['commit']}, `benchmarks/results/{file}`)")
        machines[f"{run['device']}, torch {run['torch']}, transformers {run['transformers']}"] = None
    return "\n".join([*lines, "", f"Made by {'; '.join(sources)}; {' and '.join(machines)}."])


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def _bounded(row: dict[str, Any], name: str) -> str:
    found, bound = row[name], row[f"{name}_bound"]
    if bound is None:
        return f"{found:.1e}"
    return f"{found:.1e} ({bound:.1e}{', beyond' if found > bound else ''})"


def decode() -> str:
    """Decode speed of a patched model on a CPU."""
    found = read("patch_cpu.json")
    stock, patched, model = found["stock"], found["patched"], found["model"]
    return (
        f"A DeepSeek-V3 of hidden size {model['hidden_size']} with {model['num_hidden_layers']} dense "
        f"layers and {model['num_attention_heads']} heads, fp32, batch {found['batch']}, decodes "
        f"{found['decode_steps']} tokens after a prompt of {found['prompt_tokens']:,}: stock "
        f"{stock['decode_tokens_per_second']} tokens/s, patched {patched['decode_tokens_per_second']} tokens/s, "
        f"{found['decode_speedup']} × as fast (medians of {found['rounds']} rounds in turns), the same tokens; "
        f"{found['cpu']}, {found['threads']} threads, commit {found['commit'][:7]}: `{found['command']}`."
    )


NAMES = {
    "qwen3_30b_a3b": "Qwen3-30B-A3B", "qwen3_30b": "Qwen3-30B-A3B", "qwen3_8b": "Qwen3-8B",
    "gpt_oss_20b": "GPT-OSS-20B (MXFP4)",
}  # fmt: skip


def h200() -> str:
    """Decode on one H200: a patched model against stock, and generate against vLLM's figures."""
    lines = [
        "| `fl.patch(model, cuda_graph=True)` | batch | stock | stock, compiled | patched |",
        "|---|---|---|---|---|",
    ]
    for row in [*performance("patch_qwen3_30b"), *performance("patch_qwen3_8b")]:
        if "ms" in row:
            ms = row["ms"]
            times = [
                f"{ms['stock']:.1f}",
                f"{ms['stock_best']:.2f}" if "stock_best" in ms else "",
                f"{ms['graph']:.2f}",
            ]
            lines.append(f"| {' | '.join([NAMES[row['model']], str(row['batch']), *times])} |")
    lines += [
        "",
        "| `fastlayers_models.generate` | batch | context | ms per token | vLLM 0.22.1 |",
        "|---|---|---|---|---|",
    ]
    for row in performance("generate"):
        if "tpot_ms" in row:
            vllm = VLLM[row["model"], row["batch"]]
            name, batch = NAMES[row["model"]], row["batch"]
            lines.append(f"| {name} | {batch} | {row['prompt']} | {row['tpot_ms']:.2f} | {vllm:.2f} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {"accuracy": accuracy, "decode": decode, "h200": h200}


def fill(text: str) -> str:
    """Return the README's text with every table renewed."""
    return marked.fill(text, "README.md", TABLES)


def main() -> None:
    """Renew the tables, or with ``--check`` fail if they are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is stale")
    check, readme = parser.parse_args().check, ROOT / "README.md"
    before = readme.read_text()
    after = fill(before)
    if check:
        raise SystemExit(0 if before == after else "README.md: tables are stale; run: python tools/readme_tables.py")
    readme.write_text(after)


if __name__ == "__main__":
    main()
