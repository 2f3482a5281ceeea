"""First tokens behind a cached prefix: ``python benchmarks/prefix_first_token.py [--out FILE]``.

Layers of DeepSeek-V3 at real widths (those of ``slice.py``, FP8 blocks, random weights) behind a server's engine with
its prefix cache: a prompt of 32,768 tokens is answered once, then prompts that begin with it and end with 512 tokens of
their own get a first token each, by turns with each way through latent attention: the prefix and the new tokens
expanded in one shot, in two chunks, and attended to as latents. The time is that of the call: planning, the step, the
head, the draw. One JSON line a way.
"""

from __future__ import annotations

import statistics
import time

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


def ways(prefix: int, new: int) -> dict[str, MLAThresholds]:
    """Return the ways through latent attention, one shot first."""
    return {
        "one shot": MLAThresholds(few=1), "two chunks": MLAThresholds(one_shot=1, chunk=(prefix + new) // 2, few=1),
        "latents": MLAThresholds(few=ALWAYS),
    }  # fmt: skip


def first_token(server: LLM, prompt: list[int], prefix: int) -> float:
    """Return the milliseconds until a prompt's first token is there."""
    begin = time.perf_counter()
    (found,) = server.generate([prompt], Params(max_tokens=1, temperature=0.0, ignore_eos=True))
    took = 1e3 * (time.perf_counter() - begin)
    if found.cached_tokens < prefix:
        raise RuntimeError(f"{found.cached_tokens} tokens of the prompt were cached, not {prefix}")
    return took


def main() -> None:
    """Time each way by turns."""
    options = arguments(__doc__, 60.0).parse_args()
    rows, device = Rows(options), options.device
    prefix, new, rounds = (SMALL_PREFIX, SMALL_NEW, 1) if options.small else (PREFIX, NEW, ROUNDS)
    changes = SMALL if options.small else SLICE
    config = dict(KNOWN["deepseek-ai/DeepSeek-V3"]) | changes | {"max_position_embeddings": 2 * prefix}
    model = random_model(config, device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    layers = [module for module in model.modules() if isinstance(module, MLAAttention)]
    limit = prefix + new + 64
    settings = EngineConfig(
        device=device, max_model_len=limit, num_pages=3 * limit // 64, max_running_requests=4, load_format="dummy"
    )  # fmt: skip
    # By name, without a folder: no grammars, which would need a package. Any words do: prompts are ids.
    words, draw = TokenText(model_folder("tiny")), torch.Generator().manual_seed(0)
    server = LLM("deepseek-ai/DeepSeek-V3", settings, loaded=model, tokens=words)

    def drawn(count: int) -> list[int]:
        found: list[int] = torch.randint(3, config["vocab_size"], (count,), generator=draw).tolist()
        return found

    shared, tried = drawn(prefix), ways(prefix, new)
    server.generate([shared], Params(max_tokens=1, ignore_eos=True))
    took: dict[str, list[float]] = {name: [] for name in tried}
    for turn in range(rounds + 1):
        for name, thresholds in tried.items():
            for layer in layers:
                layer.thresholds = thresholds
            # Tokens of its own, or it would find what the way before has cached.
            ms = first_token(server, [*shared, *drawn(new)], prefix)
            took[name] += [ms] if turn else []  # the first one compiles
    for name, times in took.items():
        row = {"what": "first token", "way": name, "prefix": prefix, "new": new, "layers": len(layers)}
        spread = [round(min(times), 2), round(max(times), 2)]
        rows.put({**row, "ms": round(statistics.median(times), 2), "spread_ms": spread, "page": 64})
    server.close()


if __name__ == "__main__":
    main()
