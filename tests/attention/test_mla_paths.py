"""Which way MLA takes for a batch: every threshold from both sides, and how prefixes are cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastlayers.attention.meta import AttentionBatch
from fastlayers.attention.mla.prefix_chunks import MLAThresholds, outweighs_capture, prefix_chunks, select_path

USUAL, HEADS = MLAThresholds(), 128
# What engines for DeepSeek-V3 on Hopper take.
CONTRACT = MLAThresholds(prefix=8192, few=1)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "mla_paths_h200.jsonl"


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
        # Up to 128 new tokens, however long the prefix is; one more: expanded.
        ((128,), (1,), "mqa"),
        ((129,), (1,), "mha_one_shot"),
        ((128,), (8192,), "mqa"),
        ((129,), (8192,), "mha_one_shot"),
        ((128, 128), (200_000, 1), "mqa"),
        ((129, 129), (60_000, 1), "mha_one_shot"),
        # 131072 tokens with the new ones: at once, one more: chunk by chunk.
        ((129,), (130_943,), "mha_one_shot"),
        ((129,), (130_944,), "mha_chunked"),
        ((200, 1, 0), (130_865, 6, 0), "mha_one_shot"),
        ((200, 1, 0), (130_865, 7, 0), "mha_chunked"),
        # Drafts to verify: a few new tokens behind a long prefix, of every request.
        ((4, 4, 1), (60_000, 70_000, 80_000), "mqa"),
        ((4, 128, 1), (60_000, 1_000, 0), "mqa"),
        # A piece of a prompt among requests that decode: all prefixes would be expanded for its few keys.
        ((512, *(1,) * 31), (0, *(4096,) * 31), "mqa"),
        ((512, *(1,) * 31), (65_536, *(500,) * 31), "mha_one_shot"),
        # 32 · 1,032 + 1,000 · 1,000 new tokens meet 2,032: 508.4 each; 9,000 more cached ones make it 117.4.
        ((32, 1000), (1000, 0), "mha_one_shot"),
        ((32, 1000), (10_000, 0), "mqa"),
    ],
)
def test_paths(new: tuple[int, ...], prefix: tuple[int, ...], path: str) -> None:
    assert select_path(batch(new, prefix), USUAL, HEADS) == path


@pytest.mark.parametrize(
    ("new", "prefix", "path"),
    [
        # A prefix of 8192 over the whole batch, not of each request.
        ((100,), (0,), "mha"),
        ((100,), (1,), "mqa"),
        ((100,), (8191,), "mqa"),
        ((100,), (8192,), "mha_one_shot"),
        ((100, 100), (4096, 4095), "mqa"),
        ((100, 100), (4096, 4096), "mha_one_shot"),
        ((2,), (8192,), "mha_one_shot"),
        ((1, 1), (8192, 8192), "mqa"),
        ((100,), (130_972,), "mha_one_shot"),
        ((100,), (130_973,), "mha_chunked"),
        ((65, 1, 0), (131_000, 6, 0), "mha_one_shot"),
        ((65, 1, 0), (131_000, 7, 0), "mha_chunked"),
    ],
)
def test_paths_of_the_contract(new: tuple[int, ...], prefix: tuple[int, ...], path: str) -> None:
    assert select_path(batch(new, prefix), CONTRACT, HEADS) == path


@pytest.mark.parametrize(("heads", "few"), [(1, 256), (16, 256), (63, 256), (64, 128), (128, 128)])
def test_few_new_tokens_are_more_with_few_heads(heads: int, few: int) -> None:
    assert select_path(batch((few,), (5000,)), USUAL, heads) == "mqa"
    assert select_path(batch((few + 1,), (5000,)), USUAL, heads) == "mha_one_shot"
    assert select_path(batch((9,), (5000,)), MLAThresholds(few=8), heads) == "mha_one_shot"


def test_the_usual_thresholds_are_those_that_were_measured() -> None:
    """At each point the way that is chosen took at most three percent longer on an H200 than the other one."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    points = [row for row in rows if "new" in row and "page" not in row]
    ways = {row["mqa_us"] < row["mha_one_shot_us"] for row in points}
    assert ways == {True, False} and {row["heads"] for row in points} == {16, 128}
    for row in points:
        chosen = select_path(batch((row["new"],), (row["prefix"],)), USUAL, row["heads"])
        assert row[f"{chosen}_us"] <= 1.03 * min(row["mqa_us"], row["mha_one_shot_us"]), row


@pytest.mark.parametrize("prefix", [1, 8191, 8192, 131_071, 131_072, 1_000_000])
@pytest.mark.parametrize("requests", [1, 64])
def test_drafts_are_verified_on_latents(requests: int, prefix: int) -> None:
    """Whatever the prefix is, and also where no request has one token alone."""
    for new in range(1, 9):
        assert select_path(batch((new,) * requests, (prefix,) * requests), USUAL, HEADS) == "mqa"


def test_the_usual_thresholds() -> None:
    assert (USUAL.prefix, USUAL.one_shot, USUAL.chunk, USUAL.few) == (1, 131072, 131072, None)


def test_each_threshold_moves_its_own_edge() -> None:
    long = batch((200,), (8192,))
    for thresholds, path in (
        (MLAThresholds(prefix=8192), "mha_one_shot"), (MLAThresholds(prefix=8193), "mqa"),
        (MLAThresholds(one_shot=8392), "mha_one_shot"), (MLAThresholds(one_shot=8391), "mha_chunked"),
        (MLAThresholds(few=199), "mha_one_shot"), (MLAThresholds(few=200), "mqa"),
    ):  # fmt: skip
        assert select_path(long, thresholds, HEADS) == path, thresholds


@pytest.mark.parametrize(
    ("new", "prefix", "heads", "leaves"),
    [
        ((512,), (32768,), 128, True), ((256,), (8192,), 128, True), ((512,), (32768,), 16, True),
        # Short enough that a host may take longer to launch it.
        ((256,), (7900,), 128, False), ((512,), (2048,), 128, False), ((512,), (32000,), 16, False),
        # Latents are the faster way: there are few new tokens.
        ((128,), (131072,), 128, False), ((4,) * 64, (32768,) * 64, 128, False),
        # There is no prefix to expand.
        ((8192,), (0,), 128, False),
    ],
)  # fmt: skip
def test_long_prefixes_are_not_left_to_captured_steps(
    new: tuple[int, ...], prefix: tuple[int, ...], heads: int, leaves: bool
) -> None:
    assert outweighs_capture(batch(new, prefix), USUAL, heads) is leaves
    assert not outweighs_capture(batch(new, prefix), MLAThresholds(uncaptured=1 << 62), heads)


def test_masks_go_where_they_are_masked() -> None:
    """Left padding and trees, whatever their lengths."""
    assert select_path(batch((200,), (9000,), starts=(5,)), USUAL, HEADS) == "mqa"
    assert select_path(batch((200,), (0,), starts=(5,)), USUAL, HEADS) == "mqa"
    tree = tuple(place - 1 for place in range(62))
    assert select_path(batch((62,), (9000,), parents=(tree,)), MLAThresholds(few=1), HEADS) == "mqa"
    assert select_path(batch((62,), (0,), parents=(tree,)), USUAL, HEADS) == "mqa"


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
