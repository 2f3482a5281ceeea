"""The Triton experts' plans: every way to run gives the reference's result; what the tuner may try."""

from __future__ import annotations

import pytest
import torch

from fastlayers.moe.fused_moe.cases import make_inputs, prepare, run
from fastlayers.moe.fused_moe.launch_config import LaunchConfig, Tile, candidates, plan_for
from fastlayers.moe.fused_moe.layer import FusedMoEConfig
from fastlayers.moe.fused_moe.reference import ReferenceFusedMoE
from fastlayers.moe.fused_moe.triton.backend import TritonFusedMoE
from fastlayers.testing.parity import compare, poisoned_memory
from fastlayers.testing.spec import spec_of

SHAPES = {
    "qwen3": FusedMoEConfig(2048, 768, 128, 8),
    "deepseek_v3_tp8": FusedMoEConfig(7168, 256, 256, 8, num_shared=1, quant="fp8_block"),
    "gpt_oss": FusedMoEConfig(2880, 2880, 32, 4, quant="mxfp4", activation="swiglu_oai", bias=True, interleaved=True),
}
BLOCKS = LaunchConfig(Tile(16, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2), band=1)
WIDE_BLOCKS = LaunchConfig(Tile(16, 64, 128, 4, 2), Tile(16, 128, 128, 4, 2))
FUSED_BLOCKS = LaunchConfig(Tile(16, 128, 128, 4, 2), Tile(16, 64, 128, 4, 2))
DIRECT = LaunchConfig(Tile(1, 16, 64, 4, 2), Tile(1, 32, 64, 4, 2), splits=3)
MATRIX = LaunchConfig(Tile(1, 64, 128, 4, 3), Tile(1, 32, 128, 2, 3), splits=2, splits1=3)
PAIRED = LaunchConfig(Tile(1, 32, 64, 2, 3), Tile(1, 64, 32, 4, 3))
ALIGNED = LaunchConfig(Tile(16, 32, 128, 4, 2), Tile(16, 64, 32, 4, 2), band=1, splits=2)


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        ("tiny_bf16", BLOCKS),
        ("fp8", FUSED_BLOCKS),
        ("fp8_ragged_shared", WIDE_BLOCKS),
        ("int8_odd_shared", BLOCKS),
        ("tiny_bf16", MATRIX),
        ("tiny_bf16", PAIRED),
        ("shared_fp32", PAIRED),
        ("odd_sizes", MATRIX),
        ("odd_sizes", PAIRED),
        ("gpt_oss_interleaved", MATRIX),
        ("gpt_oss_interleaved", PAIRED),
        ("gpt_oss", PAIRED),
        ("fp8", MATRIX),
        ("fp8_ragged_shared", MATRIX),
        ("fp8_ue8m0", MATRIX),
        ("fp8_none", MATRIX),
        ("fp8_shared", MATRIX),
        ("bf16_shared", PAIRED),
        ("int8", MATRIX),
        ("int8_odd_shared", MATRIX),
        ("mxfp4_bf16", DIRECT),
        ("mxfp4_bf16", ALIGNED),
        ("mxfp4_halves_fp16", DIRECT),
    ],
)
def test_every_plan_gives_the_reference(case: str, plan: LaunchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("fused_moe")
    chosen = spec.case(case)
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
        assert LaunchConfig.of_numbers(plan.numbers()) == plan
        if cfg.quant == "fp8_block":
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


@pytest.mark.parametrize("shape", SHAPES)
def test_few_tokens_need_no_alignment_and_many_do(shape: str) -> None:
    few, many = (plan_for(tokens, SHAPES[shape], False) for tokens in (1, 512))
    assert few.by_pair and not many.by_pair
