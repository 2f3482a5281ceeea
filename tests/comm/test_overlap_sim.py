"""The simulation of more GPUs: held to every step that was measured on two, and the page to the committed result."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fastlayers as fl
from fastlayers.errors import ArgumentError
from fastlayers.testing.overlap_sim import (
    MODELS,
    SLICE,
    Split,
    Stage,
    calibrate,
    expert_loads,
    layer_stages,
    link_us,
    memory_bytes,
    narrow_of,
    run,
    splits_of,
    step_ms,
    varied,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("simulate_splits", ROOT / "tools/simulate_splits.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulate_splits"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(tool: Any) -> Any:
    return tool.calibrated()


@pytest.fixture(scope="module")
def committed(tool: Any) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(tool.FILE.read_text())
    return result


def test_every_measured_step_of_two_gpus_is_met(tool: Any, found: Any) -> None:
    rows = tool.accepted(found)
    assert len(rows) == sum(
        row.get("what") == "decode_groups" or (row.get("what") == "decode" and row["ranks"] == 2)
        for row in tool.read(tool.DECODE)
    )
    assert len(rows) >= 20 and sum(not row["used"] for row in rows) >= 13
    for row in rows:
        assert abs(row["simulated_ms"] / row["measured_ms"] - 1) <= 0.1, row


def missed(tool: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if abs(row["simulated_ms"] / row["measured_ms"] - 1) > tool.ACCEPTED]


def test_every_measured_step_of_the_slices_is_met(tool: Any, found: Any) -> None:
    rows = tool.sliced(found)
    assert len(rows) == sum(row.get("what") in ("decode", "decode_groups") for row in tool.read(tool.SLICES))
    unseen = [row for row in rows if not row["used"]]
    assert len(unseen) >= 12 and {1, 2, 16, 64, 128} <= {row["batch"] for row in unseen}
    assert all(row["split"] == "one GPU" for row in rows if row["used"])
    assert tool.ACCEPTED == 0.1 and missed(tool, unseen) == []


def test_steps_of_two_gpus_calibrate_nothing_of_deepseek(tool: Any, found: Any) -> None:
    one = [row for row in tool.read(tool.SLICES) if row.get("ranks") == 1]
    assert len(one) < len(tool.read(tool.SLICES))
    again = calibrate(
        tool.read(tool.DECODE), tool.read(tool.ROWS), found.rate, found.flops, slices=one,
        attention_flops=found.attention_flops, narrow=found.narrow["deepseek_v3"],
    )  # fmt: skip
    assert again == found


@pytest.mark.parametrize("without", ["launch_us", "attention_flops", "narrow"])
def test_each_term_is_needed(tool: Any, found: Any, without: str) -> None:
    """Few requests are missed without the cost of launches, others without the other terms."""
    if without == "attention_flops":
        other = replace(found, attention_flops=math.inf)
    elif without == "launch_us":
        other = replace(found, launch_us={**found.launch_us, "deepseek_v3": found.launch_us["qwen3_8b"]})
    else:  # as if FP8 weights became as slow as bf16 ones by being halved
        other = replace(found, narrow=dict.fromkeys(found.narrow, 2 * max(found.narrow.values())))
    assert missed(tool, tool.sliced(other))


def test_launches_are_those_of_the_profiles(tool: Any) -> None:
    """Beside the layers' a step has some ten launches of its own."""
    profiles = [row for row in tool.read("two_gpus_profiles_h200.jsonl") if row.get("what") == "profile"]
    for name, model, ranks in (("deepseek_v3_slice", SLICE, 1), ("qwen3_30b_a3b", MODELS["qwen3_30b_a3b"], 2)):
        kernels = next(
            row["kernels"] for row in profiles if (row["model"], row["ranks"], row["batch"]) == (name, ranks, 1)
        )
        assert 0 <= kernels - model.layers * (model.launches[1] + 2) <= 12
    alone = next(row for row in tool.read(tool.EIGHTH) if row.get("profile") == "decode 1")
    assert alone["kernels"] == MODELS["deepseek_v3"].launches[1] + 2


def test_an_eighth_of_a_layer_alone(tool: Any, found: Any) -> None:
    """Other kernels than those that the launches' cost is of: for few requests no closer than a fifth."""
    rows = tool.eighths(found)
    assert [row["batch"] for row in rows] == [1, 64, 128]
    for row in rows:
        assert abs(row["simulated_us"] / row["measured_us"] - 1) <= (0.2 if row["batch"] == 1 else 0.1), row


def test_narrower_weights_are_told_from_launches() -> None:
    whole = {1: 80.0, 16: 800.0, 64: 1600.0}
    parts = {tokens: 9 + us / 8 * (1 + 3 * 0.05) for tokens, us in whole.items()}
    assert narrow_of(whole, parts, 8) == pytest.approx(0.05)


def test_variants_are_ranked_as_measured(tool: Any, found: Any) -> None:
    """Where two ways of the same work were measured more than 5 % apart, the simulation has the same one first."""
    sliced = [{"model": f"slice, {row['context']}", **row} for row in tool.sliced(found)]
    rows, compared = tool.accepted(found) + sliced, 0
    for a in rows:
        for b in rows:
            alike = (a["model"], a["batch"]) == (b["model"], b["batch"])
            # Kernels that start early and those that are held back are one way to the simulation.
            alike = alike and (a["split"], a["links"]) != (b["split"], b["links"])
            if alike and a["measured_ms"] > 1.05 * b["measured_ms"]:
                assert a["simulated_ms"] > b["simulated_ms"], (a, b)
                compared += 1
    assert compared >= 10


def test_one_gpu_is_what_it_was_calibrated_on(tool: Any, found: Any) -> None:
    for row in tool.read(tool.DECODE):
        if row.get("what") == "decode" and row["ranks"] == 1:
            assert step_ms(MODELS[row["model"]], Split(), row["batch"], found) == pytest.approx(row["device_ms"])
    for row in tool.sliced(found):
        assert not row["used"] or row["simulated_ms"] == pytest.approx(row["measured_ms"])


def test_published_times_between_hosts(tool: Any, found: Any) -> None:
    for ranks, us in tool.PUBLISHED.items():
        assert abs(link_us(found, "combine", 7168, 128, ranks) / us - 1) <= 0.25
    assert abs(tool.node_tokens(found) / tool.NODE_TOKENS - 1) <= 0.3


def test_the_result_and_the_page_are_fresh(tool: Any, found: Any, committed: dict[str, Any]) -> None:
    assert committed["accepted"] == tool.accepted(found)
    assert committed["slices"] == tool.sliced(found)
    assert committed["eighths"] == tool.eighths(found)
    assert committed["published_node_tokens"]["simulated"] == round(tool.node_tokens(found))
    assert tool.PAGE.read_text() == tool.fill(tool.PAGE.read_text(), committed)
    now = [{k: v for k, v in row.items() if k != "range_ms"} for row in tool.best_splits(found, [found])]
    assert now == [{k: v for k, v in row.items() if k != "range_ms"} for row in committed["splits"]]
    for row in committed["splits"]:
        assert "ms" not in row or row["range_ms"][0] <= row["ms"] <= row["range_ms"][1]


def test_each_sentence_says_that_it_is_simulated(tool: Any, committed: dict[str, Any]) -> None:
    text = tool.page(committed)
    sentences = [
        sentence
        for part in text.split("\n\n") if not part.startswith("|")
        for sentence in re.split(r"(?<=[.:])\s+(?=[A-Z])", re.sub(r"`[^`]*`", "", part))
    ]  # fmt: skip
    assert len(sentences) >= 8
    for sentence in sentences:
        assert "simulated" in sentence, sentence


def stage(unit: str, *us: float) -> Stage:
    return Stage(unit, us)


def test_links_wait_for_the_last_rank() -> None:
    stages = [stage("compute", 3, 5), stage("link", 2, 2), stage("compute", 1, 1)]
    assert run([stages], 0.0) == 8.0
    # Two batches: one's bytes are under way while the other computes; each unit does one thing at a time.
    assert run([stages, stages], 0.0) == 5 + 5 + 2 + 1
    assert run([stages, stages], 0.5) > run([stages, stages], 0.0)
    long_links = [stage("compute", 1), stage("link", 10)] * 2
    assert run([long_links, long_links], 0.0) == 41.0


def test_what_grows_costs_more(found: Any) -> None:
    for model in MODELS.values():
        for split in splits_of(model, 8):
            times = [step_ms(model, split, batch, found) for batch in (8, 64, 512)]
            assert times == sorted(times) and len(set(times)) == 3
    for what in ("sum", "gather", "scatter", "dispatch", "combine"):
        by_rows = [link_us(found, what, 7168, rows, 8) for rows in (1, 64, 4096)]
        assert by_rows == sorted(by_rows) and by_rows[2] > 10 * by_rows[0]
        assert link_us(found, what, 7168, 256, 16) > link_us(found, what, 7168, 256, 8)  # beyond one host
        assert link_us(found, what, 7168, 256, 1) == 0.0


def test_the_busiest_rank_sets_the_pace(found: Any) -> None:
    model, split = MODELS["deepseek_v3"], Split(1, 32, 32, "all_to_all")

    def experts(zipf: float, eplb: fl.EplbConfig | None) -> list[float]:
        return list(layer_stages(model, split, 256, 4096, found, dense=False, zipf=zipf, eplb=eplb)[2].us)

    alike, skewed = experts(0.0, None), experts(1.0, None)
    assert max(alike) == pytest.approx(min(alike)) and max(skewed) > 1.5 * max(alike)
    placed = experts(1.0, fl.EplbConfig(num_redundant_experts=32))
    assert max(placed) < 0.7 * max(skewed)
    assert sum(expert_loads(model, 1.0)) == pytest.approx(1.0)


def test_memory_counts_what_is_on_a_rank() -> None:
    deepseek, qwen = MODELS["deepseek_v3"], MODELS["qwen3_8b"]
    assert 660e9 < memory_bytes(deepseek, Split(), 0, 0) < 680e9
    assert 16e9 < memory_bytes(qwen, Split(), 0, 0) < 17e9
    # MLA keeps each token on every rank of tp, grouped heads do not; attention groups keep their own requests only.
    assert memory_bytes(deepseek, Split(8), 64, 4096) - memory_bytes(deepseek, Split(8), 0, 0) == 64 * 4096 * 61 * 1152
    grown = memory_bytes(deepseek, Split(1, 8), 64, 4096) - memory_bytes(deepseek, Split(1, 8), 0, 0)
    assert grown == 8 * 4096 * 61 * 1152
    assert memory_bytes(qwen, Split(8), 64, 88) - memory_bytes(qwen, Split(8), 0, 0) == 64 * 88 * 36 * 4096 / 8


def test_other_parameters_give_other_times(found: Any) -> None:
    model, split = MODELS["qwen3_30b_a3b"], Split(2)
    base, others = step_ms(model, split, 64, found), varied(found)
    times = [step_ms(model, split, 64, other) for other in others]
    assert len(others) == 24 and min(times) < base < max(times)
    assert max(times) < 1.3 * base and min(times) > 0.75 * base
    assert step_ms(model, replace(split, nccl=True), 64, found) > base


def test_wrong_splits_are_named() -> None:
    with pytest.raises(ArgumentError, match="ep is 3"):
        Split(2, 2, 3)
    with pytest.raises(ArgumentError, match="way"):
        Split(2, 2, way="broadcast")
    assert [str(split) for split in splits_of(MODELS["qwen3_8b"], 2)] == ["tp=2", "dp=2"]
    assert str(Split(1, 2, 2, "all_to_all")) == "dp=2, ep=2, all-to-all" and str(Split()) == "one GPU"
