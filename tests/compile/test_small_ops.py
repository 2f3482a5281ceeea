"""How small operators are compiled for sm_90: what their speed rests on, read in the code."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from fastlayers import env
from fastlayers.moe.router.layer import RouterConfig
from fastlayers.moe.router.triton import TritonRouter
from fastlayers.registry.spec import Case
from fastlayers.rotary.layer import RotaryConfig
from fastlayers.rotary.triton import TritonRotary
from fastlayers.testing.compile_check import KernelBuild, compile_for, compiled_for

sys.path.insert(0, str(Path(__file__).parent))
from recorded import _run, recording

pytestmark = [pytest.mark.compile, pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")]
OSS = RouterConfig(32, 4, "softmax_after_topk", renormalize=False)
FEW, MANY = 16, 4096


@cache
def router(cfg: RouterConfig, tokens: int, dtype: torch.dtype = torch.float32) -> KernelBuild:
    """Return the launch for so many tokens."""
    shape = {"num_tokens": tokens, "dtype": dtype, "kind": "spread", "padded": False}
    with recording() as recorder:
        recorder.label = "router"
        _run("router", TritonRouter(cfg), Case("router", cfg, shape))
    (build,) = recorder.builds.values()
    return build


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sixteen_tokens_a_program_need_no_barrier_and_whole_vectors(dtype: torch.dtype) -> None:
    build = router(OSS, MANY, dtype)
    assert (build.constexprs["ROWS"], build.num_warps) == (16, 4)
    compiled, report = compiled_for(build), compile_for(build)
    ptx = compiled.asm["ptx"]
    assert report.spills == 0 and report.shared == 0 and "bar." not in ptx
    # Four values a thread: the logits once, ids and weights once each.
    words = {torch.float32: "v4", torch.bfloat16: "v2"}[dtype]
    assert len(re.findall(rf"ld\.global\.{words}\.b32", ptx)) == 1 and ptx.count("ld.global") == 1
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 2 and ptx.count("st.global") == 2
    # Eight lanes a token: three exchanges for each of two reductions of each round.
    assert ptx.count("shfl.sync.bfly") == 2 * 3 * OSS.top_k


def _lanes_of_sums(build: KernelBuild) -> set[tuple[int, int]]:
    """Return values a thread and threads of a warp along the axis over which the launch sums."""
    text = compiled_for(build).asm["ttgir"]
    layouts = {
        name: (sizes.split(",")[-1], threads.split(",")[-1])
        for name, sizes, threads in re.findall(
            r"(#\w+) = #ttg\.blocked<\{sizePerThread = \[([^\]]*)\], threadsPerWarp = \[([^\]]*)\]", text
        )
    }
    sums = re.findall(r"arith\.addf[^\n]*\n\s*tt\.reduce\.return[^\n]*\n\s*\}\) : \(tensor<[^>]*?(#\w+)>\)", text)
    return {(int(layouts[name][0]), int(layouts[name][1])) for name in sums}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("experts", [24, 32, 64, 128, 256])
def test_a_softmax_over_experts_is_summed_by_the_same_lanes(experts: int, dtype: torch.dtype) -> None:
    cfg = RouterConfig(experts, 8, renormalize=False)
    few, many = router(cfg, FEW, dtype), router(cfg, MANY, dtype)
    assert (few.constexprs["ROWS"], many.constexprs["ROWS"], many.num_warps) == (1, 4, 4)
    found = _lanes_of_sums(many)
    assert found and found <= _lanes_of_sums(few), found


@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_several_tokens_a_program_compile_for_other_cards(capability: int) -> None:
    for cfg in (OSS, RouterConfig(128, 8)):
        build = router(cfg, MANY)
        constants = {**build.constexprs, "PDL": build.constexprs["PDL"] and capability >= 90}
        assert "ROWS" in constants
        other = KernelBuild(
            build.name, build.kernel, build.signature, constants, build.num_warps, aligned=build.aligned
        )
        assert f"sm_{capability}" in compiled_for(other, capability).asm["ptx"]


def rotary(dim: int, tokens: int, heads: tuple[int, int] = (32, 8), interleaved: bool = False) -> KernelBuild:
    """Return the launch for so many tokens."""
    cfg = RotaryConfig(dim, dim, interleaved)
    shape = {
        "num_tokens": tokens, "heads": heads, "dtype": torch.bfloat16, "width": dim, "max_position": 64, "axes": 1,
        "positions": torch.int64,
    }  # fmt: skip
    with recording() as recorder:
        recorder.label = "rotary"
        _run("rotary", TritonRotary(cfg), Case("rotary", cfg, shape))
    (build,) = recorder.builds.values()
    return build


@pytest.mark.parametrize(("dim", "tile"), [(128, True), (64, False)])
def test_angles_of_a_few_tokens_pass_through_no_shared_memory(dim: int, tile: bool) -> None:
    build = rotary(dim, FEW)
    assert build.constexprs["TILE"] is tile and not rotary(dim, FEW + 1).constexprs["TILE"]
    compiled = compiled_for(build)
    assert compiled.metadata.shared == 0 and "bar." not in compiled.asm["ptx"]


@pytest.mark.parametrize(("tokens", "heads", "warps"), [(1, 8, 1), (FEW, 8, 1), (FEW + 1, 32, 8), (128, 32, 8)])
@pytest.mark.parametrize("interleaved", [True, False])
def test_programs_of_many_heads(tokens: int, heads: int, warps: int, interleaved: bool) -> None:
    """DeepSeek-V3's: nothing passes through shared memory, and a thread's values stay in registers."""
    build = rotary(64, tokens, (128, 1), interleaved)
    assert (build.constexprs["HEADS"], build.num_warps, build.constexprs["TILE"]) == (heads, warps, warps == 1)
    report, ptx = compile_for(build), compiled_for(build).asm["ptx"]
    assert (report.spills, report.shared) == (0, 0) and report.registers <= 48 and "bar." not in ptx
    # Where all programs cannot run at once anyway, and with the heads of other models, as before.
    for other, usual in ((rotary(64, 129, (128, 1), interleaved), 32), (rotary(64, tokens, (64, 8)), min(heads, 32))):
        assert (other.constexprs["HEADS"], other.num_warps, other.constexprs["TILE"]) == (usual, 2, False)
