"""Every Triton kernel, as the layers launch it at real shapes, compiles for sm_90 without spills or too much memory."""

from __future__ import annotations

import re
import subprocess
import sys
import traceback
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from fastlayers import env
from fastlayers.attention.mla import gluon as mla_gluon
from fastlayers.attention.mla import gluon_columns as mla_columns
from fastlayers.attention.mla import triton_reduce as mla_reduce
from fastlayers.attention.mla import wgmma as mla_wgmma
from fastlayers.device import Device
from fastlayers.linear.dense import triton_wgmma as linear_wgmma
from fastlayers.linear.dense.layer import LinearConfig
from fastlayers.moe.fused_moe.triton.mxfp4 import plans as mxfp4_plans
from fastlayers.moe.fused_moe.triton.mxfp4 import wgmma as mxfp4_wgmma
from fastlayers.registry import LAYERS, registry
from fastlayers.registry.spec import spec_of
from fastlayers.runtime.launch import fewer_stages
from fastlayers.testing.compile_check import SHARED_MEMORY_LIMIT, KernelBuild, compile_for, compiled_for

sys.path.insert(0, str(Path(__file__).parent))
from recorded import GPT_OSS, QWEN3_EXPERTS, V3_EXPERTS, builds, kernels, launched_without_kernel
from recorded import cases as recorded_cases

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.compile, pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")]
BUILDS = [] if env.triton_interpret() else builds()
# Bytes a thread that ptxas spills although registers are left, or (exchange) with the 128 that 16 warps leave.
KNOWN_SPILLS = {
    "_exchange_kernel-exchange-8-scattergather": 100,
    "_exchange_kernel-exchange-8-norm-gather": 80,
    "_exchange_kernel-exchange-8-gather-fp8": 12,
    "_decode_kernel-mla-deepseek_tp8_decode-tree-256": 4,
    "_linear_kernel-linear-N=24576,K=4096,bfloat16_bfloat16,T=2": 8,
    "_linear_kernel-linear-N=24576,K=1536,float16_float16,T=2": 8,
    # Once a program, outside of its loops: its threads have 128 registers each, given out among four kinds of work.
    "heads_kernel-mla-deepseek_e4m3-heads-128-64-64-fp16": 8,
    "heads_kernel-mla-deepseek_e4m3-heads-128-1-1-fp16": 8,
    "heads_kernel-mla-deepseek_e4m3-heads-100-64-512-bf16": 4,
    "heads_kernel-mla-deepseek_tp8_e4m3-heads-32-16-1000-bf16": 12,
    "heads_kernel-mla-deepseek_tp8_e4m3-heads-32-16-1000-fp16": 12,
}


def test_no_kernel_is_left_out() -> None:
    launched = {(build.kernel.__module__, build.kernel.__name__) for build in BUILDS}
    assert kernels() - launched == set() and len(kernels()) > 100


def test_no_kernel_is_launched_that_is_not_recorded() -> None:
    sources = [path.read_text() for path in (ROOT / "src" / "fastlayers").rglob("*.py")]
    assert len(sources) > 300 and launched_without_kernel(sources) == set()
    planted = "@triton.jit\ndef _bare(x): pass\n@kernel\ndef _known(x): pass\n_bare[(1,)](x)\n_known[(1,)](x)\n"
    assert launched_without_kernel([*sources, planted]) == {"_bare"}


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.name)
def test_compiles_without_spills(build: KernelBuild) -> None:
    report = compile_for(build)
    assert report.spills == KNOWN_SPILLS.get(build.name, 0), report
    assert report.shared <= SHARED_MEMORY_LIMIT, report


# Kernels that round each product before they add it, as the operations do that they stand for.
ROUNDING = ("_turn_kernel",)


@pytest.mark.parametrize("name", ROUNDING)
def test_what_rounds_each_product_has_no_fused_multiplication(name: str) -> None:
    of_this = [build for build in BUILDS if build.kernel.__name__ == name]
    assert len(of_this) > 2
    for build in of_this:
        ptx = compiled_for(build).asm["ptx"]
        assert "mul.rn" in ptx and "fma." not in ptx, build.name


E4M3_LATENTS = [
    build for build in BUILDS
    if build.kernel.__name__ == "_decode_kernel" and ".mla." in build.kernel.__module__
    and build.constexprs["BLOCK_M"] == 16 and "fp8e4nv" in str(build.signature)
]  # fmt: skip


@pytest.mark.parametrize("build", E4M3_LATENTS, ids=lambda build: build.name)
def test_e4m3_latents_are_loaded_ahead_and_converted_once(build: KernelBuild) -> None:
    found = compiled_for(build)
    sizes, threads = build.constexprs, 32 * build.num_warps
    pairs = sizes["BLOCK_N"] * (sizes["RANK"] + sizes["ROPE"]) // 2
    assert found.asm["ptx"].count("cvt.rn.f16x2.e4m3x2") == pairs // threads
    loop = found.asm["ttgir"].partition("scf.for")[2]
    assert "async_copy_global_to_local" in loop and "tt.load %latent" not in loop


COLUMNS = [build for build in BUILDS if build.kernel.__module__ in (mla_columns.__name__, mla_wgmma.__name__)]


@pytest.mark.parametrize("build", COLUMNS, ids=lambda build: build.name)
def test_cached_rows_are_left_operands_where_copies_put_them(build: KernelBuild) -> None:
    """Three products of a tile, two tiles in shared memory, and nothing of a tile in registers."""
    found = compiled_for(build)
    loop = found.asm["ttgir"].partition("scf.for")[2]
    assert loop.count("ttng.warp_group_dot ") == 3 and "async_copy_global_to_local" in loop
    assert "ttg.local_load" not in loop and "tt.load %latent" not in loop
    tiles = 2 * 2 * 64 * 576
    assert tiles < found.metadata.shared <= tiles + 24 * 1024
    # Whether the next tile is asked for while this one is multiplied.
    ahead = loop.index("async_copy_global_to_local") < loop.index("warp_group_dot_wait")
    assert ahead == (build.kernel.__module__ == mla_columns.__name__)
    ptx = found.asm["ptx"]
    wait = ptx.index("griddepcontrol.wait")
    assert "ld.global" not in ptx[:wait] and ptx.count("griddepcontrol.wait") == 1


PARTS = [build for build in BUILDS if build.kernel.__module__ == mla_reduce.__name__]


@pytest.mark.parametrize("build", PARTS, ids=lambda build: build.name)
def test_parts_are_all_asked_for_before_any_is_awaited(build: KernelBuild, tmp_path: Path) -> None:
    """In machine code: ptxas puts sums over what came first between loads, unless a branch keeps them apart."""
    binary = tmp_path / "parts.cubin"
    binary.write_bytes(compiled_for(build).asm["cubin"])
    disassembler = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(binary)]
    code = subprocess.run(disassembler, check=True, capture_output=True, text=True).stdout
    sizes, threads = build.constexprs, 32 * build.num_warps
    before = code[: code.index("SHFL")]
    assert before.count("LDG.E.128") == sizes["BLOCK"] * sizes["COLUMNS"] // 4 // threads
    assert before.index("ACQBULK") < before.index("LDG") and "BRA" in before[before.rindex("LDG") :]


HEADS = [build for build in BUILDS if build.kernel.__module__ == mla_gluon.__name__]


@pytest.mark.parametrize("build", HEADS, ids=lambda build: build.name)
def test_warps_have_tasks_of_their_own(build: KernelBuild) -> None:
    ptx = compiled_for(build).asm["ptx"]
    # Each code is converted once, two at a time; sixteen bytes of them come at a time.
    assert ptx.count("cvt.rn.f16x2.e4m3x2") == 64 * 576 // 2 // 128
    assert ptx.count("ld.global.v4.b32") >= 2 * 64 * 576 // 16 // 128
    assert ".reqntid 512" in ptx and "wgmma.mma_async" in ptx
    assert {*re.findall(r"setmaxnreg.*u32 \t(\d+)", ptx)} == {"24", "72", "120", "160", "232"}
    # Whoever leaves early tells the other groups so, and all read behind the wait.
    wait = ptx.index("griddepcontrol.wait")
    assert "ld.global" not in ptx[:wait] and ptx.count("griddepcontrol.wait") == 1


@pytest.mark.parametrize(
    "build", [build for build in BUILDS if ".comm." in build.kernel.__module__], ids=lambda b: b.name
)
def test_how_ranks_see_each_others_stores(build: KernelBuild) -> None:
    """Waits are compiled to loads that no register and no cache of this GPU answers."""
    ptx = compiled_for(build).asm["ptx"]
    assert "multimem" not in ptx  # NVLink multicast
    if build.kernel.__name__ == "_push_sum_kernel":  # words are their own flags, sixteen bytes at a time
        assert ptx.count("ld.volatile.global.v4") > 0 and ".acquire" not in ptx and ".release" not in ptx
        return
    assert "atom.global.sys.release.exch.b32" in ptx and "ld.global.sys.acquire.b32" in ptx
    # What other ranks sum up is read as it is in memory.
    assert ("ld.volatile.global.v4" in ptx) == (build.constexprs.get("SCATTER", "combine" in build.kernel.__name__))


# Of each kernel one launch, for the other cards. What cannot be compiled there is refused by the rows that launch it:
# e4m3 below sm_89 (by its type in the signature, or inside), MXFP4 below sm_90.
OF_EACH = {(build.kernel.__module__, build.kernel.__name__): build for build in reversed(BUILDS)}
E4M3_INSIDE = {"_nvfp4_quant_kernel"}
# More shared memory than cards of 99 KiB have, with a single buffer, too: MLA's row refuses there, in words.
REFUSED = {"_prefill_kernel-mla-deepseek_prefill"}


def compiles_on(build: KernelBuild, capability: int) -> bool:
    """Return whether a card's Triton is expected to compile the launch."""
    e4m3 = "*fp8e4nv" in build.signature.values() or build.kernel.__name__ in E4M3_INSIDE
    return capability >= (89 if e4m3 else 80)


def needs_sm_90(build: KernelBuild) -> bool:
    """Return whether a launch decodes MXFP4 codes, by instructions of sm_90."""
    return ".mxfp4." in build.kernel.__module__


def needs_wgmma(build: KernelBuild) -> bool:
    """Return whether a launch multiplies by ``wgmma``, which sm_90 alone has; its plan or row says so elsewhere."""
    return build.kernel.__module__ in (
        linear_wgmma.__name__,
        mxfp4_wgmma.__name__,
        mla_gluon.__name__,
        mla_wgmma.__name__,
        mla_columns.__name__,
    )


V3_PACKAGES = ("deep_gemm", "deep_gemm_masked", "deep_gemm_gathered", "sgl_kernel")
# Which rows make those launches that no case of a layer names.
OTHERS = {
    r"linear-wgmma-.*": ("linear", "wgmma"),
    r"gqa-(?P<case>\w+)-tree-\d": ("gqa", "triton"),
    r"mla-(?P<case>\w+)-tree-\d+": ("mla", "triton"),
    r"mla-(?P<case>\w+)-heads-.*": ("mla", "gluon"),
    r"mla-(?P<case>\w+)-columns-.*": ("mla", "wgmma"),
    r"mla-queries": ("mla", "flashmla"),
    r"rms_norm-codes-.*": ("fp8_linear", "triton"),  # which takes the codes, and without which nobody asks for them
    r"rms_norm-splits-.*": ("rms_norm", "triton"),
    r"fused_moe-DeepGemmFusedMoE-.*": ("fused_moe", "deep_gemm"),
    r"fused_moe-DeepGemmMaskedFusedMoE-.*": ("fused_moe", "deep_gemm_masked"),
    r"fused_moe-DeepGemmGatheredFusedMoE-.*": ("fused_moe", "deep_gemm_gathered"),
    r"fused_moe-vectors-(?P<case>.+,fp8_block,.+)": ("fused_moe", "triton"),
    r"fused_moe-vectors-.+,w4a16,.+": ("fused_moe", "triton"),
    r"fused_moe-rows": ("fused_moe", "sgl_kernel"),
    r"\d+-[\d_]+": ("fused_moe", "triton_swizzled"),
}


@cache
def configurations() -> dict[str, tuple[str, str, Any]]:
    """Return by label which row makes a launch, and for which configuration."""
    found = {f"{layer}-{case.name}": (layer, "triton", case.cfg) for layer in LAYERS for case in recorded_cases(layer)}
    known = {f"{layer}-{case.name}": case.cfg for layer in LAYERS for case in spec_of(layer).cases}
    known |= {label: cfg for label, (_, _, cfg) in found.items()}
    usual = {
        ("mla", "flashmla"): replace(known["mla-deepseek_tp8_decode"], kv_dtype=torch.float8_e4m3fn, fp8_math=True),
        ("linear", "wgmma"): LinearConfig(4096, 6144),
        ("fused_moe", "triton_swizzled"): GPT_OSS,
        ("fused_moe", "triton"): replace(QWEN3_EXPERTS, quant="w4a16", group_size=128, zero_point=True),
        ("fp8_linear", "triton"): spec_of("fp8_linear").cases[0].cfg,
        ("rms_norm", "triton"): spec_of("rms_norm").cases[0].cfg,
    }  # fmt: skip
    usual |= {("fused_moe", name): V3_EXPERTS for name in V3_PACKAGES}
    for label in {build.name.removeprefix(f"{build.kernel.__name__}-") for build in BUILDS} - found.keys():
        for pattern, row in OTHERS.items():
            if (match := re.fullmatch(pattern, label)) is not None:
                case = match.groupdict().get("case")
                found[label] = (*row, usual[row] if case is None else known[f"{row[0]}-{case}"])
    return found


@pytest.mark.parametrize("capability", [80, 89])
def test_what_a_card_cannot_compile_is_refused_there_in_words(capability: int) -> None:
    card = Device("cuda", "a card", (capability // 10, capability % 10))
    layers = set()
    for build in BUILDS:
        only_there = needs_sm_90(build) or needs_wgmma(build)
        if compiles_on(build, capability) and not (only_there and capability < 90):
            continue
        layer, name, cfg = configurations()[build.name.removeprefix(f"{build.kernel.__name__}-")]
        assert f"this is sm_{capability}" in (registry(layer).named(name).refusal(cfg, card) or ""), build.name
        layers.add(layer)
    wanted = {"fused_moe", "linear", "mla"} if capability == 89 else {
        "silu_mul_quant", "group_quant", "mxfp8_quant", "nvfp4_quant", "linear", "fp8_linear", "fp8_scaled_linear",
        "bmm", "mla", "gqa", "fused_moe", "kv_write", "mla_kv_write", "rotary_kv_write",
    }  # fmt: skip
    assert layers == wanted


@pytest.mark.parametrize("capability", [80, 89, 100, 120])
@pytest.mark.parametrize("build", OF_EACH.values(), ids=lambda build: build.name)
def test_compiles_for_other_cards(build: KernelBuild, capability: int) -> None:
    if needs_sm_90(build) and capability < 90:
        pytest.skip("MXFP4 codes are decoded by instructions of sm_90; both rows refuse this card")
    if needs_wgmma(build):
        card = Device("cuda", "a card", (capability // 10, capability % 10))
        if ".mla." in build.kernel.__module__:
            cfg = spec_of("mla").case("deepseek_tp8_decode").cfg
            assert registry("mla").named("wgmma").refusal(cfg, card) == f"needs sm_90, this is sm_{capability}"
            cfg = spec_of("mla").case("deepseek_e4m3").cfg
            assert registry("mla").named("gluon").refusal(cfg, card) == f"needs sm_90, this is sm_{capability}"
            return
        if ".linear." in build.kernel.__module__:
            refused = registry("linear").named("wgmma").refusal(LinearConfig(4096, 6144), card)
            assert refused == f"needs sm_90, this is sm_{capability}"
            return
        why = mxfp4_plans.no_wgmma(GPT_OSS.hidden_size, GPT_OSS.intermediate_size, card)
        assert why == f"wgmma needs sm_90, which alone has it; this is sm_{capability}"
        return
    constants = dict(build.constexprs) | ({"PDL": False} if "PDL" in build.constexprs and capability < 90 else {})
    build = replace(build, constexprs=constants)
    if not compiles_on(build, capability):
        with pytest.raises(Exception) as refused:
            compiled_for(build, capability)
        assert "fp8e4nv not supported" in "".join(traceback.format_exception(refused.value))
        return
    compiled: Any = compiled_for(build, capability)
    card = Device("cuda", "a card", (capability // 10, capability % 10))
    # A launch that needs more begins again with a buffer less, until it fits: see Kernel._through_triton.
    while compiled.metadata.shared > card.shared_memory:
        fewer = fewer_stages({**build.constexprs, "num_stages": build.num_stages})
        if fewer is None:
            break
        stages = fewer.pop("num_stages")
        build = replace(build, num_stages=stages, constexprs={**build.constexprs, **fewer})
        compiled = compiled_for(build, capability)
    fits = compiled.metadata.shared <= card.shared_memory
    assert fits or build.name in REFUSED, compiled.metadata.shared
    if not fits:
        row, case = registry("mla").named("triton"), spec_of("mla").case("deepseek_prefill")
        assert "KiB of shared memory" in str(row.why_not(case.cfg, card))


# Of weights in 12 bits the shapes of Qwen3-8B and GPT-OSS, with few outliers.
BF12 = [
    build for build in BUILDS
    if re.search(r"-bf12-(6144x4096-4|4096x12288-8|5120x2880-4)-bf16$", build.name)
]  # fmt: skip


@pytest.mark.parametrize("capability", [80, 89, 100, 120])
@pytest.mark.parametrize("build", BF12, ids=lambda build: build.name)
def test_bf12_vectors_spill_on_no_card(build: KernelBuild, capability: int) -> None:
    assert len(BF12) == 3
    build = replace(build, constexprs=build.constexprs | {"PDL": build.constexprs["PDL"] and capability >= 90})
    report = compile_for(build, capability)
    assert report.spills == 0 and report.shared <= 1024, report
