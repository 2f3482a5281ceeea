"""One token's 16-bit experts compiled for sm_90: what is read early, what L2 gives up first, what fits at once."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest

from fastlayers import env
from fastlayers.moe.fused_moe.triton.backend import TritonFusedMoE
from fastlayers.testing.compile_check import KernelBuild, compile_for, compiled_for

sys.path.insert(0, str(Path(__file__).parent))
from recorded import QWEN3_EXPERTS, _at, _run, recording

pytestmark = [pytest.mark.compile, pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")]
# Loads of 16 bytes: of weights, which L2 gives up first, and all others.
EVICTED = r"ld\.global\.L1::evict_first\.L2::cache_hint\.v4"
OTHERS = r"ld\.global\.v4"


@cache
def launches() -> dict[str, KernelBuild]:
    """Return what one token of Qwen3-30B-A3B launches."""
    with recording() as recorder:
        for case in _at("fused_moe", (1,), QWEN3_EXPERTS):
            _run("fused_moe", TritonFusedMoE(case.cfg), case)
    return {build.kernel.__name__: build for build in recorder.builds.values()}


def asked(name: str, pattern: str) -> tuple[int, int]:
    """Return how many loads of a kind a thread makes before the wait, and in all."""
    before, wait, after = compiled_for(launches()[name]).asm["ptx"].partition("griddepcontrol.wait")
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
