"""The Triton experts' plans: every way to run gives the reference's result; what the tuner may try."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fastlayers.integers import next_power_of_2
from fastlayers.moe.fused_moe.cases import make_inputs, prepare, run
from fastlayers.moe.fused_moe.launch_config import LaunchConfig, Tile, candidates, plan_for, plan_of
from fastlayers.moe.fused_moe.layer import FusedMoEConfig
from fastlayers.moe.fused_moe.reference import ReferenceFusedMoE
from fastlayers.moe.fused_moe.triton import pair_vector
from fastlayers.moe.fused_moe.triton.backend import TritonFusedMoE
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.registry.spec import Case
from fastlayers.testing.parity import compare, poisoned_memory
from fastlayers.testing.spec import spec_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from planted_faults import planted

SHAPES = {
    "qwen3": FusedMoEConfig(2048, 768, 128, 8),
    "deepseek_v3_tp8": FusedMoEConfig(7168, 256, 256, 8, num_shared=1, quant="fp8_block"),
    "gpt_oss": FusedMoEConfig(2880, 2880, 32, 4, quant="mxfp4", activation="swiglu_oai", bias=True, interleaved=True),
    "qwen3_w4a16": FusedMoEConfig(2048, 768, 128, 8, quant="w4a16", group_size=128),
    "deepseek_v3_w8a16": FusedMoEConfig(7168, 256, 256, 8, num_shared=1, quant="w8a16"),
}
BLOCKS = LaunchConfig(Tile(16, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2), band=1)
WIDE_BLOCKS = LaunchConfig(Tile(16, 64, 128, 4, 2), Tile(16, 128, 128, 4, 2))
FUSED_BLOCKS = LaunchConfig(Tile(16, 128, 128, 4, 2), Tile(16, 64, 128, 4, 2))
DIRECT = LaunchConfig(Tile(1, 16, 64, 4, 2), Tile(1, 32, 64, 4, 2), splits=3)
MATRIX = LaunchConfig(Tile(1, 64, 128, 4, 3), Tile(1, 32, 128, 2, 3), splits=2, splits1=3)
PAIRED = LaunchConfig(Tile(1, 32, 64, 2, 3), Tile(1, 64, 32, 4, 3))
VECTORS = LaunchConfig(Tile(0, 2, 32, 1, 2), Tile(0, 2, 32, 1, 2))
DEEP_VECTORS = LaunchConfig(Tile(0, 4, 128, 2, 9), Tile(0, 1, 16, 1, 9))
ALIGNED = LaunchConfig(Tile(16, 32, 128, 4, 2), Tile(16, 64, 32, 4, 2), band=1, splits=2)


# Slow ones have a kernel, a format and an epilogue that others here have, too, each with something else.
@pytest.mark.parametrize(
    ("case", "plan"),
    [
        ("tiny_bf16", BLOCKS),
        ("fp8", FUSED_BLOCKS),
        ("fp8_ragged_shared", WIDE_BLOCKS),
        ("int8_odd_shared", BLOCKS),
        ("tiny_bf16", MATRIX),
        pytest.param("tiny_bf16", PAIRED, marks=pytest.mark.slow),
        ("shared_fp32", PAIRED),
        ("odd_sizes", MATRIX),
        ("odd_sizes", PAIRED),
        ("gpt_oss_interleaved", MATRIX),
        ("gpt_oss_interleaved", PAIRED),
        ("gpt_oss", PAIRED),
        pytest.param("tiny_bf16", VECTORS, marks=pytest.mark.slow),
        ("odd_sizes", VECTORS),
        ("odd_sizes", DEEP_VECTORS),
        ("gpt_oss_interleaved", VECTORS),
        pytest.param("gpt_oss", DEEP_VECTORS, marks=pytest.mark.slow),
        pytest.param("fp8", MATRIX, marks=pytest.mark.slow),
        ("fp8_ragged_shared", MATRIX),
        ("fp8_ue8m0", MATRIX),
        ("fp8_none", MATRIX),
        pytest.param("fp8_shared", MATRIX, marks=pytest.mark.slow),
        pytest.param("bf16_shared", PAIRED, marks=pytest.mark.slow),
        pytest.param("int8", MATRIX, marks=pytest.mark.slow),
        ("int8_odd_shared", MATRIX),
        pytest.param("mxfp4_bf16", DIRECT, marks=pytest.mark.slow),
        ("mxfp4_bf16", ALIGNED),
        ("mxfp4_halves_fp16", DIRECT),
        ("w4a16", DIRECT),
        ("w4a16_zeros_fp32", ALIGNED),
        ("w4a16_128_shared_fp16", BLOCKS),
        ("w4a16_channel", ALIGNED),
        ("w8a16_odd", DIRECT),
        ("w8a16_groups", WIDE_BLOCKS),
        ("fp8_w8a16", DIRECT),
    ],
)
def test_every_plan_gives_the_reference(case: str, plan: LaunchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("fused_moe")
    chosen = spec.case(case)
    if plan is VECTORS:  # a program for two rows of a pair: many
        chosen = replace(chosen, shape=chosen.shape | {"num_tokens": 2})
    # A table's plan is not taken for fp32 activations; here it is, so that rounding hides nothing.
    monkeypatch.setattr("fastlayers.moe.fused_moe.triton.backend.plan_for", lambda *_: plan)
    inputs = make_inputs(chosen, torch.device("cpu"), 3)
    results = []
    for impl in (ReferenceFusedMoE(chosen.cfg), TritonFusedMoE(chosen.cfg, plan.config())):
        with poisoned_memory():
            results.append(run(impl, inputs, prepare(impl, inputs))["y"])
    assert compare(case, results[1], results[0], spec.bounds(chosen).get("y")) >= 0.0


@pytest.mark.parametrize("tokens", [1, 3, 16, 64, 512, 4096, 20000])
@pytest.mark.parametrize("shape", SHAPES)
def test_candidates_are_few_and_possible(shape: str, tokens: int) -> None:
    cfg = SHAPES[shape]
    found = candidates(cfg, tokens)
    plans = [LaunchConfig.of(config) for config in found]
    assert 1 <= len(plans) <= 40 and len(set(plans)) == len(plans)
    assert plans[0] == plan_for(tokens, cfg, False)
    for plan in plans:
        assert plan_of(tuple(plan.numbers())) == plan
        if cfg.quant == "fp8_block" and plan.first.m > 0:
            # One scale a step of K and a block of rows.
            assert (plan.first.k, plan.second.k) == (128, 128) and max(plan.first.n, plan.second.n) <= 128


@pytest.mark.parametrize("tokens", [16, 64, 256, 512, 1024, 4096])
def test_candidates_of_16_bit_weights_fit_shared_memory(tokens: int) -> None:
    cfg = SHAPES["qwen3"]
    plans = [LaunchConfig.of(config) for config in candidates(cfg, tokens)]
    for plan in plans:
        for tile, rows in ((plan.first, 2 * plan.first.n), (plan.second, plan.second.n)):
            buffers = tile.stages - (tile.m < 64)
            assert plan.by_pair or 2 * tile.k * (tile.m + rows) * buffers <= 227 * 1024
    # Half empty blocks that read an expert's weights once, an expert after the other.
    once = LaunchConfig(Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3), band=1)
    assert (once in plans) == (tokens >= 256)


def test_one_token_of_16_bit_weights_takes_vectors() -> None:
    assert plan_for(1, SHAPES["qwen3"], False).first.m == 0
    assert plan_for(2, SHAPES["qwen3"], False).first.m > 0
    for cfg in (SHAPES["gpt_oss"], replace(SHAPES["qwen3"], num_shared=1)):
        assert not any(LaunchConfig.of(config).first.m == 0 for config in candidates(cfg, 1))
    for top_k in (1, 6, 16):
        for config in candidates(replace(SHAPES["qwen3"], top_k=top_k), 1):
            plan = LaunchConfig.of(config)
            if plan.first.m == 0:
                rows = plan.second.n * next_power_of_2(top_k)
                # Fp32 sums of a thread.
                assert rows * plan.second.k <= 64 * 32 * plan.second.warps, plan
                assert plan.first.n * plan.first.k <= 64 * 32 * plan.first.warps, plan


MUTANTS = {
    "first tile again": ("gates[i].to", "gates[0].to"),
    "up is gate": ("up += x * ups[i]", "up += x * gates[i]"),
    "every token the first": ("(pair // TOP_K)", "(pair // TOP_K * 0)"),
    "dropped pairs count": ("(expert >= 0) & (expert < num_routed) & (column < D)", "column < D"),
    "unweighted": ("+ bias) * weight", "+ bias)"),
    "pair of another token": ("pair = token * TOP_K + slot", "pair = slot"),
    "first tile of the second product again": ("held[i].to", "held[0].to"),
    "a tile late": ("_second_tile(rows, (i + AHEAD)", "_second_tile(rows, i"),
    "largest of neighbours": ("tl.sum(tl.reshape(product", "tl.max(tl.reshape(product"),
    "no second bias": ("(tl.sum(acc, axis=1) + bias)", "tl.sum(acc, axis=1)"),
}


def experts(module: ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the matrix-vector experts write for three tokens with a dropped pair, and the same in fp64."""
    random = torch.Generator().manual_seed(5)
    tokens, top_k, count, hidden, inner = 3, 3, 5, 48, 40
    plan = LaunchConfig(Tile(0, 2, 32, 1, 1), Tile(0, 2, 16, 1, 2))
    x, w13, w2 = (
        torch.randn(shape, generator=random).bfloat16()
        for shape in ((tokens, hidden), (count, 2 * inner, hidden), (count, hidden, inner))
    )
    b13, b2 = (torch.randn(shape, generator=random).bfloat16() for shape in ((count, 2 * inner), (count, hidden)))
    ids = torch.tensor([[1, 4, 0], [2, -1, 3], [0, 2, 4]], dtype=torch.int32)
    weights = torch.rand(tokens, top_k, generator=random)
    y = torch.full((tokens, hidden), float("nan"), dtype=torch.bfloat16)
    packed = MoEWeights(w13, w2, None, None, b13, b2)
    module.vector_experts(x, weights, ids, packed, y, plan, False, 0.0, 0.0, 1.5, False)
    wanted = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for slot, expert in enumerate(ids[token].tolist()):
            if expert >= 0:
                h = w13[expert].double() @ x[token].double() + b13[expert].double()
                a = (torch.nn.functional.silu(h[:inner]) * h[inner:]).bfloat16().double()
                wanted[token] += 1.5 * weights[token, slot].double() * (w2[expert].double() @ a + b2[expert].double())
    return y, wanted


def close(y: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(torch.isclose(y.double(), wanted, rtol=2e-2, atol=0.5).all())


def test_matrix_vector_experts_agree_with_float64_in_equal_bits() -> None:
    y, wanted = experts(pair_vector)
    assert close(y, wanted)
    assert torch.equal(y, experts(pair_vector)[0])


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_in_matrix_vector_experts_shows(name: str, tmp_path: Path) -> None:
    mutant = planted(pair_vector, tmp_path, MUTANTS[name])
    try:
        y, wanted = experts(mutant)
    except Exception:  # an index that is none
        return
    assert not close(y, wanted), f"{name} changes nothing"


def one_token(cfg: FusedMoEConfig, plans: list[LaunchConfig], device: str, replays: int) -> None:
    """Check that all of these plans give one token the reference's result, in equal bits, also replayed on a GPU."""
    spec = spec_of("fused_moe")
    case = Case("one_token", cfg, {"num_tokens": 1, "dtype": cfg.dtype, "load": "uneven"})
    inputs = make_inputs(case, torch.device(device), 5)
    inputs["topk_ids"][0, 1] = -1
    oracle = ReferenceFusedMoE(cfg)
    wanted, found = run(oracle, inputs, prepare(oracle, inputs))["y"], []
    assert bool(wanted.any())
    for plan in plans:
        ours = TritonFusedMoE(cfg, plan.config())
        packed = prepare(ours, inputs)
        with poisoned_memory():
            found.append(run(ours, inputs, packed)["y"])
        compare("y", found[-1], wanted, spec.bounds(case).get("y"))
        assert torch.equal(found[-1], found[0]), plan
        if replays:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = run(ours, inputs, packed)["y"]
            for replay in range(replays):
                y.fill_(float("nan"))
                graph.replay()
                assert torch.equal(y, found[0]), (plan, replay)


def test_tiles_ahead_leave_the_bits_of_vectors() -> None:
    plans = [LaunchConfig(Tile(0, 2, 32, 1, ahead), Tile(0, 2, 16, 1, ahead)) for ahead in (1, 2, 9)]
    one_token(FusedMoEConfig(96, 48, 6, 4, bias=True, activation="swiglu_oai", interleaved=True), plans, "cpu", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["qwen3", "gpt_oss"])
def test_one_token_of_real_experts_gpu(shape: str) -> None:
    cfg = replace(SHAPES[shape], num_experts=16, quant="none")
    usual = plan_for(1, cfg, False)
    assert usual.first.m == 0
    plans = [replace(usual, second=replace(usual.second, stages=ahead)) for ahead in (1, 3)]
    one_token(cfg, plans, "cuda", 20)


@pytest.mark.parametrize("shape", SHAPES)
def test_few_tokens_need_no_alignment_and_many_do(shape: str) -> None:
    few, many = (plan_for(tokens, SHAPES[shape], False) for tokens in (1, 512))
    assert few.by_pair and not many.by_pair
