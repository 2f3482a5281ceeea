"""Every Triton kernel × shipped configuration compiles for sm_90 without spills or too much shared memory."""

from __future__ import annotations

import pytest

from fastlayers import env
from fastlayers.testing.compile_check import SHARED_MEMORY_LIMIT, KernelBuild, builds, compile_for

pytestmark = [pytest.mark.compile, pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")]


def _builds() -> list[KernelBuild]:
    return [] if env.triton_interpret() else list(builds())


@pytest.mark.parametrize("build", _builds(), ids=lambda build: build.name)
def test_compiles_without_spills(build: KernelBuild) -> None:
    report = compile_for(build)
    assert report.spills == 0, report
    assert report.shared <= SHARED_MEMORY_LIMIT, report
