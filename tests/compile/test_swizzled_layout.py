"""The swizzled experts' instructions are right only where each thread holds the numbers that its lane stands for."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fastlayers import env
from fastlayers.moe.fused_moe.triton.mxfp4 import plans as mxfp4_plans
from fastlayers.testing.compile_check import KernelBuild, _ptxas_report, compiled_for

sys.path.insert(0, str(Path(__file__).parent))
from recorded import GPT_OSS, hopper_builds

pytestmark = [pytest.mark.compile, pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")]


def every_plan() -> list[KernelBuild]:
    """Return the kernels of all candidates."""
    plans = dict.fromkeys(plan for tokens in (1, 4, 16, 64, 128) for plan in mxfp4_plans.plans(tokens, 2880, 2880))
    kinds = ("swizzled", "held", "rows")
    return [build for build in hopper_builds(plans, GPT_OSS) if build.kernel.__name__.startswith(kinds)]


@pytest.mark.parametrize("build", [] if env.triton_interpret() else every_plan(), ids=lambda build: build.name)
def test_threads_hold_their_lanes(build: KernelBuild) -> None:
    compiled = compiled_for(build)
    text = compiled.asm["ttgir"]
    warps = build.num_warps
    layout = r"^(#\w+) = #ttg.blocked<{sizePerThread = \[1, 1, 4\], threadsPerWarp = \[1, 1, 32\], "
    (right,) = re.findall(layout + rf"warpsPerCTA = \[1, {warps}, 1\]", text, re.MULTILINE)
    products = [line for line in text.splitlines() if "mma.sync" in line or "ld.global.v4" in line]
    held = build.kernel.__name__.startswith("held")
    rows = build.kernel.__name__.startswith("rows")
    # All steps of a warp are spelt out where codes are held; else those ahead, for each number of groups of a block.
    steps = -(-(GPT_OSS.hidden_size // 64) // warps) if held else 1
    ahead = build.constexprs["R"] * build.constexprs["AHEAD"] if rows else 0
    if rows:
        steps = ahead * (build.constexprs["TOKENS"] // 8)
    assert sum("mma.sync" in line for line in products) == steps
    for line in products:
        used = re.findall(r"tensor<\d+x\d+x128x[^,>]+(?:<[^>]*>)?, (#\w+)>", line)
        assert used and set(used) == {right}, line
    if held:
        # The only thing that brings codes: of the steps ahead before the wait, 16 bytes a thread and step; behind it
        # what is left of them, two loads of that width a step of tokens, and one for its layout alone.
        asked, ahead = r"ld\.global[.\w:]*v4", build.constexprs["AHEAD"]
        before, _, after = compiled.asm["ptx"].partition("griddepcontrol.wait")
        assert len(re.findall(asked, before)) == ahead and "cp.async" not in before + after
        assert len(re.findall(asked, after)) == steps - ahead + 2 * steps + 1
        return
    if rows:
        # Codes of the steps ahead before the wait, scales with them, and of the alignment what a block has.
        before, wait, after = compiled.asm["ptx"].partition("griddepcontrol.wait")
        assert wait and len(re.findall(r"ld\.global[.\w:]*v4", before)) == ahead and "st.global" not in before
        assert "cp.async" not in before + after
        return
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*, (0x\w+), ", compiled.asm["ptx"])
    assert {int(size, 16) for size in copies} == {4, 16}


WGMMA = [plan for tokens in (64, 128, 256) for plan in mxfp4_plans.plans(tokens, 2880, 2880) if plan.wgmma]


@pytest.mark.parametrize("plan", dict.fromkeys(WGMMA), ids=lambda plan: "_".join(map(str, plan.numbers())))
def test_the_ring_goes_round(plan: mxfp4_plans.HopperLaunchConfig) -> None:
    """Of every plan with wgmma: a turn has what it should have, nothing more; codes are asked for before the wait."""
    builds = {build.kernel.__name__: build for build in hopper_builds([plan], GPT_OSS)}
    for name in ("wgmma_gate_up_kernel", "wgmma_down_kernel"):
        compiled, build = compiled_for(builds[name]), builds[name]
        text, tiles, stages = compiled.asm["ptx"], plan.r1, plan.s1
        registers, spills = _ptxas_report(text, 90)
        assert spills == 0 and registers <= (build.registers or 168), (name, registers)
        # Programs of an SM at once: what its registers and its shared memory allow. Three of the widest blocks.
        held = (
            65536 // (32 * build.num_warps * -(-registers // 8) * 8),
            (227 << 10) // (compiled.metadata.shared + 1024),
        )
        assert min(held) >= (3 if plan.tokens == 64 else 4), (name, held)
        # A loop goes round the ring once: for every step a barrier, and of each tile four products.
        found = re.search(r"(\$L__BB\d+_\d+):[^\n]*Loop Header(.*?)bra(?:\.uni)?\s+\1;", text, re.DOTALL)
        assert found is not None
        assert found[2].count(f"wgmma.mma_async.sync.aligned.m64n{plan.tokens}k16") == 4 * tiles * stages
        assert found[2].count("bar.sync") == found[2].count("cp.async.wait_group") == stages
        # Codes of all but one step of the ring: 16 bytes a lane and tile. Before the wait, which nothing is written
        # before; where the product gathers its rows, the alignment is in front of it, and nothing is read early.
        before, wait, after = text[: found.start()].rpartition("griddepcontrol.wait")
        asked = [int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global .*, (0x\w+), ", before)]
        assert wait and "st.global" not in before
        if build.constexprs.get("PER_TOKEN"):
            assert asked == [] and "ld.global" not in before and text.count("griddepcontrol.wait") == 1
            assert "cp.async" in after
        else:
            assert asked.count(16) == tiles * (stages - 1) and set(asked) == {4, 16}
