"""4-bit weights in groups compiled for sm_90: a tile of several runs is taken apart in registers, and how x comes."""

from __future__ import annotations

import re
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
    """Return what a tuner tries of tiles of whole runs; of splits, whose programs are alike, one each."""
    cfg = WeightOnlyLinearConfig(12288, 4096, group_size=group, zero_point=zero)
    splits = 8 if group == 128 else 2
    with recording() as recorder:
        for config in candidates(cfg, rows):
            if config.get("SPLITS") == splits:
                recorder.label = "-".join(map(str, config.values()))
                for case in _at("weight_only_linear", (rows,), cfg):
                    _run("weight_only_linear", TritonWeightOnlyLinear(cfg, config), case)
    return [build for build in recorder.builds.values() if build.kernel.__name__ == "short_groups_kernel"]


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize(("group", "zero"), [(32, False), (32, True), (64, True), (128, False), (128, True)])
def test_no_tile_of_whole_runs_spills(rows: int, group: int, zero: bool) -> None:
    found = launches(rows, group, zero)
    tiles = {(each.constexprs["BLOCK_N"], each.constexprs["RUN"] << each.constexprs["LEVELS"]) for each in found}
    assert tiles == {(64, 128), (128, 128)} | ({(64, 256)} if group < 128 else set())
    assert {each.constexprs["CACHED"] for each in found} == ({False, True} if group == 128 else {False})
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


@pytest.mark.parametrize("zero", [False, True])
def test_x_comes_in_whole_lines_by_the_cache_that_was_chosen(zero: bool) -> None:
    for build in launches(16, 128, zero):
        compiled = compiled_for(build)
        # The first-level cache keeps what comes 8 bytes at a time; of codes some do.
        copies = re.findall(r"cp\.async\.(c[ag])\.shared\.global .*, (0x\w+),", compiled.asm["ptx"])
        cached = build.constexprs["CACHED"]
        assert (("ca", "0x8") if cached else ("cg", "0x10")) in copies
        # Lanes lie side by side along a row, whose 256 bytes come in one instruction.
        ttgir = compiled.asm["ttgir"]
        (name,) = set(re.findall(r"async_copy_global_to_local .* tensor<128x16x!tt\.ptr<bf16>, #(\w+)>", ttgir))
        layout = re.search(rf"^#{name} = .*sizePerThread = \[(\d+), 1\], threadsPerWarp = \[(\d+), ", ttgir, re.M)
        assert layout is not None and layout.groups() == (("4", "32") if cached else ("8", "16"))


@pytest.mark.parametrize(("group", "depth"), [(128, 0), (128, 128), (32, 128)])
def test_rows_that_are_not_there_are_not_read(group: int, depth: int) -> None:
    """Else all programs ask for the few lines of the rows that are, as often as for 16 rows."""
    cfg = WeightOnlyLinearConfig(4096, 6144, group_size=group)
    tile = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": depth, "SPLITS": 4, "num_warps": 4, "num_stages": 4}
    with recording() as recorder:
        for case in _at("weight_only_linear", (4,), cfg):
            _run("weight_only_linear", TritonWeightOnlyLinear(cfg, tile), case)
    (build,) = (each for each in recorder.builds.values() if each.kernel.__name__ != "add_splits_kernel")
    loads = re.findall(r"tt\.load (.*) : tensor<\d+x16x!tt\.ptr<bf16>>", compiled_for(build).asm["ttir"])
    assert loads and all(load.count("%") == 3 for load in loads), loads  # an address, a mask, and what else is there
