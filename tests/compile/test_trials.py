"""Kernels of trials that are no part of the library compile for sm_90 as they are launched."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from fastlayers import env
from fastlayers.testing.compile_check import SHARED_MEMORY_LIMIT, KernelBuild, compile_for, compiled_for

ROOT = Path(__file__).parents[2]


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "trials"))
    return import_module("mla_fp8_heads")


NAMES = (
    "q_ptr", "cache_ptr", "table_ptr", "plan_ptr", "o_ptr", "lse_ptr", "q_stride_t", "q_stride_h", "page_stride",
    "row_stride", "table_stride", "scale", "value_scale", "num_rows",
)  # fmt: skip
KINDS = ("*bf16", "*i32", "*i32", "*i32", "*fp32", "*fp32", *("i32",) * 5, "fp32", "fp32", "i32")


@pytest.mark.compile
@pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")
@pytest.mark.parametrize("out", ["*fp32", "*bf16"])
@pytest.mark.parametrize("variant", ["64x2", "64x2 late", "32x4", "32x4 ahead"])
def test_kernels_of_the_trial_compile_without_spills(trial: Any, variant: str, out: str) -> None:
    sizes = trial.VARIANTS[variant]
    signature = dict(zip(NAMES, KINDS, strict=True)) | {"o_ptr": out}
    strides = ("q_stride_t", "q_stride_h", "page_stride", "row_stride")
    constants = {"HEADS": 128, "PAGE": 64} | sizes
    build = KernelBuild(variant, trial.heads_kernel, signature, constants, trial.VALUE_WARPS, 3, strides)
    report = compile_for(build)
    assert report.spills == 0 and report.shared <= SHARED_MEMORY_LIMIT, report
    ptx = compiled_for(build).asm["ptx"]
    # Each code is converted once, two at a time; sixteen bytes of them come at a time.
    assert ptx.count("cvt.rn.f16x2.e4m3x2") == sizes["KEYS"] * 576 // 2 // 128
    assert ptx.count("ld.global.v4.b32") >= 2 * sizes["KEYS"] * 576 // 16 // 128
    assert ".reqntid 512" in ptx and ptx.count("setmaxnreg") >= 4
    assert ptx.count("wgmma.mma_async") > 0 and "bar.sync" in ptx
