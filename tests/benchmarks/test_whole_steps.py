"""The search over whole steps, by scripted times: what gains together, and what each option takes more."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.attention.gqa.config import GQAConfig
from fastlayers.device import DESCRIBED
from fastlayers.linear.dense.layer import LinearConfig
from fastlayers.registry import registry
from fastlayers.tuning.samples import Option
from fastlayers_models.auto import family_of

ROOT = Path(__file__).parents[2]
TORCH, TRITON, TILE = Option("torch"), Option("triton"), Option("triton", (("BLOCK_N", 64),))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("whole_steps")


def place(steps: Any, features: int, installed: Option, *others: Option) -> Any:
    """Return a product with two calls a step."""
    return steps.Place("linear", LinearConfig(8, features), [object()] * 2, installed, [installed, *others])


def searched(steps: Any, places: list[Any], cost: Any, end: float = float("inf")) -> list[dict[str, Any]]:
    """Return the rows of a search in which a step takes what ``cost`` says of the options by place."""
    rows = steps.Rows(SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu"))), places, 32, 20, 4)

    def times(variants: Any, turns: int) -> dict[Any, float]:
        return {name: cost([it.get(i, p.installed) for i, p in enumerate(places)]) for name, it in variants.items()}

    rows.times = times
    return list(rows.search(end))


def test_what_gains_alone_and_not_with_the_rest_is_taken_back(steps: Any) -> None:
    """Attention's tiles gain 20 while the first product starts early; with cuBLAS there, they cost 10."""
    places = [place(steps, 4, TRITON, TORCH, TILE), place(steps, 6, TORCH, TILE)]

    def cost(now: list[Option]) -> float:
        early = now[0] == TRITON
        return 1000 + (40 if early else 0) + 500 * (now[0] == TILE) + (0 if now[1] == TORCH else -20 if early else 10)

    found = searched(steps, places, cost)
    assert [row["gain_us"] for row in found if "round" in row] == [40.0, -10.0]
    told = {row["key"]: row["options"] for row in found if "options" in row}
    # A call each of two: what was 46 % off is not tried again, what is chosen takes nothing more.
    assert told["N=4,K=8,bfloat16_bfloat16"] == [
        {"backend": "torch", "us_more": 0.0}, {"backend": "triton", "us_more": 20.0}
    ]  # fmt: skip
    assert told["N=6,K=8,bfloat16_bfloat16"] == [
        {"backend": "torch", "us_more": 0.0}, {"backend": "triton", "us_more": 5.0, "config": {"BLOCK_N": 64}}
    ]  # fmt: skip
    assert found[-1] == {"rows": 32, "installed_us": 1040, "chosen_us": 1000}


def test_no_exchange_for_less_than_captures_differ_by_and_none_behind_the_end(steps: Any) -> None:
    places = [place(steps, 4, TRITON, TORCH)]
    little = searched(steps, places, lambda now: 1000 - 2 * (now[0] == TORCH))
    late = searched(steps, places, lambda now: 1000 - 90 * (now[0] == TORCH), end=0.0)
    for found, more in ((little, -1.0), (late, -45.0)):
        assert found[-1]["chosen_us"] == found[-1]["installed_us"] == 1000
        assert found[1]["options"][1] == {"backend": "torch", "us_more": more}


@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_30b_a3b", "gpt_oss_20b"])
def test_the_small_model_is_one_of_each_family(steps: Any, name: str) -> None:
    small = steps.MODELS[name] | steps.SMALL
    assert family_of(small).config_class.from_hf(small).hidden_size == steps.SMALL["hidden_size"]


def test_layers_of_a_shape_are_exchanged_together_and_back(steps: Any) -> None:
    layers = [fl.Linear(8, 4, device="cpu", dtype=torch.bfloat16) for _ in range(2)]
    kept, one = [layer.ladder for layer in layers], steps.Place("linear", layers[0].cfg, layers)
    one.use(Option("reference"))
    assert {type(layer.ladder.pick(3)).__name__ for layer in layers} == {"ReferenceLinear"}
    one.use(None)
    assert [layer.ladder for layer in layers] == kept


@pytest.mark.parametrize("rows", [1, 2, 8, 32])
def test_what_is_tried_on_an_h200_is_what_its_tables_hold_as_nearly_as_fast(steps: Any, rows: int) -> None:
    h200 = DESCRIBED["H200"]
    shapes = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096), (4096, 151936))
    places = []
    for columns, features in shapes:
        cfg = LinearConfig(columns, features)
        choice = registry("linear").choose(cfg, h200, "auto")
        places.append(steps.Place("linear", cfg, [SimpleNamespace(choice=choice)]))
    attention: Any = replace(GQAConfig(32, 8, 128, 0.088, page_size=64), phase="decode", context=1024)
    choice = registry("gqa").choose_phases(attention, ("decode",), h200, "auto")[0]
    places.append(steps.Place("gqa", attention, [SimpleNamespace(decode_choice=choice)]))
    steps.offer(places, rows, h200)
    for each in places:
        # A rung's own configuration is among them, and each is built as it was read.
        assert each.options[0] == each.installed and 2 < len(each.options) <= 2 * steps.MOST + 3
        assert all(each.build(option) is not None for option in each.options if option != TORCH)
        rule = registry(each.layer).named("triton").load().candidates(each.cfg, rows)[0]
        assert [dict(o.config) for o in each.options if o != each.installed].count(rule) == 0
        assert rows <= 4 or not any(dict(option.config).get("VECTOR") for option in each.options)
    if rows == 1:
        assert dict(places[0].installed.config)["VECTOR"] == 1  # of the table's first rung
    if rows == 32:  # the best at the next count of rows
        tile = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "SPLITS": 2, "VECTOR": 0, "num_warps": 4, "num_stages": 4}
        assert tile in [dict(option.config) for option in places[3].options] and TORCH in places[1].options


def test_splits_are_also_left_where_a_norm_reads_them(steps: Any) -> None:
    """Of a layer's linears those two whose output a norm reads; of their options those that split."""
    small = steps.MODELS["qwen3_8b"] | steps.SMALL
    family: Any = family_of(small)
    model = family(family.config_class.from_hf(small), device="cpu", dtype=torch.bfloat16)
    places = [each for each in steps.places_of(model, 1024) if each.layer == "linear"]
    layer = model.decoder.layers[0]
    wanted = [layer.self_attn.o_proj, layer.mlp.down_proj]
    assert [each.modules for each in places if each.leaves] == [[linear] for linear in wanted]
    tile, vector = {"BLOCK_N": 64, "SPLITS": 4}, {"VECTOR": 1}
    options = [Option("torch"), TRITON, Option("triton", (("SPLITS", 1),)), Option("triton", tuple(vector.items()))]
    options.append(Option("triton", tuple(sorted(tile.items()))))
    found = [dict(each.config) for each in steps.leaving(options, {"triton": {"SPLITS": 2}})]
    assert found == [{"SPLITS": 2, "LEAVE": 1}, tile | {"LEAVE": 1}]
    h200 = DESCRIBED["H200"]
    shape = LinearConfig(12288, 4096)
    choice = registry("linear").choose(shape, h200, "auto")
    for leaves in (False, True):
        one = steps.Place("linear", shape, [SimpleNamespace(choice=choice)], leaves=leaves)
        steps.offer([one], 32, h200)
        split = [dict(each.config) for each in one.options if dict(each.config).get("SPLITS", 1) > 1]
        plain, left = ([each for each in split if ("LEAVE" in each) == leave] for leave in (False, True))
        assert len(plain) > 2 and all((each | {"LEAVE": 1} in left) == leaves for each in plain)
        rules = [registry("linear").named(name).load().candidates(shape, 32)[0] for name in ("triton", "wgmma")]
        assert all(each in [rule | {"LEAVE": 1} for rule in (*plain, *rules)] for each in left)
        assert all(one.build(each).leaves_splits for each in one.options if dict(each.config).get("LEAVE"))


def test_few_of_each_place_are_tried_again_and_always_what_was_installed(steps: Any) -> None:
    tiles = [Option("triton", (("BLOCK_N", n),)) for n in range(6)]
    places = [place(steps, 4, TRITON, *tiles)]
    rows = steps.Rows(SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu"))), places, 32, 20, 4)
    found = {(0, tile): 1000.0 + n for n, tile in enumerate(tiles)} | {(0, TRITON): 1004.5}
    alive = [(0, option) for option in (*tiles, TRITON)]
    assert rows._alive(alive, found, 1000.0) == [(0, option) for option in (*tiles[: steps.FEW], TRITON)]
    assert rows._alive(alive, dict.fromkeys(alive, 1009.0), 1000.0) == [(0, TRITON)]


def test_a_second_round_captures_few_of_each_place(steps: Any) -> None:
    """Six tiles are nearly alike: all are captured once, then those that may still be the best."""
    tiles = [Option("triton", (("BLOCK_N", n),)) for n in range(6)]
    places = [place(steps, 4, TRITON, *tiles)]
    found = searched(steps, places, lambda now: 1020.0 if now[0] == TRITON else 1000.0 + tiles.index(now[0]))
    assert [row["gain_us"] for row in found if "round" in row] == [20.0, -1.0]
    (told,) = [row["options"] for row in found if "options" in row]
    assert told == [
        {"backend": "triton", "us_more": us, **({} if tile is None else {"config": {"BLOCK_N": tile}})}
        for tile, us in ((0, 0.0), (1, 0.5), (2, 1.0), (None, 10.0))
    ]


def test_each_count_that_a_part_names_has_its_rows_in_the_committed_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ladders follow these rows: a run of other counts must not take the place of those that it has not."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    parts = [part for part in import_module("parts").PARTS if part.name.startswith("whole_steps.")]
    head: dict[str, Any] = {}
    there = set()
    for line in (ROOT / "benchmarks/results/whole_steps_h200.jsonl").read_text().splitlines():
        row = json.loads(line)
        head = row if "sources" in row else head
        there |= {(head["part"], row["rows"])} if "chosen_us" in row else set()
    for part in parts:
        counts = part.command.partition("--rows ")[2].partition(" --")[0].split()
        assert counts and {(part.name, int(count)) for count in counts} <= there, part.name
