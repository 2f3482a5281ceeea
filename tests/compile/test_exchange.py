"""Exchanges of FP8 rows compiled for sm_90: how scales of rows beside each other leave."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fastlayers import env
from fastlayers.comm import triton_exchange
from fastlayers.testing.compile_check import KernelBuild, compiled_for

sys.path.insert(0, str(Path(__file__).parent))
from recorded import builds

pytestmark = [pytest.mark.compile, pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")]
BESIDE = [
    build for build in ([] if env.triton_interpret() else builds())
    if build.kernel.__module__ == triton_exchange.__name__ and build.constexprs.get("BESIDE", 1) > 1
]  # fmt: skip
LAYOUT = r" = #ttg\.blocked<{sizePerThread = \[\d+, (\d+)\], threadsPerWarp = \[\d+, (\d+)\].*order = \[(\d)"


@pytest.mark.parametrize("build", BESIDE, ids=lambda build: build.name)
def test_scales_of_a_column_leave_side_by_side(build: KernelBuild) -> None:
    """Neighbours in a column are neighbouring lanes, whose four bytes each cross as one packet of sixteen."""
    code, many = compiled_for(build).asm["ttgir"], build.constexprs["BESIDE"]
    names = set(re.findall(rf"tt\.store .*tensor<\d+x{many}x!tt\.ptr<f32>, #(\w+)>", code))
    assert names
    for name in names:
        found = re.search(f"#{name}{LAYOUT}", code)
        assert found is not None
        values, lanes, quickest = map(int, found.groups())
        assert (quickest == 1 and values * lanes == many) == build.constexprs["COLUMNS"], found.group()


def test_both_orders_are_among_them() -> None:
    assert {build.constexprs["COLUMNS"] for build in BESIDE} == {True, False}
