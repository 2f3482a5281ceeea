"""Steps that verify drafts over short contexts: with graphs of their own where another core attends then."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastlayers.attention import context_buckets
from fastlayers.attention.mla.config import MLA
from fastlayers.attention.mla.torch import TorchMLA
from fastlayers.registry import Backend
from fastlayers_server.engine import step
from fastlayers_server.engine.step import ALL, TREE, VERIFY

sys.path.insert(0, str(Path(__file__).parent))
from serving import Bench, make_model, plain, prompts
from test_speculation import Told


class OfLong(TorchMLA):
    """A core that is taken over long contexts, from eight tokens on."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take another core for captured steps that verify where a request may have more than 96 tokens, of 256."""
    monkeypatch.setattr(context_buckets, "CONTEXTS", (48, 256))
    monkeypatch.setattr(step, "SHORT_CONTEXT", 96)
    row = Backend(
        "of_long", OfLong, auto_on=("cpu",), phases=("decode", "ragged"), few_only=True, captures_extend=True,
        auto_phases=("decode",), auto_from=lambda cfg: 8 if cfg.captured and cfg.context > 48 else None,
    )  # fmt: skip
    MLA.ranked.insert(0, row)
    yield
    MLA.ranked.remove(row)


def drafting(name: str, rows: list[list[int]], new: int, texts: list[list[int]]) -> Any:
    told = Told({tuple(row): text for row, text in zip(rows, texts, strict=True)}, 3)
    return Bench(
        make_model(name), captured=True, own_buckets=True, drafts=told, verify_each=4, max_extend_requests=6,
        max_batched_tokens=32, prefix_cache=False,
    )  # fmt: skip


def verified(bench: Any) -> dict[tuple[int, int], int]:
    """Return how often graphs of steps that verify ran, by their tokens and longest request."""
    found: dict[tuple[int, int], int] = {}
    for record in bench.executor.extending.ledger:
        if record.key.mode == VERIFY:
            place = record.key.tokens, record.key.longest
            found[place] = found.get(place, 0) + record.replays
    return found


def test_the_graph_is_that_of_the_steps_contexts(short: None) -> None:
    new = 12
    rows = [prompts(3)[0][:20], prompts(3)[0][30:60], prompts(3)[1][:20]]
    texts = plain(make_model("deepseek"), rows, new)
    bench = drafting("deepseek", rows, new, texts)
    assert bench.generate(rows, new) == texts
    ran = verified(bench)
    # Steps of fewer tokens than the other core takes have one graph for all contexts.
    assert {longest for tokens, longest in ran if tokens < 8} == {0}
    assert {longest for tokens, longest in ran if tokens >= 8} == {0, 96}
    assert sum(count for (tokens, longest), count in ran.items() if tokens >= 8 and longest) > 0
    assert not any(count for (tokens, longest), count in ran.items() if tokens >= 8 and not longest)
    assert bench.executor.extending.uncaptured.total() == 0


def test_beyond_it_is_that_of_all_contexts(short: None) -> None:
    new = 32
    # One of them is short: the longest counts.
    rows = [prompts(3)[0][:100], prompts(3)[0][1:], prompts(3)[1][:20]]
    texts = plain(make_model("deepseek"), rows, new)
    bench = drafting("deepseek", rows, new, texts)
    assert bench.generate(rows, new) == texts
    ran = verified(bench)
    assert sum(count for (tokens, longest), count in ran.items() if tokens >= 8 and not longest) > 0


def test_which_steps_have_two_graphs(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = drafting("deepseek", [], 1, [])
    extending = bench.executor.extending
    keys = [key for key in extending.graphs.keys if key.mode == VERIFY and not key.longest]
    found = extending.for_short_contexts(keys)
    assert found == [key._replace(longest=96) for key in keys if key.tokens >= 8] and found
    assert extending.for_short_contexts([key._replace(mode=ALL) for key in keys if key.tokens >= 8])
    assert not extending.for_short_contexts([key._replace(mode=TREE) for key in keys])
    # Over two ranks, of which the other would not capture the first.
    ranks = SimpleNamespace(size=2, all_reduce_=lambda said: said + torch.tensor([0] + [1] * (len(said) - 1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extending, "_ranks", ranks)
        differing = [key for key in keys if key.tokens >= 8]
        assert extending.for_short_contexts(differing) == found[1:]
    # More tokens a request than are a few, and a state that holds nothing else.
    monkeypatch.setattr(extending, "verify_each", 9)
    assert not extending.for_short_contexts([key for key in keys if key.tokens > 8])
    monkeypatch.setattr(extending, "verify_each", 4)
    monkeypatch.setattr(step, "SHORT_CONTEXT", 256)
    assert not extending.for_short_contexts(keys)


@pytest.mark.parametrize("name", ["deepseek", "qwen"])
def test_without_another_core_nothing_more_is_captured(name: str) -> None:
    bench = drafting(name, [], 1, [])
    assert verified(bench).keys() and all(longest == 0 for _, longest in verified(bench))
