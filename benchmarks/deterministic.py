"""Which backends repeat their bits on this device, and what the deterministic mode costs: ``[MODEL ...] [--out FILE]``.

The server's engine on 4 layers with random weights in deterministic mode, with whatever ``"auto"`` chooses: what the
mode would refuse is noted instead. Twelve requests (greedy, drawn, penalised; log-probabilities compared bit by bit)
alone with an empty cache, then all at once, again over cached prompts, and in another order. One row a model: its
backends, those that would be refused, how many requests gave equal bits in each way, tokens a second of 32 greedy
requests with the mode and without. A backend that is refused although all bits are equal may be told so
(``repeats_on``); no other than Triton's may claim it for CUDA without being among them.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from rows import Rows, arguments

import fastlayers_server.engine.startup as startup
from fastlayers.layer import Layer
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.protocol import Sampling, StepOut, Submit, pack_ids

MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b")
Wanted = list[tuple[list[int], dict[str, Any]]]


def noting(refused: set[str], chosen: set[str]) -> Any:
    """Return what stands in for the mode's refusal, and notes what is chosen."""

    def note(layers: Any) -> None:
        for module in layers.modules():
            if isinstance(module, Layer) and hasattr(module, "choice"):
                for choice in module.choices:
                    for rung in choice.rungs:
                        chosen.add(f"{choice.layer}={rung.backend.name}")
                        if choice.device.type not in rung.backend.repeats_on:
                            refused.add(f"{choice.layer}={rung.backend.name}")

    return note


def serve(parts: Any, wanted: Wanted) -> tuple[list[Any], float]:
    """Return each request's tokens, log-probabilities and end, and tokens a second of all."""
    news: dict[int, list[Any]] = {}

    def deliver(message: Any) -> None:
        if isinstance(message, StepOut):
            for out in message.outputs:
                news.setdefault(out.rid, []).append(out)

    engine = Engine(parts.scheduler, parts.executor, deliver, overlap=parts.overlap)
    for rid, (prompt, options) in enumerate(wanted, 1):
        engine.post(Submit(rid, pack_ids(prompt), **options))
    begin = time.perf_counter()
    engine.tick()
    while not parts.scheduler.idle or engine._pending is not None:
        engine.tick()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    took = time.perf_counter() - begin
    told = [
        (
            [i for out in news[rid] for i in out.ids],
            [e for out in news[rid] for e in out.logprobs],
            news[rid][-1].finish,
        )
        for rid in range(1, len(wanted) + 1)
    ]
    return told, sum(len(ids) for ids, _, _ in told) / took


def requests(vocabulary: int) -> Wanted:
    """Return twelve: every third shares a prefix."""
    draw = random.Random(1)

    def prompt(length: int, seed: int) -> list[int]:
        own = random.Random(seed)
        return [own.randrange(10, vocabulary) for _ in range(length)]

    wanted: Wanted = []
    for i in range(12):
        ways = (
            Sampling(temperature=0.0), Sampling(0.9, 40, 0.95, seed=i), Sampling(1.2, seed=-i),
            Sampling(0.8, seed=i, frequency_penalty=0.4),
        )  # fmt: skip
        options = {"sampling": ways[i % 4], "max_new_tokens": 24, "ignore_eos": True, "logprobs": 3}
        wanted.append((prompt(200, 7) * (i % 3 == 0) + prompt(draw.randrange(3, 200), i), options))
    return wanted


def greedy(count: int, vocabulary: int) -> Wanted:
    """Return so many requests of 128 tokens."""
    options = {"sampling": Sampling(temperature=0.0), "max_new_tokens": 32, "ignore_eos": True}
    return [([random.Random(50 + i).randrange(10, vocabulary) for _ in range(128)], options) for i in range(count)]


def measure(model: str, options: Any) -> dict[str, Any]:
    """Return the row of one model."""
    refused: set[str] = set()
    chosen: set[str] = set()
    startup.refuse_variant = noting(refused, chosen)

    def build(deterministic: bool) -> Any:
        sizes: dict[str, Any] = {"max_model_len": 2048, "max_running_requests": 32, "num_pages": 1200}
        if options.small:
            sizes = {"max_model_len": 512, "max_running_requests": 12, "device": options.device, "dtype": "fp32"}
        else:
            sizes |= {"load_format": "dummy", "layers": 4}
        config = EngineConfig(model=model, deterministic=deterministic, no_freeze_gc=True, **sizes)
        return startup.build(config, lambda phase: None)

    vocabulary, many = (200, 8) if options.small else (100000, 32)
    wanted, flat, parts, alone = requests(vocabulary), greedy(many, vocabulary), build(True), []
    for one in wanted:
        parts.scheduler.cache.flush()
        alone += serve(parts, [one])[0]
    parts.scheduler.cache.flush()
    equal = {}
    for way in ("at once", "again"):
        equal[way] = sum(a == b for a, b in zip(serve(parts, wanted)[0], alone, strict=True))
    order = random.Random(2).sample(range(12), 12)
    told = serve(parts, [wanted[i] for i in order])[0]
    equal["reordered"] = sum(told[k] == alone[i] for k, i in enumerate(order))
    with_mode = serve(parts, flat)[1]
    del parts
    torch.cuda.empty_cache()
    parts = build(False)
    serve(parts, flat)
    without = serve(parts, flat)[1]
    differs = sum(a != b for a, b in zip(serve(parts, wanted)[0], alone, strict=True))
    return {
        "model": model, "backends": sorted(chosen), "would_be_refused": sorted(refused), "equal_of_12": equal,
        "differ_without_the_mode": differs,
        "tokens_per_s": {"deterministic": round(with_mode, 1), "without": round(without, 1)},
    }  # fmt: skip


def main() -> None:
    """Run what was asked for."""
    parser = arguments(__doc__, 100.0)
    parser.add_argument("models", nargs="*")
    options = parser.parse_args()
    rows = Rows(options)
    for model in options.models or (["tiny"] if options.small else MODELS):
        if not rows.late(model=model):
            rows.put(measure(model, options))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
