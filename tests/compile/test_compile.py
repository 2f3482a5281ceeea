"""Every Triton kernel, as the layers launch it at real shapes, compiles for sm_90 without spills or too much memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fastlayers import env
from fastlayers.testing.compile_check import SHARED_MEMORY_LIMIT, KernelBuild, compile_for, compiled_for

sys.path.insert(0, str(Path(__file__).parent))
from recorded import builds, kernels

pytestmark = [pytest.mark.compile, pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")]
BUILDS = [] if env.triton_interpret() else builds()
# Bytes a thread that ptxas spills although registers are left, or (exchange) with the 128 that 16 warps leave.
KNOWN_SPILLS = {
    "_exchange_kernel-exchange-8-scattergather": 20,
    "_linear_kernel-linear-N=24576,K=4096,bfloat16_bfloat16,T=2": 8,
    "_linear_kernel-linear-N=24576,K=1536,float16_float16,T=2": 8,
}


def test_no_kernel_is_left_out() -> None:
    launched = {(build.kernel.__module__, build.kernel.__name__) for build in BUILDS}
    assert kernels() - launched == set()


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
