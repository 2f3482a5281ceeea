"""Models whose experts move between steps, over Gloo: the tokens of one process, whatever moved and when."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastlayers as fl
from fastlayers.errors import ArgumentError
from fastlayers.moe.placement.planner import rank_loads
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.testing.world import Rank, world
from fastlayers_models.auto import AutoModel
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.generate import Generator

sys.path.insert(0, str(Path(__file__).parent))
from family_tools import MOE, Variation, save_random
from tiny_models import VARIATIONS as DEEPSEEK
from tiny_models import hf_config

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17, 18], [3], [20, 21, 22, 23]]
NEW = 10
EPLB = fl.EplbConfig(num_redundant_experts=4, step_interval=3, layers_per_step=2, min_gain=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    qwen = Variation("qwen3_moe", "Qwen3MoeConfig", changes=dict(MOE, head_dim=16)).hf_config()
    configs = {"qwen3_moe": qwen, "deepseek_v3": hf_config(DEEPSEEK[0])}
    return {name: save_random(config, tmp_path_factory.mktemp(name)) for name, config in configs.items()}


def load(folder: Any, **options: Any) -> Any:
    return AutoModel.from_pretrained(folder, dtype=torch.float32, page_size=16, **options)


def generator_of(model: Any, graphs: bool = False) -> Generator:
    kept = CudaGraphs(runtime=EagerRuntime(), warm_ups=1, freeze=False) if graphs else None
    return Generator(model, max_batch=2, max_length=64, prefill_tokens=6, graphs=kept)


@pytest.fixture(scope="module")
def wanted(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    return {
        name: generator_of(load(folder)).generate(PROMPTS, max_new_tokens=NEW, eos_ids=())
        for name, folder in folders.items()
    }


def holds_what_it_says(model: Any, folder: str) -> bool:
    """Whether the slots of this rank hold the checkpoint's experts that the placement names."""
    checkpoint, right = Checkpoint(folder), True
    for index, layer in enumerate(model.decoder.layers):
        placement = getattr(getattr(layer.mlp, "experts", None), "placement", None)
        if placement is None:
            continue
        assert placement.logical == placement.physical_to_logical.tolist()
        for local, expert in enumerate(placement.logical[placement.own_slots]):
            name = f"model.layers.{index}.mlp.experts.{expert}.down_proj.weight"
            if model.parallel.moe_tp.size == 1:
                right &= torch.equal(layer.mlp.experts.w2[local], checkpoint.read(name).float())
    return right


def generate(rank: Rank, folder: str, grid: dict[str, int], graphs: bool) -> tuple[Any, ...]:
    model = load(folder, parallel=replace(rank.spec(**grid), eplb=EPLB))
    generator = generator_of(model, graphs)
    found = generator.generate(PROMPTS, max_new_tokens=NEW, eos_ids=())
    placed = [experts.placement.logical for experts in model.balancer.layers]
    replays = generator.step.graphs.replays if graphs else 0  # type: ignore[union-attr]
    return found, placed, model.balancer.moved, holds_what_it_says(model, folder), replays, model.balancer.received


@pytest.mark.parametrize(("family", "ranks", "grid", "graphs"), [
    ("qwen3_moe", 2, {"ep": 2}, False), ("qwen3_moe", 2, {"attn_dp": 2, "ep": 2}, True),
    ("deepseek_v3", 2, {"ep": 2}, True), ("deepseek_v3", 4, {"attn_dp": 2, "ep": 4}, False),
    pytest.param("qwen3_moe", 4, {"ep": 2}, False, marks=pytest.mark.slow),
])  # fmt: skip
def test_tokens_while_experts_move(
    folders: dict[str, Path], wanted: Any, family: str, ranks: int, grid: dict[str, int], graphs: bool
) -> None:
    answers = world(ranks).run(generate, str(folders[family]), grid, graphs)
    for found, placed, moved, right, replays, _ in answers:
        assert found == wanted[family] and right
        assert placed == answers[0][1] and moved == answers[0][2] >= 2
        assert (replays > 4) == graphs
    assert sum(answer[-1] for answer in answers) > 0


def loads_of(rank: Rank, folder: str) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    config = replace(EPLB, step_interval=0)
    model = load(folder, parallel=replace(rank.spec(ep=2), eplb=config))
    generator_of(model).generate(PROMPTS, max_new_tokens=NEW, eos_ids=())
    counted = [experts.placement.load.tolist() for experts in model.balancer.layers]
    before = [list(experts.placement.logical) for experts in model.balancer.layers]
    model.balancer.look()
    while model.balancer._waiting:
        model.balancer.tick()
    assert all(int(experts.placement.load.sum()) == 0 for experts in model.balancer.layers)
    return counted, before, [experts.placement.logical for experts in model.balancer.layers]


def test_loads_count_the_tokens_and_plans_follow_them(folders: dict[str, Path]) -> None:
    counted, before, after = world(2).run(loads_of, str(folders["qwen3_moe"]))[0]
    tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * (NEW - 1)
    for loads, old, new in zip(counted, before, after, strict=True):
        assert sum(loads) == tokens * 4 and len(loads) == 8
        assert max(rank_loads(loads, new, 2)) < max(rank_loads(loads, old, 2))
        assert max(rank_loads(loads, new, 2)) < 1.02 * sum(loads) / 2


def refused(rank: Rank, folder: str, config: fl.EplbConfig) -> str:
    try:
        load(folder, parallel=replace(rank.spec(ep=2), eplb=config))
    except ArgumentError as error:
        return str(error)
    return "no error"


def test_what_cannot_move_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    odd = world(2).run(refused, str(folders["qwen3_moe"]), replace(EPLB, num_redundant_experts=3))
    assert all("num_redundant_experts is 3; accepted: 0 and a multiple of 2" in each for each in odd)
    dense = save_random(Variation("qwen3", "Qwen3Config", changes={"head_dim": 16}).hf_config(), tmp_path)
    for text in world(2).run(refused, str(dense), EPLB):
        assert "QwenForCausalLM: parallel.eplb" in text and "it has no experts" in text


def test_ranks_deal_out_experts_of_models_that_have_some(folders: dict[str, Path], tmp_path: Path) -> None:
    dense = save_random(Variation("qwen3", "Qwen3Config", changes={"head_dim": 16}).hf_config(), tmp_path)
    load(dense, parallel=fl.ParallelSpec.grid(2, 0, attn_dp=2))
    load(folders["qwen3_moe"], parallel=fl.ParallelSpec.grid(2, 0, ep=2))
    accepted = r"parallel\.ep is 2; accepted: 1: no layer of this model has experts, and its MLPs are split by tp \* dp"
    for options in ({}, {"attn_dp": 2}):
        with pytest.raises(ArgumentError, match=f"QwenForCausalLM: {accepted}"):
            load(dense, parallel=fl.ParallelSpec.grid(2, 0, ep=2, **options))


def met_at(rank: Rank, folder: str, interval: int) -> list[tuple[str, int]]:
    """Return what this rank sent and received while a model was made: the call, and its bytes."""
    met: list[tuple[str, int]] = []
    plain = dist.batch_isend_irecv

    def counted(calls: list[Any]) -> Any:
        met.extend((call.op.__name__, call.tensor.nbytes) for call in calls)
        return plain(calls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", counted)
        load(folder, parallel=fl.Ranks(tp=2, ep=2, eplb=replace(EPLB, step_interval=interval)))
    return sorted(met)


def test_ranks_connect_before_the_first_step_in_which_experts_move(folders: dict[str, Path]) -> None:
    """NCCL makes a connection at its first send, for 0.2 s: not in a step."""
    folder = str(folders["qwen3_moe"])
    assert world(2).run(met_at, folder, 3) == [[("irecv", 1), ("isend", 1)]] * 2
    assert world(2).run(met_at, folder, 0) == [[], []]  # nothing will move


def test_one_process_takes_the_same_call(folders: dict[str, Path], wanted: Any) -> None:
    model = load(folders["qwen3_moe"], parallel=fl.Ranks(eplb=fl.EplbConfig(step_interval=2)))
    assert generator_of(model).generate(PROMPTS, max_new_tokens=NEW, eos_ids=()) == wanted["qwen3_moe"]
    assert model.balancer.steps > 10 and model.balancer.moved == 0
