"""Prompts: random ids as vLLM draws them, lengths like people's chats, shared prefixes, or a file. All are distinct."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fastlayers_server.bench.client import Ask

NAMES = ("random", "sharegpt-like", "prefix", "file")
# Log-normal lengths near what people publish of filtered ShareGPT: (median, sigma, least, most).
CHAT_INPUT, CHAT_OUTPUT = (110, 1.2, 4, 1024), (130, 0.9, 4, 1024)


def random_asks(
    count: int, input_len: int, output_len: int, vocab_size: int, seed: int, *, range_ratio: float = 0.0,
    prefix_len: int = 0,
) -> list[Ask]:  # fmt: skip
    """Return vLLM's random set for a seed: ids are (offset + number + position) modulo the vocabulary."""
    draw = np.random.default_rng(seed)
    bounds = [(math.floor(n * (1 - range_ratio)), math.ceil(n * (1 + range_ratio))) for n in (input_len, output_len)]
    inputs = draw.integers(bounds[0][0], bounds[0][1] + 1, size=count)
    outputs = draw.integers(max(1, bounds[1][0]), bounds[1][1] + 1, size=count)
    offsets = draw.integers(0, vocab_size, size=count)
    prefix = draw.integers(0, vocab_size, size=prefix_len).tolist()
    asks = []
    for i in range(count):
        inner = ((int(offsets[i]) + i + np.arange(int(inputs[i]))) % vocab_size).tolist()
        asks.append(Ask(prefix + inner, prefix_len + len(inner), int(outputs[i])))
    return asks


def chat_like(count: int, vocab_size: int, seed: int) -> list[Ask]:
    """Return prompts of random ids whose lengths are spread like those of chats."""
    draw = np.random.default_rng(seed)

    def lengths(median: int, sigma: float, least: int, most: int) -> list[int]:
        drawn = draw.lognormal(math.log(median), sigma, size=count)
        return np.clip(np.rint(drawn), least, most).astype(int).tolist()

    inputs, outputs = lengths(*CHAT_INPUT), lengths(*CHAT_OUTPUT)
    return [
        Ask(draw.integers(0, vocab_size, size=n).tolist(), n, m) for n, m in zip(inputs, outputs, strict=True)
    ]  # fmt: skip


def shared_prefixes(
    count: int, groups: int, prefix_len: int, input_len: int, output_len: int, vocab_size: int, seed: int
) -> list[Ask]:
    """Return prompts of which each group begins alike; neighbours are of different groups."""
    draw = np.random.default_rng(seed)
    prefixes = [draw.integers(0, vocab_size, size=prefix_len).tolist() for _ in range(groups)]
    length, asks = prefix_len + input_len, []
    for i in range(count):
        own = draw.integers(0, vocab_size, size=input_len).tolist()
        asks.append(Ask(prefixes[i % groups] + own, length, output_len))
    return asks


def from_file(path: Path, count: int, output_len: int, length: Callable[[str], int]) -> list[Ask]:
    """Return the prompts of a JSONL file: ``{"prompt": text or ids, "output_len": optional}`` a line.

    Raises
    ------
    ValueError
        A line is something else, or there are fewer lines than prompts asked for.
    """
    asks = []
    for number, line in enumerate(path.read_text("utf-8").splitlines()[:count], 1):
        found = json.loads(line)
        prompt = found.get("prompt") if isinstance(found, dict) else None
        if not isinstance(prompt, str | list) or not prompt:
            raise ValueError(f"{path}:{number}: expected a JSON object with a 'prompt'")
        size = len(prompt) if isinstance(prompt, list) else length(prompt)
        asks.append(Ask(prompt, size, int(found.get("output_len", output_len))))
    if len(asks) < count:
        raise ValueError(f"{path}: {len(asks)} prompts, not {count}; repeating them would flatter caches")
    return asks


def digest_of(asks: list[Ask]) -> str:
    """Return a digest of prompts and lengths, to tell whether two runs had the same."""
    said = [[ask.prompt, ask.output_len] for ask in asks]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def distinct(asks: list[Ask]) -> bool:
    """Return whether no prompt occurs twice: repeated ones route MoE alike, which flatters decoding."""
    return len({json.dumps(ask.prompt) for ask in asks}) == len(asks)
