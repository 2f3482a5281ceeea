"""Tokens in a tree: each sees the cached prefix and its own path, as if that path stood there alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.attention.buckets import ExtendBucket
from fastlayers.attention.gqa.config import GQA, GQAConfig
from fastlayers.attention.meta import AttentionBatch, AttentionState, seen_in_tree, whole_pages
from fastlayers.attention.mla.config import MLA, MLAConfig
from fastlayers.errors import ArgumentError, NoBackendError

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


def test_a_tree_needs_a_bucket_of_its_own() -> None:
    state, tree = AttentionState(1, 16, 4, 16, "cpu"), AttentionBatch((2,), (3,), [[1]], (), ((-1, -1),))
    with pytest.raises(
        ArgumentError, match=r"bucket is .*; accepted: None for a tree, or an ExtendBucket with tree=True"
    ):
        state.plan(tree, bucket=ExtendBucket(16, 1))
    with pytest.raises(ArgumentError, match=r"bucket is .*; accepted: one without tree for a batch without parents"):
        state.plan(AttentionBatch((2,), (3,), [[1]]), bucket=ExtendBucket(16, 1, tree=True))
    with pytest.raises(ArgumentError, match=r"bucket is .*each=1.*; accepted: each >= 2, or 0"):
        state.plan(tree, bucket=ExtendBucket(16, 1, 1, True))
    with pytest.raises(ArgumentError, match=r"each is 17; accepted: 0, or 1 to the bucket's 16 tokens"):
        ExtendBucket(16, 1, 17)
    meta = state.plan(AttentionBatch((), (), []), bucket=ExtendBucket(8, 1, 3, True))
    assert meta.phase == "captured tree" and meta.tree is not None and meta.tree.tolist() == [0] * 8
    assert (meta.max_query_len, meta.path) == (3, "mqa")
    state.plan(tree, bucket=ExtendBucket(8, 1, 3, True))
    assert meta.tree.tolist() == [1, 2] + [0] * 6 and meta.positions[:2].tolist() == [3, 3]


def drawn_trees(sizes: tuple[int, ...], generator: torch.Generator) -> tuple[tuple[int, ...], ...]:
    """Return a random tree of each size: each token behind any one before it, or a beginning of its own."""
    return tuple(
        tuple(int(torch.randint(-1, place, (), generator=generator)) if place else -1 for place in range(size))
        for size in sizes
    )


# New tokens and cached ones of each request, the bucket of a captured step, and pages of a request.
STEPS: list[tuple[tuple[int, ...], tuple[int, ...], ExtendBucket | None]] = [
    ((7, 4), (37, 0), None),
    ((32, 1, 9), (300, 12, 61), None),
    ((62,), (5,), None),
    ((7, 4), (37, 3), ExtendBucket(32, 4, 9, True)),
    ((9, 0, 12), (250, 4, 64), ExtendBucket(32, 4, 0, True)),
    ((33,), (350,), ExtendBucket(64, 1, 33, True)),
]

PAGES = (1, 16, 64)


def planned(new: tuple[int, ...], cached: tuple[int, ...], bucket: ExtendBucket | None, page: int, seed: int) -> Any:
    """Return the plain step and (where there is a bucket) the captured one, which knows no batch; and both pages."""
    generator = torch.Generator().manual_seed(seed)
    table = whole_pages([a + b for a, b in zip(new, cached, strict=True)], page)
    batch = AttentionBatch(new, cached, table, (), drawn_trees(new, generator))
    plain = AttentionState(4, 128, -(-400 // page), page, "cpu").plan(batch)
    if bucket is None:
        return plain, plain, max(map(max, table)) + 1
    state = AttentionState(4, 128, -(-400 // page), page, "cpu")
    captured = state.plan(AttentionBatch((), (), []), bucket=bucket)
    state.plan(batch, bucket=bucket)
    return plain, captured, max(map(max, table)) + 1


def poisoned(meta: Any, *caches: torch.Tensor) -> None:
    """Fill what nobody may read with NaN: the rows behind each request, and page 0."""
    for cache in caches:
        cache[0] = torch.nan
        for row, length in enumerate(meta.seq_lens.tolist()):
            pages, size = meta.page_table[row].tolist(), cache.shape[1]
            last = pages[(length - 1) // size]
            cache[last, (length - 1) % size + 1 :] = torch.nan


EXTRAS: list[dict[str, Any]] = [{}, dict(window=6, sinks=True), dict(window=70), dict(softcap=5.0)]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("more", range(len(EXTRAS)), ids=["plain", "short window", "long window", "softcap"])
@pytest.mark.parametrize("step", range(len(STEPS)))
def test_gqa_of_a_drawn_tree(backend: str, more: int, step: int) -> None:
    new, cached, bucket = STEPS[step]
    page, extras = PAGES[(step + more) % 3], EXTRAS[more]
    plain, meta, pages = planned(new, cached, bucket, page, 7 * step + page)
    cfg = GQAConfig(
        4, 2, 16, 0.25, page_size=page, dtype=torch.float32, kv_dtype=torch.float32, phase="extend", tree=True,
        captured=bucket is not None, **extras,
    )  # fmt: skip
    random = torch.Generator().manual_seed(step)
    caches = [torch.randn(pages, page, 2, 16, generator=random) for _ in range(2)]
    poisoned(plain, *caches)
    q = torch.randn(meta.num_tokens, 4, 16, generator=random)
    sinks = torch.randn(4, generator=random) if cfg.sinks else None
    usual = replace(cfg, captured=False)
    wanted, wanted_lse = GQA.choose(usual, "cpu", "reference").build().pick(1)(q[: sum(new)], *caches, plain, sinks)
    o, lse = GQA.choose(cfg, "cpu", backend).build().pick(1)(q, *caches, meta, sinks)
    torch.testing.assert_close(o[: sum(new)], wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse[: sum(new)], wanted_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("step", range(len(STEPS)))
def test_mla_of_a_drawn_tree(backend: str, step: int) -> None:
    new, cached, bucket = STEPS[step]
    page = PAGES[step % 3]
    plain, meta, pages = planned(new, cached, bucket, page, 5 * step + page)
    cfg = MLAConfig(
        3, 32, 16, 16, 16, 0.2, page_size=page, dtype=torch.float32, kv_dtype=torch.float32, phase="ragged", tree=True,
        captured=bucket is not None,
    )  # fmt: skip
    random = torch.Generator().manual_seed(step)
    cache = torch.randn(pages, page, 48, generator=random)
    poisoned(plain, cache)
    q = torch.randn(meta.num_tokens, 3, 48, generator=random)
    usual = replace(cfg, captured=False)
    wanted, wanted_lse = MLA.choose(usual, "cpu", "reference").build().pick(1).decode(q[: sum(new)], cache, plain)
    o, lse = MLA.choose(cfg, "cpu", backend).build().pick(1).decode(q, cache, meta)
    torch.testing.assert_close(o[: sum(new)], wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse[: sum(new)], wanted_lse, atol=1e-4, rtol=1e-4)


def test_the_oracles_mask_is_the_paths() -> None:
    """The reference against the plain one, path by path."""
    plain, _, pages = planned((9,), (21,), None, 16, 3)
    cfg = GQAConfig(2, 1, 16, 0.25, window=4, page_size=16, dtype=torch.float32, kv_dtype=torch.float32, tree=True)
    random = torch.Generator().manual_seed(1)
    caches = [torch.randn(pages, 16, 1, 16, generator=random) for _ in range(2)]
    q = torch.randn(9, 2, 16, generator=random)
    found, _ = GQA.choose(cfg, "cpu", "reference").build().pick(1)(q, *caches, plain, None)
    parents = plain.batch.parents[0]
    for node in range(9):
        path = path_to(parents, node)
        rows = [*range(16, 16 + 21), *(37 + place for place in path)]
        alone = [cache.flatten(0, 1)[rows] for cache in caches]
        own = [torch.zeros(3, 16, 1, 16).flatten(0, 1) for _ in caches]
        for mine, there in zip(own, alone, strict=True):
            mine[16 : 16 + len(rows)] = there
        state = AttentionState(1, 64, 2, 16, "cpu")
        meta = state.plan(AttentionBatch((len(path),), (21,), [[1, 2]]))
        usual = GQA.choose(replace(cfg, tree=False), "cpu", "reference").build().pick(1)
        wanted, _ = usual(q[path], *(mine.view(3, 16, 1, 16) for mine in own), meta, None)
        torch.testing.assert_close(found[node], wanted[-1])


def test_who_masks_no_tree_says_so() -> None:
    """By name it is another backend that takes them; what a plug-in does not claim it is not given."""
    cfg = GQAConfig(4, 2, 64, 0.3, phase="extend", lse=False, tree=True)
    for name in ("flashinfer_fa3", "flashinfer_fa2", "fa3", "sdpa"):
        with pytest.raises(NoBackendError, match=f"{name}: masks no trees of drafts: of the new tokens each would see"):
            GQA.choose(cfg, "cpu", name)
    chosen = GQA.choose_phases(cfg, ("extend",), "cpu", "sdpa")[0]
    assert chosen.name == "torch" and "sdpa does not serve trees" in chosen.evidence
    able = {backend.name for layer in (GQA, MLA) for backend in layer.ranked if backend.masks_trees}
    assert able == {"triton", "torch", "reference"}
