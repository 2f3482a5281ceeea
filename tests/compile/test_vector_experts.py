"""One token's experts compiled for sm_90: what is read early, what L2 gives up first, what fits at once."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from fastlayers import env
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.launch_config import LaunchConfig, candidates
from fastlayers.moe.fused_moe.triton.backend import TritonFusedMoE
from fastlayers.testing.compile_check import KernelBuild, compile_for, compiled_for

sys.path.insert(0, str(Path(__file__).parent))
from recorded import QWEN3_EXPERTS, V3_EXPERTS, _at, _run, recording

pytestmark = [pytest.mark.compile, pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")]
# Loads of 16 bytes: of weights, which L2 gives up first, and all others.
EVICTED = r"ld\.global\.L1::evict_first\.L2::cache_hint\.v4"
OTHERS = r"ld\.global\.v4"


FP8_PLANS = [plan for config in candidates(V3_EXPERTS, 1) if (plan := LaunchConfig.of(config)).first.m == 0]


@cache
def launches(cfg: FusedMoEConfig = QWEN3_EXPERTS, plan: LaunchConfig | None = None) -> dict[str, KernelBuild]:
    """Return what one token launches of Qwen3-30B-A3B or another: by a plan, the rule, or the first FP8 vectors."""
    plan = FP8_PLANS[0] if plan is None and cfg is V3_EXPERTS else plan  # which no rule takes
    with recording() as recorder:
        for case in _at("fused_moe", (1,), cfg):
            _run("fused_moe", TritonFusedMoE(case.cfg, None if plan is None else plan.config()), case)
    return {build.kernel.__name__: build for build in recorder.builds.values()}


def asked(name: str, pattern: str, cfg: FusedMoEConfig = QWEN3_EXPERTS) -> tuple[int, int]:
    """Return how many loads of a kind a thread makes before the wait, and in all."""
    before, wait, after = compiled_for(launches(cfg)[name]).asm["ptx"].partition("griddepcontrol.wait")
    assert wait and "st.global" not in before
    return len(re.findall(pattern, before)), len(re.findall(pattern, before + after))


def test_weights_are_evicted_first_and_rows_of_tokens_are_not() -> None:
    assert sorted(launches()) == ["vector_in_kernel", "vector_out_kernel"]
    # Two tiles, each of two gate rows and two up rows, behind the wait; of the token as many tiles of one row.
    assert asked("vector_in_kernel", EVICTED) == (0, 8) and asked("vector_in_kernel", OTHERS) == (0, 2)
    # Three tiles of two outputs times eight pairs, 256 columns each, the first of them before the wait.
    assert asked("vector_out_kernel", EVICTED) == (4, 12) and asked("vector_out_kernel", OTHERS) == (0, 12)


def test_all_programs_of_the_second_product_fit_at_once() -> None:
    report, build = compile_for(launches()["vector_out_kernel"]), launches()["vector_out_kernel"]
    threads = 32 * build.num_warps
    programs = QWEN3_EXPERTS.hidden_size // build.constexprs["BLOCK_N"]
    assert report.spills == 0
    assert 132 * (65536 // (threads * -(-report.registers // 8) * 8)) >= programs


def test_fp8_weights_and_rows_lie_in_registers_alike() -> None:
    first, second = "vector_in_fp8_kernel", "vector_out_fp8_kernel"
    assert sorted(launches(V3_EXPERTS)) == [first, second]
    # Eight rows, each three tiles of 16 bytes a thread and one of 8, all behind the wait.
    assert asked(first, EVICTED, V3_EXPERTS) == (0, 24)
    assert asked(first, EVICTED.replace("v4", "v2"), V3_EXPERTS) == (0, 8)
    # Sixteen tiles of eight pairs and two of one pair's eight outputs, all before the wait.
    assert asked(second, EVICTED, V3_EXPERTS) == (18, 18)
    # Nothing but sums and ids goes through shared memory: its barriers do not grow with the tiles.
    for name, barriers in ((first, 4), (second, 6)):
        assert compiled_for(launches(V3_EXPERTS)[name]).asm["ptx"].count("bar.sync") == barriers


@pytest.mark.parametrize("plan", FP8_PLANS, ids=lambda plan: "-".join(map(str, plan.numbers()[4:])))
def test_no_fp8_vectors_spill(plan: LaunchConfig) -> None:
    for build in launches(V3_EXPERTS, plan).values():
        assert compile_for(build).spills == 0, build.kernel.__name__


def test_all_programs_of_both_fp8_products_fit_at_once() -> None:
    found = launches(V3_EXPERTS)
    rows = V3_EXPERTS.pairs_per_token * V3_EXPERTS.intermediate_size, V3_EXPERTS.hidden_size
    for (_, build), outputs in zip(sorted(found.items()), rows, strict=True):
        threads, registers = 32 * build.num_warps, -(-compile_for(build).registers // 8) * 8
        assert 132 * (65536 // (threads * registers)) >= outputs // build.constexprs["BLOCK_N"]


NIBBLES = replace(QWEN3_EXPERTS, quant="w4a16", group_size=128, zero_point=True)
PACKED_PLANS = [plan for config in candidates(NIBBLES, 1) if (plan := LaunchConfig.of(config)).first.m == 0]


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("plan", PACKED_PLANS, ids=lambda plan: "-".join(map(str, plan.numbers()[4:])))
def test_no_vectors_of_nibbles_spill(plan: LaunchConfig, group: int) -> None:
    found = launches(replace(NIBBLES, group_size=group), plan)
    assert sorted(found) == ["packed_vector_in_kernel", "packed_vector_out_kernel"]
    for build in found.values():
        assert compile_for(build).spills == 0, build.kernel.__name__


def test_all_programs_of_both_products_of_nibbles_fit_at_once() -> None:
    found = launches(NIBBLES, PACKED_PLANS[0])
    rows = NIBBLES.pairs_per_token * NIBBLES.intermediate_size, NIBBLES.hidden_size
    for (_, build), outputs in zip(sorted(found.items()), rows, strict=True):
        threads, registers = 32 * build.num_warps, -(-compile_for(build).registers // 8) * 8
        assert 132 * (65536 // (threads * registers)) >= outputs // build.constexprs["BLOCK_N"]


def test_codes_come_sixteen_bytes_at_a_time_and_zero_points_once_a_thread_and_row() -> None:
    """Codes of the second product all before the wait; its inner rows behind it."""
    codes, zeros = {}, {}
    for name, build in launches(NIBBLES, PACKED_PLANS[0]).items():
        before, wait, after = compiled_for(build).asm["ptx"].partition("griddepcontrol.wait")
        assert wait and "st.global" not in before
        codes[name] = len(re.findall(EVICTED, before)), len(re.findall(EVICTED, before + after))
        zeros[name] = (before + after).count("ld.global.b16")
    # Eight rows of one tile; two outputs of three tiles each, whose groups are as many threads apart.
    assert codes == {"packed_vector_in_kernel": (0, 8), "packed_vector_out_kernel": (6, 6)}
    assert zeros == {"packed_vector_in_kernel": 8, "packed_vector_out_kernel": 6}
