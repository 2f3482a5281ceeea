"""4-bit weights in short groups compiled for sm_90: a tile of several runs is taken apart in registers."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

from fastlayers import env
from fastlayers.linear.weight_only.layer import WeightOnlyLinearConfig
from fastlayers.linear.weight_only.triton import TritonWeightOnlyLinear, candidates
from fastlayers.testing.compile_check import KernelBuild, compile_for, compiled_for

sys.path.insert(0, str(Path(__file__).parent))
from recorded import _at, _run, recording

pytestmark = [pytest.mark.compile, pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")]
# Whose x may be in shared memory twice an SM, with the tiles of codes.
HALF_OF_SHARED = 227 * 1024 // 2


@cache
def launches(rows: int, group: int, zero: bool) -> list[KernelBuild]:
    """Return what a tuner tries of tiles of several runs; of splits one each."""
    cfg = WeightOnlyLinearConfig(12288, 4096, group_size=group, zero_point=zero)
    with recording() as recorder:
        for config in candidates(cfg, rows):
            if config.get("SPLITS") == 2:
                recorder.label = "-".join(map(str, config.values()))
                for case in _at("weight_only_linear", (rows,), cfg):
                    _run("weight_only_linear", TritonWeightOnlyLinear(cfg, config), case)
    return [build for build in recorder.builds.values() if build.kernel.__name__ == "short_groups_kernel"]


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(("group", "zero"), [(32, False), (32, True), (64, True)])
def test_no_tile_of_several_runs_spills(rows: int, group: int, zero: bool) -> None:
    found = launches(rows, group, zero)
    assert {(each.constexprs["BLOCK_N"], each.constexprs["RUN"] << each.constexprs["LEVELS"]) for each in found} == {
        (64, 128), (128, 128), (64, 256)
    }  # fmt: skip
    for build in found:
        report = compile_for(build)
        assert report.spills == 0, report
        assert rows > 32 or report.shared <= HALF_OF_SHARED, report


def test_a_tile_lent_by_groups_of_128_does_not_spill() -> None:
    cfg = WeightOnlyLinearConfig(12288, 4096, group_size=32, zero_point=True)
    lent = next(
        config for config in candidates(WeightOnlyLinearConfig(12288, 4096), 64) if config.get("BLOCK_N") == 128
    )  # fmt: skip
    with recording() as recorder:
        for case in _at("weight_only_linear", (64,), cfg):
            _run("weight_only_linear", TritonWeightOnlyLinear(cfg, lent), case)
    (build,) = (each for each in recorder.builds.values() if each.kernel.__name__ == "short_groups_kernel")
    assert lent["num_warps"] == 4 and compile_for(build).spills == 0


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("zero", [False, True])
def test_codes_stay_in_registers_and_scales_come_where_they_are_wanted(rows: int, zero: bool) -> None:
    for build in launches(rows, 32, zero):
        compiled = compiled_for(build)
        loop = compiled.asm["ttgir"].partition("scf.for")[2].partition("scf.yield")[0]
        runs = 1 << build.constexprs["LEVELS"]
        # One copy of codes, one of x for each run; each run's product.
        assert loop.count("ttg.async_copy_global_to_local") == 1 + runs
        assert loop.count("ttng.warp_group_dot ") == runs and loop.count("ttg.local_load") == 1
        assert "ttg.convert_layout" not in loop and "ttg.local_store" not in loop and "ttg.local_alloc" not in loop
        # Codes' numbers are those of two halves each, four bytes at a time.
        codes = build.constexprs["BLOCK_N"] * (build.constexprs["RUN"] * runs // 2) // (32 * build.num_warps)
        assert compiled.asm["ptx"].count("prmt.b32 p,") == codes // 4
