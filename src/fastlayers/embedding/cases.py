"""The embedding's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.embedding.layer import EmbeddingConfig
from fastlayers.registry.spec import Case, Cost, LayerSpec, calling, exact, place_of

BF16 = torch.bfloat16


def _case(
    name: str,
    tokens: tuple[int, ...],
    cfg: EmbeddingConfig,
    vocab: int = 0,
    dtype: torch.dtype = BF16,
    ids: torch.dtype = torch.int64,
    small: bool = True,
) -> Case:
    shape = {"tokens": tokens, "vocab": vocab or cfg.rows, "dtype": dtype, "ids": ids}
    return Case(name, cfg, shape, small)


CASES = (
    _case("tiny_model", (5,), EmbeddingConfig(512, 128)),
    _case("odd_hidden", (7,), EmbeddingConfig(100, 97), dtype=torch.float32, ids=torch.int32),
    _case("batched", (2, 3), EmbeddingConfig(64, 32), dtype=torch.float16),
    _case("wide", (2,), EmbeddingConfig(9, 2880)),
    _case("second_of_three_ranks", (9,), EmbeddingConfig(34, 48, 34, True), vocab=100),
    _case("last_of_three_ranks", (9,), EmbeddingConfig(34, 48, 68, True), vocab=100, dtype=torch.float32),
    _case("empty", (0,), EmbeddingConfig(16, 32)),
    _case("deepseek_v3_prefill", (4096,), EmbeddingConfig(129280, 7168), small=False),
    _case("qwen3_tp8_prefill", (4096,), EmbeddingConfig(18992, 4096, 3 * 18992, True), vocab=151936, small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Ids from the whole vocabulary, its edges included; every row of the table is different."""
    generator = torch.Generator().manual_seed(seed)
    cfg, shape = case.cfg, case.shape
    ids = torch.randint(shape["vocab"], shape["tokens"], generator=generator)
    edges = [0, shape["vocab"] - 1, cfg.start, min(cfg.start + cfg.rows, shape["vocab"]) - 1]
    flat = ids.view(-1)
    flat[: len(edges)] = torch.tensor(edges)[: flat.numel()]
    if case.small:
        weight = torch.randn(cfg.rows, cfg.hidden_size, generator=generator).to(device)
    else:  # a sum of two vectors: random numbers of this many would take longer than the test
        row = torch.randn(cfg.rows, 1, generator=generator).to(device, shape["dtype"])
        weight = row + torch.randn(cfg.hidden_size, generator=generator).to(device, shape["dtype"])
    weight[max(0, shape["vocab"] - cfg.start) :] = 0
    return {"ids": ids.to(device, shape["ids"]), "weight": weight.to(shape["dtype"])}


def cost(case: Case) -> Cost:
    """Memory bound: each wanted row once in, each output row once out."""
    tokens = 1
    for size in case.shape["tokens"]:
        tokens *= size
    row = case.cfg.hidden_size * case.shape["dtype"].itemsize
    held = case.cfg.rows / case.shape["vocab"]
    moved = tokens * (8.0 + row * (1 + held))
    return Cost(0.0, moved, moved)


def examples(layer: Any, count: int) -> list[tuple[Any, ...]]:
    """Return the layer's arguments for so many tokens."""
    return [(torch.zeros(count, dtype=torch.int64, device=place_of(layer)),)]


def at_tokens(shape: dict[str, Any], cfg: Any, tokens: int, context: int) -> dict[str, Any]:
    """Return a case's shape with another number of tokens."""
    return shape | {"tokens": (tokens,), "vocab": cfg.rows}


run = calling("ids", "weight")
SPEC = LayerSpec(CASES, make_inputs, run, cost, bounds=exact("y"), examples=examples, at_tokens=at_tokens)
