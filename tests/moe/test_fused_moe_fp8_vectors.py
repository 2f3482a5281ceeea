"""FP8 experts of a few tokens as matrix-vector products: the reference's result, equal bits, and planted bugs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fastlayers import env, tuning
from fastlayers.device import DESCRIBED
from fastlayers.moe.fused_moe.cases import make_inputs, prepare, run
from fastlayers.moe.fused_moe.launch_config import LaunchConfig, Tile, candidates, plan_for
from fastlayers.moe.fused_moe.layer import FUSED_MOE, FusedMoEConfig
from fastlayers.moe.fused_moe.reference import ReferenceFusedMoE
from fastlayers.moe.fused_moe.triton import pair_vector_fp8
from fastlayers.moe.fused_moe.triton.backend import TritonFusedMoE
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.registry.spec import Case
from fastlayers.testing.parity import compare, poisoned_memory
from fastlayers.testing.spec import spec_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from planted_faults import planted

H200 = DESCRIBED["H200"]
V3 = FusedMoEConfig(7168, 256, 256, 8, num_shared=1, quant="fp8_block", scaling_factor=2.5, dtype=torch.bfloat16)
SMALL = replace(V3, hidden_size=256, num_experts=4, top_k=2)
PLAN = LaunchConfig(Tile(0, 32, 256, 1, 1), Tile(0, 64, 256, 4, 3))


def inputs_of(cfg: FusedMoEConfig, tokens: int, device: str) -> tuple[Case, dict[str, torch.Tensor]]:
    """Return a case and its inputs, with a pair of an expert that is not here and one that is dropped."""
    case = Case("vectors", cfg, {"num_tokens": tokens, "dtype": cfg.dtype, "load": "uneven"})
    inputs = make_inputs(case, torch.device(device), 5)
    inputs["topk_ids"][0, -1] = -1
    inputs["topk_ids"][-1, 0] = cfg.num_experts if tokens > 1 else inputs["topk_ids"][-1, 0]
    return case, inputs


def agree(cfg: FusedMoEConfig, plans: list[LaunchConfig], tokens: int, device: str, replays: int = 0) -> None:
    """Check that all of these plans give the reference's result, in equal bits, also replayed on a GPU."""
    case, inputs = inputs_of(cfg, tokens, device)
    oracle = ReferenceFusedMoE(cfg)
    wanted = run(oracle, inputs, prepare(oracle, inputs))["y"]
    assert bool(wanted.any())
    for plan in plans:
        ours = TritonFusedMoE(cfg, plan.config())
        packed = prepare(ours, inputs)
        with poisoned_memory():
            found = run(ours, inputs, packed)["y"]
        compare("y", found, wanted, spec_of("fused_moe").bounds(case).get("y"))
        if replays:  # the interpreter's sums have no other order the next time
            assert torch.equal(run(ours, inputs, packed)["y"], found), plan
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = run(ours, inputs, packed)["y"]
            for replay in range(replays):
                y.fill_(float("nan"))
                graph.replay()
                assert torch.equal(y, found), (plan, replay)


# A whole tile of a row and half of one; and two and a half, with three blocks of columns in the second product.
RAGGED = replace(SMALL, hidden_size=384, intermediate_size=128, top_k=3, activation="swiglu_oai", bias=True)
LONGER = replace(RAGGED, hidden_size=640, intermediate_size=384)
RAGGED_PLAN = LaunchConfig(Tile(0, 64, 256, 1, 1), Tile(0, 64, 128, 4, 9))
CASES = {
    "one_token": (SMALL, PLAN, 1),
    "two_tokens_none_shared": (replace(SMALL, num_shared=0), PLAN, 2),
    "ue8m0": (replace(SMALL, scale_fmt="ue8m0", intermediate_size=128), RAGGED_PLAN, 1),
    "swiglu_oai_bias_tail": (RAGGED, RAGGED_PLAN, 1),
    "swiglu_oai_bias_longer_tail": (LONGER, RAGGED_PLAN, 1),
    "fp16_one_group": (
        replace(SMALL, intermediate_size=128, dtype=torch.float16),
        LaunchConfig(Tile(0, 32, 128, 1, 2), Tile(0, 128, 128, 1, 99)),
        1,
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (CASES[name][0] is LONGER)) for name in CASES]
)
def test_vectors_give_the_reference(name: str) -> None:
    cfg, plan, tokens = CASES[name]
    agree(cfg, [plan], tokens, "cpu")


def test_a_token_without_an_expert_here_is_zero() -> None:
    _, inputs = inputs_of(SMALL, 1, "cpu")
    inputs["topk_ids"][:] = torch.tensor([[-1, SMALL.num_experts]])
    ours = TritonFusedMoE(SMALL, PLAN.config())
    with poisoned_memory():
        y = run(ours, inputs, prepare(ours, inputs))["y"]
    assert not y.any()


def test_one_token_of_whole_groups_is_offered_vectors() -> None:
    # The rule has none: what they gain was measured for one shape, whose table takes them.
    assert plan_for(1, V3, False).first.m == plan_for(2, V3, False).first.m == plan_for(1, V3, True).first.m == 1
    for changed in ({"intermediate_size": 160}, {"hidden_size": 192}, {"dtype": torch.float32}, {"top_k": 16}):
        assert not any(config["m"] == 0 for config in candidates(replace(V3, **changed), 1)), changed
    for inner in (128, 256, 384, 768, 2048):
        cfg = replace(V3, intermediate_size=inner)
        plans = [plan for config in candidates(cfg, 1) if (plan := LaunchConfig.of(config)).first.m == 0]
        assert 5 <= len(plans) <= 8
        for plan in plans:
            first, second = plan.first, plan.second
            # Rows of one block of scales; a value for each thread; whole tiles of whole groups.
            assert 128 % first.n == 128 % second.n == 0 and first.k >= 128 and first.k >= 32 * first.warps
            assert inner % second.k == 0 and second.k % 128 == 0 and 512 * second.warps // second.k <= second.n


def test_chunks_hold_all_pairs() -> None:
    assert pair_vector_fp8._chunks(9, 8) == (8, 1)
    assert pair_vector_fp8._chunks(22, 8) == (8, 8, 4, 2)
    assert all(sum(pair_vector_fp8._chunks(pairs, 4)) == pairs for pairs in range(1, 17))


# The sizes at which a bug of the first product shows: tokens, hidden size and columns. In the interpreter it takes
# as long as there are pairs times columns.
ONE, TWO_TOKENS, TWO_TILES, TWO_GROUPS = (1, 128, 128), (2, 128, 128), (1, 256, 128), (1, 128, 256)
# Of the first product, and of the second one.
INTO_MUTANTS = {
    "up rows by the gates' scales": (ONE, "scales[row // BLOCK_N]", "scales[0]"),
    "up is gate": (ONE, "row + I - BLOCK_N if", "row - BLOCK_N if"),
    "scales of the first block of rows": (TWO_GROUPS, "first // _GROUP) * (K // _GROUP)", "0) * (K // _GROUP)"),
    "first tile of a row again": (TWO_TILES, "_tile(origin, i * BLOCK_K", "_tile(origin, 0"),
    "every token the first": (TWO_TOKENS, "pair // (TOP_K + SHARED) * x_stride", "0 * x_stride"),
}
OUT_MUTANTS = {
    "scales of the first block of outputs": ("(D // _GROUP) + first // _GROUP)", "(D // _GROUP))"),
    "pair of another token": ("(token * PAIRS + slot)", "slot"),
    "unweighted": ("each * weights[chunk][:, None]", "each"),
    "shared experts' weight": ("other=shared_weight", "other=1.0"),
    "dropped pairs count": ("known = expert >= 0\n", "known = expert >= -1\n"),
    "first chunk again": ("_pairs_before(chunk, CHUNKS) + row * CHUNKS", "row * CHUNKS"),
    "outputs in another order": ("(BLOCK_N * CHUNKS[chunk] // ROWS)\n", "1\n"),
    "no bias": ("each += biases[chunk]", "each += 0.0"),
    "scales of the first chunk": (
        "values = requantized(a, scales[chunk * BLOCKS + block]",
        "values = requantized(a, scales[0]",
    ),
}


class Kept:
    """The sound first product, computed once: it is nine tenths of what the interpreter does for both."""

    def __init__(self) -> None:
        self.a: torch.Tensor | None = None

    def at(self, *given: Any, **constants: Any) -> Callable[..., None]:
        launch = pair_vector_fp8.vector_in_fp8_kernel.at(*given, **constants)

        def write(*arguments: torch.Tensor) -> None:
            a = arguments[-1]
            if self.a is None:
                launch(*arguments)
                self.a = a.clone()
            a.copy_(self.a)

        return write


@pytest.fixture(scope="module")
def kept() -> Kept:
    return Kept()


def behind(kept: Kept, module: ModuleType) -> ModuleType:
    """Return a module whose first product is the sound one."""
    vars(module)["vector_in_fp8_kernel"] = kept
    return module


def error(module: ModuleType, tokens: int, hidden: int = 256, columns: int = 256, tile: int = 256) -> float:
    """Return how far tokens' results are from the reference's; one of two has a dropped pair.

    ``tile``: of the first product's rows.
    """
    cfg = replace(SMALL, hidden_size=hidden, intermediate_size=columns, num_experts=3, bias=True, top_k=2)
    _, inputs = inputs_of(cfg, tokens, "cpu")
    oracle = ReferenceFusedMoE(cfg)
    packed: MoEWeights = prepare(oracle, inputs)
    wanted = run(oracle, inputs, packed)["y"]
    y = torch.full(wanted.shape, float("nan"), dtype=torch.bfloat16)
    with poisoned_memory():
        module.fp8_vector_experts(
            inputs["x"], inputs["topk_weights"], inputs["topk_ids"], packed, y, cfg.num_shared,
            LaunchConfig(Tile(0, 64, tile, 1, 1), Tile(0, 128, 128, 1, 2)), False, False, 0.0, 0.0, cfg.scaling_factor,
        )  # fmt: skip
    return float((y.float() - wanted).norm() / wanted.norm())


def test_vectors_agree_with_the_reference(tmp_path: Path, kept: Kept) -> None:
    for sizes in sorted({sizes for sizes, *_ in INTO_MUTANTS.values()} - {ONE}):
        assert error(pair_vector_fp8, *sizes, tile=128) < 0.01, sizes
    assert error(behind(kept, planted(pair_vector_fp8, tmp_path)), 2) < 0.01


@pytest.mark.parametrize("name", INTO_MUTANTS)
def test_planted_bug_of_the_first_product_shows(name: str, tmp_path: Path) -> None:
    sizes, before, after = INTO_MUTANTS[name]
    mutant = planted(pair_vector_fp8, tmp_path, (before, after))
    assert not error(mutant, *sizes, tile=128) < 0.02, f"{name}: no change"


@pytest.mark.parametrize("name", OUT_MUTANTS)
def test_planted_bug_of_the_second_product_shows(name: str, tmp_path: Path, kept: Kept) -> None:
    mutant = planted(pair_vector_fp8, tmp_path, OUT_MUTANTS[name])
    assert not error(behind(kept, mutant), 2) < 0.02, f"{name} changes nothing"


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [0, 1])
def test_one_token_of_real_experts_gpu(shared: int) -> None:
    cfg = replace(V3, num_experts=16, num_shared=shared)
    plans = [LaunchConfig.of(config) for config in candidates(cfg, 1) if config["m"] == 0]
    assert len(plans) > 4 and plan_for(1, cfg, False) not in plans  # tables alone take them
    agree(cfg, plans, 1, "cuda", 20)


def test_a_plan_lent_by_another_shape_serves_no_columns_that_are_no_whole_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    path = tuning.path_of(tmp_path, "fused_moe", V3.tuning_key(), H200)
    rung = {"max_tokens": None, "backend": "triton", "config": PLAN.config()}
    tuning.write(path, {"schema": 1, "layer": "fused_moe", "device": "H200", "ladder": [rung]})
    found = [FUSED_MOE.choose(replace(V3, intermediate_size=columns), H200) for columns in (256, 384, 192)]
    assert all(path.name in choice.evidence for choice in found) and PLAN.first.m == 0
    assert [dict(choice.rungs[0].config) for choice in found] == [PLAN.config(), PLAN.config(), {}]
    assert TritonFusedMoE.fits(found[2].cfg, replace(PLAN, first=Tile(1, 64, 128, 4, 4)).config())
