"""The experts' first product over gathered rows: the bits of the product by pairs, rows in no use, planted bugs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.integers import cdiv
from fastlayers.moe.align.triton import align
from fastlayers.moe.fused_moe.cases import make_inputs
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.packages.deep_gemm_gathered import DeepGemmGatheredFusedMoE
from fastlayers.moe.fused_moe.triton import backend, gathered_gate_up, grouped_gemm
from fastlayers.moe.fused_moe.triton.gathered_gate_up import PLANS, Plan
from fastlayers.moe.fused_moe.triton.permute import Rows, place
from fastlayers.moe.fused_moe.triton.quantize import quantize
from fastlayers.moe.fused_moe.weights import EPS, GROUP
from fastlayers.registry.spec import Case
from fastlayers.testing.parity import poisoned_memory
from fastlayers.triton_lang import dependent_launch

sys.path.insert(0, str(Path(__file__).parents[1]))
from planted_faults import planted

V3 = FusedMoEConfig(7168, 256, 256, 8, num_shared=1, quant="fp8_block", scaling_factor=2.5, dtype=torch.bfloat16)
SMALL = replace(V3, hidden_size=384, num_experts=5, top_k=2)
Outputs = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """Tokens in codes, experts of which some have no rows, and pairs of which some are dropped."""

    cfg: FusedMoEConfig
    ids: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor
    weight: torch.Tensor
    weight_scale: torch.Tensor
    rows: Rows

    @property
    def used(self) -> torch.Tensor:
        """The rows that pairs have."""
        return self.rows.row_of[self.rows.row_of >= 0].long()

    def gathered(self, plan: Plan, module: Any = gathered_gate_up) -> Outputs:
        """Return all rows' codes and scales as bytes; what nobody writes is what memory was filled with."""
        with poisoned_memory():
            a, s = module.gathered_gate_up(
                self.codes, self.scale, self.weight, self.weight_scale, self.rows, plan, self.cfg.scale_fmt == "ue8m0"
            )
        return a.view(torch.uint8), s.contiguous().view(torch.int32)

    def by_pairs(self, m: int = 64) -> Outputs:
        """Return the same, for rows in use, from the product by tiles of pairs."""
        cfg, pairs, inner = self.cfg, self.rows.row_of.numel(), self.cfg.intermediate_size
        _, ids = backend._extend(self.ids.float(), self.ids, cfg.num_experts, cfg.num_shared, 1.0)
        slots, experts, total = align(ids, cfg.all_experts, m)
        a = torch.empty(pairs, inner, dtype=torch.float8_e4m3fn, device=ids.device)
        s = torch.empty(pairs, inner // GROUP, device=ids.device)
        grouped_gemm.gate_up_kernel[(len(experts) * (inner // GROUP),)](
            self.codes, self.scale, self.weight, self.weight_scale, s, a, s, slots, experts, total, pairs,
            len(experts), cfg.hidden_size, inner, cfg.hidden_size, inner, 0.0, 0.0, EPS,
            PER_TOKEN=cfg.pairs_per_token, QUANT=1, QUANT_OUT=True, UE8M0=cfg.scale_fmt == "ue8m0", WIDE=False,
            OAI=False, HAS_BIAS=False, INTERLEAVED=False, EVEN_K=True, BLOCK_M=m, BLOCK_N=GROUP, BLOCK_K=GROUP, BAND=2,
            num_warps=8, num_stages=3, **dependent_launch(ids.device),
        )  # fmt: skip
        mine = self.rows.row_of >= 0
        return a[mine].view(torch.uint8), s[mine].view(torch.int32)


def problem(cfg: FusedMoEConfig, tokens: int, device: str = "cpu", align: int = 128) -> Problem:
    inputs = make_inputs(Case("gathered", cfg, {"num_tokens": tokens, "dtype": cfg.dtype, "load": "uneven"}),
                         torch.device(device), 5)  # fmt: skip
    ids = inputs["topk_ids"]
    ids[1::7] = -1
    ids[-1, 0] = cfg.num_experts
    codes, scale = quantize(inputs["x"], None, cfg.all_experts, "fp8_block", cfg.scale_fmt == "ue8m0")
    rows = place(ids, cfg.num_experts, cfg.num_shared, align=align, tokens_of_rows=True)
    return Problem(cfg, ids, codes, scale, inputs["w13"], inputs["w13_scale"], rows)


# One group of columns and more, of tokens and of experts; shared experts and none; more pairs than are placed at once.
CASES = {
    "two_groups": (SMALL, 9),
    "one_group": (replace(SMALL, intermediate_size=128, num_shared=0), 23),
    "three_groups_ue8m0": (replace(SMALL, intermediate_size=384, hidden_size=128, scale_fmt="ue8m0"), 5),
    "many_pairs": (replace(SMALL, hidden_size=128, num_experts=3), 1100),
}


@pytest.mark.parametrize("m", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_rows_have_the_bits_of_pairs_and_the_rest_is_left(name: str, m: int) -> None:
    given = problem(*CASES[name])
    a, s = given.gathered(Plan(m, 4, 2))
    wanted = given.by_pairs()
    assert torch.equal(a[given.used], wanted[0]) and torch.equal(s[given.used], wanted[1])
    assert bool(wanted[0].any()) and given.rows.align == 128
    rest = torch.ones(given.rows.total, dtype=torch.bool)
    rest[given.used] = False
    with poisoned_memory():
        memory = torch.empty_like(given.codes[:1])
    # A whole row of what was there before it was written.
    assert bool(rest.any()) and bool((a[rest] == memory.view(torch.uint8)[0, 0]).all())


def test_blocks_begin_where_experts_do() -> None:
    given = problem(SMALL, 5, align=64)
    with pytest.raises(AssertionError):
        given.gathered(Plan(128, 4, 2))


def test_the_rule_is_the_first_candidate() -> None:
    first, *others = DeepGemmGatheredFusedMoE.candidates(V3, 4096)
    assert DeepGemmGatheredFusedMoE(V3).numbers == list(first.values()) == list(PLANS[0])
    assert others and all(each["m"] in (64, 128) for each in others)


def test_a_config_names_the_whole_plan() -> None:
    with pytest.raises(ValueError, match=r"config of the deep_gemm_gathered backend.*m, warps, stages"):
        DeepGemmGatheredFusedMoE(V3, {"m": 128})
    with pytest.raises(ValueError, match=r"config\['m'\] is 48; accepted: .*64.*128"):
        DeepGemmGatheredFusedMoE(V3, {"m": 48, "warps": 4, "stages": 4})


MUTANTS = {
    "up with the scales of gate": ("+ I // _GROUP * GROUPS", "+ 0"),
    "up is gate": ("gate_rows + I * D", "gate_rows"),
    "rows of the tokens' order": ("x_ptr + token[:, None]", "x_ptr + tl.where(real, row, 0)[:, None] % 9"),
    "a group's scale for all": ("x_scale + group)", "x_scale)"),
    "one expert for all": ("axis=0) - 1", "axis=0) * 0"),
    "the last row is left out": ("real = row < end", "real = row < end - 1"),
    "codes of the first group": ("* I + group * _GROUP + column", "* I + column"),
}


@lru_cache
def sound() -> tuple[Problem, Outputs]:
    given = problem(SMALL, 9)
    return given, given.gathered(Plan(64, 4, 2))


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name: str, tmp_path: Path) -> None:
    given, wanted = sound()
    mutant = planted(gathered_gate_up, tmp_path, MUTANTS[name])
    found = given.gathered(Plan(64, 4, 2), mutant)
    assert not all(torch.equal(*both) for both in zip(found, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [16, 300, 4096])
@pytest.mark.parametrize("cfg", [replace(V3, num_experts=32), replace(V3, hidden_size=2048, intermediate_size=768)],
                         ids=["wide", "deep"])  # fmt: skip
def test_gpu_rows_have_the_bits_of_pairs_over_replays(cfg: FusedMoEConfig, tokens: int) -> None:
    given, other = problem(cfg, tokens, "cuda"), problem(cfg, 33, "cuda")
    wanted = given.by_pairs()
    for plan in PLANS:
        a, s = given.gathered(plan)
        assert torch.equal(a[given.used], wanted[0]) and torch.equal(s[given.used], wanted[1]), plan
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = given.gathered(plan)
        for replay in range(100):
            again[0].fill_(255)
            graph.replay()
            assert torch.equal(again[0][given.used], wanted[0]), (plan, replay)
            if replay == 50:
                other.gathered(plan)
    assert cdiv(given.rows.total, 128) * 128 == given.rows.total
