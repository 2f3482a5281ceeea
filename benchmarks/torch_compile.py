"""What compiling small operators is worth in captured decode: ``python benchmarks/torch_compile.py [MODEL ...]``.

Models have their real dimensions and random weights. One process measures, in turns, a generator without it and one
for each mode of :class:`fastlayers.TorchCompile`: seconds to capture the buckets of batch 1 and ``--batch`` for the
first time (compilation included), and milliseconds per output token at both (128 tokens in and out). One JSON line a
row; the first line describes the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from generate import MODELS, arrivals, prompts_of, randomize

import fastlayers as fl
from fastlayers.torch_compile import MODES
from fastlayers.tuning.bench import describe_run
from fastlayers_models.auto import family_of
from fastlayers_models.generate import Generator

LENGTH, NEW = 128, 128


@torch.inference_mode()
def measure(name: str, batches: tuple[int, ...], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield one row for each mode and batch."""
    family: Any = family_of(MODELS[name])
    model = family(family.config_class.from_hf(MODELS[name]), dtype=torch.bfloat16, device="cuda").eval()
    randomize(model)
    generators, seconds = {}, {}
    Generator(model, max_batch=max(batches), max_length=2 * LENGTH).capture(batches)  # compiles our own kernels
    for mode in (None, *MODES):
        how = None if mode is None else fl.TorchCompile(max_batch=max(batches), mode=mode)
        generators[mode] = Generator(model, max_batch=max(batches), max_length=2 * LENGTH, torch_compile=how)
        begin = time.perf_counter()
        generators[mode].capture(batches)
        seconds[mode] = round(time.perf_counter() - begin, 2)
    times: dict[tuple[str | None, int], list[float]] = {}
    for batch in batches:
        rows = prompts_of(batch, LENGTH, model.config.vocab_size)
        for _ in range(rounds):
            for mode, generator in generators.items():
                found = arrivals(generator.stream(rows, max_new_tokens=NEW, eos_ids=()), batch)
                times.setdefault((mode, batch), []).append((found[-1] - found[0]) / (NEW - 1) * 1e3)
    for (mode, batch), values in times.items():
        yield {
            "model": name, "torch_compile": mode, "batch": batch, "tpot_ms": round(statistics.median(values), 3),
            "tpot_spread_ms": round(max(values) - min(values), 3), "capture_s": seconds[mode],
        }  # fmt: skip


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["qwen3_8b", "qwen3_30b_a3b"], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", default="", help="the commit that results name; default: ask git")
    options = parser.parse_args()
    about = {"commit": options.commit} if options.commit else {}
    print(json.dumps(describe_run(torch.device("cuda")) | about))
    for name in options.models:
        for row in measure(name, tuple(sorted({1, options.batch})), options.rounds):
            print(json.dumps(row), flush=True)
        print(f"{name}: {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB at most", file=sys.stderr)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
