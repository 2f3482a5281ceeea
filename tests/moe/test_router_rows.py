"""The Triton router with several tokens a program: what one token a program gives, and which sum of weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fastlayers.moe.router import triton as router_triton
from fastlayers.moe.router.layer import SCORINGS, RouterConfig
from fastlayers.registry.spec import spec_of
from fastlayers.testing.parity import check_parity

OSS = RouterConfig(32, 4, "softmax_after_topk", renormalize=False)
CONFIGS = (
    OSS,
    RouterConfig(128, 8),
    RouterConfig(37, 5, "sigmoid", scaling_factor=2.5),
    RouterConfig(16, 1, "sigmoid", renormalize=False),
    RouterConfig(60, 4, renormalize=False, weights_dtype=torch.bfloat16),
    RouterConfig(12, 12, "softmax_after_topk", num_groups=4, topk_groups=4, masked_score="zero"),
)
TOKENS = 19  # no whole number of programs


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let a test say up to how many tokens have a program each."""
    yield monkeypatch
    router_triton._launch.cache_clear()


def routed(
    monkeypatch: pytest.MonkeyPatch, few: int, cfg: RouterConfig, logits: torch.Tensor, valid: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route, as if ``few`` tokens were few; of more, several a program whatever the softmax's lanes."""
    monkeypatch.setattr(router_triton, "FEW_TOKENS", few)
    chosen = (1, 1) if logits.shape[0] <= few else (16 if cfg.num_experts <= 32 and cfg.scoring != "softmax" else 4, 4)
    monkeypatch.setattr(router_triton, "_rows_and_warps", lambda *shape: chosen)
    router_triton._launch.cache_clear()
    return router_triton.TritonRouter(cfg)(logits, None, valid)


def drawn(experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits with ties, zeros of both signs, infinities and NaN, one row behind the other in wider rows."""
    z = torch.randn(TOKENS, experts, generator=torch.Generator().manual_seed(3))
    z[3], z[4], z[5] = 0.0, -0.0, float("nan")
    z[6, ::2], z[7, ::3], z[8] = float("nan"), float("inf"), float("-inf")
    z[9:12] = torch.randint(0, 3, (3, experts), generator=torch.Generator().manual_seed(4)).float()
    return torch.cat((z, torch.full_like(z, 9.0)), -1).to(dtype)[:, :experts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: f"{cfg.num_experts}-{cfg.scoring}")
def test_several_tokens_a_program_are_routed_as_one(
    cfg: RouterConfig, dtype: torch.dtype, few_tokens: pytest.MonkeyPatch
) -> None:
    logits, count = drawn(cfg.num_experts, dtype), torch.tensor([TOKENS - 6], dtype=torch.int32)
    weights, ids = routed(few_tokens, 0, cfg, logits, None)
    alone, ids_alone = routed(few_tokens, TOKENS, cfg, logits, None)
    assert torch.equal(ids, ids_alone) and len(set(map(tuple, ids.tolist()))) > 3
    # The interpreter sums in another order than a warp does; on hardware bits are the same.
    torch.testing.assert_close(weights, alone, rtol=1e-6 if cfg.weights_dtype is None else 2**-7, atol=1e-30)
    padded, padded_ids = routed(few_tokens, 0, cfg, logits, count)
    assert torch.equal(padded_ids[:-6], ids[:-6]) and torch.equal(padded[:-6], weights[:-6])
    assert (padded_ids[-6:] == -1).all() and not padded[-6:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: f"{cfg.num_experts}-{cfg.scoring}")
def test_bits_are_those_of_one_token_a_program_gpu(
    cfg: RouterConfig, dtype: torch.dtype, few_tokens: pytest.MonkeyPatch
) -> None:
    _same_bits("cuda", cfg, dtype, few_tokens)


def _same_bits(device: str, cfg: RouterConfig, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = drawn(cfg.num_experts, dtype).to(device)
    for logits in (wide, wide.contiguous()):
        found = []
        for few in (0, TOKENS):
            monkeypatch.setattr(router_triton, "FEW_TOKENS", few)
            router_triton._launch.cache_clear()
            found.append(router_triton.TritonRouter(cfg)(logits, None, None))
        (weights, ids), (alone, ids_alone) = found
        assert torch.equal(ids, ids_alone) and torch.equal(weights, alone)


def _halves(values: np.ndarray) -> np.ndarray:
    """Sum of the last axis as a warp's lanes sum: those half the width apart first."""
    width = 1 << (values.shape[-1] - 1).bit_length()
    values = np.pad(values, ((0, 0), (0, width - values.shape[-1])))
    while width > 1:
        width //= 2
        values = values[:, :width] + values[:, width:]
    return values[:, 0]


@pytest.mark.parametrize("top_k", [3, 4, 6, 8])
def test_weights_are_summed_as_lanes_are(top_k: int, few_tokens: pytest.MonkeyPatch) -> None:
    logits = torch.randn(200, 32, generator=torch.Generator().manual_seed(top_k))
    cfg = RouterConfig(32, top_k, "softmax_after_topk", renormalize=False)
    weights, ids = routed(few_tokens, 0, cfg, logits, None)
    z = logits.gather(1, ids.long()).numpy()
    powers = np.exp(z - z[:, :1])
    assert np.array_equal(weights.numpy(), powers / _halves(powers)[:, None])
    one_by_one = powers[:, 0]
    for k in range(1, top_k):
        one_by_one = one_by_one + powers[:, k]
    assert not np.array_equal(weights.numpy(), powers / one_by_one[:, None])


def test_every_case_without_groups_passes_with_several_tokens_a_program(few_tokens: pytest.MonkeyPatch) -> None:
    few_tokens.setattr(router_triton, "FEW_TOKENS", 0)
    router_triton._launch.cache_clear()
    cases = [case for case in spec_of("router").cases if case.small and not case.cfg.grouped and case.cfg.num_experts]
    assert len(cases) >= 5
    for case in cases:
        assert check_parity("router", "triton", case.name, "cpu")


@pytest.mark.parametrize(
    ("tokens", "groups", "size", "stride", "top_k", "scoring", "bias", "wanted"),
    [
        (256, 1, 32, 32, 4, "softmax_after_topk", False, (1, 1)),
        (257, 1, 32, 32, 4, "softmax_after_topk", False, (16, 4)),
        (4096, 1, 24, 25, 4, "softmax", False, (4, 4)),  # a warp sums all experts of a token
        (4096, 1, 128, 128, 8, "softmax", False, (4, 4)),
        (4096, 1, 128, 136, 8, "softmax", False, (1, 1)),  # other lanes would sum
        (4096, 1, 60, 64, 8, "softmax", False, (1, 1)),
        (4096, 1, 128, 136, 8, "sigmoid", False, (4, 4)),
        (4096, 1, 128, 128, 8, "sigmoid", True, (1, 1)),
        (4096, 8, 32, 256, 8, "sigmoid", False, (1, 1)),
        (4096, 1, 512, 512, 17, "softmax", False, (1, 1)),
        (4096, 1, 1024, 1024, 8, "softmax", False, (1, 4)),
        (1, 1, 1024, 1024, 8, "softmax", False, (1, 4)),
    ],
)
def test_tokens_and_warps_of_a_program(
    tokens: int, groups: int, size: int, stride: int, top_k: int, scoring: str, bias: bool, wanted: tuple[int, int]
) -> None:
    found = router_triton._rows_and_warps(tokens, groups, size, stride, top_k, SCORINGS.index(scoring), bias)
    assert found == wanted
