"""Time to the first token of Hugging Face ``generate`` on one GPU: stock, patched, patched with CUDA graphs.

Two models of the same random weights (see patch_gpu.py) stand side by side, one patched with ``cuda_graph=True``; the
variants alternate in one process, ``generate(max_new_tokens=1)`` each:

    stock          eager, dynamic cache
    patched        with disable_compile=True: nothing is replayed
    graph          prompts replayed where they are captured (``replayed``)

For each batch × prompt: median milliseconds, the sum of the kernels' times, whether the tokens are stock's. A batch
above 1 is left-padded: row b lacks b tokens. The last row of a model is what was captured, and what that cost.

    python benchmarks/patch_first_token.py --model qwen3_8b --out benchmarks/results/patch_first_token.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from first_token import record
from patch_gpu import CONFIGS, build

import fastlayers as fl
from fastlayers.patching import decode

SHAPES = ((1, 16), (1, 128), (1, 300), (1, 512), (1, 700), (1, 2048), (1, 8192), (4, 128))
VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "stock": (False, {}), "patched": (True, {"disable_compile": True}), "graph": (True, {})
}  # fmt: skip


def prompts(batch: int, length: int, vocab: int) -> dict[str, torch.Tensor]:
    """Return random prompts of which row b begins with b tokens of padding."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(2, vocab, (batch, length), generator=random)
    mask = (torch.arange(length) >= torch.arange(batch)[:, None]).long()
    return {"input_ids": (ids * mask).cuda(), "attention_mask": mask.cuda()}


@torch.inference_mode()
def first_token(model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Return milliseconds of one call, and the tokens."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    out = model.generate(**inputs, do_sample=False, max_new_tokens=1, min_new_tokens=1, pad_token_id=0, **options)
    found = out[:, -1].cpu()
    return (time.perf_counter() - begin) * 1e3, found


def device_ms(model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> tuple[float, int]:
    """Return the sum of the kernels' times of one call, and their number."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        first_token(model, inputs, options)
        torch.cuda.synchronize()
    times = [
        event.time_range.elapsed_us()
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Mem")
    ]
    return sum(times) / 1e3, len(times)


def bench(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model."""
    stock, fast = build(name), build(name)
    fl.patch(fast, cuda_graph=True)
    driver = decode.driver_of(fast)
    assert driver is not None
    for batch, length in options.shapes:
        inputs = prompts(batch, length, stock.config.vocab_size)
        times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        tokens, row = {}, {"model": name, "batch": batch, "prompt": length}
        for turn in range(options.repeats + 3):
            for variant, (patched, how) in VARIANTS.items():
                spent, tokens[variant] = first_token(fast if patched else stock, inputs, how)
                if turn >= 3:  # compiles, captures
                    times[variant].append(spent)
        for variant, (patched, how) in VARIANTS.items():
            before = int(driver.prefills)
            device, kernels = device_ms(fast if patched else stock, inputs, how)
            row |= {
                f"{variant}_ms": round(statistics.median(times[variant]), 3), f"{variant}_device_ms": round(device, 3),
                f"{variant}_kernels": kernels, f"{variant}_replayed": int(driver.prefills) > before,
                f"{variant}_same": int((tokens[variant] == tokens["stock"]).sum()),
            }  # fmt: skip
        yield row
    yield {"model": name, "report": driver.report()}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="*", default=["qwen3_8b", "qwen3_30b"], choices=list(CONFIGS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--shapes", type=lambda text: tuple(map(int, text.split("x"))), nargs="*", default=SHAPES,
                        metavar="BATCHxTOKENS")  # fmt: skip
    options = parser.parse_args()
    head = {"run": "patch_first_token", "transformers": transformers.__version__, "repeats": options.repeats}
    record(head, (bench(name, options) for name in options.model), options.out)


if __name__ == "__main__":
    main()
