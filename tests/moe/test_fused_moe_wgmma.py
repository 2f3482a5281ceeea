"""MXFP4 experts by wgmma: a lane decodes the left operand, who is refused, the twin's bits, launches, and a GPU's."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fastlayers import env
from fastlayers.device import Device, as_device
from fastlayers.explain import backends
from fastlayers.moe.align.triton import align
from fastlayers.moe.fused_moe import cases
from fastlayers.moe.fused_moe.layer import FUSED_MOE, FusedMoEConfig
from fastlayers.moe.fused_moe.reference import ReferenceFusedMoE
from fastlayers.moe.fused_moe.swizzle import SwizzledWeights, swizzle_codes, swizzle_scales
from fastlayers.moe.fused_moe.triton.mxfp4 import hopper as mxfp4_hopper
from fastlayers.moe.fused_moe.triton.mxfp4 import mma as mxfp4_mma
from fastlayers.moe.fused_moe.triton.mxfp4 import plans as mxfp4_plans
from fastlayers.moe.fused_moe.triton.mxfp4 import wgmma as mxfp4_wgmma
from fastlayers.moe.fused_moe.triton.mxfp4.hopper import TritonSwizzledFusedMoE
from fastlayers.moe.fused_moe.triton.mxfp4.plans import DIRECT, GATHERED, HopperLaunchConfig, no_wgmma, plan_for, plans
from fastlayers.quant.mxfp4.codes import dequantize_mxfp4
from fastlayers.runtime.precompile import cover
from fastlayers.testing.parity import compare

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "compile"))
from planted_faults import planted
from recorded import recording

interpreted = pytest.mark.skipif(not env.triton_interpret(), reason="needs TRITON_INTERPRET=1 without a GPU")
compiles = pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")
SMALL = FusedMoEConfig(
    320, 320, 4, 2, quant="mxfp4", activation="swiglu_oai", bias=True, interleaved=True, dtype=torch.bfloat16
)
GPT_OSS = replace(SMALL, hidden_size=2880, intermediate_size=2880, num_experts=32, top_k=4)
WIDE = HopperLaunchConfig(16, 2, 4, 5, 2, 4, 5, 0, DIRECT)

# ---- decoding --------------------------------------------------------------------------------------------------

MASK = 0xFFFFFFFF


def halves(word: torch.Tensor) -> torch.Tensor:
    """Return the two bf16 values of words."""
    both = torch.stack((word & 0xFFFF, word >> 16), -1)
    return (both << 16).to(torch.int32).view(torch.float32)


def run(text: str, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the few instructions that decoding has on words held as int64."""
    held = dict(given)

    def value(name: str) -> torch.Tensor | int:
        return held[name] if name in held else int(name, 0)

    for line in re.findall(r"[^;{}]+(?:\{[^}]*\}[^;{}]*)*;", text[1:-1]):
        name, _, rest = line.strip().rstrip(";").partition(" ")
        if name.startswith(".reg"):
            continue
        if name == "mov.b32" and rest.startswith("{"):
            parts, source = re.fullmatch(r"\{(.*)\}, (\w+)", rest).groups()
            low, high = parts.split(", ")
            held |= {low: held[source] & 0xFFFF, high: held[source] >> 16}
            continue
        if name == "mov.b32":
            to, low, high = re.fullmatch(r"(\w+), \{(\w+), (\w+)\}", rest).groups()
            held[to] = held[low] | held[high] << 16
            continue
        to, *names = rest.split(", ")
        a, b, *c = (value(word) for word in names)
        if name == "and.b32":
            found = a & b
        elif name == "shl.b32":
            found = a << b & MASK
        elif name == "mul.hi.u32":
            found = a * b >> 32
        elif name == "mad.lo.u32":
            found = a * b + c[0] & MASK
        elif name == "lop3.b32":
            assert c[1] == 0xEA  # (a & b) | c
            found = a & b | c[0]
        elif name == "prmt.b32":
            bytes_ = [a >> 8 * i & 255 for i in range(4)] + [torch.zeros_like(a)] * 4
            found = sum(bytes_[c[0] >> 4 * i & 15] << 8 * i for i in range(4))
        else:
            assert name == "mul.bf16x2"
            product = (halves(a) * halves(b)).bfloat16().view(torch.int16).long() & 0xFFFF
            found = product[..., 0] | product[..., 1] << 16
        held[to] = found
    return held


def decoded(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the left operand that instructions make of 64 rows and columns, and what it should be."""
    blocks = torch.randint(0, 256, (1, 64, 2, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = torch.randint(110, 130, (1, 64, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    # As the kernel finds them: (w f), o, (t q); of the scales' bytes (s, b) one word for each row g = 2·f + o.
    codes = swizzle_codes(blocks).view(torch.int32)[0].view(4, 4, -1)[:, :, :32].long() & MASK
    words = codes.reshape(4, 4, 2, 4, 4)
    swizzled = swizzle_scales(scales).view(torch.int32)[0, :4].long() & MASK
    scale = swizzled.view(4, 2, 4, 2)[:, 0].reshape(4, 4, 2, 1)
    given = {f"${16 + q}": words[..., q] for q in range(4)} | {"$20": scale.expand(4, 4, 2, 4)}
    held = run(text, given)
    # What Triton makes of 16 registers: eight results of four values, two in a register.
    found = torch.stack([torch.cat([halves(held[f"${2 * k + i}"]) for i in (0, 1)], -1) for k in range(8)], -1)
    assert found.shape == (4, 4, 2, 4, 4, 8)
    both = found.reshape(4, 4, 2, 4, 2, 2, 2, 2, 2).permute(0, 1, 2, 3, 4, 5, 8, 7, 6)  # k is p h b; joined: b h p
    rows = both.permute(0, 6, 1, 2, 4, 8, 7, 3, 5).reshape(64, 64).double() * 2.0**mxfp4_mma._FOLD
    return rows, dequantize_mxfp4(blocks, scales)[0].double()


def test_a_lane_decodes_the_left_operand() -> None:
    rows, wanted = decoded(mxfp4_wgmma.DECODE.value)
    assert torch.equal(rows, wanted)


DECODE_MUTANTS = {
    "second code one bit off": ("shl.b32 u, $17, 3;", "shl.b32 u, $17, 4;"),
    "third code for the second": ("shl.b32 u, $18, 3;", "shl.b32 u, $18, 6;"),
    "fourth codes without signs": ("and.b32 v, v, 0x80008000;", "and.b32 v, v, 0x00000000;"),
    "scales of the other row": ("mul.bf16x2 $2, $2, m1;", "mul.bf16x2 $2, $2, m0;"),
    "scales of the first group for both": ("0x4342;", "0x4140;"),
    "words in turns": ("and.b32 $1, $18, 0x81C081C0;", "and.b32 $1, $16, 0x81C081C0;"),
}


@pytest.mark.parametrize("name", DECODE_MUTANTS)
def test_planted_bug_in_decoding_shows(name: str) -> None:
    before, after = DECODE_MUTANTS[name]
    text = mxfp4_wgmma.DECODE.value
    assert before in text, f"the instructions no longer have {before!r}"
    rows, wanted = decoded(text.replace(before, after))
    assert not torch.equal(rows, wanted), f"{name} changes nothing"


def test_both_kinds_of_products_decode_by_the_same_instructions() -> None:
    """But for the registers' names: those of every word, in order."""

    def plain(text: str) -> list[str]:
        kept = [line for line in text.splitlines() if not line.startswith((".reg", "mma", "mov.f32", "{", "}"))]
        return [re.sub(r"\$\d+|\ba\d\b", "_", line) for line in kept]

    wanted = plain(mxfp4_wgmma.DECODE.value)
    assert len(wanted) == 2 * 5 + 4 * 14
    assert all(plain(code.value) == wanted for code in mxfp4_mma.CODES)


# ---- plans -----------------------------------------------------------------------------------------------------


def test_the_rule_takes_wgmma_from_forty_tokens_on() -> None:
    kinds = {
        tokens: plan_for(tokens, 2880, 2880) for tokens in (1, 16, 32, 39, 40, 64, 96, 97, 128, 192, 193, 256, 4096)
    }
    assert {tokens: (plan.tokens, plan.wgmma) for tokens, plan in kinds.items()} == {
        1: (0, 0), 16: (8, 0), 32: (8, 0), 39: (8, 0), 40: (16, DIRECT), 64: (16, DIRECT), 96: (16, DIRECT),
        97: (32, DIRECT), 128: (32, DIRECT), 192: (32, DIRECT), 193: (64, GATHERED), 256: (64, GATHERED),
        4096: (64, GATHERED),
    }  # fmt: skip
    # Every plan of the rule is one that a table may hold.
    assert all(HopperLaunchConfig.of(plan.config()) == plan for plan in kinds.values())
    assert all(HopperLaunchConfig(*plan.numbers()) == plan for plan in kinds.values())


def test_a_warm_up_meets_every_plan() -> None:
    for sizes in ((2880, 2880), (2880, 1440)):
        met = {plan_for(tokens, *sizes) for tokens in cover(4096)}
        assert met == {plan_for(tokens, *sizes) for tokens in range(1, 4097)}


def test_other_shapes_keep_the_kernels_without_it() -> None:
    for hidden, inner in ((2880, 1440), (1440, 2880), (2880, 2944), (128, 192)):
        assert "multiples of 320 columns, 5 steps of 64, not" in str(no_wgmma(hidden, inner))
        for tokens in (40, 64, 128, 256, 4096):
            assert plan_for(tokens, hidden, inner).wgmma == 0
            assert not any(plan.wgmma for plan in plans(tokens, hidden, inner))
    assert no_wgmma(320, 640) is None


@pytest.mark.parametrize(("tokens", "count"), [(32, 0), (39, 0), (40, 4), (64, 4), (128, 4), (256, 4), (4096, 4)])
def test_the_tuner_is_offered_a_few(tokens: int, count: int) -> None:
    found = [HopperLaunchConfig.of(config) for config in TritonSwizzledFusedMoE.candidates(GPT_OSS, tokens)]
    mine = [plan for plan in found if plan.wgmma]
    assert len(found) == len(set(found)) <= 14 and len(mine) == count
    assert (count > 0) == (found[0] in mine)
    if count:
        assert {plan.wgmma for plan in mine} == {GATHERED, DIRECT} and {plan.tokens for plan in mine} <= {16, 32, 64}
    if count and tokens < mxfp4_plans.MANY:
        assert {(plan.r1, plan.w1) for plan in mine} == {(2, 4), (1, 8)} and len(found) > count


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_cards_are_refused_in_words(capability: tuple[int, int]) -> None:
    card = Device("cuda", "a card", capability)
    words = f"wgmma needs sm_90, which alone has it; this is {card.sm}"
    assert no_wgmma(2880, 2880, card) == words
    row = FUSED_MOE.named("triton_swizzled")
    if capability < (9, 0):  # the backend is not taken at all
        assert f"this is {card.sm}" in str(row.refuse(GPT_OSS, card))
    else:
        assert row.refuse(GPT_OSS, card) is None
    assert row.about is not None and row.about(GPT_OSS, card) == f"mma.sync for any number: {words}"


def test_a_hopper_card_takes_it_and_says_so() -> None:
    row = FUSED_MOE.named("triton_swizzled")
    for name in ("H20", "H100", "H200"):
        assert no_wgmma(2880, 2880, as_device(name)) is None
        assert row.about is not None and row.about(GPT_OSS, as_device(name)).startswith("wgmma from 40 tokens on")
    tp2 = replace(GPT_OSS, intermediate_size=1440)
    assert row.about is not None and "not 2880 and 1440" in row.about(tp2, as_device("H200"))
    # Without a configuration whatever case comes first stands for all.
    said = {each.name: each.reason for each in backends("fused_moe", "H200")}["triton_swizzled"]
    assert said.endswith("wgmma from 40 tokens on, on sm_90 and of multiples of 320 columns; else mma.sync")


def test_a_plan_runs_as_its_twin_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    h200, b200 = as_device("H200"), as_device("B200")
    monkeypatch.setattr(env, "triton_interpret", lambda: False)
    assert WIDE.here(2880, 2880, h200) == WIDE
    for twin in (WIDE.here(2880, 2880, b200), WIDE.here(2880, 1440, h200)):
        assert twin == WIDE.twin() and not twin.wgmma and twin.tokens == WIDE.tokens
    monkeypatch.setattr(env, "triton_interpret", lambda: True)
    assert WIDE.here(2880, 2880, h200) == WIDE.twin()
    assert replace(WIDE, tokens=64).twin().tokens == 32
    rows = plan_for(16, 2880, 2880)
    assert rows.twin() == rows == rows.here(2880, 2880, b200)


# ---- the interpreter -------------------------------------------------------------------------------------------


def drawn(cfg: FusedMoEConfig, tokens: int, device: str = "cpu") -> dict[str, Any]:
    """Return inputs of uneven experts, of which one has no token, some pairs dropped."""
    case = replace(cases.SPEC.case("mxfp4_bf16"), cfg=cfg)
    case = replace(case, shape={"num_tokens": tokens, "dtype": torch.bfloat16, "load": "filtered"})
    return cases.make_inputs(case, torch.device(device), 5)


@interpreted
@pytest.mark.parametrize("sizes", [pytest.param((320, 320), marks=pytest.mark.slow), (96, 160)], ids=str)
def test_the_twin_is_right(sizes: tuple[int, int]) -> None:
    """By the reference; with the bits of the kernels without wgmma, whatever the plan; of lent plans, too."""
    cfg = replace(SMALL, hidden_size=sizes[0], intermediate_size=sizes[1])
    inputs = drawn(cfg, 21)
    oracle = ReferenceFusedMoE(cfg)
    wanted = cases.run(oracle, inputs, cases.prepare(oracle, inputs))["y"]
    found = []
    for plan in (WIDE, replace(WIDE, tokens=64, wgmma=GATHERED), HopperLaunchConfig(16, 2, 4, 3, 2, 4, 3)):
        ours = TritonSwizzledFusedMoE(cfg, plan.config())
        found.append(cases.run(ours, inputs, cases.prepare(ours, inputs))["y"])
    compare("y", found[0], wanted)
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])


@interpreted
def test_the_twin_is_of_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a plan that runs as pairs by themselves, or in blocks of another size, is not what is promised."""
    cfg = replace(SMALL, hidden_size=64, intermediate_size=64)
    inputs, blocks = drawn(cfg, 21), []
    through = mxfp4_hopper._blocks

    def watched(*given: Any) -> Any:
        blocks.append(next(each for each in given if isinstance(each, HopperLaunchConfig)))
        return through(*given)

    monkeypatch.setattr(mxfp4_hopper, "_blocks", watched)
    mxfp4_hopper._launches.cache_clear()
    for size in (16, 32):
        ours = TritonSwizzledFusedMoE(cfg, replace(WIDE, tokens=size).config())
        cases.run(ours, inputs, cases.prepare(ours, inputs))
    mxfp4_hopper._launches.cache_clear()
    assert [(plan.tokens, plan.wgmma) for plan in blocks] == [(16, 0), (32, 0)]


def slots_of(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that a module's kernel writes for 13 tokens, some pairs dropped, and those that it should."""
    ids = torch.randint(-1, 4, (13, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
    whole = torch.randn(13, 120, generator=torch.Generator().manual_seed(4)).bfloat16()
    x = whole[:, 10:106]  # rows apart
    order, _, total = align(ids, 4, 16)
    order[int(total) :] = 0  # what lies behind the end is anything
    out = torch.full((order.numel(), 96), 7.0, dtype=torch.bfloat16)
    wanted = out.clone()
    for slot in range(int(total)):
        if order[slot] < 26:
            wanted[slot] = x[int(order[slot]) // 2]
    module.slots_kernel[(order.numel(),)](
        x, order, total, out, x.stride(0), 96, 26, PER_TOKEN=2, BLOCK=128, num_warps=4, PDL=False
    )
    return out, wanted


SLOT_MUTANTS = {
    "pairs for tokens": ("(pair // PER_TOKEN).to", "(pair % 13).to"),
    "rows of the output one after another": ("* x_stride + column", "* width + column"),
    "behind the end": ("if slot >= tl.load(total_ptr):", "if slot < 0:"),
    "empty slots, too": ("if pair >= num_pairs:", "if pair > num_pairs:"),
    "a slot late": ("slot.to(tl.int64) * width", "(slot.to(tl.int64) ^ 1) * width"),
}


@interpreted
def test_rows_are_gathered() -> None:
    out, wanted = slots_of(mxfp4_wgmma)
    assert torch.equal(out, wanted)


@interpreted
@pytest.mark.parametrize("name", SLOT_MUTANTS)
def test_planted_bug_in_gathering_shows(name: str, tmp_path: Path) -> None:
    out, wanted = slots_of(planted(mxfp4_wgmma, tmp_path, SLOT_MUTANTS[name]))
    assert not torch.equal(out, wanted), f"{name} changes nothing"


# ---- launches --------------------------------------------------------------------------------------------------


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the plans as they run there; nothing that is launched may run."""
    for cached in (mxfp4_hopper._plan_of, mxfp4_hopper._launches):
        cached.cache_clear()
    monkeypatch.setattr(env, "triton_interpret", lambda: False)
    yield
    for cached in (mxfp4_hopper._plan_of, mxfp4_hopper._launches):
        cached.cache_clear()


def without_numbers() -> SwizzledWeights:
    """Return weights of GPT-OSS as packed: 32 experts, rows by 64 (scales: 256), columns by 128 (64)."""
    codes = [torch.empty(32, rows, 5888, dtype=torch.uint8).mT for rows in (1440, 720)]
    scales = [torch.empty(32, rows, 2880, dtype=torch.uint8).mT for rows in (184, 96)]
    return SwizzledWeights(*codes, *scales, torch.empty(32, 5760), torch.empty(32, 2880))


@pytest.mark.parametrize(
    ("kind", "lies", "gathers"),
    [
        (DIRECT, "one after another", False),
        (DIRECT, "two bytes on", True),
        (DIRECT, "apart", True),
        (GATHERED, "one after another", True),
    ],
)
def test_who_gathers_the_rows(kind: int, lies: str, gathers: bool, as_on_hopper: None) -> None:
    """What copies 16 bytes at a time takes rows that begin there; others are gathered by a launch of their own."""
    memory = torch.empty(64 * 2896 + 64, dtype=torch.bfloat16)
    x = memory[: 64 * 2880].view(64, 2880)
    if lies == "two bytes on":
        x = memory[1 : 64 * 2880 + 1].view(64, 2880)
    elif lies == "apart":
        x = memory[: 64 * 2896].view(64, 2896)[:, :2880]
    ours = TritonSwizzledFusedMoE(GPT_OSS, replace(WIDE, wgmma=kind).config())
    with recording() as launched:
        ours(x, torch.empty(64, 4), torch.zeros(64, 4, dtype=torch.int32), without_numbers())
    builds = {build.kernel.__name__: build for build in launched.builds.values()}
    names = {"_few_kernel", "wgmma_gate_up_kernel", "wgmma_down_kernel", "reduce_kernel"}
    assert builds.keys() == names | ({"slots_kernel"} if gathers else set())
    assert builds["wgmma_gate_up_kernel"].constexprs["PER_TOKEN"] == (0 if gathers else 4)
    assert builds["wgmma_gate_up_kernel"].signature["ws_ptr"] == "*i32"


class NoDriver:
    """Stands for a GPU of sm_90 where only compiling asks for one."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.mark.compile
@compiles
@pytest.mark.parametrize(
    "plan", [replace(WIDE, tokens=32), HopperLaunchConfig(32, 1, 8, 5, 1, 8, 5, 0, GATHERED)], ids=str
)
def test_launches_bind(plan: HopperLaunchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Triton's own binder: grids, warps and registers of what the plan launches for 128 tokens."""
    launched: dict[str, tuple[Any, ...]] = {}
    through_triton = JITFunction.run

    def run_only_compiles(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        made = through_triton(self, *arguments, grid=grid, warmup=True, **constants)
        launched[self.__name__] = (grid, made.metadata.num_warps, made.metadata.maxnreg)

    monkeypatch.setattr(JITFunction, "run", run_only_compiles)
    monkeypatch.setattr(driver, "_active", NoDriver())
    monkeypatch.setattr("fastlayers.runtime.launch.driver.device", lambda: 0)
    x = torch.empty(128, 2880, dtype=torch.bfloat16)
    y = TritonSwizzledFusedMoE(GPT_OSS, plan.config())(
        x, torch.empty(128, 4), torch.zeros(128, 4, dtype=torch.int32), without_numbers()
    )
    assert y.shape == x.shape
    # 32 blocks that 32 experts open, and 15 that 480 further pairs may fill.
    height, options = 16 * plan.r1 * plan.w1, (plan.w1, mxfp4_plans.REGISTERS.get(plan.w1))
    assert launched.pop("wgmma_gate_up_kernel") == ((47 * -(-5760 // height),), *options)
    assert launched.pop("wgmma_down_kernel") == ((47 * -(-2880 // height),), *options)
    assert launched.keys() == {"_few_kernel", "reduce_kernel"} | ({"slots_kernel"} if plan.wgmma == GATHERED else set())


# ---- a GPU -----------------------------------------------------------------------------------------------------


def routed(tokens: int, how: str) -> torch.Tensor:
    """Return experts of GPT-OSS: all tokens to the same four, to one alone, or uneven with experts that get none."""
    if how == "four":
        return torch.tensor([[7, 0, 31, 12]], dtype=torch.int32).expand(tokens, 4).contiguous()
    if how == "one":
        ids = torch.full((tokens, 4), -1, dtype=torch.int32)
        ids[:, 2] = 17
        return ids
    share = torch.linspace(2.0, 0.1, 32)
    share[torch.arange(1, 32, 5)] = 0.0
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.multinomial(share.expand(tokens, -1), 4, generator=generator).int()
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    return ids


@lru_cache(maxsize=1)
def on_the_gpu() -> tuple[dict[str, Any], Any]:
    """Return inputs of 256 tokens and packed weights."""
    inputs = drawn(GPT_OSS, 256, "cuda")
    return inputs, cases.prepare(TritonSwizzledFusedMoE(GPT_OSS), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["uneven", "four", "one"])
@pytest.mark.parametrize("tokens", [40, 64, 100, 128, 256])
def test_bits_are_those_of_the_kernels_without_wgmma(tokens: int, how: str) -> None:
    """Of every plan that the tuner is offered: eager, and in 20 replays of a graph over memory that held no numbers."""
    if no_wgmma(2880, 2880, as_device("cuda")) is not None:
        pytest.skip("wgmma is an instruction of sm_90")
    inputs, packed = on_the_gpu()
    x, weights, ids = inputs["x"][:tokens], inputs["topk_weights"][:tokens], routed(tokens, how).cuda()
    mine = [plan for plan in plans(tokens, 2880, 2880) if plan.wgmma]
    assert len(mine) == 4
    wanted = TritonSwizzledFusedMoE(GPT_OSS, mine[0].twin().config())(x, weights, ids, packed)
    assert bool(wanted.isfinite().all()) and bool(wanted.any())
    for plan in mine:
        ours = TritonSwizzledFusedMoE(GPT_OSS, plan.config())
        # What is freed here is what the call's memory holds.
        torch.full((64 << 20,), float("nan"), device="cuda")
        assert torch.equal(ours(x, weights, ids, packed), wanted), plan
        shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
        assert torch.equal(ours(shifted, weights, ids, packed), wanted), plan
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ours(x, weights, ids, packed)
        for replay in range(20):
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, wanted), (plan, replay)
