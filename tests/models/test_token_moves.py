"""Tokens that go to the ranks of their experts: the bits of rows that are gathered and sums that are scattered."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.comm import ladders
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.token_moves import way_of
from fastlayers.device import DESCRIBED
from fastlayers.errors import ArgumentError, CollectiveMismatch
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.testing.world import Rank, world
from fastlayers_models.auto import AutoModel
from fastlayers_models.generate import Generator

sys.path.insert(0, str(Path(__file__).parent))
from family_tools import save_random, tiny_config

# Both ways hand Gloo sums of the same shape, so that it adds them in the same order, of four ranks, too.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {}, "qwen3_moe": {}, "gpt_oss": dict(num_hidden_layers=2, initializer_range=0.2)
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17, 18], [3], [20, 21, 22, 23]]
NEW = 6
EPLB = fl.EplbConfig(num_redundant_experts=4, step_interval=3, layers_per_step=2, min_gain=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        name: str(save_random(tiny_config(name, **changes), tmp_path_factory.mktemp(name)))
        for name, changes in FAMILIES.items()
    }


def load(folder: str, **options: Any) -> Any:
    return AutoModel.from_pretrained(folder, dtype=torch.float32, page_size=16, **options)


def shared_of(model: Any) -> list[Any]:
    found = [getattr(layer.mlp, "shared_experts", None) for layer in model.decoder.layers]
    return [each for each in found if each is not None]


def row_by_row(router: Any) -> None:
    """Let a router's product of a row be the same whatever rows are beside it, as ours on a GPU."""
    whole = router.forward

    def forward(x: torch.Tensor, real: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = (torch.cat(each) for each in zip(*(whole(row) for row in (*x.split(1), x[:0])), strict=True))
        return weights, ids if real is None else ids.index_fill(0, torch.arange(int(real), len(x)), -1)

    router.forward = forward


def bits(
    rank: Rank, folder: str, grid: dict[str, int], eplb: Any, graphs: bool, shared: bool, prompts: list[list[int]]
) -> tuple[Any, ...]:
    """Return the tokens of both ways, how far their logits are apart, and what was captured and moved."""
    found: list[Any] = []
    for way in ("gather", "exchange"):
        model = load(folder, parallel=replace(rank.spec(**grid), eplb=eplb, expert_exchange=way))
        assert (model.token_moves is None) == (way == "gather")
        for each in () if shared else shared_of(model):
            each.down_proj.weight.data.zero_()
        for module in model.modules():
            if isinstance(module, fl.TopKRouter):
                row_by_row(module)
        kept = CudaGraphs(runtime=EagerRuntime(), warm_ups=1, freeze=False) if graphs else None
        generator = Generator(model, max_batch=2, max_length=64, prefill_tokens=6, graphs=kept)
        logits: list[torch.Tensor] = []
        compute = model.compute_logits
        model.compute_logits = lambda rows, c=compute, kept=logits: (kept.append(c(rows)), kept[-1])[1]
        tokens = generator.generate(prompts, max_new_tokens=NEW, eos_ids=())
        moved = 0 if model.balancer is None else model.balancer.moved
        found.append((tokens, logits, generator.step.graphs.replays if graphs else 0, moved))  # type: ignore[union-attr]
    (tokens, logits, _, _), (same, others, replays, moved) = found
    assert [each.shape for each in logits] == [each.shape for each in others]
    apart = max((float((a - b).abs().max()) for a, b in zip(logits, others, strict=True) if a.numel()), default=0.0)
    return tokens, same, apart, replays, moved


DP2, DP4, TP2DP2 = {"attn_dp": 2, "ep": 2}, {"attn_dp": 4, "ep": 4}, {"attn_dp": 2, "ep": 4}


@pytest.mark.parametrize(("family", "ranks", "grid", "eplb", "graphs"), [
    ("deepseek_v3", 2, DP2, None, False), ("deepseek_v3", 4, TP2DP2, EPLB, False),
    ("qwen3_moe", 2, DP2, EPLB, True), ("qwen3_moe", 4, DP4, None, False), ("qwen3_moe", 2, {"ep": 2}, None, False),
    ("gpt_oss", 2, DP2, None, True), pytest.param("gpt_oss", 4, DP4, None, True, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_bits_of_both_ways(
    folders: dict[str, str], family: str, ranks: int, grid: dict[str, int], eplb: Any, graphs: bool
) -> None:
    # Gathered rows of groups of several ranks have the residual added before the sum over the group, which rounds.
    most = 0.0 if grid != TP2DP2 else 1e-5
    # The groups' prompts differ in length, and the last round leaves groups idle.
    for prompts in (PROMPTS, PROMPTS[:1]):
        for tokens, same, apart, replays, moved in world(ranks).run(
            bits, folders[family], grid, eplb, graphs, False, prompts
        ):
            assert tokens == same and apart <= most
            assert (replays > 0) == graphs and (moved > 0 or eplb is None)


def test_whole_shared_experts_round_otherwise(folders: dict[str, str]) -> None:
    for tokens, same, apart, _, _ in world(2).run(bits, folders["deepseek_v3"], DP2, None, False, True, PROMPTS):
        assert tokens == same and apart < 1e-5


def alone(rank: Rank | None, folder: str, grid: dict[str, int]) -> tuple[list[list[int]], int]:
    """Return the tokens of ranks that send them to their experts, and the replays; without a rank of one process."""
    spec = ParallelSpec() if rank is None else replace(rank.spec(**grid), expert_exchange="exchange")
    model = load(folder, parallel=spec)
    kept = CudaGraphs(runtime=EagerRuntime(), warm_ups=1, freeze=False)
    generator = Generator(model, max_batch=2, max_length=64, prefill_tokens=6, graphs=kept)
    return generator.generate(PROMPTS, max_new_tokens=NEW, eos_ids=()), kept.replays


@pytest.mark.parametrize(("family", "grid"), [
    ("deepseek_v3", DP2), ("qwen3_moe", DP2), ("gpt_oss", DP2), ("qwen3_moe", {"ep": 2})
])  # fmt: skip
def test_captured_steps_give_the_tokens_of_one_process(
    folders: dict[str, str], family: str, grid: dict[str, int]
) -> None:
    """The same on two GPUs: ``test_models_on_two_gpus.py``."""
    wanted, _ = alone(None, folders[family], {})
    (first, one), (second, other) = world(2).run(alone, folders[family], grid)
    assert first == second == wanted and one == other > 0


def said(call: Any) -> str:
    try:
        call()
    except (ArgumentError, CollectiveMismatch) as error:
        return str(error)
    return "nothing"


def refused(rank: Rank, folder: str, dense: str) -> tuple[list[str], list[str]]:
    asked = {"expert_exchange": "exchange"}
    split, whole = replace(rank.spec(attn_dp=2), **asked), replace(rank.spec(**DP2), **asked)  # type: ignore[arg-type]
    differs = replace(whole, expert_exchange=("gather", "exchange")[rank.rank])
    words = [said(lambda spec=spec, path=path: load(path, parallel=spec)) for spec, path in (
        (split, folder), (whole, dense), (differs, folder),
    )]  # fmt: skip
    model = load(folder, parallel=whole)
    words.append(said(lambda: Generator(model, max_length=32, overlap="two_batch")))
    with torch.inference_mode():
        rows = torch.zeros(1, model.config.hidden_size)
        words.append(said(lambda: model.decoder.layers[0].mlp(rows)))
    shown = [line for line in fl.explain(model).ranks if "exchange" in line or "prepare_mlp" in line]
    return words, shown + [
        each for each in fl.explain(load(folder, parallel=rank.spec(**DP2))).ranks if "tokens" in each
    ]


def test_what_cannot_be_exchanged_is_said(folders: dict[str, str], tmp_path: Path) -> None:
    dense = str(save_random(tiny_config("qwen3"), tmp_path))
    for words, shown in world(2).run(refused, folders["qwen3_moe"], dense):
        split, experts, differs, halves, rows = words
        assert (
            "'exchange', while each expert is split over 2 ranks" in split and "with ep=2 it is whole on one" in split
        )
        assert "while the model has no experts" in experts and "accepted: 'gather' or 'auto'" in experts
        assert differs == (
            "ranks differ in expert_exchange: rank 0 has gather; rank 1 has exchange; accepted: the same on all ranks"
        )
        assert "'off' with expert_exchange: tokens go to other ranks inside a stage that computes" in halves
        assert "valid is NoneType; accepted: OwnRows" in rows
        assert "tokens to experts: exchange: asked for" in shown
        assert any("prepare_mlp: attn_full" in line and "-> scattered" in line for line in shown)
        assert shown[-1].startswith("tokens to experts: gather: both ways were not measured for 2 ranks, cpu, 4 of 8")
    with pytest.raises(ArgumentError, match="one rank has nobody to exchange with"):
        load(folders["qwen3_moe"], parallel=ParallelSpec(expert_exchange="exchange"))


def ladder(layer: str, way: str, tokens: list[int], times: list[float]) -> dict[str, Any]:
    return {
        "layer": layer, "way": way, "ranks": 2, "device": "H200", "dtype": "bfloat16", "hidden_size": 7168,
        "ladder": [{"max_tokens": None, "backend": "nccl"}], "tokens": tokens, "times": {"nccl": times},
        "made": {"commit": "abc", "torch": torch.__version__},
    }  # fmt: skip


def test_what_was_measured_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ParallelSpec.grid(2, 0, attn_dp=2, ep=2)
    monkeypatch.setattr("fastlayers.comm.token_moves.as_device", lambda device: DESCRIBED["H200"])

    def found(spec: ParallelSpec = spec, top_k: int = 8) -> str:
        return way_of(spec, 7168, 256, top_k, torch.bfloat16, torch.device("cpu")).words

    # What ships: between two ranks both ways send as many bytes.
    assert found() == (
        "tokens to experts: gather: measured for 128 / 512 tokens a rank: 24.8 / 59.2 us exchanged, 24.1 / 58.7 us "
        "gathered"
    )
    assert "gather: both ways were not measured for 2 ranks, H200, 4 of 256 experts" in found(top_k=4)
    assert "gather: the ranks of one attention group have all rows" in found(ParallelSpec.grid(2, 0, ep=2))
    assert "gather: each expert is split over 2 ranks" in found(ParallelSpec.grid(2, 0, attn_dp=2))
    assert found(replace(spec, expert_exchange="exchange")).endswith("exchange: asked for")
    rows = [ladder(name, "", [8, 64, 512], [4.0, 9.0, 30.0]) for name in ("gather_rows", "scatter_rows")]
    monkeypatch.setenv("FASTLAYERS_TUNED_DIR", str(tmp_path))
    for times, way in (([17.5, 50.0], "exchange"), ([17.5, 60.5], "gather")):
        entries = [ladder("expert_exchange", "8 of 256", [64, 512], times), *rows]
        (tmp_path / ladders.NAME).write_text(json.dumps({"schema": 1, "ladders": entries}))
        assert (
            f"experts: {way}: measured for 64 / 512 tokens a rank: 17.5 / {times[1]} us exchanged, 18.0 / 60.0"
            in found()
        )
