"""First tokens behind a cached prefix: ``python benchmarks/prefix_first_token.py [--out FILE]``.

Layers of DeepSeek-V3 at real widths (those of ``slice.py``, FP8 blocks, random weights) behind a server's engine with
its prefix cache: a prompt of 32,768 tokens is answered once, then prompts that begin with it and end with 512 tokens of
their own get a first token each, by turns with each way through latent attention: the prefix and the new tokens
expanded in one shot, in two chunks, and attended to as latents; the last one's steps are captured, as a server's are.
The time is that of the call: planning, the step, the head, the draw; of it, ``planned_ms`` passed before the step was
launched, and ``launch_ms`` is what the host took to launch it, which the device works beside. One JSON line a way. It
says which way the layers took, and it is an error if that is another one than the row is named for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import torch
from rows import Rows, arguments
from slice import SLICE, SMALL

from fastlayers.attention.mla.layer import MLAAttention
from fastlayers.attention.mla.prefix_chunks import MLAThresholds
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.engine.startup import model_folder
from fastlayers_server.front.tokens import TokenText
from fastlayers_server.known_models import KNOWN
from fastlayers_server.llm import LLM, Params
from fastlayers_server.random_models import random_model

PREFIX, NEW, ROUNDS = 32768, 512, 7
SMALL_PREFIX, SMALL_NEW = 256, 32
# More new tokens than any prompt has: latents, however long the prefix is.
ALWAYS = 1 << 30
PATHS = {"one shot": "mha_one_shot", "two chunks": "mha_chunked", "latents": "mqa"}


def ways(prefix: int, new: int) -> dict[str, MLAThresholds]:
    """Return the ways through latent attention, one shot first; those that expand leave captured steps at any size."""
    chunk = (prefix + new) // 2
    return {
        "one shot": MLAThresholds(few=1, uncaptured=1),
        "two chunks": MLAThresholds(one_shot=1, chunk=chunk, few=1, uncaptured=1),
        "latents": MLAThresholds(few=ALWAYS),
    }


class Watch:
    """What a server's extends do: their buckets, the way each layer takes, and when they are launched.

    A replay calls no layer: that step takes what layers took when its bucket was captured, so watch them before.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.count = len(layers)
        self.taken: dict[Any, dict[int, str]] = {}  # by bucket, None where a step is not captured; then by layer
        self.buckets: list[Any] = []
        self.launched: list[tuple[float, float]] = []
        for place, layer in enumerate(layers):
            layer.path = partial(self._path, layer.path, place)

    def follow(self, executor: Any) -> None:
        """Watch the steps of a server that is ready."""
        state = executor.extending.state
        state.plan, executor.launch = partial(self._plan, state.plan), partial(self._launch, executor.launch)

    def begin(self) -> None:
        """Forget the steps so far, and what is no captured step's."""
        self.taken.pop(None, None)
        self.buckets.clear()
        self.launched.clear()

    def paths(self) -> set[str]:
        """Return the ways that layers took in the steps since; ``""``: that of a layer is not known."""
        found = [self.taken.get(bucket, {}) for bucket in self.buckets]
        return {taken.get(place, "") for taken in found for place in range(self.count)}

    def _path(self, chosen: Callable[[Any], str], place: int, meta: Any) -> str:
        path = chosen(meta)
        self.taken.setdefault(meta.bucket, {})[place] = path
        return path

    def _plan(self, plan: Callable[..., Any], *given: Any, **options: Any) -> Any:
        meta = plan(*given, **options)
        self.buckets.append(meta.bucket)
        return meta

    def _launch(self, launch: Callable[[Any], Any], plan: Any) -> Any:
        begin = time.perf_counter()
        step = launch(plan)
        self.launched.append((begin, time.perf_counter()))
        return step


def first_token(server: LLM, watch: Watch, prompt: list[int], prefix: int, path: str) -> dict[str, float]:
    """Return the milliseconds until a prompt's first token is there, and those of its parts.

    Raises
    ------
    RuntimeError
        Less was cached than the prefix, it was more than one step, or a layer took another way than ``path``.
    """
    watch.begin()
    begin = time.perf_counter()
    (found,) = server.generate([prompt], Params(max_tokens=1, temperature=0.0, ignore_eos=True))
    end = time.perf_counter()
    if found.cached_tokens < prefix:
        raise RuntimeError(f"{found.cached_tokens} tokens of the prompt were cached, not {prefix}")
    if len(watch.launched) != 1 or len(watch.buckets) != 1:
        raise RuntimeError(f"{len(watch.launched)} launches and {len(watch.buckets)} extends, not one")
    if watch.paths() != {path}:
        padded = f"a step padded to {watch.buckets[0]}" if watch.buckets[0] else "an uncaptured step"
        raise RuntimeError(f"layers took {sorted(watch.paths())} in {padded}, not {path}")
    ((launched, done),) = watch.launched
    return {"ms": 1e3 * (end - begin), "planned_ms": 1e3 * (launched - begin), "launch_ms": 1e3 * (done - launched)}


def main() -> None:
    """Time each way by turns."""
    options = arguments(__doc__, 60.0).parse_args()
    rows, device = Rows(options), options.device
    prefix, new, rounds = (SMALL_PREFIX, SMALL_NEW, 1) if options.small else (PREFIX, NEW, ROUNDS)
    changes = SMALL if options.small else SLICE
    config = dict(KNOWN["deepseek-ai/DeepSeek-V3"]) | changes | {"max_position_embeddings": 2 * prefix}
    model = random_model(config, device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    layers = [module for module in model.modules() if isinstance(module, MLAAttention)]
    watch = Watch(layers)
    limit = prefix + new + 64
    settings = EngineConfig(
        device=device, max_model_len=limit, num_pages=3 * limit // 64, max_running_requests=4, load_format="dummy"
    )  # fmt: skip
    # By name, without a folder: no grammars, which would need a package. Any words do: prompts are ids.
    words, draw = TokenText(model_folder("tiny")), torch.Generator().manual_seed(0)
    server = LLM("deepseek-ai/DeepSeek-V3", settings, loaded=model, tokens=words)
    watch.follow(server.engine.executor)

    def drawn(count: int) -> list[int]:
        found: list[int] = torch.randint(3, config["vocab_size"], (count,), generator=draw).tolist()
        return found

    shared, tried = drawn(prefix), ways(prefix, new)
    took: dict[str, list[dict[str, float]]] = {name: [] for name in tried}
    captured = dict[str, bool]()
    with closing(server):
        server.generate([shared], Params(max_tokens=1, ignore_eos=True))
        for turn in range(rounds + 1):
            for name, thresholds in tried.items():
                for layer in layers:
                    layer.thresholds = thresholds
                # Tokens of its own, or it would find what the way before has cached.
                parts = first_token(server, watch, [*shared, *drawn(new)], prefix, PATHS[name])
                took[name] += [parts] if turn else []  # the first one compiles
                captured[name] = watch.buckets[0] is not None
    for name, times in took.items():
        row = {"what": "first token", "way": name, "prefix": prefix, "new": new, "layers": len(layers)}
        row |= {"path": PATHS[name], "captured": captured[name]}
        row |= {part: round(statistics.median(each[part] for each in times), 2) for part in times[0]}
        whole = [each["ms"] for each in times]
        rows.put({**row, "spread_ms": [round(min(whole), 2), round(max(whole), 2)], "page": 64})


if __name__ == "__main__":
    main()
