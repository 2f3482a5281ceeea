"""From a configuration to an engine's parts: what fits, what is refused, what is measured."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import fastlayers as fl
from fastlayers.attention.gqa.config import GQAConfig
from fastlayers.attention.gqa.triton import _least_part, _num_splits, tile_config
from fastlayers.errors import ArgumentError, FastlayersError
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.registry import LAYERS, registry
from fastlayers.runtime import precompile
from fastlayers_models.find import TINY, assets
from fastlayers_server.engine import startup
from fastlayers_server.engine.budget import Budget
from fastlayers_server.engine.config import EngineConfig, SchedulerConfig
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.mtp import ModelDrafts
from fastlayers_server.engine.protocol import Shutdown
from fastlayers_server.engine.startup import build
from fastlayers_server.engine.warming import Kernels, behind_prefixes, draw_specially, measure, tails, warm_up

SMALL = EngineConfig(device="cpu", max_model_len=256, max_running_requests=4, page_size=16, no_freeze_gc=True)


def test_parts_of_the_shipped_model() -> None:
    phases: list[str] = []
    parts = build(SMALL, phases.append, 3)
    assert phases == ["weights", "warmup", "capture"]
    info = parts.info
    assert (info.epoch, info.vocab_size, info.max_model_len, info.eos_ids) == (3, 512, 256, (1,))
    assert info.num_pages == 4 * 16 + 1 and info.page_size == 16 and not parts.overlap
    assert set(info.startup_seconds) == set(phases)
    assert json.loads(json.dumps(parts.executor.explain()))["graphs"] == []
    assert not parts.scheduler.config.drop_last_block
    assert build(replace(SMALL, speculative_algorithm="mtp"), phases.append).scheduler.config.drop_last_block


def test_what_backends_were_chosen_is_found_before_requests_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU beside the first ones: a start takes no longer than looking into all packages."""
    engine = build(SMALL, lambda phase: None)
    explain, asked = fl.explain, []
    monkeypatch.setattr(fl, "explain", lambda model: (asked.append(model), explain(model))[1])
    engine.post(Shutdown())
    engine.run()
    reading = [thread for thread in threading.enumerate() if thread.name == "engine-read"]
    for thread in reading:
        thread.join(20)
    found = engine.executor.backends()
    assert asked == [engine.executor.model]  # type: ignore[attr-defined]
    assert len(found) > 20 and "rms_norm" in {row["layer"] for row in found}


def test_a_random_model_of_known_shapes() -> None:
    parts = build(replace(SMALL, load_format="dummy", layers=2, dtype="fp32"), lambda phase: None)
    assert parts.info.model_type == "deepseek_v3"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_model_len": 5000}, r"max_model_len is 5000; accepted: 2 to 4096"),
        ({"num_pages": 9}, r"max_model_len is 256, which needs .* GiB, 17 pages; accepted: what fits 9 pages"),
        ({"deterministic": True, "speculative_algorithm": "ngram"}, "accepted: 'none' with deterministic"),
        ({"deterministic": True, "max_num_batched_tokens": 32}, "max_num_batched_tokens is 32; accepted: 64 or more"),
        ({"speculative_algorithm": "eagle"}, r"speculative_algorithm is 'eagle'; accepted: 'none', 'ngram'"),
        (
            {"speculative_algorithm": "ngram", "speculative_verify": "rejection"},
            "'rejection' where 'mtp' or 'draft' drafts",
        ),
        (
            {"speculative_algorithm": "ngram", "speculative_topk": 2},
            "topk is 2; accepted: 1, or 2 to 4 where",
        ),
        ({"speculative_algorithm": "draft"}, "speculative_draft_model is ''; accepted: a model for 'draft'"),
        ({"speculative_max_k": 0}, r"speculative_max_k is 0; accepted: 1 to 8"),
        ({"kv_cache_dtype": "int3"}, r"kv_cache_dtype is 'int3'; accepted: auto, bf16"),
    ],
)
def test_what_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        build(replace(SMALL, **change), lambda phase: None)
    with pytest.raises(FastlayersError):
        build(replace(SMALL, model="not/here"), lambda phase: None)


def test_deterministic_mode_takes_only_backends_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(SMALL, deterministic=True)
    assert build(config, lambda phase: None).scheduler.config.piece == 64
    table = registry("rms_norm")
    silent = [replace(b, repeats_on=()) if b.name == "torch" else b for b in table.ranked]
    monkeypatch.setattr(table, "ranked", silent)
    said = r"deterministic is True, with rms_norm=torch, .* on cpu; accepted: False, or .*rms_norm=… one of: \w+"
    with pytest.raises(ArgumentError, match=said):
        build(config, lambda phase: None)


TESTS = Path(__file__).parents[2]
# Kernels of ours that were seen to by a test of their own on a GPU: equal calls, whatever ran in between.
SEEN_TO = {"linear=wgmma": "linear/test_wgmma.py::test_replays_repeat_bits_behind_a_slow_producer_and_other_sizes"}


def test_what_claims_to_repeat_its_bits_on_cuda_was_seen_to() -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "results" / "deterministic_h200.jsonl"
    rows = [row for line in path.read_text().splitlines() if "equal_of_12" in (row := json.loads(line))]
    assert len(rows) >= 3 and all(set(row["equal_of_12"].values()) == {12} for row in rows)
    seen = {name for row in rows for name in row.get("backends", row["would_be_refused"])}
    claimed = {f"{layer}={b.name}" for layer in LAYERS for b in registry(layer).ranked if "cuda" in b.repeats_on}
    assert seen <= claimed
    assert {name for name in claimed if "=triton" not in name} <= seen | SEEN_TO.keys() and SEEN_TO.keys() <= claimed
    for test in SEEN_TO.values():
        file, _, function = test.partition("::")
        marks = (TESTS / file).read_text().partition(f"\ndef {function}(")[0].splitlines()[-2:]
        assert marks[0].endswith(".gpu")


def test_another_model_drafts() -> None:
    config = replace(SMALL, speculative_algorithm="draft", speculative_draft_model="tiny")
    parts = build(config, lambda phase: None)
    assert parts.drafts is not None and isinstance(parts.drafts.source, ModelDrafts)
    # Both caches share the memory for pages.
    room = replace(config, max_running_requests=4096, max_model_len=4096)
    alone = replace(room, speculative_algorithm="none", speculative_draft_model="")
    pages = [build(one, lambda phase: None).info.num_pages for one in (room, alone)]
    assert pages[0] == pytest.approx(pages[1] / 2, rel=0.2)


def test_the_chunk_beside_decoding_rows() -> None:
    budget = Budget(8192, 0.050)
    assert budget.chunk(0) == budget.chunk(5) == 8192
    assert not budget.backlog(5, 1000)  # nothing is measured
    budget.measured({64: 0.004, 512: 0.012, 2048: 0.030, 4096: 0.060}, {1: 0.003, 32: 0.015, 256: 0.030})
    # With the chunk less than three times a decode step, within the target.
    assert [budget.chunk(rows) for rows in (0, 1, 20, 30, 100)] == [8192, 64, 64, 512, 512]
    # With a backlog the whole step: eight requests, and a quarter of the rows, or sixteen.
    asked = ((20, 7), (20, 8), (40, 9), (40, 10), (100, 15), (100, 16))
    assert [budget.backlog(*each) for each in asked] == [False, True] * 3
    assert [budget.chunk(*each) for each in asked] == [64, 8192, 64, 8192, 512, 8192]
    # The more wait the longer is the step: twice as long for sixteen as for eight.
    budget.measured(budget.extend, {64: 0.005})
    assert [budget.chunk(60, waiting) for waiting in (0, 8, 10, 12)] == [64, 64, 64, 512]
    # Rows in the same step: it is as long as an extend of both, and what their caches take.
    budget.measured({64: 0.004, 512: 0.012, 2048: 0.030, 4096: 0.060}, {64: 0.015}, {32: 0.001, 64: 0.003})
    assert [budget.chunk(rows) for rows in (30, 60)] == [2048 - 30, 2048 - 60]
    assert budget.chunk(60, 8) == 2048 - 60 and Budget(1024, 0.05).chunk(60) == 1024
    unbounded = Budget(8192, 0.0)
    unbounded.measured(budget.extend, budget.decode)
    assert [unbounded.chunk(rows) for rows in (0, 1, 100)] == [8192] * 3
    # Where every chunk costs as much as the launches, the largest of the cheap ones.
    budget.measured({64: 0.100, 512: 0.101, 2048: 0.110, 4096: 0.200}, {256: 0.030})
    assert budget.chunk(3) == 2048


def test_what_is_compiled_after_the_start_is_counted() -> None:
    parts = build(EngineConfig(model="tiny", max_model_len=256, no_freeze_gc=True), lambda phase: None)
    engine = Engine(parts.scheduler, parts.executor, lambda message: None)
    assert engine.stats().counters["jit_compiles_total"] == {}
    parts.executor.watch.compiled += ["a", "b", "a"]  # type: ignore[attr-defined]
    assert engine.stats().counters["jit_compiles_total"] == {"a": 2.0, "b": 1.0}
    assert parts.executor.explain()["compiled"] == ["a", "b", "a"]
    behind_prefixes(parts.executor, parts.scheduler.config)  # as before a capture
    assert parts.executor.graph_counts() == ({}, {})  # and nobody counts it


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (32, 4, 128), (64, 8, 64)])
@pytest.mark.parametrize("window", [None, 128])
def test_tails_need_every_kernel_of_short_extends(heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
    """Of Qwen3-8B, Qwen3-30B-A3B and GPT-OSS-20B: tiles and splits as the Triton backend takes them."""
    cfg = GQAConfig(heads, kv_heads, head_dim, dtype=torch.bfloat16, softmax_scale=1.0, window=window)

    def kernel(count: int, length: int) -> tuple[int, ...]:
        tile = tile_config(next_power_of_2(count), cfg)
        tiles = cdiv(count * heads // kv_heads, tile["BLOCK_M"])
        keys = min(length, window + count - 1) if window else length
        least = _least_part(count, heads // kv_heads, window or 0)
        return (*tile.values(), least, _num_splits(tiles * kv_heads, keys, least))

    for most in (1000, 4096, 40960):
        limits = SchedulerConfig(1000, most, 4096, 64, ())
        met = {kernel(*each) for each in tails(limits)}
        wanted = {kernel(count, length) for count in range(2, 65) for length in range(513, most + 1, 255)}
        assert wanted <= met, wanted - met


def test_a_start_tells_what_it_spends_its_seconds_on(caplog: pytest.LogCaptureFixture) -> None:
    begun = time.monotonic() - 5.0
    with caplog.at_level("INFO", "fastlayers_server.engine.startup"):
        parts = build(replace(SMALL, begun=begun), lambda phase: None)
    told = parts.executor.explain()["start"]
    assert told[0][0] == "process and its imports" and told[0][1] >= 5.0
    assert 5.0 < sum(seconds for _, seconds in told) <= time.monotonic() - begun + 0.01
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("start: ")]
    assert len(lines) == len(told) and lines[0].endswith("process and its imports")


def test_steps_are_measured_over_tokens_that_differ_in_pages_that_are_given_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = build(replace(SMALL, max_num_batched_tokens=300), lambda phase: None)
    executor, model = parts.executor, type(parts.executor.model)  # type: ignore[attr-defined]
    forward, seen, pages = model.forward, [], []

    def watched(self: Any, ids: torch.Tensor, meta: Any, *args: Any, **options: Any) -> torch.Tensor:
        seen.append(ids.tolist())
        pages.append(executor.decoding.pages[1 : 1 + meta.num_requests, 0].tolist())
        return forward(self, ids, meta, *args, **options)

    monkeypatch.setattr(model, "forward", watched)
    extends, decodes, besides = measure(executor, parts.scheduler)
    assert not besides and not parts.scheduler.config.mixed  # its attention is to latents
    assert set(extends) == {16, 32, 64, 128, 256} and set(decodes) == {1, 2, 4}
    assert min(*extends.values(), *decodes.values()) > 0
    first = {len(ids): ids for ids in reversed(seen)}  # decode steps draw what the next one takes
    assert set(first) == {1, 2, 4, 16, 32, 64, 128, 256}
    assert all(len(set(ids)) == min(len(ids), executor.model.config.vocab_size) for ids in first.values())
    assert all(len(set(found)) == len(found) and 0 not in found for found in pages)
    assert not executor.decoding.pages.any() and not executor.decoding.uncaptured


def test_steps_of_more_prompts_than_may_run_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(SMALL, max_model_len=64, max_running_requests=2, max_num_batched_tokens=300)
    parts = build(replace(few, speculative_algorithm="ngram"), lambda phase: None)
    executor: Any = parts.executor
    extend, modes = executor.extending.extend_chunks, []

    def watched(chunks: Any, mode: str, *rest: Any) -> Any:
        modes.append(mode)
        return extend(chunks, mode, *rest)

    monkeypatch.setattr(executor.extending, "extend_chunks", watched)
    assert set(measure(executor, parts.scheduler)[0]) == {16, 32, 64}
    # Nor is one that verifies, but it runs: without a graph nothing else compiles its kernels before a request comes.
    assert modes.count("verify") == 1 and set(modes) == {"verify", "logits"} and not executor.extending.uncaptured


def test_a_tree_is_verified_once_before_requests_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no graph is captured: verifying one needs kernels that chains do not."""
    config = replace(SMALL, speculative_algorithm="mtp", speculative_topk=2, max_model_len=64)
    parts = build(config, lambda phase: None)
    executor: Any = parts.executor
    finish, modes = executor.extending._finish, []
    monkeypatch.setattr(executor.extending, "_finish", lambda *a: (modes.append(a[2]), finish(*a))[1])
    measure(executor, parts.scheduler)
    assert modes.count("verify a tree") == 1 and "verify" not in modes


def test_models_that_cannot_draft_are_refused_before_they_are_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(startup, "load_model", lambda *a: pytest.fail("it was loaded"))
    about = json.loads((assets() / TINY / "config.json").read_text())
    for name, change in (("alone", {"num_nextn_predict_layers": 0}), ("other", {"vocab_size": 300})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(ArgumentError, match="'mtp'; accepted: 'none' or 'ngram': this model has no draft layer"):
        build(replace(SMALL, model=str(tmp_path / "alone"), speculative_algorithm="mtp"), lambda phase: None)
    drafted = replace(SMALL, speculative_algorithm="draft", speculative_draft_model=str(tmp_path / "other"))
    with pytest.raises(ArgumentError, match="is one with a vocabulary of 300; accepted: one of 512"):
        build(drafted, lambda phase: None)


def test_a_warm_up_runs_each_kind_of_layer_and_no_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build(SMALL, lambda phase: None)
    model, limits = parts.executor.model, msgspec.structs.replace(parts.scheduler.config, max_batched_tokens=64)  # type: ignore[attr-defined]
    # Those whose layers around them run without entering their forward are left.
    inner = {"RotaryEmbedding", "MergeState"}
    kinds = {type(layer).__name__ for _, layer in precompile.representatives(model)} - inner
    ran: dict[str, set[int]] = {}

    def count(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        ran.setdefault(type(module).__name__, set()).add(arguments[0].shape[0])

    # Decode behind longer requests is not probed.
    assert Kernels(model, limits).max_length == parts.info.max_model_len
    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    said: list[str] = []
    try:
        warm_up(model, limits, said.append)
    finally:
        hook.remove()
    assert kinds | {"Sampler"} <= set(ran) and type(model).__name__ not in ran
    attention = next(type(m).__name__ for m in model.modules() if hasattr(m, "decode_choice"))
    assert {1, 64} <= ran[attention] and {1, 3, 4} <= ran["Sampler"]
    assert said[0].startswith("kernels: ")


@pytest.mark.parametrize("running", [1, 20])
def test_every_wish_is_drawn_for_once_before_requests_come(monkeypatch: pytest.MonkeyPatch, running: int) -> None:
    parts = build(replace(SMALL, max_running_requests=running), lambda phase: None)
    executor: Any = parts.executor
    import xgrammar

    masked, apply = [], xgrammar.apply_token_bitmask_inplace
    monkeypatch.setattr(
        xgrammar, "apply_token_bitmask_inplace", lambda x, mask: (masked.append(len(x)), apply(x, mask))
    )
    modes: list[str] = []
    hook = executor.special.sampler.register_forward_pre_hook(lambda layer, given: modes.append(given[2]))
    before = [tensor.clone() for tensor in executor.decoding.table.tensors]
    adjusted, adjust = [], executor.special._adjust
    monkeypatch.setattr(
        executor.special, "_adjust", lambda x, *rest: (adjusted.append(x.clone()), adjust(x, *rest), adjusted.append(x))
    )
    draw_specially(executor, parts.grammars)
    hook.remove()
    # Kernels of the mask know whether there is one row, and whether there are sixteen of them.
    assert masked == sorted(2 * [1, 2, 16] if running > 1 else [1, 1])
    assert modes == ["greedy", "filtered"] * (len(masked) // 2)
    assert len(adjusted) == 2 * sum(masked) and adjusted[1][0] == float("-inf")  # its end is forbidden
    assert not executor.special.history.any()
    rows = executor.decoding.nobody
    assert all(
        (now[:, :rows] == old[:, :rows]).all() for now, old in zip(executor.decoding.table.tensors, before, strict=True)
    )
