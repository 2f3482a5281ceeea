"""Kernels of ``benchmarks/trials/decode_round4.py`` at their models' widths: registers, spills, what is read early."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers import env
from fastlayers.attention.gqa.launch_config import blocks_of, one_page
from fastlayers.attention.rotary_kv_write.triton import _blocks
from fastlayers.testing.compile_check import KernelBuild, compile_for, compiled_for

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))
from recorded import Recorder
from trials import decode_round4_triton as kernels
from trials import decode_round4_triton_experts as experts

pytestmark = [pytest.mark.compile, pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")]
FIRST: dict[str, Any] = {"EVICT": "evict_first"}
TILE = {"EVEN_K": True, "num_warps": 4}


def tensors(kinds: str) -> list[torch.Tensor]:
    """Return tensors without memory: b bf16, f fp32, i int32, l int64, u codes."""
    types = {"b": torch.bfloat16, "f": torch.float32, "i": torch.int32, "l": torch.int64, "u": torch.uint8}
    return [torch.empty(4, dtype=types[kind], device="meta") for kind in kinds]


def _experts(add: Any) -> None:
    """Record Qwen3-30B-A3B's and GPT-OSS's experts."""
    out = {"TOP_K": 8, "SPAN": 8, "HAS_BIAS": False, "BLOCKS": 3, "BLOCK_N": 2, "BLOCK_K": 256, "num_warps": 4}
    add("54", experts.vector_out_kernel, "bbbifb", 128, 2048, 768, 1.0, **out, **FIRST, FOLD=8, AHEAD=1)
    add("80", experts.vector_out_kernel, "bbbifb", 128, 2048, 768, 1.0, **out, **FIRST, FOLD=1, AHEAD=3)
    into = {"TOP_K": 8, "HAS_BIAS": False, "INTERLEAVED": False, "OAI": False, "BLOCKS": 2, "AHEAD": 2}
    add(
        "52", experts.vector_in_kernel, "bbbib", 128, 768, 2048, 2048, 1.702, 7.0, **into, **FIRST, **TILE,
        BLOCK_N=2, BLOCK_K=1024,
    )  # fmt: skip
    held = {"HIDDEN": 2880, "INNER": 2880, "HAS_BIAS": True, "R": 1, "W": 4, "num_warps": 4}
    for ahead, first, second in ((3, "52", "52"), (4, "52", "60"), (5, "60", "61"), (6, "65", "70")):
        add(first, experts.ahead_gate_up_kernel, "iiufbi", 32, 1.702, 7.0, **held, PER_TOKEN=4, AHEAD=ahead)
        add(second, experts.ahead_down_kernel, "iiufffi", 32, **held, AHEAD=ahead)
    plain = {"QUANT": 0, "WIDE": False, "HAS_BIAS": False, "BLOCK_M": 16, "BLOCK_N": 128, "BLOCK_K": 128, "BAND": 1}
    add("168", experts.down_kernel, "bfbffffiii", 256, 144, 2048, 768, 768, **plain, **TILE, num_stages=3)


def _linears(add: Any) -> None:
    """Record Qwen3-8B's."""
    row = {"BLOCKS": 4, "AHEAD": 1, "BLOCK_K": 1024} | TILE
    add(
        "64",
        kernels.vector_kernel,
        "bbbb",
        1,
        6144,
        4096,
        4096,
        4096,
        **row,
        **FIRST,
        HAS_BIAS=False,
        ROWS=1,
        BLOCK_N=2,
    )
    for outputs, registers in ((1, "64"), (2, "82")):
        add(registers, kernels.gate_up_silu_vector_kernel, "bbb", 12288, 4096, 4096, **row, EVICT="", BLOCK_N=outputs)
    for n, k, stages in ((64, 64, 6), (32, 128, 4)):
        add(
            "128", kernels.gate_up_silu_tile_kernel, "bbb", 32, 12288, 4096, 4096, 4096, BLOCK_M=32, BLOCK_N=n,
            BLOCK_K=k, num_stages=stages, num_warps=4,
        )  # fmt: skip
    for m, n, k, splits in ((64, 4096, 4096, 2), (32, 4096, 12288, 4), (16, 2048, 4096, 4)):
        add(
            "96", kernels.split_kernel, "bbbbfi", 32, n, k, k, k, **TILE, HAS_BIAS=False, SPLITS=splits, BLOCK_M=m,
            BLOCK_N=64, BLOCK_K=128, num_stages=4,
        )  # fmt: skip


def _attention(add: Any) -> None:
    """Record rotation and attention of all three models."""
    plain = {"SECTION_T": 0, "SECTION_H": 0, "SECTION_W": 0, "ALTERNATE": False, "num_warps": 4}
    for heads, keys, dim, window in ((32, 4, 128, 0), (32, 8, 128, 0), (64, 8, 64, 0), (64, 8, 64, 128)):
        width, norm = (heads + 2 * keys) * dim, dim == 128
        numbers = (*3 * (width, dim), heads * dim, dim, keys * dim, keys * dim, 40960, 1, heads, keys, 1e-6)
        blocks = _blocks(heads, keys, dim, dim, dim, False, False, norm)
        add("48", kernels.rotary_kv_write_kernel, "bbbfflbbblbb", *numbers, **blocks, **plain)
        size, stages, warps, splits = (128, 2, 8, 1) if window else (64, 4, 4, 16)
        shared = {
            "HEADS": heads, "KV_HEADS": keys, "HEAD_DIM": dim, "WINDOW": window, "SINKS": dim == 64, "PAGE": 64,
            "ONE_PAGE": one_page(64, size, window), "MIN_BLOCKS": 1, "MAX_BLOCKS": 2048 // size,
            "BLOCK_N": size, "SOFTCAP": False, "SPLIT": splits > 1, "FUSED": splits <= 4,
            "EACH": 1, **blocks_of(heads // keys, 1, dim, splits), "num_warps": warps, "num_stages": stages,
        }  # fmt: skip
        numbers = (heads * dim, dim, 16, splits, splits, 0.088, 0.0)
        add("128", kernels.decode_kernel, "bbbfbfffiiiii", *numbers, **shared)


def builds() -> list[tuple[int, KernelBuild]]:
    """Return the launches, and how many registers each may take."""
    recorder = Recorder()

    def add(registers: str, kernel: Any, kinds: str, *numbers: float, **constants: Any) -> None:
        recorder.label = f"{len(recorder.builds)}-{registers}"
        recorder.add(kernel, (1,), *tensors(kinds), *numbers, **constants, PDL=True)

    for record in (_experts, _linears, _attention):
        record(add)
    return [(int(build.name.rpartition("-")[2]), build) for build in recorder.builds.values()]


@pytest.mark.parametrize(
    ("registers", "build"), [] if env.triton_interpret() else builds(), ids=lambda it: getattr(it, "name", None)
)
def test_fits_and_reads_only_what_is_there(registers: int, build: KernelBuild) -> None:
    report, ptx = compile_for(build), compiled_for(build).asm["ptx"]
    assert report.spills == 0 and report.registers <= registers, report
    waits = ptx.count("griddepcontrol.wait")
    assert waits == (2 if build.kernel.__name__ == "rotary_kv_write_kernel" else 1)
    before = ptx.partition("griddepcontrol.wait")[0]
    assert "st.global" not in before and "atom." not in before
    if build.constexprs.get("EVICT") == "evict_first":
        assert "L2::evict_first" in ptx or "evict_first" in ptx
    if build.kernel.__name__ == "decode_kernel":
        assert len(re.findall(r"prefetch\.global\.L2", before)) >= 2
    if build.kernel.__name__ == "down_kernel":
        assert before.count("ld.global") >= 4  # how many blocks, whose, which rows, their weights
