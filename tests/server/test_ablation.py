"""``fastlayers bench ablation``: every switch changes what it says, and nothing that is computed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fastlayers as fl
from fastlayers.errors import ArgumentError
from fastlayers.runtime import launch
from fastlayers.tuning import clock
from fastlayers_server import ablation
from fastlayers_server.ablation import SWITCHES, Stack, _Undependent, relative_rms, replaced, switch_row
from fastlayers_server.ablation_models import check, stack_of
from fastlayers_server.bench_command import _with_noise
from fastlayers_server.cli import app
from fastlayers_server.known_models import DEEPSEEK_V3, GPT_OSS_20B

CONFIGS = {"deepseek-ai/DeepSeek-V3": DEEPSEEK_V3, "openai/gpt-oss-20b": GPT_OSS_20B}


@pytest.fixture(scope="module")
def stacks() -> dict[str, Stack]:
    made = {name: stack_of(name, config, "cpu", torch.float32, 2) for name, config in CONFIGS.items()}
    with torch.inference_mode():
        return {name: Stack(model, 2, 40) for name, model in made.items()}


def switch(words: str) -> Any:
    (found,) = [each for each in SWITCHES if words in each.what]
    return found


# What a CPU can show; the others need streams, kernels or dependent launches. Expanded keys come from a product of
# e4m3 activations, absorbed ones from a dequantised weight; an expert may change with them.
EXPECTED = {
    "deepseek-ai/DeepSeek-V3": {
        "absorbed queries": 0.0, "latents attended": 0.15, "q_a and kv_a": 0.0, "RoPE and": 1e-6, "router": 0.0,
        "shared expert": 1e-6, "routed factor": 1e-6, "factor in the gate": 1e-6, "activation that writes": 0.0,
    },
    "openai/gpt-oss-20b": {"RoPE and": 1e-6, "router": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("model", EXPECTED)
@torch.inference_mode()
def test_both_ways_compute_the_same(model: str, stacks: dict[str, Stack]) -> None:
    ran = {}
    for each in SWITCHES:
        row = switch_row(each, stacks[model], 1)
        if "skipped" in row:
            assert len(row["skipped"]) > 10
        elif not each.other:
            assert (
                row["off_us"] > 0
                and row["on_us"] > 0
                and row["ratio"] == pytest.approx(row["off_us"] / row["on_us"], 0.01)
            )
            ran[each.what] = row["difference"]
    for words, most in EXPECTED[model].items():
        assert ran.pop(switch(words).what) <= most, words
    assert not ran, "every switch that runs here is expected to"


@torch.inference_mode()
def test_copied_queries_cost_their_copies_alone(stacks: dict[str, Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither way multiplies out the weights that latents are multiplied by."""
    stack, made = stacks["deepseek-ai/DeepSeek-V3"], []
    absorb = fl.MLAAttention._absorb
    monkeypatch.setattr(fl.MLAAttention, "_absorb", lambda layer: made.append(layer) or absorb(layer))
    off = switch("absorbed queries").off(stack)
    usual = stack()
    with off():
        assert torch.equal(stack(), usual)
    assert made == []


@torch.inference_mode()
def test_switches_that_change_what_is_computed_do(stacks: dict[str, Stack]) -> None:
    deepseek = "deepseek-ai/DeepSeek-V3"
    for model, words in (("openai/gpt-oss-20b", "sinks"), (deepseek, "padding"), (deepseek, "absorbed products")):
        stack, each = stacks[model], switch(words)
        off, on = each.off(stack), each.on(stack) if each.on else fl.patched
        row = switch_row(each, stack, 1)
        assert "difference" not in row and row["ratio"] > 0
        way = on if each.on else off
        with way():
            changed = stack()
        # The first row is real in both; sinks and rounded inputs of products change it, padding does not.
        far = relative_rms(changed[:1], stack()[:1])
        assert (far > 1e-4) == (words != "padding") and (far < 0.06 or words == "sinks")


@torch.inference_mode()
def test_everything_is_as_before_afterwards(stacks: dict[str, Stack]) -> None:
    for stack in stacks.values():
        before = stack()
        for each in SWITCHES:
            switch_row(each, stack, 1)
        assert torch.equal(stack(), before)


@torch.inference_mode()
def test_a_switch_takes_the_way_that_it_names(stacks: dict[str, Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts calls: two products for one, a rotation of its own, keys expanded, a factor multiplied apart."""
    stack = stacks["deepseek-ai/DeepSeek-V3"]
    calls: list[str] = []
    counted = {
        "rotary": (fl.RotaryEmbedding, "forward"),
        "linear": (fl.FP8BlockLinear, "forward"),
        "expand": (fl.MLAAttention, "_expand"),
        "experts": (fl.FusedMoE, "forward"),
        "gated": (fl.FP8BlockLinear, "gated"),
    }
    for name, (owner, method) in counted.items():
        usual = getattr(owner, method)

        def noted(self: Any, *given: Any, name: str = name, usual: Any = usual) -> Any:
            calls.append(name)
            return usual(self, *given)

        monkeypatch.setattr(owner, method, noted)

    def count(words: str | None) -> dict[str, int]:
        calls.clear()
        if words is None:
            stack()
        else:
            with switch(words).off(stack)():
                stack()
        return {name: calls.count(name) for name in counted}

    usual = count(None)
    assert usual["rotary"] == usual["expand"] == 0 and usual["experts"] == 1
    assert count("q_a and kv_a")["linear"] == usual["linear"] + 2
    assert count("RoPE and")["rotary"] == 2
    assert count("latents attended")["expand"] == 2
    assert count("routed factor") == usual
    # The dense layer's projection and the shared expert's.
    assert usual["gated"] == 2 and count("activation that writes") == usual | {"gated": 0}


def test_replaced_gives_back_what_was_there() -> None:
    layer = torch.nn.Linear(2, 2)
    weight, forward = layer.weight, layer.forward
    with pytest.raises(KeyError), replaced((layer, "weight", None), (layer, "forward", len), (layer, "weight", 3)):
        assert layer.weight == 3 and layer([1, 2, 3]) == 3
        raise KeyError
    assert layer.weight is weight and layer.forward == forward and "forward" not in vars(layer)


def test_launches_are_prepared_without_the_attribute_and_it_comes_back() -> None:
    class Usual:
        device = stream = maker = None

        @staticmethod
        def prepare(compiled: Any) -> bool:
            found: bool = compiled.run.launch_pdl
            return found

    class Run:
        launch_pdl = True

    class Compiled:
        run = Run()

    assert Usual.prepare(Compiled) is True and _Undependent(Usual).prepare(Compiled) is False
    asked = {name for name in dir(launch.driver) if not name.startswith("_")}
    assert asked >= {"device", "stream", "prepare", "maker"} and asked <= {*dir(_Undependent(Usual))}
    assert Compiled.run.launch_pdl is True


def test_command() -> None:
    arguments = ["bench", "ablation", "openai/gpt-oss-20b", "--device", "cpu", "--batch", "1,2", "--context", "20"]
    found = CliRunner().invoke(app, [*arguments, "--rounds", "1", "--dtype", "fp32", "--json"])
    head, *rows = [json.loads(line) for line in found.output.splitlines()]
    assert head["model"] == "openai/gpt-oss-20b" and head["sources"] and head["layers"] == 2
    assert head["sizes"] == "small"
    assert [row["batch"] for row in rows] == [1] * (len(SWITCHES) + 1) + [2] * (len(SWITCHES) + 1)
    assert all(row["quoted"] and row["items"] and ("ratio" in row or "skipped" in row) for row in rows)
    other = CliRunner().invoke(app, ["bench", "ablation", "Qwen/Qwen3-8B", "--device", "cpu"]).exception
    assert isinstance(other, ArgumentError) and "accepted: deepseek_v3, gpt_oss" in str(other)


def test_a_context_without_room_for_the_next_token_is_refused() -> None:
    """By the option's name, and before a model is made; of a CPU it is the small model's."""
    arguments = ["bench", "ablation", "--device", "cpu", "--context"]
    for context in ("4096", "9000"):
        other = CliRunner().invoke(app, [*arguments, context]).exception
        assert isinstance(other, ArgumentError)
        assert f"bench ablation: --context is {context}; accepted: 1 to 4095: the small model that a CPU" in str(other)
    for name, config in CONFIGS.items():
        check(name, config, "cpu", 4095)
        most = config["max_position_embeddings"]
        check(name, config, "cuda", most - 1)
        with pytest.raises(ArgumentError, match=f"accepted: 1 to {most - 1}: the model has {most} positions"):
            check(name, config, "cuda", most)


def test_a_ratio_that_captures_differ_by_decides_nothing(monkeypatch: pytest.MonkeyPatch, stacks: Any) -> None:
    times = {"off": [100.0, 104.0, 102.0], "on": [100.0, 101.0, 99.0]}
    monkeypatch.setattr(ablation, "measure_captures", lambda *given: times)
    row = switch_row(switch("router"), stacks["openai/gpt-oss-20b"], 1)
    assert (row["ratio"], row["noise"]) == (1.02, 0.04)
    assert _with_noise(row) == "1.020 ± 4.0%, decides nothing"
    assert _with_noise(row | {"ratio": 1.05}) == "1.050 ± 4.0%" and _with_noise({"ratio": 1.0}) == "1.000"


def test_items_alone() -> None:
    arguments = ["bench", "ablation", "--device", "cpu", "--batch", "1", "--context", "20", "--rounds", "1", "--json"]
    found = CliRunner().invoke(app, [*arguments, "--items", "28,44"])
    assert [json.loads(line)["items"] for line in found.output.splitlines()[1:]] == ["28", "44, 45, 46"]
    other = CliRunner().invoke(app, [*arguments, "--items", "3"]).exception
    assert isinstance(other, ArgumentError) and "--items is '3'; accepted: of 2, 10, 11" in str(other)


def test_the_table_shows_what_ran_and_why_the_rest_did_not() -> None:
    arguments = ["bench", "ablation", "--device", "cpu", "--batch", "1", "--context", "20", "--rounds", "1"]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.exception
    assert "small sizes" in found.output.replace("\n", " ") and "graphs are CUDA's" in found.output
    (line,) = [line for line in found.output.splitlines() if "router in one kernel" in line]
    off, on, ratio = (float(cell) for cell in line.split("│")[4:7])
    assert off > 0 and on > 0 and ratio == pytest.approx(off / on, rel=0.01)


def test_the_median_of_several_captures_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way is captured several times, by turns; where buffers lie makes one capture slower than the next."""
    prepared = list[str]()
    captures = iter((10.0, 100.0, 30.0, 120.0, 20.0, 110.0))

    class Played:
        def prepare(self, call: Any) -> tuple[str, float]:
            prepared.append(call())
            return prepared[-1], next(captures)

        def measure(self, calls: dict[str, Any], rounds: int) -> dict[str, Any]:
            return {name: SimpleNamespace(us=us) for name, (_, us) in calls.items()}

    monkeypatch.setattr(clock, "clock_for", lambda device: Played())
    calls = {"off": lambda: "off", "on": lambda: "on"}
    found = clock.measure_captures(calls, torch.device("cuda"), 3, rounds=1)
    assert found == {"off": [10.0, 30.0, 20.0], "on": [100.0, 120.0, 110.0]}
    assert prepared == ["off", "on"] * 3
    captures = iter((1.0, 2.0))
    assert clock.measure_captures(calls, torch.device("cpu"), 3, rounds=1) == {"off": [1.0], "on": [2.0]}
