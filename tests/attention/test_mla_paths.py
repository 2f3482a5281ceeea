"""Which way MLA takes for a batch: every threshold from both sides, and how prefixes are cut."""

from __future__ import annotations

from typing import Any

import pytest

from fastlayers.attention.meta import AttentionBatch
from fastlayers.attention.mla.prefix_chunks import MLAThresholds, prefix_chunks, select_path

USUAL = MLAThresholds()


def batch(new: tuple[int, ...], prefix: tuple[int, ...], **more: Any) -> AttentionBatch:
    return AttentionBatch(new, prefix, [[1]] * len(new), **more)


@pytest.mark.parametrize(
    ("new", "prefix", "path"),
    [
        # Decode, also of a long context, and steps without requests that do anything.
        ((1, 1), (9000, 200_000), "mqa"),
        ((1,), (0,), "mqa"),
        ((), (), "mqa"),
        # Nothing is cached: the new tokens alone, few or many.
        ((2,), (0,), "mha"),
        ((65, 3), (0, 0), "mha"),
        ((500_000,), (0,), "mha"),
        # A prefix of 8192 over the whole batch, not of each request.
        ((100,), (1,), "mqa"),
        ((100,), (8191,), "mqa"),
        ((100,), (8192,), "mha_one_shot"),
        ((100, 100), (4096, 4095), "mqa"),
        ((100, 100), (4096, 4096), "mha_one_shot"),
        # 131072 tokens with the new ones: at once, one more: chunk by chunk.
        ((100,), (130_972,), "mha_one_shot"),
        ((100,), (130_973,), "mha_chunked"),
        ((65, 1, 0), (131_000, 6, 0), "mha_one_shot"),
        ((65, 1, 0), (131_000, 7, 0), "mha_chunked"),
        # Drafts to verify: a few new tokens behind a long prefix, of every request.
        ((64,), (8192,), "mqa"),
        ((65,), (8192,), "mha_one_shot"),
        ((4, 4, 1), (60_000, 70_000, 80_000), "mqa"),
        ((4, 65, 1), (60_000, 1_000, 0), "mha_one_shot"),
        ((64, 64), (200_000, 0), "mqa"),
        ((65, 64), (200_000, 0), "mha_chunked"),
    ],
)
def test_paths(new: tuple[int, ...], prefix: tuple[int, ...], path: str) -> None:
    assert select_path(batch(new, prefix), USUAL) == path


@pytest.mark.parametrize("prefix", [1, 8191, 8192, 131_071, 131_072, 1_000_000])
@pytest.mark.parametrize("requests", [1, 64])
def test_drafts_are_verified_on_latents(requests: int, prefix: int) -> None:
    """Whatever the prefix is, and also where no request has one token alone."""
    for new in range(1, 9):
        assert select_path(batch((new,) * requests, (prefix,) * requests), USUAL) == "mqa"


def test_the_usual_thresholds() -> None:
    assert (USUAL.prefix, USUAL.one_shot, USUAL.chunk, USUAL.few) == (8192, 131072, 131072, 64)


def test_each_threshold_moves_its_own_edge() -> None:
    long = batch((100,), (8192,))
    assert select_path(long, MLAThresholds(prefix=8193)) == "mqa"
    assert select_path(long, MLAThresholds(one_shot=8292)) == "mha_one_shot"
    assert select_path(long, MLAThresholds(one_shot=8291)) == "mha_chunked"
    assert select_path(long, MLAThresholds(few=99)) == "mha_one_shot"
    assert select_path(long, MLAThresholds(few=100)) == "mqa"


def test_masks_go_where_they_are_masked() -> None:
    """Left padding and trees, whatever their lengths."""
    assert select_path(batch((100,), (9000,), starts=(5,)), USUAL) == "mqa"
    assert select_path(batch((100,), (0,), starts=(5,)), USUAL) == "mqa"
    tree = tuple(place - 1 for place in range(62))
    assert select_path(batch((62,), (9000,), parents=(tree,)), MLAThresholds(few=1)) == "mqa"
    assert select_path(batch((62,), (0,), parents=(tree,)), USUAL) == "mqa"


@pytest.mark.parametrize(
    ("prefixes", "capacity", "lengths"),
    [
        ((10,), 10, [(10,)]),
        ((10,), 9, [(9,), (1,)]),
        ((11,), 10, [(10,), (1,)]),
        # The capacity is shared: c = capacity // requests.
        ((10, 3), 10, [(5, 3), (5, 0)]),
        ((10, 0, 7), 9, [(3, 0, 3), (3, 0, 3), (3, 0, 1), (1, 0, 0)]),
        # More requests than room: one token each at a time.
        ((2, 1, 1), 2, [(1, 1, 1), (1, 0, 0)]),
        ((0, 0), 8, []),
        ((), 8, []),
    ],
)
def test_chunks(prefixes: tuple[int, ...], capacity: int, lengths: list[tuple[int, ...]]) -> None:
    chunks = prefix_chunks(prefixes, capacity)
    assert [each for _, each in chunks] == lengths
    step = max(1, capacity // max(1, len(prefixes)))
    for number, (starts, each) in enumerate(chunks):
        for prefix, start, length in zip(prefixes, starts, each, strict=True):
            assert start == min(number * step, prefix) and start + length <= prefix


@pytest.mark.parametrize("capacity", [1, 2, 7, 131072])
def test_chunks_cover_every_token_once(capacity: int) -> None:
    prefixes = (0, 1, 5, 13)
    seen = [
        (request, start + token)
        for starts, lengths in prefix_chunks(prefixes, capacity)
        for request, (start, length) in enumerate(zip(starts, lengths, strict=True))
        for token in range(length)
    ]
    assert sorted(seen) == [(request, token) for request, prefix in enumerate(prefixes) for token in range(prefix)]
