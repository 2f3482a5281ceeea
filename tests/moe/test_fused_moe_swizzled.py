"""MXFP4 experts over weights in the matrix units' order: the order itself, every plan, limits of scales, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastlayers import env
from fastlayers.device import as_device
from fastlayers.errors import ArgumentError
from fastlayers.moe.fused_moe import cases
from fastlayers.moe.fused_moe.layer import FUSED_MOE, FusedMoEConfig
from fastlayers.moe.fused_moe.reference import ReferenceFusedMoE
from fastlayers.moe.fused_moe.swizzle import swizzle_codes, swizzle_scales
from fastlayers.moe.fused_moe.triton.mxfp4_hopper import HopperLaunchConfig, TritonSwizzledFusedMoE
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.testing.parity import check_parity, compare

interpreted = pytest.mark.skipif(not env.triton_interpret(), reason="needs TRITON_INTERPRET=1 without a GPU")
OSS = FusedMoEConfig(
    128, 192, 4, 2, quant="mxfp4", activation="swiglu_oai", bias=True, interleaved=True, dtype=torch.bfloat16
)
ROW = FUSED_MOE.named("triton_swizzled")


def code_at(words: torch.Tensor, expert: int, row: int, column: int) -> int:
    """Return a code by the words of the file's head: words ``[E, N/16, f, K/64, o, t, q]``."""
    b, f, o = row % 16 // 8, row % 8 // 2, row % 2
    q, h, t, c = column % 64 // 16, column % 16 // 8, column % 8 // 2, column % 2
    half = int(words[expert, row // 16, f, column // 64, o, t, q]) >> 16 * c & 0xFFFF
    place = 2 * h + b
    if place < 3:
        half <<= 3 * place
        return half >> 12 & 8 | half >> 6 & 7
    return half >> 11 & 8 | half >> 9 & 6 | half >> 13 & 1


def test_codes_lie_where_the_head_says() -> None:
    experts, rows, columns = 2, 80, 192  # padded to 128 rows and 256 columns
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    swizzled = swizzle_codes(blocks)
    assert swizzled.shape == (experts, 32, 512)
    words = swizzled.view(torch.int32).view(experts, 8, 4, 4, 2, 4, 4)
    assert int(words[:, 5:].abs().max()) == 0 and int(words[:, :, :, 3].abs().max()) == 0
    flat = blocks.flatten(-2)
    for row in range(rows):
        column = (row * 37 + torch.arange(0, columns, 7)) % columns
        for k in column.tolist():
            wanted = int(flat[1, row, k // 2]) >> 4 * (k % 2) & 15
            assert code_at(words, 1, row, k) == wanted, (row, k)


def test_scales_lie_where_the_head_says() -> None:
    scales = torch.randint(0, 256, (2, 288, 5), dtype=torch.uint8)
    swizzled = swizzle_scales(scales)
    assert swizzled.shape == (2, 16, 192)
    view = swizzled.view(2, 2, 8, 3, 2, 8, 2, 2)
    for row in range(288):
        for group in range(5):
            n, a, w, b, g = row // 256, row % 256 // 128, row % 128 // 16, row % 16 // 8, row % 8
            assert view[1, n, w, group // 2, a, g, group % 2, b] == scales[1, row, group]


@interpreted
def test_parity() -> None:
    assert check_parity("fused_moe", "triton_swizzled", "mxfp4_bf16", "cpu")


PLANS = [
    HopperLaunchConfig(0, 1, 4, 4, 2, 2, 3, 0),
    HopperLaunchConfig(8, 2, 1, 3, 1, 8, 4, 0),
    HopperLaunchConfig(16, 4, 2, 4, 2, 4, 4, 1),
    HopperLaunchConfig(8, 1, 2, 3, 8, 1, 3, 1),
]


@interpreted
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_plan_gives_the_same(plan: HopperLaunchConfig) -> None:
    # Up to 20 pairs an expert: several blocks; 96 columns end inside a step, 160 rows inside a tile.
    case = replace(cases.SPEC.case("mxfp4_bf16"), cfg=replace(OSS, hidden_size=96, intermediate_size=160))
    case = replace(case, shape={"num_tokens": 23, "dtype": torch.bfloat16, "load": "filtered"})
    inputs = cases.make_inputs(case, torch.device("cpu"), 3)
    oracle, ours = ReferenceFusedMoE(case.cfg), TritonSwizzledFusedMoE(case.cfg, plan.config())
    wanted = cases.run(oracle, inputs, cases.prepare(oracle, inputs))["y"]
    compare("y", cases.run(ours, inputs, cases.prepare(ours, inputs))["y"], wanted)


def test_candidates_are_plans() -> None:
    for tokens in (1, 4, 16, 64, 512):
        found = TritonSwizzledFusedMoE.candidates(OSS, tokens)
        assert 0 < len(found) <= 40 and len({str(config) for config in found}) == len(found)
        assert all(TritonSwizzledFusedMoE(OSS, config).plan is not None for config in found)


def test_scales_beyond_the_range_are_named() -> None:
    blocks = torch.zeros(1, 32, 2, 16, dtype=torch.uint8)
    scales = torch.full((1, 32, 2), 192, dtype=torch.uint8)
    backend = TritonSwizzledFusedMoE(OSS)
    backend.pack(MoEWeights(blocks, blocks, scales, scales))
    with pytest.raises(ArgumentError, match=r"FusedMoE: w2_scale is up to 2\^66; accepted: scales of at most 2\^65"):
        backend.pack(MoEWeights(blocks, blocks, scales, scales + 1))


def test_refusals() -> None:
    h200 = as_device("H200")
    assert ROW.refuse(OSS, h200) is None and ROW.weight_layout == FUSED_MOE.named("triton_kernels").weight_layout
    for change, why in (
        ({"dtype": torch.float16}, "dtype float16 is not bfloat16"),
        ({"activation": "silu"}, "clamped SwiGLU"),
        ({"interleaved": False}, "interleaved"),
        ({"quant": "none"}, "quant 'none' is not 'mxfp4'"),
    ):
        assert why in str(ROW.refuse(replace(OSS, **change), h200))
    assert "needs sm_90" in str(ROW.refuse(OSS, as_device("A100")))
