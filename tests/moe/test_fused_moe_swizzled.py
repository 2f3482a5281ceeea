"""MXFP4 experts over weights in the matrix units' order: the order itself, every plan, limits of scales, refusals."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from fastlayers import env
from fastlayers.device import as_device
from fastlayers.errors import ArgumentError
from fastlayers.linear.dense.layer import LinearConfig
from fastlayers.linear.dense.triton import TritonLinear
from fastlayers.moe.fused_moe import cases
from fastlayers.moe.fused_moe.launch_config import LaunchConfig, Tile
from fastlayers.moe.fused_moe.layer import FUSED_MOE, FusedMoEConfig
from fastlayers.moe.fused_moe.reference import ReferenceFusedMoE
from fastlayers.moe.fused_moe.swizzle import swizzle_codes, swizzle_scales
from fastlayers.moe.fused_moe.triton.backend import TritonFusedMoE
from fastlayers.moe.fused_moe.triton.mxfp4 import hopper as mxfp4_hopper
from fastlayers.moe.fused_moe.triton.mxfp4 import mma as mxfp4_mma
from fastlayers.moe.fused_moe.triton.mxfp4 import plans as mxfp4_plans
from fastlayers.moe.fused_moe.triton.mxfp4 import rows as mxfp4_rows
from fastlayers.moe.fused_moe.triton.mxfp4.hopper import TritonSwizzledFusedMoE
from fastlayers.moe.fused_moe.triton.mxfp4.plans import HopperLaunchConfig
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.registry.spec import Case
from fastlayers.testing.parity import check_parity, compare

sys.path.insert(0, str(Path(__file__).parents[1]))
from planted_faults import planted

interpreted = pytest.mark.skipif(not env.triton_interpret(), reason="needs TRITON_INTERPRET=1 without a GPU")
OSS = FusedMoEConfig(
    128, 192, 4, 2, quant="mxfp4", activation="swiglu_oai", bias=True, interleaved=True, dtype=torch.bfloat16
)
GPT_OSS = replace(OSS, hidden_size=2880, intermediate_size=2880, num_experts=32, top_k=4)
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


def test_a_table_of_other_plans_is_named() -> None:
    """Of a table made by another version neither a key that is unknown nor one that lacks goes unnoticed."""
    row = HopperLaunchConfig(8, 2, 2, 3, 2, 4, 5).config()
    before = {name: number for name, number in row.items() if name not in ("held", "wgmma")}  # tables from before
    assert TritonSwizzledFusedMoE(OSS, before).plan == HopperLaunchConfig(**row)
    for wrong in (row | {"stages": 3}, {name: number for name, number in row.items() if name != "r1"}):
        with pytest.raises(ArgumentError, match=r"triton_swizzled is .*accepted: the keys tokens, r1"):
            TritonSwizzledFusedMoE(OSS, wrong)
    plain = LaunchConfig(Tile(16, 64, 64, 4, 3), Tile(16, 64, 64, 4, 3))
    assert TritonFusedMoE(replace(OSS, quant="none"), plain.config()).plan == plain
    with pytest.raises(ArgumentError, match="fused_moe: config of the Triton backend is"):
        TritonFusedMoE(replace(OSS, quant="none"), plain.config() | {"SPLITS": 2})
    with pytest.raises(ArgumentError, match=r"linear: config of the Triton backend is .*'BLOCKS': 2"):
        TritonLinear(LinearConfig(64, 64), {"VECTOR": 0, "BLOCKS": 2})


@interpreted
def test_parity() -> None:
    assert check_parity("fused_moe", "triton_swizzled", "mxfp4_bf16", "cpu")


PLANS = [
    HopperLaunchConfig(0, 1, 4, 4, 2, 2, 3),
    HopperLaunchConfig(8, 2, 1, 3, 1, 8, 4),
    HopperLaunchConfig(16, 4, 2, 1, 2, 4, 2),
    HopperLaunchConfig(32, 1, 2, 2, 1, 4, 1),
    HopperLaunchConfig(0, 1, 4, 4, 2, 2, 4, 3),
]


@interpreted
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_plan_gives_the_same(plan: HopperLaunchConfig) -> None:
    # Up to 20 pairs an expert: several blocks, where there are; 96 columns end inside a step, 160 rows inside a tile.
    case = replace(cases.SPEC.case("mxfp4_bf16"), cfg=replace(OSS, hidden_size=96, intermediate_size=160))
    tokens = 23 if plan.tokens else 5
    case = replace(case, shape={"num_tokens": tokens, "dtype": torch.bfloat16, "load": "filtered"})
    inputs = cases.make_inputs(case, torch.device("cpu"), 3)
    oracle, ours = ReferenceFusedMoE(case.cfg), TritonSwizzledFusedMoE(case.cfg, plan.config())
    wanted = cases.run(oracle, inputs, cases.prepare(oracle, inputs))["y"]
    compare("y", cases.run(ours, inputs, cases.prepare(ours, inputs))["y"], wanted)


def few_tokens(plan: HopperLaunchConfig) -> torch.Tensor:
    """Return three tokens' result, some pairs dropped, over columns that end inside a step and rows inside a tile."""
    case = replace(cases.SPEC.case("mxfp4_bf16"), cfg=replace(OSS, hidden_size=96, intermediate_size=160))
    case = replace(case, shape={"num_tokens": 3, "dtype": torch.bfloat16, "load": "filtered"})
    inputs = cases.make_inputs(case, torch.device("cpu"), 7)
    ours = TritonSwizzledFusedMoE(case.cfg, plan.config())
    y: torch.Tensor = cases.run(ours, inputs, cases.prepare(ours, inputs))["y"]
    return y


# Two steps a warp in both products.
PLAIN = HopperLaunchConfig(0, 1, 1, 3, 1, 2, 3)


@lru_cache
def plain() -> torch.Tensor:
    return few_tokens(PLAIN)


ALL_STEPS = mxfp4_plans.ALL_STEPS
# Of the first product, of the second and of both; one step ahead, two and all.
HELD = [(1, 2), (2, ALL_STEPS), (3, 1)]
HELD += [pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 1), (2, 1), (3, 2), (3, ALL_STEPS))]


@interpreted
@pytest.mark.parametrize(("held", "ahead"), HELD)
def test_codes_in_registers_give_the_same_bits(held: int, ahead: int) -> None:
    assert torch.equal(few_tokens(replace(PLAIN, held=held, s1=ahead, s2=ahead)), plain())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2])
def test_codes_in_registers_give_the_same_bits_gpu(tokens: int) -> None:
    """Of GPT-OSS's experts, by every plan with codes in registers; eager, and in 20 replays of a graph."""
    if (why := ROW.why_not(GPT_OSS, as_device("cuda"))) is not None:
        pytest.skip(why)
    shape = {"num_tokens": tokens, "dtype": torch.bfloat16, "load": "uneven"}
    inputs = cases.make_inputs(Case("few", GPT_OSS, shape), torch.device("cuda"), 7)
    inputs["topk_ids"][0, 1] = -1
    usual = replace(mxfp4_plans.HELD[0], held=0)
    packed = cases.prepare(TritonSwizzledFusedMoE(GPT_OSS), inputs)
    wanted = cases.run(TritonSwizzledFusedMoE(GPT_OSS, usual.config()), inputs, packed)["y"]
    assert bool(wanted.isfinite().all()) and bool(wanted.any())
    for plan in (mxfp4_plans.plan_for(tokens, 2880, 2880), *mxfp4_plans.HELD[:2]):
        ours = TritonSwizzledFusedMoE(GPT_OSS, plan.config())
        assert plan.held == 3 and torch.equal(cases.run(ours, inputs, packed)["y"], wanted), plan
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = cases.run(ours, inputs, packed)["y"]
        for replay in range(20):
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, wanted), (plan, replay)


def test_steps_ahead_are_at_most_all() -> None:
    one, two = (mxfp4_plans.plan_for(tokens, 2880, 2880) for tokens in (1, 2))
    assert one == replace(two, s1=6, s2=6) and one.held == two.held == 3
    assert [mxfp4_plans.steps_ahead(2880, 4, plan.s1) for plan in (one, two)] == [6, 12]
    assert mxfp4_plans.steps_ahead(1440, 4, one.s2) == mxfp4_plans.steps_ahead(1440, 4, two.s2) == 6
    assert mxfp4_plans.steps_ahead(mxfp4_plans.MAX_HELD, 4, two.s1) == mxfp4_plans.ALL_STEPS


MUTANTS = {
    "first step again": ("mma", "held[i], held_scales[i]", "held[0], held_scales[i]"),
    "first scales again": ("mma", "held[i], held_scales[i]", "held[i], held_scales[0]"),
    "codes a turn late": ("mma", "step + AHEAD * W", "step"),
    "unweighted": ("hopper", "(sums + bias) * weight", "sums + bias"),
    "no bias": ("hopper", "(sums + bias) * weight", "sums * weight"),
    "every token the first": ("hopper", "tl.int32) + pair // PER_TOKEN", "tl.int32)"),
    # The first pair is dropped: by its expert nothing would be written, and unwritten memory may hold what is right.
    "expert of the second pair": ("hopper", "tl.load(ids_ptr + pair)", "tl.load(ids_ptr + 1)"),
}


@interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_in_held_kernels_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, before, after = MUTANTS[name]
    wanted = plain()
    names = (
        ("fastlayers.moe.fused_moe.triton.mxfp4.mma import", "mutant_mma import"),
        ('experts_operator("fused_moe_swizzled"', f'experts_operator("mutant_{abs(hash(name))}"'),
    )
    for each, more in ((mxfp4_mma, ()), (mxfp4_hopper, names)):
        changes = [(before, after)] if each.__name__.endswith(module) else []
        made = planted(each, tmp_path, *changes, *more)
        monkeypatch.setitem(sys.modules, made.__name__, made)
    for kernel in ("held_gate_up_kernel", "held_down_kernel"):
        monkeypatch.setattr(mxfp4_hopper, kernel, getattr(made, kernel))
    mxfp4_hopper._launches.cache_clear()
    try:
        assert not torch.equal(few_tokens(replace(PLAIN, held=3, s1=1, s2=1)), wanted), f"{name} changes nothing"
    finally:
        mxfp4_hopper._launches.cache_clear()


# Blocks of 8: of one expert four groups of eight have pairs, of others three, two and one.
BLOCKS = HopperLaunchConfig(8, 1, 2, 1, 1, 2, 1)


def many_tokens(plan: HopperLaunchConfig) -> torch.Tensor:
    """Return thirty tokens' result, all of them by the first expert, over columns that end inside a step."""
    case = replace(cases.SPEC.case("mxfp4_bf16"), cfg=replace(OSS, hidden_size=96, intermediate_size=64))
    case = replace(case, shape={"num_tokens": 30, "dtype": torch.bfloat16, "load": "uneven"})
    inputs = cases.make_inputs(case, torch.device("cpu"), 7)
    second = torch.tensor([1] * 18 + [2] * 9 + [3, -1, 3], dtype=torch.int32)
    inputs["topk_ids"] = torch.stack([torch.zeros_like(second), second], 1)
    ours = TritonSwizzledFusedMoE(case.cfg, plan.config())
    y: torch.Tensor = cases.run(ours, inputs, cases.prepare(ours, inputs))["y"]
    return y


@lru_cache
def in_blocks() -> torch.Tensor:
    return many_tokens(BLOCKS)


@interpreted
def test_blocks_of_any_size_give_the_same_bits() -> None:
    wanted = in_blocks()
    for plan in (HopperLaunchConfig(32, 1, 4, 2, 2, 1, 2), HopperLaunchConfig(16, 2, 2, 1, 1, 8, 3)):
        assert torch.equal(many_tokens(plan), wanted), plan


BLOCK_MUTANTS = {
    "first tile's codes": ("held[i * R + r], held_scales", "held[i * R], held_scales"),
    "scales of a step before": ("scales + step * 64, inside", "scales + (step - step % 2) * 64, inside"),
    "codes a step late": ("step + AHEAD, STEPS", "step + AHEAD - 1, STEPS"),
    "first group again": ("(block * STEPS + step) * 256", "step * 256"),
    "third group left out": ("elif count <= 16:", "elif count <= 24:"),
    "fourth group left out": ("elif count <= 24:", "elif count <= 32:"),
    "unweighted": ("(sums[r * BLOCKS + i] + bias) * weight", "sums[r * BLOCKS + i] + bias"),
    "no bias": ("(sums[r * BLOCKS + i] + bias) * weight", "sums[r * BLOCKS + i] * weight"),
    "two slots in one place": ("slot % 8 * 32", "slot % 4 * 32"),
    "tokens of the pairs' numbers": ("(pair // PER_TOKEN).to", "(pair // PER_TOKEN // 2).to"),
    "empty groups gathered, full ones not": ("slot // 8 * 8) >= num_pairs", "slot // 8 * 8 + 7) >= num_pairs"),
}


# The others are planted where there is time.
QUICK = ("codes a step late", "first group again", "third group left out", "unweighted", "two slots in one place")


@interpreted
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BLOCK_MUTANTS]
)
def test_planted_bug_in_blocks_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = planted(mxfp4_rows, tmp_path, BLOCK_MUTANTS[name])
    wanted = in_blocks()
    for kernel in ("gather_kernel", "rows_gate_up_kernel", "rows_down_kernel"):
        monkeypatch.setattr(mxfp4_hopper, kernel, getattr(mutant, kernel))
    mxfp4_hopper._launches.cache_clear()
    try:
        found = many_tokens(HopperLaunchConfig(32, 2, 1, 1, 2, 1, 1))
        assert not torch.equal(found, wanted), f"{name} changes nothing"
    finally:
        mxfp4_hopper._launches.cache_clear()


def test_candidates_are_plans() -> None:
    for tokens in (1, 4, 16, 64, 512):
        found = TritonSwizzledFusedMoE.candidates(OSS, tokens)
        assert 0 < len(found) <= 40 and len({str(config) for config in found}) == len(found)
        assert all(TritonSwizzledFusedMoE(OSS, config).plan is not None for config in found)
        assert found[0] == mxfp4_plans.plan_for(tokens, 128, 192).config()


def test_codes_of_long_rows_are_not_held() -> None:
    assert mxfp4_plans.plan_for(1, mxfp4_plans.MAX_HELD, 192).held == 3
    for tokens in (1, 4):
        assert mxfp4_plans.plan_for(tokens, 128, mxfp4_plans.MAX_HELD + 1).held == 0
        assert not any(plan.held for plan in mxfp4_plans.plans(tokens, 128, mxfp4_plans.MAX_HELD + 1))


def fourth(word: int) -> int:
    """Return the fourth codes of both halves as bf16 has them, bit by bit as the head of swizzle.py says."""
    return sum(
        (word >> at & 1) << to
        for h in (0, 16)
        for at, to in ((14 + h, 15 + h), (11 + h, 8 + h), (10 + h, 7 + h), (13 + h, 6 + h))
    )


def test_fourth_code_by_one_product() -> None:
    text = mxfp4_mma.CODES[0].value
    masked, factor, taken, sign = (int(number, 16) for number in re.search(
        r"and\.b32 u, \$4, (0x\w+);\nmul\.hi\.u32 u, u, (0x\w+);\nshl\.b32 v, \$4, 1;\nand\.b32 v, v, (0x\w+);\n"
        r"lop3\.b32 a3, u, (0x\w+), v, 0xEA;", text,
    ).group(1, 2, 4, 3))  # fmt: skip
    for half in range(1 << 16):
        for word in (half, half << 16, half | 0xFFFF0000, half << 16 | 0xFFFF):
            assert ((word & masked) * factor >> 32) & taken | word << 1 & sign == fourth(word), hex(word)


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
