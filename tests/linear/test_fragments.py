"""The product on tensor cores from registers: any rows and edges, equal bits, planted bugs, early reads, refusals."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fastlayers import env
from fastlayers.errors import ArgumentError
from fastlayers.integers import cdiv
from fastlayers.linear.dense import triton as linear_triton
from fastlayers.linear.dense import triton_fragments as fragments
from fastlayers.linear.dense.layer import LinearConfig
from fastlayers.testing.compile_check import KernelBuild, compile_for, compiled_for
from fastlayers.triton_lang import dependent_launch

sys.path.insert(0, str(Path(__file__).parent))
from test_vector import behind_a_slow_copy

interpreted = pytest.mark.skipif(not env.triton_interpret(), reason="needs Triton's interpreter")


def product(
    kernel: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: int,
    warps: int,
    ahead: int,
    span: int = 1,
) -> torch.Tensor:
    """Return ``x @ weight^T + bias`` by the kernel, in rows that nothing else wrote."""
    (m, k), n = x.shape, weight.shape[0]
    blocks = cdiv(k, 32 * span * warps)
    y = torch.full((m, n), float("nan"), dtype=x.dtype)
    kernel[(cdiv(n, 16 * groups),)](
        x, weight, y if bias is None else bias, y, m, n, k, x.stride(0), weight.stride(0),
        HAS_BIAS=bias is not None, EVEN_K=k % (32 * span * warps) == 0, BLOCKS=blocks, AHEAD=min(ahead, blocks),
        GROUPS=groups, HALVES=cdiv(m, 8), SPAN=span, WARPS=warps, PDL=False, num_warps=warps,
    )  # fmt: skip
    return y


def operands(rows: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """Return x, weight and bias; x and weight are slices of wider rows with numbers behind that no result may hold."""
    random = torch.Generator().manual_seed(rows * 1000 + n + k)
    x, weight = (torch.full((height, k + 8), 1e3, dtype=dtype)[:, :k] for height in (rows, n))
    x.copy_(torch.randn(rows, k, generator=random))
    weight.copy_(torch.randn(n, k, generator=random))
    return x, weight, torch.randn(n, generator=random).to(dtype)


def close(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return which results agree with the product in fp64."""
    wanted = x.double() @ weight.double().t()
    return torch.isclose(y.double(), wanted if bias is None else wanted + bias.double(), rtol=8e-3, atol=2e-2)


@interpreted
@pytest.mark.parametrize("rows", range(1, 17))
@pytest.mark.parametrize(
    ("n", "k", "groups", "warps", "span"),
    [(32, 192, 1, 2, 1), (37, 200, 2, 2, 2), (5, 31, 1, 1, 2), (20, 512, 1, 2, 4)],
)
def test_agrees_with_float64_whatever_is_ahead(rows: int, n: int, k: int, groups: int, warps: int, span: int) -> None:
    x, weight, bias = operands(rows, n, k)
    found = [product(fragments.fragment_kernel, x, weight, bias, groups, warps, ahead, span) for ahead in (1, 2, 9)]
    for y in found:
        assert close(y, x, weight, bias).all()
        assert torch.equal(y, found[0])


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_without_bias_and_with_half_the_numbers(dtype: torch.dtype) -> None:
    x, weight, _ = operands(3, 18, 64, dtype)
    assert close(product(fragments.fragment_kernel, x, weight, None, 1, 1, 2), x, weight, None).all()


@interpreted
def test_rows_do_not_depend_on_each_other() -> None:
    x, weight, bias = operands(11, 20, 160)
    together = product(fragments.fragment_kernel, x, weight, bias, 1, 2, 2)
    for rows in (1, 4, 8):
        for begin in range(0, 11 - rows + 1, rows):
            some = product(fragments.fragment_kernel, x[begin : begin + rows], weight, bias, 1, 2, 2)
            assert torch.equal(some, together[begin : begin + rows])


@interpreted
@pytest.mark.parametrize(
    "config",
    [{"BLOCK_N": 16, "BLOCK_K": 32, "num_warps": 2, "AHEAD": 4}, {"BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 1}],
)
def test_as_a_configuration_of_the_layers_backend(config: dict[str, int]) -> None:
    for rows in (1, 4, 8, 9):
        x, weight, bias = operands(rows, 40, 130)
        layer = linear_triton.TritonLinear(LinearConfig(130, 40, True), {"VECTOR": linear_triton.FRAGMENTS} | config)
        assert close(layer(x, weight, bias), x, weight, bias).all()
        assert layer(x.unsqueeze(0), weight, bias).shape == (1, rows, 40)


MUTANTS = {
    "first tile again": ("held[2 * (i * GROUPS + group) * SPAN", "held[2 * group * SPAN"),
    "lower outputs twice": ("tl.join(low, high)", "tl.join(low, low)"),
    "columns of one operand in another order": ("weight = _share(weight, OUTPUTS, WARPS)", "weight = weight + 0.0"),
    "one of two sums": ("both = sums[group * HALVES + half] +", "both ="),
    "first row for all": ("row * x_stride", "0 * x_stride"),
    "second rows not read": ("row, k = half * ROWS + eight,", "row, k = eight,"),
    "no bias": (" + biases[group][:, None]", ""),
    "tile after the next": ("(i + AHEAD) * WIDTH", "(i + AHEAD + 1) * WIDTH"),
    "warps read the same columns": ("warp * (SPAN * COLUMNS) + tl", "tl"),
    "first piece again": ("SPAN + piece]", "SPAN]"),
    "edge of K not masked": ("mask=known & (k < K)", "mask=known"),
    "no wait": ("    await_inputs(PDL)\n", ""),
}


def mutated(name: str, folder: Path) -> ModuleType:
    """Return the kernel's module with one expression changed."""
    before, after = MUTANTS[name]
    text = Path(fragments.__file__).read_text()
    assert before in text, f"the kernel no longer has {before!r}"
    path = folder / "mutant.py"
    path.write_text(text.replace(before, after))
    spec = importlib.util.spec_from_file_location("fragments_mutant", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@interpreted
@pytest.mark.parametrize("name", [name for name in MUTANTS if name != "no wait"])
def test_planted_bug_shows(name: str, tmp_path: Path) -> None:
    x, weight, bias = operands(10, 37, 400)
    try:
        y = product(mutated(name, tmp_path).fragment_kernel, x, weight, bias, 2, 2, 2, 2)
    except Exception:  # an index that is none
        return
    assert not close(y, x, weight, bias).all(), f"{name} changes nothing"


def test_other_rows_and_numbers_are_refused() -> None:
    config = {"VECTOR": linear_triton.FRAGMENTS, "BLOCK_N": 16, "BLOCK_K": 32, "num_warps": 2, "AHEAD": 2}
    x, weight, _ = operands(17, 16, 64)
    with pytest.raises(ArgumentError, match=r"Linear: config is .*17 rows of torch.bfloat16.*at most 16 rows"):
        linear_triton.TritonLinear(LinearConfig(64, 16), config)(x, weight, None)
    with pytest.raises(ArgumentError, match=r"1 rows of torch.float32.*16 bits"):
        wide = LinearConfig(64, 16, dtype=torch.float32)
        linear_triton.TritonLinear(wide, config)(x[:1].float(), weight.float(), None)


def test_is_a_candidate_for_few_rows_of_half_the_numbers() -> None:
    def offered(cfg: LinearConfig, rows: int) -> list[dict[str, int]]:
        found = linear_triton.candidates(cfg, rows)
        return [config for config in found if config["VECTOR"] == linear_triton.FRAGMENTS]

    for n, k in ((5120, 2048), (2880, 4096), (4096, 12288), (128, 2048)):
        for rows in (1, 4, 8, 16):
            assert len(offered(LinearConfig(k, n), rows)) >= 3
        assert not offered(LinearConfig(k, n), 17)
        # A quick tuner takes 14 from all over the list: what never wins is not in it.
        for rows in (4, 8, 16):
            found = linear_triton.candidates(LinearConfig(k, n), rows)
            vectors = [config for config in found if config["VECTOR"] == linear_triton.VECTOR]
            assert n <= 1024 or (len(found) <= 24 and not vectors)
        assert not offered(LinearConfig(k, n, dtype=torch.float32), 4)
    assert not offered(LinearConfig(40, 8), 4)


def build(**constants: int) -> KernelBuild:
    """Return how the kernel is launched for 4 rows and 4,096 columns."""
    pointers = {name: "*bf16" for name in ("x_ptr", "weight_ptr", "bias_ptr", "y_ptr")}
    sizes = {name: "i32" for name in ("M", "N", "K", "x_stride", "weight_stride")}
    known = {
        "HAS_BIAS": False,
        "EVEN_K": True,
        "BLOCKS": 8,
        "AHEAD": 4,
        "GROUPS": 1,
        "HALVES": 1,
        "WARPS": 8,
        "SPAN": 2,
    }
    return KernelBuild(
        "fragments", fragments.fragment_kernel, pointers | sizes, known | {"PDL": True} | constants, 8, 1,
        ("N", "K", "x_stride", "weight_stride"),
    )  # fmt: skip


@pytest.mark.compile
@pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")
def test_operands_go_from_memory_into_instructions() -> None:
    ptx = compiled_for(build()).asm["ptx"]
    before, wait, after = ptx.partition("griddepcontrol.wait")
    assert wait
    loads = re.compile(r"ld\.global[.\w:]*v4")
    # 4 tiles of two times 8 outputs and two times 32 columns are on their way, 16 bytes a thread, and nothing else.
    assert len(loads.findall(before)) == 16 and len(re.findall(r"ld\.global", before)) == 16
    assert not re.search(r"st\.", before)
    # Then as many again, and x, a load for 32 columns. Two instructions for these.
    assert len(loads.findall(after)) == 16 + 16 and len(re.findall(r"mma\.sync\S*m16n8k16", after)) == 32
    # Shared memory: sums of 8 warps, once.
    assert len(re.findall(r"bar\.sync", ptx)) <= 4 and "ldmatrix" not in ptx
    assert compiled_for(build()).metadata.shared == 8 * 16 * 8 * 4


@pytest.mark.compile
@pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")
@pytest.mark.parametrize(("groups", "halves", "ahead"), [(1, 1, 4), (1, 2, 4), (2, 1, 2), (2, 2, 2)])
def test_two_programs_fit_a_multiprocessor(groups: int, halves: int, ahead: int) -> None:
    report = compile_for(build(GROUPS=groups, HALVES=halves, AHEAD=ahead))
    assert report.spills == 0 and report.registers <= 128, report


EIGHT_WARPS = {"BLOCKS": 8, "AHEAD": 8, "GROUPS": 1, "HALVES": 1, "SPAN": 2, "WARPS": 8, "num_warps": 8}


@pytest.mark.gpu
def test_gpu_input_is_read_after_the_wait() -> None:
    assert behind_a_slow_copy(fragments.fragment_kernel, 20, 128, EIGHT_WARPS)


@pytest.mark.gpu
def test_gpu_input_read_before_the_wait_shows(tmp_path: Path) -> None:
    without = mutated("no wait", tmp_path)
    if dependent_launch(torch.device("cuda"))["PDL"]:
        assert not behind_a_slow_copy(without.fragment_kernel, 3, 128, EIGHT_WARPS)


@pytest.mark.gpu
def test_gpu_rows_repeat_their_bits_alone_and_together() -> None:
    random = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(16, 2880, device="cuda", generator=random).bfloat16()
    weight = torch.randn(2880, 2880, device="cuda", generator=random).bfloat16()
    config = {"VECTOR": linear_triton.FRAGMENTS, "BLOCK_N": 16, "BLOCK_K": 64, "num_warps": 8, "AHEAD": 2}
    layer = linear_triton.TritonLinear(LinearConfig(2880, 2880), config)
    together = layer(x, weight, None)
    torch.testing.assert_close(together.double(), x.double() @ weight.double().t(), rtol=2e-2, atol=0.3)
    for rows in (1, 3, 4, 8):
        for _ in range(20):
            assert torch.equal(layer(x[:rows], weight, None), together[:rows])
