"""The tiny DeepSeek on 2 and 4 ranks over Gloo gives the logits of one process, and each rank reads only its part."""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.comm.padding import StepTokens
from fastlayers.errors import ArgumentError
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.testing.world import Rank, world
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.convert import convert_to_fp8_block
from fastlayers_models.deepseek import DeepseekForCausalLM
from fastlayers_models.generate import Generator

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import Feeder, per_row_error, with_mtp
from family_tools import DP2, EP2, EP2_TP2_DP2, TP2, TP4, Grid
from tiny_models import YARN, Variation, hf_model, prompts, relative_rms

BOUND = 1e-5
MODELS = {
    "v3": Variation("v3", changes={"n_group": 4, "topk_group": 2, "vocab_size": 163}),
    "v2_lite": Variation(
        "v2_lite",
        "v2",
        changes={"q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 2, "rope_parameters": YARN},
    ),
    "dense": Variation("dense", changes={"first_k_dense_replace": 3, "attention_bias": True}),
}

# Whole 128×128 blocks on each of two ranks; the latent projection's last block is ragged.
BLOCKS = Variation(
    "blocks",
    changes=dict(
        hidden_size=256, intermediate_size=512, moe_intermediate_size=256, q_lora_rank=128, kv_lora_rank=128,
        qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64, initializer_range=0.05,
    ),
)  # fmt: skip


SPLIT = (0, 1, 1, 0)
DP2_TP2, DP4 = Grid(4, 2, group=SPLIT), Grid(4, 4, group=(0, 2, 2, 3))
EP2_DP2, EP4_DP2 = Grid(2, 2, 2, SPLIT), Grid(4, 2, 4, SPLIT)
GRIDS = (TP2, TP4, EP2, DP2, DP2_TP2, DP4, EP2_DP2, EP2_TP2_DP2, EP4_DP2)

# Rows 1 and 2 belong to group 1 of SPLIT: idle in the second step of RAGGED, group 0 in the third.
RAGGED = [
    ("extend", (13, 9, 5, 1)),
    ("extend", (7, 0, 0, 4)),
    ("extend", (0, 3, 6, 0)),
    *[("decode", (1, 1, 1, 1))] * 3,
]
IDLE = [("extend", (8, 0, 0, 5)), *[("decode", (1, 0, 0, 1))] * 2, ("decode", (1, 1, 0, 1)), ("decode", (0, 1, 1, 0))]
PADDED = [
    ("max_len", (13, 9, 5, 1)),
    ("max_len", (3, 0, 0, 2)),
    *[("max_len", (1, 1, 0, 1))] * 2,
    ("decode", (1, 0, 0, 0)),
]
SCHEDULES = {"ragged": RAGGED, "idle": IDLE, "padded": PADDED}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, variation in MODELS.items():
        hf_model(variation, made[name])
    bf16 = tmp_path_factory.mktemp("bf16")
    hf_model(BLOCKS, bf16)
    made["fp8"] = tmp_path_factory.mktemp("fp8") / "model"
    convert_to_fp8_block(bf16, made["fp8"], include_ragged=True)
    made["v3_mtp"] = with_mtp(made["v3"], tmp_path_factory.mktemp("mtp") / "model")
    return made


def load(folder: Path | str, **options: Any) -> DeepseekForCausalLM:
    return DeepseekForCausalLM.from_pretrained(folder, dtype=torch.float32, page_size=16, **options)


def rows_of(model: DeepseekForCausalLM) -> list[list[int]]:
    # The last ids of the vocabulary live on the last rank, in its padded slice.
    vocab = model.config.vocab_size
    return [[vocab - 1, *row] for row in prompts(4, vocab=vocab)]


def feed(rank: Rank, folder: str, attn_dp: int, ep: int, group: tuple[int, ...], mtp: bool = False) -> dict[str, Any]:
    """Return this rank's logits for every schedule."""
    model = load(folder, parallel=rank.spec(attn_dp=attn_dp, ep=ep))
    return {name: Feeder(model, rows_of(model), group).run(steps, mtp=mtp) for name, steps in SCHEDULES.items()}


@pytest.fixture(scope="module")
def single(folders: dict[str, Path]) -> Any:
    """Return a function: model name -> logits by schedule and row, in one process."""
    made: dict[tuple[str, bool], dict[str, dict[int, torch.Tensor]]] = {}

    def get(name: str, mtp: bool = False) -> dict[str, dict[int, torch.Tensor]]:
        if (name, mtp) not in made:
            model = load(folders[name])
            made[name, mtp] = {s: Feeder(model, rows_of(model)).run(steps, mtp=mtp) for s, steps in SCHEDULES.items()}
        return made[name, mtp]

    return get


def check(found: list[dict[str, Any]], wanted: dict[str, dict[int, torch.Tensor]], grid: Grid) -> None:
    per_group = grid.world // grid.attn_dp
    for name, logits in wanted.items():
        for row, expected in logits.items():
            ranks = range(grid.group[row] * per_group, (grid.group[row] + 1) * per_group)
            for rank in ranks:
                actual = found[rank][name][row]
                assert actual.shape == expected.shape
                assert relative_rms(actual, expected) <= BOUND, (name, row, rank)
                assert per_row_error(actual, expected) <= 5 * BOUND, (name, row, rank)
        rows = [set(answer[name]) for answer in found]
        assert rows == [{i for i in logits if grid.group[i] == rank // per_group} for rank in range(grid.world)]


# A model without experts has nothing to spread over them.
GRIDS_OF = [
    pytest.param(name, grid, id=f"{name}-{grid}")
    for name in MODELS
    for grid in GRIDS
    if name != "dense" or grid.ep == 1
]


@pytest.mark.parametrize(("name", "grid"), GRIDS_OF)
def test_ranks_give_the_logits_of_one_process(folders: dict[str, Path], single: Any, name: str, grid: Grid) -> None:
    found = world(grid.world).run(feed, str(folders[name]), grid.attn_dp, grid.ep, grid.group)
    check(found, single(name), grid)


@pytest.mark.parametrize("grid", [TP2, DP2, EP2_TP2_DP2], ids=str)
def test_mtp_layer_on_ranks(folders: dict[str, Path], single: Any, grid: Grid) -> None:
    found = world(grid.world).run(feed, str(folders["v3_mtp"]), grid.attn_dp, grid.ep, grid.group, True)
    check(found, single("v3_mtp", True), grid)


def feed_spread(rank: Rank, folder: str, attn_dp: int, ep: int, group: tuple[int, ...], mtp: bool) -> dict[str, Any]:
    """Return this rank's logits of the ragged schedule where each rank adds and norms only its own rows."""
    model = load(folder, parallel=rank.spec(attn_dp=attn_dp, ep=ep))
    return {"ragged": Feeder(model, rows_of(model), group, spread=True).run(RAGGED, mtp=mtp)}


@pytest.mark.parametrize(("grid", "mtp"), [(TP2, True), (TP4, False), (DP2, False), (EP2_TP2_DP2, True)], ids=str)
def test_scattered_residuals(folders: dict[str, Path], single: Any, grid: Grid, mtp: bool) -> None:
    found = world(grid.world).run(feed_spread, str(folders["v3_mtp"]), grid.attn_dp, grid.ep, grid.group, mtp)
    check(found, {"ragged": single("v3_mtp", mtp)["ragged"]}, grid)


@pytest.mark.parametrize("grid", [TP2, EP2, DP2, EP2_DP2], ids=str)
def test_fp8_block_weights_on_ranks(folders: dict[str, Path], single: Any, grid: Grid) -> None:
    found = world(2).run(feed, str(folders["fp8"]), grid.attn_dp, grid.ep, grid.group)
    wanted = single("fp8")
    errors = []
    for name, logits in wanted.items():
        for row, expected in logits.items():
            actual = found[grid.group[row] * (2 // grid.attn_dp)][name][row]
            errors.append((actual - expected).norm(dim=-1) / expected.norm(dim=-1))
    # Scales and codes are of blocks that no rank splits, so most rows are equal. Sums in another order may turn an
    # activation into the neighbouring code; that costs its row about 1%, as much as one code is apart.
    per_row = torch.cat(errors)
    assert float(per_row.median()) <= BOUND and float(per_row.mean()) <= 0.01


def count_reads(rank: Rank, folder: str, attn_dp: int, ep: int) -> tuple[dict[str, int], int]:
    """Return the numbers read of each tensor, and all numbers in parameters."""
    read: dict[str, int] = {}
    original = Checkpoint.read

    def counting(self: Checkpoint, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        value = original(self, name, index)
        read[name] = read.get(name, 0) + value.numel()
        return value

    Checkpoint.read = counting  # type: ignore[method-assign]
    try:
        model = load(folder, parallel=rank.spec(attn_dp=attn_dp, ep=ep))
    finally:
        Checkpoint.read = original  # type: ignore[method-assign]
    return read, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("grid", [TP4, EP2_TP2_DP2, EP4_DP2], ids=str)
def test_each_rank_reads_only_its_slices(folders: dict[str, Path], grid: Grid) -> None:
    checkpoint = Checkpoint(folders["v3"])
    results = world(grid.world).run(count_reads, str(folders["v3"]), grid.attn_dp, grid.ep)
    heads, moe_tp = grid.world // grid.attn_dp, grid.world // grid.ep
    layer = "model.layers.1."
    parts = {
        f"{layer}self_attn.kv_b_proj.weight": heads, f"{layer}self_attn.o_proj.weight": heads,
        "model.layers.0.mlp.down_proj.weight": grid.world, "model.layers.0.mlp.up_proj.weight": grid.world,
        f"{layer}mlp.shared_experts.gate_proj.weight": grid.world, f"{layer}self_attn.q_a_proj.weight": 1,
    }  # fmt: skip
    for rank, (read, held) in enumerate(results):
        for name, count in parts.items():
            assert read[name] == prod(checkpoint.shape(name)) // count, (rank, name)
        for expert in range(8):
            name = f"{layer}mlp.experts.{expert}.gate_proj.weight"
            mine = expert // (8 // grid.ep) == rank // moe_tp
            assert read.get(name, 0) == (prod(checkpoint.shape(name)) // moe_tp if mine else 0), (rank, name)
        # Whole vocabulary slices: every number read is in a parameter, and only padding was not read.
        vocab = -(-163 // heads) * heads // heads
        assert read["lm_head.weight"] <= vocab * 64
        assert held - 2 * vocab * 64 <= sum(read.values()) <= held, rank
    for name in ("lm_head.weight", "model.embed_tokens.weight", f"{layer}mlp.experts.5.down_proj.weight"):
        groups = 1 if "experts" in name else grid.attn_dp
        assert sum(read.get(name, 0) for read, _ in results) == groups * prod(checkpoint.shape(name))


def generate(rank: Rank, folder: str, rows: list[list[int]]) -> list[list[list[int]]]:
    """Return what is generated with prompts' steps whole and spread over ranks; their counts are odd now and then."""
    model, found = load(folder, parallel=rank.spec()), []
    for model.spread_rows in (range(0), range(9, 65)):
        generator = Generator(model, prefill_tokens=64, max_batch=3)
        found.append(generator.generate(rows, max_new_tokens=12, eos_ids=()))
    return found


def test_generator_gives_the_same_tokens_on_every_rank(folders: dict[str, Path]) -> None:
    model = load(folders["v3"])
    rows = [row[: 41 + i] for i, row in enumerate(rows_of(model))]
    wanted = Generator(model).generate(rows, max_new_tokens=12, eos_ids=())
    assert world(2).run(generate, str(folders["v3"]), rows) == [[wanted] * 2] * 2


class FailsOn(EagerRuntime):
    """Captures by calling; on one rank, what is of this kind cannot be captured."""

    def __init__(self, broken: bool) -> None:
        self.broken, self.captured = broken, 0

    def capture(self, fn: Any) -> Any:
        self.captured += 1
        made = super().capture(fn)  # unlike a real capture it communicates, so every rank comes here
        if self.broken and self.captured == 1:
            raise RuntimeError("no memory on this rank")
        return made


def replay(rank: Rank, folder: str, rows: list[list[int]], failing: int) -> tuple[Any, ...]:
    model = load(folder, parallel=rank.spec())
    graphs = CudaGraphs(runtime=FailsOn(rank.rank == failing), freeze=False)
    generator = Generator(model, max_batch=3, max_length=64, graphs=graphs)
    found = [generator.generate(rows, max_new_tokens=5, eos_ids=()) for _ in range(2)]
    kinds = sorted({key.kind for key in graphs.keys})  # type: ignore[attr-defined]
    return found, kinds, sorted(generator.step.uncaptured.values()), graphs.replays


def test_ranks_replay_and_agree_on_what_they_cannot(folders: dict[str, Path]) -> None:
    model = load(folders["v3"])
    rows = [row[: 11 + i] for i, row in enumerate(rows_of(model))][:3]
    wanted = Generator(model, max_length=64).generate(rows, max_new_tokens=5, eos_ids=())
    for failing, kinds, uncaptured in ((-1, ["decode", "extend"], [1]), (1, ["decode"], [1, 1])):
        first, second = world(2).run(replay, str(folders["v3"]), rows, failing)
        assert first[0] == second[0] == [wanted] * 2
        assert first[1:] == second[1:] and first[1] == kinds and first[2] == uncaptured and first[3] > 4


def route(rank: Rank, folder: str, group: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return, for every step of PADDED and every MoE layer, how many rows are real and how many the experts skip."""
    model = load(folder, parallel=rank.spec(attn_dp=2))
    seen: list[tuple[int, int]] = []

    def look(_: Any, args: Any) -> None:
        skipped = (args[2] == -1).all(-1)
        assert torch.equal(skipped, (args[2] == -1).any(-1))
        seen.append((int((~skipped).sum()), int(skipped.sum())))

    for layer in model.model.layers[1:3]:
        layer.mlp.experts.register_forward_pre_hook(look)
    Feeder(model, rows_of(model), group).run(PADDED)
    return seen


def test_padding_rows_cost_no_expert_work(folders: dict[str, Path]) -> None:
    wanted = []
    for mode, counts in PADDED:
        real = [sum(c for c, g in zip(counts, SPLIT, strict=True) if g == d) for d in (0, 1)]
        step = StepTokens.plan(real, attn_tp=2, extend=mode != "decode", graph=mode == "max_len")
        wanted += [(sum(real), step.full_rows - sum(real))] * 2
    assert sum(pads for _, pads in wanted) > 10
    assert world(4).run(route, str(folders["v3"]), SPLIT) == [wanted] * 4


def forget_step(rank: Rank, folder: str) -> str:
    model = load(folder, parallel=rank.spec(attn_dp=2))
    feeder = Feeder(model, [[5, 6, 7], [8, 9]], [0, 1])
    ids, meta, _, _ = feeder.plan([3, 2], "extend")
    try:
        model(ids, meta, feeder.caches)
    except ArgumentError as error:
        return str(error)
    return "no error"


def test_missing_token_counts_are_named(folders: dict[str, Path]) -> None:
    for message in world(2).run(forget_step, str(folders["dense"])):
        assert "DeepseekForCausalLM: step" in message and "attention groups" in message
