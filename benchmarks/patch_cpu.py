"""Decode speed of a Hugging Face DeepSeek-V3 on a CPU, before and after ``fastlayers.patch``, in one process.

The model: hidden 2048, two dense layers with an MLP of 2048, 16 heads, rank 512, fp32, batch 1, random weights.
Each run prefills the prompt once and then generates; the time of the prefill (up to the first new token) is kept
apart from the rest. Stock and patched runs alternate. The tokens of both are compared.

    python benchmarks/patch_cpu.py --json benchmarks/results/patch_cpu.json
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import fastlayers as fl
from fastlayers.tuning.provenance import provenance

SIZES: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 2, "first_k_dense_replace": 2,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 1024,
}  # fmt: skip


class FirstToken:
    """A streamer that notes when the first new token arrived (the prompt itself is put first)."""

    def __init__(self) -> None:
        self.calls, self.at = 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        """Count a piece of the stream."""
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        """Nothing to flush."""


@dataclass(frozen=True)
class Run:
    """One ``generate``: seconds of the prefill with the first token, of the decode steps after it, and the tokens."""

    prefill: float
    decode: float
    tokens: list[int]


def build() -> Any:
    """Return the model with random weights large enough that tokens vary."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **SIZES, n_group=1, topk_group=1, max_position_embeddings=8192, initializer_range=0.1, eos_token_id=None
    )
    return DeepseekV3ForCausalLM(config).eval()


@torch.inference_mode()
def generate(model: Any, ids: torch.Tensor, steps: int) -> Run:
    """Generate the first token and ``steps`` more."""
    clock, begin = FirstToken(), time.perf_counter()
    count = steps + 1
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count,
        pad_token_id=0, streamer=clock,
    )  # fmt: skip
    end = time.perf_counter()
    return Run(clock.at - begin, end - clock.at, out[0, ids.shape[1] :].tolist())


def cpu_name() -> str:
    """Return the processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measure(prompt: int, steps: int, rounds: int) -> dict[str, Any]:
    """Run both sides ``rounds`` times, one after the other in turn, after one short run of each."""
    model = build()
    ids = torch.randint(2, SIZES["vocab_size"], (1, prompt), generator=torch.Generator().manual_seed(1))
    runs: dict[str, list[Run]] = {"stock": [], "patched": []}
    hits = 0
    for number in range(rounds + 1):
        length, count = (ids[:, :128], 4) if number == 0 else (ids, steps)
        stock = generate(model, length, count)
        with fl.patched(model) as report:
            patched = generate(model, length, count)
            hits = sum(report.hits().values())
        if number:
            runs["stock"].append(stock)
            runs["patched"].append(patched)
            print(f"round {number}: stock {stock.decode:.3f} s, patched {patched.decode:.3f} s", flush=True)
    identical = all(run.tokens == runs["stock"][0].tokens for side in runs.values() for run in side)
    result: dict[str, Any] = {"identical_tokens": identical, "distinct_tokens": len(set(runs["stock"][0].tokens))}
    for side, made in runs.items():
        decode = [run.decode for run in made]
        result[side] = {
            "decode_seconds": [round(s, 4) for s in decode],
            "decode_seconds_median": round(statistics.median(decode), 4),
            "decode_tokens_per_second": round(steps / statistics.median(decode), 2),
            "prefill_seconds_median": round(statistics.median(run.prefill for run in made), 4),
        }
    ratio = result["stock"]["decode_seconds_median"] / result["patched"]["decode_seconds_median"]
    return result | {"decode_speedup": round(ratio, 2), "hits_last_round": hits}


def main() -> int:
    """Measure, print and save; exit code 1 if tokens differ or the speed-up is below ``--at-least``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=32, help="decode steps after the first token")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--at-least", type=float, default=8.0, help="required decode speed-up")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    result = {
        "benchmark": "patch_cpu",
        "command": shlex.join(["python", *sys.argv]),
        **provenance(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__, "fastlayers": fl.__version__,
        },
        "model": SIZES | {"dtype": "float32"},
        "batch": 1, "prompt_tokens": options.prompt, "decode_steps": options.steps, "rounds": options.rounds,
        **measure(options.prompt, options.steps, options.rounds),
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n")
    return 0 if result["identical_tokens"] and result["decode_speedup"] >= options.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
