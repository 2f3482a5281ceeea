"""Tokens in a tree: each sees the cached prefix and its own path, as if that path stood there alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.attention.meta import AttentionBatch, AttentionState, seen_in_tree
from fastlayers.errors import ArgumentError

sys.path.insert(0, str(Path(__file__).parents[1] / "server" / "engine"))
from serving import make_model, prompts

# 0 ─ 1 ─ 3 ─ 6        two requests; the second one's has two beginnings
#   └ 2 ─ 4
#       └ 5
PARENTS = ((-1, 0, 0, 1, 2, 2, 3), (-1, -1, 0, 2))


def path_to(parents: tuple[int, ...], node: int) -> list[int]:
    found: list[int] = []
    while node >= 0:
        found, node = [node, *found], parents[node]
    return found


@pytest.mark.parametrize("name", ["deepseek", "qwen", "gpt_oss"])
@pytest.mark.parametrize("page_size", [16, 1])
def test_each_path_is_as_if_it_stood_alone(name: str, page_size: int) -> None:
    model = make_model(name, page_size)
    prefixes = [row[:37] for row in prompts(4, 60, seed=5) if len(row) > 20][:2]
    news = [torch.randint(3, 90, (len(tree),), generator=torch.Generator().manual_seed(8)).tolist() for tree in PARENTS]
    state = AttentionState(2, 128, 128 // page_size, page_size, "cpu")
    pages = [list(range(1, 1 + 64 // page_size)), list(range(1 + 64 // page_size, 1 + 128 // page_size))]

    def run(caches: Any, ids: list[list[int]], starts: list[int], parents: tuple[tuple[int, ...], ...] = ()) -> Any:
        lengths = tuple(map(len, ids))
        kept = [i for i, length in enumerate(lengths) if length]
        batch = AttentionBatch(
            tuple(lengths[i] for i in kept), tuple(starts[i] for i in kept), [pages[i] for i in kept], (), parents
        )
        flat = torch.tensor([token for row in ids for token in row])
        with torch.inference_mode():
            return model.compute_logits(model(flat, state.plan(batch), caches)).float().split([*lengths])

    def fresh() -> Any:
        caches = fl.kv_cache_spec(model, page_size=page_size, dtype=model.kv_dtype).allocate(
            1 + 128 // page_size, "cpu"
        )
        run(caches, prefixes, [0, 0])
        return caches

    starts = [len(prefix) for prefix in prefixes]
    found = run(fresh(), news, starts, PARENTS)
    for request, tree in enumerate(PARENTS):
        for node in range(len(tree)):
            path = path_to(tree, node)
            alone: list[list[int]] = [[], []]
            alone[request] = [news[request][i] for i in path]
            wanted = run(fresh(), alone, starts)[request][-1]
            torch.testing.assert_close(found[request][node], wanted, atol=2e-4, rtol=2e-4)
    # A chain is a tree.
    chain = tuple((-1, *range(len(tree) - 1)) for tree in PARENTS)
    for one, other in zip(run(fresh(), news, starts, chain), run(fresh(), news, starts), strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)


def test_a_mask_by_hand() -> None:
    batch = AttentionBatch((4,), (3,), [[1]], (), ((-1, 0, 0, 2),))
    depths, seen = batch.tree()
    assert (depths, seen, batch.phase, batch.is_decode) == ([0, 1, 1, 2], [0b1, 0b11, 0b101, 0b1101], "tree", False)
    found = seen_in_tree(torch.tensor([seen]), torch.arange(7)[None], torch.tensor([3]))
    wanted = [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1, 1]]
    assert found[0].int().tolist() == wanted
    meta = AttentionState(1, 8, 1, 16, "cpu").plan(batch)
    assert meta.positions.tolist() == [3, 4, 4, 5] and meta.out_cache_loc.tolist() == [19, 20, 21, 22]


@pytest.mark.parametrize("parents", [((0,),), ((-1, 1),), ((-2,),), ((-1, 0), ()), ((-1,) * 63,)])
def test_what_is_no_tree(parents: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ArgumentError, match=r"parents is .*accepted: for each new token one before it, or -1"):
        AttentionBatch((max(map(len, parents)),), (3,), [[1, 2, 3, 4, 5]], (), parents)


def test_a_tree_is_not_captured() -> None:
    from fastlayers.attention.buckets import ExtendBucket

    state = AttentionState(1, 16, 4, 16, "cpu")
    with pytest.raises(ArgumentError, match=r"bucket is .*; accepted: None for a tree"):
        state.plan(AttentionBatch((2,), (3,), [[1]], (), ((-1, -1),)), bucket=ExtendBucket(16, 1))
