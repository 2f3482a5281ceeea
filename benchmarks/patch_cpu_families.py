"""Prefill and decode of every family on a CPU, stock and patched in turns, in one process.

Small random models (hidden 512, two layers) in bf16 and fp32, on one thread. A round runs one model and then the other,
who comes first changing each time: a prompt, then tokens one by one. (Token by token in turns, each model would find
the other's weights in the caches, which nobody's model does.) Calls are timed by the processor's time of the thread.
What other programs do still counts there, through caches and memory that are shared, and only ever adds: so a time is
the mean of the fastest quarter of its calls, and a ratio is stock's such time divided by the patched model's. A row
with a ratio below ``--again-below`` is measured again, up to three times, with all its calls taken together: a burst of
other programs' work passes, a slower model stays slower.

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
    "llama4": ("Llama4", {
        **GQA, "num_local_experts": 16, "interleave_moe_layer_step": 2, "intermediate_size": 256,
        "intermediate_size_mlp": 1024, "attention_chunk_size": 512, "no_rope_layers": [1, 0],
    }),
}  # fmt: skip
CONFIGS = {"Llama4": "Llama4TextConfig"}


def build(family: str, dtype: torch.dtype) -> Any:
    """Return a random model in evaluation mode."""
    prefix, own = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS.get(prefix, f"{prefix}Config"))(**COMMON | own)
    return getattr(transformers, f"{prefix}ForCausalLM")(config).to(dtype).eval()


@torch.inference_mode()
def round_of(models: tuple[Any, Any], ids: torch.Tensor, steps: int, turn: int) -> list[list[float]]:
    """Return seconds of a prefill and of each token after it, for both models; ``turn``: who is first, 0 or 1."""
    took: list[list[float]] = [[], []]
    for place in (turn % 2, (turn + 1) % 2):
        cache = None
        for step in range(steps + 1):
            rows = ids[:, step - 1 : step] if step else ids
            start = time.thread_time()
            out = models[place](rows, past_key_values=cache, use_cache=True, logits_to_keep=1)
            took[place].append(time.thread_time() - start)
            cache = out.past_key_values
    return took


def fastest(times: list[float]) -> float:
    """Return the mean of the fastest quarter."""
    return statistics.fmean(sorted(times)[: max(1, len(times) // 4)])


def measure(
    family: str, dtype: torch.dtype, prompt: int, steps: int, rounds: int, again_below: float
) -> dict[str, Any]:  # fmt: skip
    """Return the row of one family, dtype and prompt."""
    stock = build(family, dtype)
    fast = copy.deepcopy(stock)
    report = fl.patch(fast, strict=True)
    ids = torch.randint(0, COMMON["vocab_size"], (1, prompt), generator=torch.Generator().manual_seed(1))
    round_of((stock, fast), ids[:, :64], 2, 0)
    times: list[list[list[float]]] = []
    row: dict[str, Any] = {}
    for _ in range(4):
        times += [round_of((stock, fast), ids, steps, turn) for turn in range(rounds)]
        row = {"family": family, "dtype": str(dtype).removeprefix("torch."), "prompt": prompt, "rounds": len(times)}
        for phase, where in (("prefill", slice(1)), ("decode", slice(1, None))):
            theirs, ours = ([second for took in times for second in took[place][where]] for place in (0, 1))
            row |= {
                f"{phase}_stock_ms": round(1e3 * fastest(theirs), 2),
                f"{phase}_patched_ms": round(1e3 * fastest(ours), 2),
                f"{phase}_ratio": round(fastest(theirs) / fastest(ours), 3),
            }
        if min(row["prefill_ratio"], row["decode_ratio"]) >= again_below:
            break
    if any(report.fallbacks().values()):
        raise SystemExit(f"{family}: {report.summary()}")
    return row


def main() -> None:
    """Measure all families and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--prompts", nargs="+", type=int, default=[256, 1500])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--again-below", type=float, default=0.985)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for family in args.families:
        for dtype in (torch.bfloat16, torch.float32):
            for prompt in args.prompts:
                rows.append(measure(family, dtype, prompt, args.steps, args.rounds, args.again_below))
                print(rows[-1], flush=True)
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        head = {
            "command": shlex.join(["python", *sys.argv]), "commit": commit.stdout.strip(), "torch": torch.__version__,
            "transformers": transformers.__version__, "threads": torch.get_num_threads(), "machine": platform.machine(),
        }  # fmt: skip
        args.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
