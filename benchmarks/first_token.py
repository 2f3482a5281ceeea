"""Time to the first token, captured and not: ``python benchmarks/first_token.py [MODEL ...] [--out FILE]``.

Models have their real dimensions and random weights. For each batch × prompt: milliseconds from the call to the first
tokens of all prompts on the host (median of several), with prefill captured as it is by default, captured whatever the
padding (``padded``), and uncaptured; the sum of the kernels' times of each; and whether the tokens are the same. The
last row of a model is what was captured, and what that cost. One JSON line a row.

Shapes that ``peers/bench_vllm.py`` times as well are timed as it does: between two first tokens the same prompts get
128 tokens. A GPU that only prefills takes all the power that it may, and prefills more slowly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from generate import MODELS, prompts_of, randomize

import fastlayers as fl
from fastlayers.attention.buckets import ExtendBuckets
from fastlayers.tuning.bench import describe_run
from fastlayers_models.auto import family_of
from fastlayers_models.generate import Generator

MLA: dict[str, Any] = dict(
    model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
    num_hidden_layers=6, first_k_dense_replace=1, num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536,
    kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=32, n_group=8,
    topk_group=4, num_experts_per_tok=8, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True,
    scoring_func="sigmoid", topk_method="noaux_tc", max_position_embeddings=16384, rms_norm_eps=1e-6,
    rope_theta=10000.0, eos_token_id=1, bos_token_id=0, num_nextn_predict_layers=0,
)  # fmt: skip
ALL = MODELS | {"deepseek_v3_6_layers": MLA}
SHAPES = ((1, 16), (1, 128), (1, 300), (1, 512), (1, 700), (1, 1100), (1, 2048), (8, 16), (8, 200), (32, 512))
WAYS: dict[str, dict[str, Any]] = {
    "captured": {}, "padded": {"extend_buckets": ExtendBuckets(max_padding=1.0)}, "uncaptured": {"cuda_graph": False}
}  # fmt: skip
# What the peer's program times, and how many tokens it makes in between.
PEER_SHAPES, PEER_TOKENS = ((1, 128), (32, 512)), 128


def wall_ms(
    generator: Generator, rows: list[list[int]], repeats: int, between: Callable[[], Any]
) -> tuple[list[float], list[list[int]]]:
    """Return so many times' milliseconds to the first tokens, and those; ``between`` comes in front of each."""
    found, tokens = [], []
    for run in range(repeats + 2):  # the first compiles and is captured behind its token
        if run > 1:
            between()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        stream = generator.stream(rows, max_new_tokens=1, eos_ids=())
        tokens = [next(stream).id for _ in rows]
        found.append((time.perf_counter() - begin) * 1e3)
        list(stream)
    return found[2:], [tokens]


def device_ms(generator: Generator, rows: list[list[int]]) -> tuple[float, int]:
    """Return the sum of the kernels' times of one prefill, and their number."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        generator.generate(rows, max_new_tokens=1, eos_ids=())
        torch.cuda.synchronize()
    times = [
        event.time_range.elapsed_us()
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Mem")
    ]
    return sum(times) / 1e3, len(times)


@torch.inference_mode()
def bench(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model."""
    config = ALL[name] | ({"num_hidden_layers": options.layers} if options.layers else {})
    family: Any = family_of(config)
    model = family(family.config_class.from_hf(config), dtype=torch.bfloat16, device="cuda").eval()
    randomize(model)
    ways = {
        way: Generator(model, max_batch=32, max_length=2304, num_pages=32 * 12 + 40, **WAYS[way])
        for way in options.ways
    }
    for batch, length in options.shapes:
        rows = prompts_of(batch, length, model.config.vocab_size)
        row: dict[str, Any] = {"model": name, "batch": batch, "prompt": length}
        tokens = {}
        peers = (batch, length) in PEER_SHAPES
        for way, generator in ways.items():
            decode = partial(generator.generate, rows, max_new_tokens=PEER_TOKENS, eos_ids=())
            between = decode if peers else list
            times, tokens[way] = wall_ms(generator, rows, options.repeats, between)
            before = generator.step.graphs.replays if generator.step.graphs is not None else 0
            device, kernels = device_ms(generator, rows)
            replayed = generator.step.graphs is not None and generator.step.graphs.replays > before
            row |= {f"{way}_ms": round(statistics.median(times), 3), f"{way}_least_ms": round(min(times), 3)}
            row |= {f"{way}_device_ms": round(device, 3), f"{way}_kernels": kernels}
            row |= {f"{way}_replayed": replayed}
        last = tokens[options.ways[-1]][0]
        same = [sum(a == b for a, b in zip(last, tokens[way][0], strict=True)) for way in ways]
        told = {"tokens_between": PEER_TOKENS} if peers else {}
        yield row | told | {"same_tokens": dict(zip(ways, same, strict=True))}
    yield {"model": name, "report": ways["captured"].step.report()}


def record(head: dict[str, Any], models: Iterable[Iterable[dict[str, Any]]], out: Path | None) -> None:
    """Print the rows of one model after the other behind a line that describes the run, and write them to ``out``."""
    lines = [head | describe_run("cuda") | {"command": "python " + " ".join(sys.argv)}]
    print(json.dumps(lines[0]), flush=True)
    for rows in models:
        for row in rows:
            lines.append(row)
            print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()
    if out:
        out.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(ALL), help=f"of {', '.join(ALL)}")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layers", type=int, help="fewer decoder layers, to try things out")
    parser.add_argument("--ways", choices=list(WAYS), nargs="*", default=list(WAYS), help="tokens are the last one's")
    parser.add_argument("--shapes", type=lambda text: tuple(map(int, text.split("x"))), nargs="*", default=SHAPES,
                        metavar="BATCHxTOKENS")  # fmt: skip
    options = parser.parse_args()
    head = {"run": "first_token", "fastlayers": fl.__version__, "repeats": options.repeats}
    record(head, (bench(name, options) for name in options.models), options.out)


if __name__ == "__main__":
    main()
