"""Packages that choose schedules and route by themselves: what they choose, and that routing outside is the same.

Two rows are guards (`trtllm_gen` on sm_100, `flashinfer_cutlass` on sm_90); a stand-in written from their contract
plays the first here: logits, bias, groups and factor go in, and rows are [up; gate].
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fastlayers as fl
from fastlayers.device import as_device
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.cutlass_schedules import Schedule, schedule_for
from fastlayers.moe.fused_moe.layer import FUSED_MOE

V3 = FusedMoEConfig(7168, 256, 256, 8, quant="fp8_block", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "k", "rows", "expected"),
    [
        ("H20", 7168, 1, Schedule((64, 128, 128), (2, 1, 1), "pingpong", True)),
        ("H20", 256, 4096, Schedule((64, 128, 128), (2, 1, 1), "pingpong", False)),
        ("H20", 129, 1, Schedule((64, 128, 128), (2, 1, 1), "pingpong", True)),
        ("H20", 128, 1, Schedule((128, 128, 128), (1, 2, 1), "cooperative", True)),
        ("H100", 7168, 1, Schedule((128, 128, 128), (1, 2, 1), "cooperative", True)),
        ("H200", 7168, 2047, Schedule((128, 128, 128), (1, 2, 1), "cooperative", True)),
        ("H200", 7168, 2048, Schedule((128, 128, 128), (1, 2, 1), "cooperative", True)),
        ("H200", 7168, 2049, Schedule((128, 128, 128), (1, 2, 1), "cooperative", False)),
        ("H20", 7168, 2048, Schedule((64, 128, 128), (2, 1, 1), "pingpong", True)),
        ("H20", 7168, 2049, Schedule((64, 128, 128), (2, 1, 1), "pingpong", False)),
    ],
)
def test_schedules_of_cutlass_experts(device: str, k: int, rows: int, expected: Schedule) -> None:
    assert schedule_for(as_device(device), k, rows) == expected


def test_backends_say_which_schedule_a_device_gets() -> None:
    def said(device: str) -> str:
        return next(row.reason for row in fl.backends("fused_moe", device=device, cfg=V3) if row.name == "sgl_kernel")

    assert "pingpong tiles of 64×128×128, clusters of 2×1×1; operands swapped up to 2048 rows" in said("H20")
    assert all("cooperative tiles of 128×128×128, clusters of 1×2×1" in said(device) for device in ("H100", "H200"))
    assert "tiles" not in said("B200")


@pytest.mark.parametrize(
    ("name", "device", "cfg", "words"),
    [
        ("flashinfer_cutlass", "H200", V3, None),
        ("flashinfer_cutlass", "B200", V3, "needs sm_90, this is sm_100"),
        ("flashinfer_cutlass", "A100", V3, "needs sm_90, this is sm_80"),
        ("flashinfer_cutlass", "H200", replace(V3, num_shared=1), "no shared experts"),
        ("flashinfer_cutlass", "H200", replace(V3, bias=True), "biases"),
        ("flashinfer_cutlass", "H200", replace(V3, quant="none"), "quant 'none'"),
        ("flashinfer_cutlass", "H200", replace(V3, intermediate_size=160), "intermediate_size 160"),
        ("trtllm_gen", "B200", V3, None),
        ("trtllm_gen", "H200", V3, "needs sm_100, this is sm_90"),
        ("trtllm_gen", "B200", replace(V3, quant="none"), "quant 'none'"),
    ],
)
def test_refusals(name: str, device: str, cfg: FusedMoEConfig, words: str | None) -> None:
    why = FUSED_MOE.named(name).refusal(cfg, as_device(device))
    assert why is None if words is None else words in str(why)


def routed_inside(
    logits: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, up_gate: torch.Tensor, down: torch.Tensor,
    top_k: int, groups: int, kept: int, factor: float,
) -> torch.Tensor:  # fmt: skip
    """What an operator that routes inside promises, token by token in fp64: `up_gate [E, 2I, D]` has ups first."""
    y = torch.zeros_like(x, dtype=torch.float64)
    for token, row in enumerate(logits.double()):
        scores = torch.sigmoid(row)
        chosen_by = (scores + bias.double()).view(groups, -1)
        best = chosen_by.topk(2, dim=1).values.sum(1).topk(kept).indices
        left = torch.full_like(chosen_by, float("-inf"))
        left[best] = chosen_by[best]
        ids = left.flatten().topk(top_k).indices
        weights = scores[ids] / scores[ids].sum() * factor
        for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            up, gate = (up_gate[expert].double() @ x[token].double()).chunk(2)
            y[token] += weight * (down[expert].double() @ (torch.nn.functional.silu(gate) * up))
    return y


@pytest.mark.parametrize("in_router", [False, True])
def test_routing_outside_gives_what_routing_inside_does(in_router: bool) -> None:
    """Router and experts as DeepSeek-V3 builds them; the factor once, wherever it is applied."""
    torch.manual_seed(0)
    hidden, inner, experts, top_k, groups, kept, factor = 32, 24, 16, 4, 4, 2, 2.5
    router = fl.TopKRouter(
        hidden, experts, top_k, scoring="sigmoid", num_groups=groups, topk_groups=kept, group_score="top2_sum",
        masked_score="-inf", correction_bias=True, renormalize=True, scaling_factor=factor, apply_scaling=in_router,
        dtype=torch.float32,
    )  # fmt: skip
    moe = fl.FusedMoE(
        hidden, inner, experts, top_k, scaling_factor=1.0 if in_router else factor, dtype=torch.float32
    )  # fmt: skip
    for parameter in (*router.parameters(), *moe.parameters()):
        parameter.data.normal_(0, 0.3)
    x = torch.randn(9, hidden)
    weights, ids = router(x)
    gate, up = moe.w13.chunk(2, 1)
    names = dict(router.named_parameters()) | dict(router.named_buffers())
    bias = next(value for name, value in names.items() if "bias" in name)
    inside = routed_inside(
        x @ router.weight.T, bias, x, torch.cat([up, gate], 1), moe.w2, top_k, groups, kept, factor
    )  # fmt: skip
    torch.testing.assert_close(moe(x, weights, ids).double(), inside, rtol=1e-4, atol=1e-5)
    # The stand-in tells halves and factors apart.
    for wrong in (moe.w13, torch.cat([up, gate], 1) * 2):
        other = routed_inside(x @ router.weight.T, bias, x, wrong, moe.w2, top_k, groups, kept, factor)
        assert not torch.allclose(other, inside, rtol=1e-2)
