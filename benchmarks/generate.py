"""Time ``fastlayers_models.generate`` end to end: ``python benchmarks/generate.py [MODEL ...] [--out FILE]``.

Models have their real dimensions and random weights, made on the GPU. For each: seconds from this program's start to
the first token, seconds to capture all batch buckets (``--capture``: also without the frozen collector and under
``torch.compiler.config.force_cudagraph_gc``), milliseconds per output token at batch 1 (128 in, 128 out) and batch 32
(512 in, 128 out), the same split into replay and host, and the floor: bytes that a step must read over the bandwidth.
``--profile`` prints the kernels of one step. One JSON line a row; the first line describes the run.
"""

from __future__ import annotations

import time

BEGIN = time.perf_counter()

import argparse  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
from collections import defaultdict  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from itertools import pairwise  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

import fastlayers as fl  # noqa: E402
from fastlayers.attention.meta import AttentionBatch  # noqa: E402
from fastlayers.device import OPTIONAL_PACKAGES, as_device, package  # noqa: E402
from fastlayers.tuning.provenance import loop_ms, provenance  # noqa: E402
from fastlayers_models.auto import family_of  # noqa: E402
from fastlayers_models.generate import Generator  # noqa: E402
from fastlayers_models.step import StepKey  # noqa: E402

QWEN = dict(vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6, head_dim=128, eos_token_id=151645)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_30b_a3b": QWEN | dict(
        model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, rope_theta=1000000.0,
    ),
    "qwen3_8b": QWEN | dict(
        model_type="qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, rope_theta=1000000.0,
    ),
    "gpt_oss_20b": dict(
        model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
        max_position_embeddings=131072, rms_norm_eps=1e-5, eos_token_id=200002, sliding_window=128,
        quantization_config=dict(
            quant_method="mxfp4",
            modules_to_not_convert=[
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
            ],
        ),
    ),
}  # fmt: skip


def randomize(model: nn.Module) -> None:
    """Fill the weights on their device: normal with 0.02, norms 1, MXFP4 codes anything and scales near 2^-7."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, fl.RMSNorm):
                parameter.fill_(1.0)
            elif parameter.dtype == torch.uint8:
                low, high = (118, 121) if "scale" in name else (0, 256)
                parameter.random_(low, high)
            else:
                parameter.normal_(0.0, 0.02)
    fl.finalize(model)


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's weights, counted before backends pack them."""

    always: float
    experts: tuple[tuple[float, float], ...]  # (bytes, share that one token chooses) of every expert layer
    total: float

    @staticmethod
    def of(model: nn.Module) -> Weights:
        """Count; the embedding's rows cost next to nothing."""
        always, total, experts = 0.0, 0.0, []
        for module in model.modules():
            size = sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
            total += size
            if isinstance(module, fl.FusedMoE):
                experts.append((size, module.cfg.top_k / module.cfg.num_experts))
            elif not isinstance(module, fl.VocabEmbedding):
                always += size
        return Weights(always, tuple(experts), total)

    def step(self, batch: int) -> float:
        """Return the bytes that a decode step of ``batch`` tokens must read, if each chooses experts at random."""
        return self.always + sum(size * (1 - (1 - share) ** batch) for size, share in self.experts)


def cache_bytes(model: Any, batch: int, context: int) -> float:
    """Return the bytes of keys and values that a decode step must read."""
    config = model.config
    spec = fl.kv_cache_spec(model, page_size=model.page_size, dtype=model.kv_dtype)
    windows = getattr(config, "windows", ()) or (None,) * config.num_hidden_layers
    seen = sum(min(context, window or context) for window in windows) / len(windows)
    return spec.bytes_per_token * seen * batch


def prompts_of(batch: int, length: int, vocab: int) -> list[list[int]]:
    """Return distinct random prompts."""
    random = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab, (batch, length), generator=random).tolist()


def arrivals(stream: Iterator[Any], batch: int) -> list[float]:
    """Return when each step's tokens were there, from now on."""
    begin, found = time.perf_counter(), []
    for index, _ in enumerate(stream):
        if index % batch == batch - 1:
            found.append(time.perf_counter() - begin)
    return found


class Stopwatch:
    """Times every launch of a decode step on the device, and its host work, while a generator runs."""

    def __init__(self, generator: Generator) -> None:
        self.host: list[float] = []
        self._events: list[tuple[Any, Any]] = []
        launch = generator.step.launch

        def timed(batch: AttentionBatch) -> Any:
            """Launch between two events."""
            events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin = time.perf_counter()
            events[0].record()
            pending = launch(batch)
            events[1].record()
            self.host.append((time.perf_counter() - begin) * 1e3)
            self._events.append(events)  # type: ignore[arg-type]
            return pending

        generator.step.launch = timed  # type: ignore[method-assign]

    def report(self) -> dict[str, float]:
        """Return median milliseconds of a step on the device, of its launch on the host, and between two steps."""
        torch.cuda.synchronize()
        steps = [begin.elapsed_time(end) for begin, end in self._events]
        gaps = [a[1].elapsed_time(b[0]) for a, b in pairwise(self._events)]
        found = {"device_ms": steps, "first_device_ms": steps[:5], "host_ms": self.host, "gap_ms": gaps}
        return {name: round(statistics.median(values), 3) for name, values in found.items()}


def time_decode(
    generator: Generator, weights: Weights, batch: int, length: int, new: int, repeats: int
) -> dict[str, Any]:
    """Return milliseconds per output token after the first (median of ``repeats`` runs), and device and host apart."""
    rows = prompts_of(batch, length, generator.model.config.vocab_size)
    runs, first = [], []
    for _ in range(repeats + 1):
        times = arrivals(generator.stream(rows, max_new_tokens=new, eos_ids=()), batch)
        runs.append((times[-1] - times[0]) / (new - 1) * 1e3)
        first.append(times[0])
    plain, watch = generator.step.launch, Stopwatch(generator)
    arrivals(generator.stream(rows, max_new_tokens=new, eos_ids=()), batch)
    generator.step.launch = plain  # type: ignore[method-assign]
    tpot = statistics.median(runs[1:])
    read = weights.step(batch) + cache_bytes(generator.model, batch, length + new // 2)
    floor = read / as_device("cuda").bandwidth
    return {
        "batch": batch, "prompt": length, "new": new, "tpot_ms": round(tpot, 3),
        "tpot_spread_ms": round(max(runs[1:]) - min(runs[1:]), 3), **watch.report(),
        "ttft_ms": round(statistics.median(first[1:]) * 1e3, 1), "floor_ms": round(floor * 1e3, 3),
        "tokens_per_s": round(batch / tpot * 1e3, 1),
    }  # fmt: skip


def time_captures(generator: Generator, all_settings: bool) -> Iterator[dict[str, Any]]:
    """Yield what capturing all buckets afresh costs: with all settings the median of three rounds of them in turns."""
    settings = [(True, False), *([(False, False), (True, True), (False, True)] if all_settings else [])]
    rounds = [[time_capture(generator, *each) for each in settings] for _ in range(3 if all_settings else 1)]
    for rows in zip(*rounds, strict=True):
        runs = [row["capture_s"] for row in rows]
        yield rows[-1] | {"capture_s": statistics.median(runs), "runs_s": runs}


def time_capture(generator: Generator, freeze: bool, force_gc: bool) -> dict[str, Any]:
    """Capture all buckets afresh and return what it cost; kernels are compiled beforehand."""
    step = generator.step
    assert step.graphs is not None
    step.graphs.clear()
    step.graphs.freeze = freeze
    torch.compiler.config.force_cudagraph_gc = force_gc
    torch.cuda.synchronize()
    begin = time.perf_counter()
    generator.capture()
    seconds = time.perf_counter() - begin
    torch.compiler.config.force_cudagraph_gc = False
    ledger = step.graphs.ledger
    return {
        "capture_s": round(seconds, 3), "frozen": freeze, "force_cudagraph_gc": force_gc, "graphs": len(ledger),
        "objects": len(gc.get_objects()), "buckets": list(step.buckets),
        "warm_up_s": round(sum(r.warm_up_seconds for r in ledger), 3),
        "mib": round(sum(r.bytes for r in ledger) / 2**20, 1),
    }  # fmt: skip


def decode_key(generator: Generator, batch: int) -> StepKey:
    """Return the key of a greedy decode step of so many rows."""
    bucket = min(n for n in generator.step.buckets if n >= batch)
    return StepKey("decode", bucket, bucket, "greedy")


def profile_step(generator: Generator, batch: int) -> list[tuple[int, float, str]]:
    """Print and return the kernels of one replay that take longest: count, microseconds together, name."""
    step = generator.step
    assert step.graphs is not None
    key = decode_key(generator, batch)
    step.capture([key.tokens])
    step.graphs.replay(key)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step.graphs.replay(key)
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.time_range.elapsed_us())
    total = sum(map(sum, found.values()))
    print(f"batch {batch}: {sum(map(len, found.values()))} kernels, {total:.0f} us of work", file=sys.stderr)
    longest = sorted(found.items(), key=lambda row: -sum(row[1]))[:24]
    for name, times in longest:
        print(f"{len(times):5} x {statistics.mean(times):7.2f} = {sum(times):8.1f}  {name[:110]}", file=sys.stderr)
    return [(len(times), round(sum(times), 1), name[:110]) for name, times in longest]


@torch.inference_mode()
def bench(name: str, options: argparse.Namespace, started: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model."""
    begin = time.perf_counter()
    config = MODELS[name] | ({"num_hidden_layers": options.layers} if options.layers else {})
    family: Any = family_of(config)
    model = family(family.config_class.from_hf(config), dtype=torch.bfloat16, device="cuda").eval()
    weights = Weights.of(model)
    randomize(model)
    torch.cuda.synchronize()
    built = time.perf_counter()
    if options.bf12:
        stored = fl.store_bf12(model)
        yield {"model": name, "bf12_layers": len(stored.layers), "bf12_gib": round(stored.nbytes / 2**30, 2)}
    generator = Generator(model, max_batch=options.max_batch, max_length=options.max_length)
    first = next(iter(generator.stream(prompts_of(1, 128, model.config.vocab_size), max_new_tokens=2, eos_ids=())))
    now = time.perf_counter()
    yield {
        "model": name, "import_to_first_token_s": round(now - started, 2), "build_s": round(built - begin, 2),
        "first_token_s": round(now - built, 2), "token": first.id,
        "gib": round(weights.total / 2**30, 1),
    }  # fmt: skip
    torch.cuda.synchronize()
    generator.capture()  # compiles what is missing
    ballast = [[] for _ in range(options.objects)]  # type: ignore[var-annotated]
    for row in time_captures(generator, options.capture):
        yield {"model": name} | row
    del ballast
    if options.no_decode:
        return
    assert generator.step.graphs is not None
    generator.step.graphs.freeze = True
    for batch, length in ((1, 128), (32, 512), *((batch, 512) for batch in options.also)):
        if batch <= options.max_batch:
            yield {"model": name} | time_decode(generator, weights, batch, length, 128, options.repeats)
            if options.profile:
                yield {"model": name, "rows": batch, "profile": profile_step(generator, batch)}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, help="fewer decoder layers, to try things out")
    parser.add_argument("--capture", action="store_true", help="time the capture under four settings, in turns")
    parser.add_argument("--no-decode", action="store_true", help="end behind the capture")
    parser.add_argument("--objects", type=int, default=0, help="Python objects alive during capture, besides torch's")
    parser.add_argument("--also", type=int, nargs="*", default=[], help="more batches of prompts of 512 tokens")
    parser.add_argument("--profile", action="store_true", help="also the kernels of one step")
    parser.add_argument("--bf12", action="store_true", help="bf12 copies serve steps of one token")
    options = parser.parse_args()
    lines: list[dict[str, Any]] = [{
        "command": "python " + " ".join(sys.argv), **provenance(), "loop_ms": loop_ms(), "torch": torch.__version__,
        "fastlayers": fl.__version__, "device": str(as_device("cuda")),
        "packages": {name: found for name in OPTIONAL_PACKAGES if (found := package(name, load=False).version)},
    }]  # fmt: skip
    print(json.dumps(lines[0]))
    started = BEGIN
    for name in options.models:
        for row in bench(name, options, started):
            lines.append(row)
            print(json.dumps(row), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        started = time.perf_counter()  # of later models the imports are not counted
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
