"""What the tuner's check says of FP8 experts: right arithmetic passes with a margin, wrong kernels do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastlayers.moe.fused_moe.backends import FUSED_MOE
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.reference import ReferenceFusedMoE, RoundedFusedMoE
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.registry import Backend
from fastlayers.registry.spec import BOUNDS, spec_of
from fastlayers.tuning.clock import HostClock
from fastlayers.tuning.parity import ParityError
from fastlayers.tuning.samples import Option
from fastlayers.tuning.search import Bench
from fastlayers.tuning.sweep import case_at, inputs_of

CPU = torch.device("cpu")
# Two groups of features in each expert, as DeepSeek-V3's on eight ranks: so few that one token's error is of few codes.
CFG = FusedMoEConfig(512, 256, 16, 8, num_shared=1, quant="fp8_block", scaling_factor=2.5)
# Root mean square of what Hopper's FP8 products leave out of a sum, over the sum's: products are added in steps of 32,
# each cut to 14 bits of the largest (computed step by step for 1,024 features).
NOISE = 1.25e-4
BOUND = BOUNDS[torch.bfloat16].rel_rms


class Noisy(ReferenceFusedMoE):
    """The formula, with a first product that is as inexact as the tensor cores', and an output in bf16."""

    def rounded(self, gate_up: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(gate_up.shape, generator=torch.Generator().manual_seed(gate_up.shape[0]))
        return super().rounded(gate_up + NOISE * gate_up.square().mean().sqrt() * noise)

    def __call__(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        return super().__call__(x, *given).to(x.dtype)


class NoisyRounding(Noisy, RoundedFusedMoE):
    """The same of a backend that rounds the first product to bf16."""


def rows(cfg: FusedMoEConfig, noisy: type[ReferenceFusedMoE], oracle: type[ReferenceFusedMoE]) -> torch.Tensor:
    """Return ``[2, T]``: each token's squared error, and the square of what it should be."""
    spec = spec_of("fused_moe")
    case = case_at("fused_moe", cfg, spec.checked_tokens)
    inputs = inputs_of("fused_moe", case, CPU)
    with torch.inference_mode():
        actual, expected = (
            spec.run(impl, inputs, spec.prepare(impl, inputs))["y"].double() for impl in (noisy(cfg), oracle(cfg))
        )
    return torch.stack([(actual - expected).square().sum(-1), expected.square().sum(-1)])


def relative(found: torch.Tensor) -> torch.Tensor:
    return (found[0].sum(-1) / found[1].sum(-1)).sqrt()


def deviation(found: torch.Tensor) -> float:
    """Return the standard deviation of the relative error from one draw of so many tokens to the next."""
    error = relative(found)
    return float((found[0] - error.square() * found[1]).square().sum().sqrt() / (2 * error * found[1].sum()))


@pytest.mark.parametrize("experts", [16, pytest.param(256, marks=pytest.mark.slow)])
def test_right_arithmetic_passes_by_a_margin_and_five_tokens_would_not_tell(experts: int) -> None:
    found = rows(replace(CFG, num_experts=experts), Noisy, ReferenceFusedMoE)
    assert relative(found) + 4 * deviation(found) < BOUND
    # As it was: the error of five tokens is that of a few codes that lie between two values.
    five = relative(found[:, : found.shape[1] // 5 * 5].unflatten(1, (-1, 5)))
    assert five.max() > BOUND and five.min() < 0.6 * BOUND
    assert 0.02 < (five > BOUND).double().mean() < 0.5


def test_single_tokens_of_right_arithmetic_pass_the_bound_of_few_and_not_the_usual_one() -> None:
    oracle = spec_of("fused_moe").oracle("deep_gemm_gathered")
    assert oracle is not None and oracle.target.endswith(":ReferenceFusedMoE")
    few, many = (oracle.bounds(case_at("fused_moe", CFG, tokens))["y"].rel_rms for tokens in (1, 64))
    assert many == BOUND and few == 2.5e-2
    single = relative(rows(CFG, Noisy, ReferenceFusedMoE)[:, :, None])
    assert (single > BOUND).double().mean() > 0.05 and single.max() < few
    # What a bug does to a token that it meets is far beyond.
    for wrong in (scales_moved, one_expert_scaled, block_dropped):
        met = relative(rows(CFG, planted(wrong), ReferenceFusedMoE)[:, :, None])
        assert met.quantile(0.99) > 2 * few, wrong.__name__


def test_packages_that_round_pass_their_bound_by_a_margin() -> None:
    found = rows(CFG, NoisyRounding, RoundedFusedMoE)
    spec = spec_of("fused_moe")
    oracle = spec.oracle("sgl_kernel")
    assert oracle is not None and oracle.target.endswith(":RoundedFusedMoE")
    bound = oracle.bounds(case_at("fused_moe", CFG, spec.checked_tokens))["y"].rel_rms
    assert bound == 7.5e-3 and relative(found) + 4 * deviation(found) < bound


def scales_moved(weights: MoEWeights) -> MoEWeights:
    """Take the scales of the first columns for the second, in every expert."""
    assert weights.w13_scale is not None
    scale = weights.w13_scale.clone()
    scale[..., 1] = scale[..., 0]
    return replace(weights, w13_scale=scale)


def one_block_scaled(weights: MoEWeights) -> MoEWeights:
    """Halve one block's scale in one expert."""
    assert weights.w2_scale is not None
    scale = weights.w2_scale.clone()
    scale[3, 1, 0] /= 2
    return replace(weights, w2_scale=scale)


def one_expert_scaled(weights: MoEWeights) -> MoEWeights:
    """Halve all scales of the rarest expert's second product."""
    assert weights.w2_scale is not None
    scale = weights.w2_scale.clone()
    scale[CFG.num_experts - 1] /= 2
    return replace(weights, w2_scale=scale)


def block_dropped(weights: MoEWeights) -> MoEWeights:
    """Leave out the last 128 columns of the first product."""
    codes = weights.w13.clone()
    codes[..., -128:] = 0
    return replace(weights, w13=codes)


def planted(wrong: Callable[[MoEWeights], MoEWeights] | None) -> type[Noisy]:
    """Return right arithmetic with wrong weights."""

    class Planted(Noisy):
        def pack(self, weights: MoEWeights) -> MoEWeights:
            return weights if wrong is None else wrong(weights)

    return Planted


@pytest.mark.parametrize(
    "wrong", [None, scales_moved, one_block_scaled, one_expert_scaled, block_dropped],
    ids=lambda wrong: getattr(wrong, "__name__", "right"),
)  # fmt: skip
def test_planted_bugs_are_refused(
    wrong: Callable[[MoEWeights], MoEWeights] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Backend("planted", planted(wrong), auto_on=("cpu",))
    monkeypatch.setattr(FUSED_MOE, "ranked", [row, *FUSED_MOE.ranked])
    bench = Bench("fused_moe", CFG, CPU, HostClock())
    if wrong is None:
        assert bench.check(Option("planted")) < 0.9 * BOUND
    else:
        with pytest.raises(ParityError, match=r"planted/T=256 on cpu: y: relative RMS error"):
            bench.check(Option("planted"))
