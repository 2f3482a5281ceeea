"""One attention layer, two ladders: what is named serves the phases that it can, and plans follow the steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.attention.core import PHASES
from fastlayers.attention.gqa.config import GQA, GQAConfig
from fastlayers.attention.gqa.torch import TorchGQA
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState
from fastlayers.errors import ArgumentError, NoBackendError
from fastlayers.registry import Backend, Rung
from fastlayers.tuning import ladder

CFG = GQAConfig(4, 2, 8, 0.3, page_size=16, dtype=torch.float32, kv_dtype=torch.float32)


@pytest.fixture
def decode_only() -> Iterator[Backend]:
    """A registered backend that serves decode alone."""
    row = Backend("decode_only", TorchGQA, auto_on=(), phases=("decode",))
    GQA.add(row)
    yield row
    GQA.ranked.remove(row)


def test_a_named_backend_serves_the_phases_it_can(decode_only: Backend) -> None:
    decode, extend = GQA.choose_phases(CFG, PHASES, "cpu", "decode_only")
    assert (decode.name, decode.cfg.phase, decode.evidence) == ("decode_only", "decode", "asked for by name")
    assert (extend.name, extend.cfg.phase) == ("torch", "extend")
    assert "decode_only does not serve extend" in extend.evidence


def test_a_ladder_is_cut_to_the_phase(decode_only: Backend) -> None:
    decode, extend = GQA.choose_phases(CFG, PHASES, "cpu", "torch:8|decode_only")
    assert (decode.name, decode.evidence) == ("torch:8|decode_only", "asked for by name")
    assert (extend.name, extend.evidence) == ("torch", "asked for by name; decode_only does not serve extend")


def test_asked_for_one_phase_by_name_it_runs_or_raises(decode_only: Backend) -> None:
    with pytest.raises(NoBackendError, match="serves decode only, not extend"):
        GQA.choose(GQAConfig(4, 2, 8, 0.3, phase="extend"), "cpu", "decode_only")
    with pytest.raises(NoBackendError, match="serves decode only, not every phase"):
        GQA.choose(CFG, "cpu", "decode_only")
    with pytest.raises(ArgumentError, match="phase"):
        GQAConfig(4, 2, 8, 0.3, phase="prefill")


def test_a_layer_takes_the_ladder_of_the_step(decode_only: Backend) -> None:
    rotary = fl.RotaryEmbedding(8, max_position=64)
    layer = fl.Attention(32, 4, 2, 8, rotary=rotary, page_size=16, dtype=torch.float32, backend="decode_only")
    assert layer.decode_choice.name == "decode_only" and layer.choice.name == "torch"
    assert {e.chosen for e in fl.explain(layer) if e.layer == "gqa"} == {"decode_only", "torch"}
    calls: list[str] = []

    def record(name: str, impl: TorchGQA) -> None:
        inner = impl.__class__.__call__

        class Recorder(TorchGQA):
            def __call__(self, *args: object) -> object:
                calls.append(name)
                return inner(impl, *args)

        ladder = layer.decode_ladder if name == "decode" else layer.ladder
        ladder.single = Recorder(impl.cfg)

    record("decode", layer.decode_ladder.single)
    record("extend", layer.ladder.single)
    cache = fl.kv_cache_spec(layer, page_size=16).allocate(num_pages=4)[0]
    state = AttentionState(2, 8, 2, 16)
    layer(torch.zeros(8, 32), state.plan(AttentionBatch((5, 3), (0, 0), [[1], [2]])), cache)
    layer(torch.zeros(2, 32), state.plan(AttentionBatch((1, 1), (5, 3), [[1], [2]])), cache)
    layer(torch.zeros(3, 32), state.plan(AttentionBatch((1, 2), (6, 4), [[1], [2]])), cache)
    assert calls == ["extend", "decode", "extend"]


class Named(TorchGQA):
    """Notes for which steps it was chosen."""

    calls: list[str]

    def __call__(self, *args: Any) -> Any:
        self.calls.append(f"{self.cfg.phase}@{self.cfg.context}")
        return super().__call__(*args)


@pytest.mark.parametrize(("window", "usual", "long"), [(None, 4096, 16384), (9, 1024, 1024)])
def test_a_layer_takes_the_ladder_of_the_context(
    monkeypatch: pytest.MonkeyPatch, window: int | None, usual: int, long: int
) -> None:
    monkeypatch.setattr(Named, "calls", [], raising=False)
    row = Backend("named", Named, phases=("decode",))

    def by_context(layer: str, cfg: Any, *_: Any) -> SimpleNamespace | None:
        if layer != "gqa" or cfg.phase != "decode":
            return None
        return SimpleNamespace(rungs=(Rung(None, row, float(cfg.context)),), evidence="a table for each context")

    monkeypatch.setattr(ladder, "ladder_for", by_context)
    rotary = fl.RotaryEmbedding(8, max_position=16384)
    layer = fl.Attention(32, 4, 2, 8, rotary=rotary, page_size=16, window=window, dtype=torch.float32)
    cache = fl.kv_cache_spec(layer, page_size=16).allocate(num_pages=600)[0]
    cache.keys.zero_(), cache.values.zero_()
    state, pages = AttentionState(2, 8, 590, 16), list(range(1, 590))
    for length, bucket, expected in ((3000, None, usual), (30, None, 1024), (9000, None, long), (30, 2, long)):
        Named.calls.clear()
        meta = state.plan(AttentionBatch((1,), (length,), [pages]), bucket=bucket)
        y = layer(torch.randn(bucket or 1, 32), meta, cache)
        assert Named.calls == [f"decode@{expected}"] and y.isfinite().all()


def test_contexts_with_one_choice_share_what_is_built() -> None:
    rotary = fl.RotaryEmbedding(8, max_position=64)
    layer = fl.Attention(32, 4, 2, 8, rotary=rotary, page_size=16, dtype=torch.float32)
    meta = AttentionState(1, 8, 2, 16).plan(AttentionBatch((1,), (5,), [[1]]))
    assert layer.cfg.context == 4096 and meta.context == 1024
    assert layer.core(meta, 1) is layer.decode_ladder.single and layer._ladders["decode", 1024] is layer.decode_ladder


@dataclass
class Recorded:
    """A plan that notes the lengths it was planned for."""

    seen: list[tuple[int, ...]]

    def plan(self, meta: AttentionMeta) -> None:
        self.seen.append(meta.batch.seq_lens)


def test_plans_are_made_once_and_planned_once_a_step() -> None:
    state, made = AttentionState(2, 8, 2, 16), []

    def make(meta: AttentionMeta) -> Recorded:
        made.append(meta.bucket)
        return Recorded([])

    first = state.plan(AttentionBatch((1,), (3,), [[1]]))
    plan = first.plan_of("a", make)
    assert first.plan_of("a", make) is plan and plan.seen == [(4,)]
    second = state.plan(AttentionBatch((1,), (4,), [[1]]))
    assert plan.seen == [(4,)], "without a bucket a plan is refreshed by its first use"
    assert second.plan_of("a", make) is plan and plan.seen == [(4,), (5,)]
    captured = state.plan(AttentionBatch((1,), (5,), [[1]]), bucket=2)
    other = captured.plan_of("a", make)
    assert other is not plan and made == [None, 2]
    state.plan(AttentionBatch((1, 1), (6, 2), [[1], [2]]), bucket=2)
    assert other.seen == [(6,), (7, 3)], "a bucket's plans are refreshed before the replay"
    assert plan.seen == [(4,), (5,)]
