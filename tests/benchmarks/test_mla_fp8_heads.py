"""The trial of e4m3 latents with many heads: what of it needs no GPU, and that its kernels compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers import env
from fastlayers.testing.compile_check import SHARED_MEMORY_LIMIT, KernelBuild, compile_for, compiled_for

ROOT = Path(__file__).parents[2]


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "trials"))
    return import_module("mla_fp8_heads")


def test_the_twin_gives_what_one_softmax_gives(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    program = ROOT / "benchmarks" / "trials" / "mla_fp8_heads.py"
    command = [sys.executable, str(program), "--small", "--out", str(out), "--variants", "64x2", "32x4"]
    paths = os.pathsep.join(str(ROOT / name) for name in ("src", "models", "server"))
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 6 and all(row["right"] for row in rows), rows
    assert {row["splits"] for row in rows} == {1, 2}


def test_a_scale_that_is_left_out_is_noticed(trial: Any) -> None:
    shapes = (((9,), 64, 16, 0),)

    def without(*given: Any) -> None:
        trial.through_torch(*given[:6], 1.0, *given[7:])

    (row,) = trial.check("64x2", without, shapes, torch.device("cpu"), (0.5,))
    assert not row["right"]


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("lengths", [(4096,) * 128, (4096,), (20865, 1, 300, 4000) * 16, (64,), (65, 1)])
def test_parts_hold_each_row_once_and_are_few(trial: Any, lengths: tuple[int, ...], heads: int) -> None:
    parts = trial.plan(lengths, heads)
    for request, length in enumerate(lengths):
        own = sorted(part[1:] for part in parts if part[0] == request)
        assert [low for low, _, _ in own] == [0, *(high for _, high, _ in own[:-1])] and own[-1][1] == length
        assert [number for *_, number in own] == list(range(len(own))) and len(own) <= trial.MOST_PARTS
    even = sum(lengths) * heads // 64 / trial.PLACES
    whole = trial.makespan([length for length in lengths for _ in range(heads // 64)], trial.PLACES)
    cut = trial.makespan([high - low for _, low, high, _ in parts for _ in range(heads // 64)], trial.PLACES)
    assert even <= cut <= whole


def test_equal_requests_of_two_full_rounds_are_not_cut(trial: Any) -> None:
    assert len(trial.plan((4096,) * 128, 128)) == 128
    # A quarter of the places taken: four parts each.
    assert len(trial.plan((4096,) * 16, 128)) == 64


NAMES = (
    "q_ptr", "cache_ptr", "table_ptr", "plan_ptr", "o_ptr", "lse_ptr", "q_stride_t", "q_stride_h", "page_stride",
    "row_stride", "table_stride", "scale", "value_scale", "num_rows",
)  # fmt: skip
KINDS = ("*bf16", "*i32", "*i32", "*i32", "*fp32", "*fp32", *("i32",) * 5, "fp32", "fp32", "i32")


@pytest.mark.compile
@pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")
@pytest.mark.parametrize("out", ["*fp32", "*bf16"])
@pytest.mark.parametrize("variant", ["64x2", "32x4", "32x4 ahead"])
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
