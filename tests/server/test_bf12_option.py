"""``--bf12``: copies of weights in 12 bits reach the engine before its cache is sized, and are refused in words."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import fastlayers as fl
from fastlayers.bf12 import StoredBF12
from fastlayers.errors import ArgumentError
from fastlayers.linear.dense import layer as dense
from fastlayers.quant import bf12
from fastlayers.registry.first_rung import FirstRung
from fastlayers.testing.world import Rank, world
from fastlayers_models import AutoModel
from fastlayers_models.find import TINY, assets
from fastlayers_server import LLM, Params
from fastlayers_server.cli import app
from fastlayers_server.engine import startup
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.engine.startup import build, keep_bf12, load_model
from fastlayers_server.serve_config import parse

SMALL = EngineConfig(
    device="cpu", dtype="bf16", max_model_len=64, max_running_requests=2, page_size=16, no_freeze_gc=True, bf12=True
)
# Of the model that ships two linears of each layer have so many, of which decode takes one: few are interpreted.
SOME = 98_304
FIRST = "model.layers.0.self_attn.q_b_proj"


def copied(model: Any) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(getattr(layer, "ladder", None), FirstRung)]


def test_the_flag_reaches_the_engine_before_its_cache_is_sized(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert parse(["tiny", "--bf12"])[0].bf12 and not parse(["tiny"])[0].bf12
    assert parse(["tiny", "--bf12"])[0].shown()["bf12"] is True  # as /server_info tells it
    monkeypatch.setattr(bf12, "LEAST", SOME)
    there: list[list[str]] = []
    limits = startup.scheduler_config

    def sized(config: EngineConfig, model: Any, drafter: Any = None) -> Any:
        there.append(copied(model))
        return limits(config, model, drafter)

    monkeypatch.setattr(startup, "scheduler_config", sized)
    with caplog.at_level("INFO", "fastlayers_server.engine.startup"):
        engine: Any = build(SMALL, lambda phase: None)
    model = engine.executor.model
    assert there == [copied(model)] and "model.layers.1.self_attn.q_b_proj" in " ".join(there[0])
    told = [part for part, _ in engine.executor.start if part.startswith("bf12: ")]
    assert told == [line for record in caplog.records if (line := record.getMessage().partition(" s ")[2]) in told]
    assert len(told) == 1 and told[0].startswith(f"bf12: {len(there[0])} layers, ") and "\n" not in told[0]
    assert "without: " in told[0] and "are fewer than 98304" in told[0]
    build(replace(SMALL, bf12=False), lambda phase: None)
    assert there[1] == []


def test_a_drafter_keeps_copies_too_and_may_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf12, "LEAST", SOME)
    config = replace(SMALL, speculative_algorithm="draft", speculative_draft_model="tiny")
    load, models = startup.load_model, []

    def loaded(given: EngineConfig, *said: Any) -> Any:
        # The second one, which drafts, of weights that take no copies.
        models.append(load(replace(given, dtype="fp32") if short and models else given, *said))
        return models[-1]

    monkeypatch.setattr(startup, "load_model", loaded)
    for short in (False, True):
        models.clear()
        engine: Any = build(config, lambda phase: None)
        assert copied(models[0]) and bool(copied(models[1])) is not short
        told = [part for part, _ in engine.executor.start if part.startswith("draft model: bf12: ")]
        assert len(told) == 1 and ("0 layers" in told[0]) is short


def test_greedy_tokens_with_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf12, "LEAST", SOME)
    steps = []
    for given in (False, True):
        llm = LLM("tiny", replace(SMALL, bf12=given))
        model = llm.engine.executor.model  # type: ignore[attr-defined]
        ran: list[int] = []
        for layer in model.modules():
            if isinstance(ladder := getattr(layer, "ladder", None), FirstRung):
                impl = ladder.impl
                ladder.impl = lambda *rest, _impl=impl, _ran=ran: (_ran.append(1), _impl(*rest))[1]
        found = llm.generate([[0, 3, 56, 316]], Params(temperature=0.0, max_tokens=4, ignore_eos=True))
        steps.append((found[0].outputs[0].token_ids, bool(ran)))
    assert [ran for _, ran in steps] == [False, True]
    assert steps[0][0] == steps[1][0] and len(steps[0][0]) == 4


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": "fp32"}, r"27 \(weights are float32, not bfloat16\)"),
        ({}, r"27 \(\d+ weights are fewer than 12582912\)"),
    ],
)
def test_a_model_without_a_layer_that_takes_it_is_refused(change: dict[str, str], why: str) -> None:
    said = f"engine: bf12 is True; accepted: False: no layer of this model can keep such a copy: {why}$"
    with pytest.raises(ArgumentError, match=said):
        build(replace(SMALL, **change), lambda phase: None)
    with pytest.raises(RuntimeError, match="bf12 is True"):
        LLM("tiny", replace(SMALL, **change))


def test_where_no_kernel_runs_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf12, "LEAST", 1)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ArgumentError, match=r"27 \(Triton needs a CUDA device"):
        keep_bf12(load_model(SMALL))


def test_without_plain_layers_it_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"who: bf12 is True; .*: it has no linears of plain weights"):
        keep_bf12(torch.nn.Sequential(fl.RMSNorm(64)), "who")


def test_reasons_are_counted_in_one_line() -> None:
    many = {f"layers.{n}": f"{n} weights are fewer than 9" for n in range(3)}
    kinds = {"b": "weights are float32", "c": "weights are float16"}
    stored = StoredBF12(("a",), 3 << 30, kinds | many)
    told = "bf12: 1 layers, 3.00 GiB beside their weights"
    each = "1 (weights are float32); 1 (weights are float16)"
    assert stored.summary == f"{told}; without: 3 (0 weights are fewer than 9); {each}"
    assert StoredBF12(("a",), 3 << 30).summary == told


def test_generate_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["generate", "What is 127 + 45?", "--device", "cpu", "--max-new-tokens", "2", "--json"]
    refused = CliRunner().invoke(app, [*flags, "--bf12"])
    assert isinstance(refused.exception, ArgumentError) and "generate: bf12 is True" in str(refused.exception)
    monkeypatch.setattr(bf12, "LEAST", 2 * SOME)
    plain, kept = (CliRunner().invoke(app, [*flags, *more]) for more in ([], ["--bf12"]))
    assert plain.exit_code == kept.exit_code == 0, (plain.output, kept.output)
    assert json.loads(plain.stdout) == json.loads(kept.stdout)
    assert "bf12: 4 layers, " in kept.stderr and "bf12" not in plain.stderr


def shards(rank: Rank) -> tuple[tuple[str, ...], int]:
    bf12.LEAST = SOME // 2
    model = AutoModel.from_pretrained(assets() / TINY, dtype=torch.bfloat16, parallel=rank.spec())
    stored = keep_bf12(model)
    return stored.layers, stored.nbytes


def test_each_rank_keeps_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf12, "LEAST", SOME)
    whole = keep_bf12(load_model(SMALL))
    for layers, nbytes in world(2).run(shards):
        assert set(whole.layers) <= set(layers) and 0.4 < nbytes / whole.nbytes < 1


def kept_where_the_second_lacks(rank: Rank, lacks: str) -> tuple[list[str], dict[str, str], str]:
    """Return which layers have copies, why others have none, and what was raised."""
    model = AutoModel.from_pretrained(assets() / TINY, dtype=torch.bfloat16, parallel=rank.spec())
    weight, calls, pack = model.get_submodule(FIRST).weight, itertools.count(), bf12.pack_bf12

    def packed(given: torch.Tensor) -> Any:
        if rank.rank == 1 and (lacks == "all memory" or (lacks == "memory" and next(calls) == 0)):
            raise torch.OutOfMemoryError
        return pack(given)

    if rank.rank == 1 and lacks == "numbers":
        for place, size in enumerate((2.0**-100, 1.0, 2.0**30)):
            weight[0, place::3] = size
    with mock.patch.object(dense, "pack_bf12", packed), mock.patch.object(bf12, "LEAST", SOME // 2):
        try:
            stored = keep_bf12(model)
        except ArgumentError as error:
            return copied(model), {}, str(error)
    assert stored.nbytes == sum(model.get_submodule(name).serving_one_token.weight.nbytes for name in stored.layers)
    return copied(model), stored.refused, ""


@pytest.mark.parametrize("lacks", ["numbers", "memory", "all memory"])
def test_what_one_rank_refuses_none_keeps(lacks: str) -> None:
    one, other = world(2).run(kept_where_the_second_lacks, lacks)
    assert one == other
    layers, refused, raised = one
    if lacks == "all memory":
        assert not layers and re.search(r"engine: bf12 is True; .* \(rank 1: no memory is left for a copy\)", raised)
    else:
        why = bf12.TOO_MANY if lacks == "numbers" else bf12.NO_MEMORY
        assert layers and not raised and FIRST not in layers and refused[FIRST] == f"rank 1: {why}"
        assert sum("rank" in each for each in refused.values()) == 1
