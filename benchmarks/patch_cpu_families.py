"""Prefill and decode of every family on a CPU, stock and patched in turns, in one process.

Small random models (hidden 512, two layers) in bf16 and fp32, on one thread. A round prefills a prompt and then decodes
tokens one by one with the cache of that prefill. What counts is the processor's time, which other programs on the
machine disturb least; ratios are medians over rounds of stock's time divided by the patched model's of the same round.

    python benchmarks/patch_cpu_families.py --json benchmarks/results/patch_cpu_families.json
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import fastlayers as fl

COMMON: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 16, "max_position_embeddings": 8192, "initializer_range": 0.1,
}  # fmt: skip
GQA = {"num_key_value_heads": 4, "head_dim": 64}
SPARSE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
MLA = {
    "num_key_value_heads": 16, "q_lora_rank": 192, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "n_group": 4,
    "qk_nope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 16, "num_experts_per_tok": 4, "topk_group": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 256,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GQA), "qwen2": ("Qwen2", {"num_key_value_heads": 4}),
    "qwen2_moe": ("Qwen2Moe", {"num_key_value_heads": 4, **SPARSE, "shared_expert_intermediate_size": 256}),
    "qwen3": ("Qwen3", GQA), "qwen3_moe": ("Qwen3Moe", {**GQA, **SPARSE}),
    "deepseek_v2": ("DeepseekV2", {**MLA, "topk_method": "group_limited_greedy"}), "deepseek_v3": ("DeepseekV3", MLA),
    "gpt_oss": ("GptOss", {**GQA, "num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 128}),
}  # fmt: skip


def build(family: str, dtype: torch.dtype) -> Any:
    """Return a random model in evaluation mode."""
    prefix, own = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**COMMON, **own)
    return getattr(transformers, f"{prefix}ForCausalLM")(config).to(dtype).eval()


@torch.inference_mode()
def round_of(model: Any, ids: torch.Tensor, steps: int) -> tuple[float, float]:
    """Return seconds of a prefill, and of a decoded token after it."""
    start = time.process_time()
    out = model(ids, use_cache=True, logits_to_keep=1)
    middle = time.process_time()
    for step in range(steps):
        out = model(ids[:, step : step + 1], past_key_values=out.past_key_values, use_cache=True)
    return middle - start, (time.process_time() - middle) / steps


def measure(family: str, dtype: torch.dtype, prompt: int, steps: int, rounds: int) -> dict[str, Any]:
    """Return the row of one family, dtype and prompt."""
    stock = build(family, dtype)
    fast = copy.deepcopy(stock)
    report = fl.patch(fast, strict=True)
    ids = torch.randint(0, COMMON["vocab_size"], (1, prompt), generator=torch.Generator().manual_seed(1))
    for model in (stock, fast):
        round_of(model, ids[:, :64], 2)
    times = [(round_of(stock, ids, steps), round_of(fast, ids, steps)) for _ in range(rounds)]
    if any(report.fallbacks().values()):
        raise SystemExit(f"{family}: {report.summary()}")
    row: dict[str, Any] = {"family": family, "dtype": str(dtype).removeprefix("torch."), "prompt": prompt}
    for place, phase in enumerate(("prefill", "decode")):
        ratios = sorted(a[place] / b[place] for a, b in times)
        row |= {
            f"{phase}_stock_ms": round(1e3 * statistics.median(a[place] for a, _ in times), 2),
            f"{phase}_patched_ms": round(1e3 * statistics.median(b[place] for _, b in times), 2),
            f"{phase}_ratio": round(statistics.median(ratios), 3),
            f"{phase}_ratios": [round(ratio, 3) for ratio in ratios],
        }
    return row


def main() -> None:
    """Measure all families and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--prompts", nargs="+", type=int, default=[256, 1500])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for family in args.families:
        for dtype in (torch.bfloat16, torch.float32):
            for prompt in args.prompts:
                rows.append(measure(family, dtype, prompt, args.steps, args.rounds))
                print({key: value for key, value in rows[-1].items() if not key.endswith("ratios")}, flush=True)
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        head = {
            "command": shlex.join(["python", *sys.argv]), "commit": commit.stdout.strip(), "torch": torch.__version__,
            "transformers": transformers.__version__, "threads": torch.get_num_threads(), "machine": platform.machine(),
        }  # fmt: skip
        args.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
