"""Prefill and decode of every family on a CPU, stock and patched in turns, in one process.

Small random models (hidden 512, two layers) in bf16 and fp32, on one thread. A round prefills a prompt with both models
and then decodes tokens with both caches, one token of either in turn, who comes first changing each time. What counts
is the processor's time, which other programs on the machine disturb least; ratios are medians over pairs of
neighbouring calls, stock's time divided by the patched model's.

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
def round_of(models: tuple[Any, Any], ids: torch.Tensor, steps: int, turn: int) -> list[list[float]]:
    """Return seconds of a prefill and of each token after it, for both models; ``turn``: who is first, 0 or 1."""
    took: list[list[float]] = [[], []]
    caches = [None, None]
    for step in range(steps + 1):
        for place in ((step + turn) % 2, (step + turn + 1) % 2):
            rows = ids[:, step - 1 : step] if step else ids
            start = time.process_time()
            out = models[place](rows, past_key_values=caches[place], use_cache=True, logits_to_keep=1)
            took[place].append(time.process_time() - start)
            caches[place] = out.past_key_values
    return took


def measure(family: str, dtype: torch.dtype, prompt: int, steps: int, rounds: int) -> dict[str, Any]:
    """Return the row of one family, dtype and prompt."""
    stock = build(family, dtype)
    fast = copy.deepcopy(stock)
    report = fl.patch(fast, strict=True)
    ids = torch.randint(0, COMMON["vocab_size"], (1, prompt), generator=torch.Generator().manual_seed(1))
    round_of((stock, fast), ids[:, :64], 2, 0)
    times = [round_of((stock, fast), ids, steps, turn) for turn in range(rounds)]
    if any(report.fallbacks().values()):
        raise SystemExit(f"{family}: {report.summary()}")
    row: dict[str, Any] = {"family": family, "dtype": str(dtype).removeprefix("torch."), "prompt": prompt}
    for phase, where in (("prefill", slice(1)), ("decode", slice(1, None))):
        theirs, ours = ([second for took in times for second in took[place][where]] for place in (0, 1))
        ratios = sorted(a / b for a, b in zip(theirs, ours, strict=True))
        quarters = [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]]
        row |= {
            f"{phase}_stock_ms": round(1e3 * statistics.median(theirs), 2),
            f"{phase}_patched_ms": round(1e3 * statistics.median(ours), 2),
            f"{phase}_ratio": round(statistics.median(ratios), 3),
            f"{phase}_quartiles": [round(ratio, 3) for ratio in quarters],
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
                print({key: value for key, value in rows[-1].items() if not key.endswith("quartiles")}, flush=True)
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        head = {
            "command": shlex.join(["python", *sys.argv]), "commit": commit.stdout.strip(), "torch": torch.__version__,
            "transformers": transformers.__version__, "threads": torch.get_num_threads(), "machine": platform.machine(),
        }  # fmt: skip
        args.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
