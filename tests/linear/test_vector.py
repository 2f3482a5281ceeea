"""The matrix-vector kernel: any number of rows and of tiles ahead, equal bits, planted bugs, early reads."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton.language as tl

from fastlayers import env
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.linear.dense import triton as linear_triton
from fastlayers.linear.dense import triton_vector as vector
from fastlayers.linear.dense.layer import LinearConfig
from fastlayers.linear.weight_only import triton as weight_only
from fastlayers.linear.weight_only.layer import WeightOnlyLinearConfig, quantize_weight_only
from fastlayers.linear.weight_only.torch import decoded
from fastlayers.runtime.launch import kernel
from fastlayers.testing.compile_check import KernelBuild, compiled_for
from fastlayers.triton_lang import await_inputs, dependent_launch, release_dependents

sys.path.insert(0, str(Path(__file__).parents[1]))
from planted_faults import planted

interpreted = pytest.mark.skipif(not env.triton_interpret(), reason="needs Triton's interpreter")


def product(
    kernel: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    block_n: int,
    block_k: int,
    ahead: int,
) -> torch.Tensor:
    """Return ``x @ weight^T + bias`` by the kernel, in rows that nothing else wrote."""
    (m, k), n = x.shape, weight.shape[0]
    blocks = cdiv(k, block_k)
    y = torch.full((m, n), float("nan"), dtype=x.dtype)
    kernel[(cdiv(n, block_n),)](
        x, weight, y if bias is None else bias, y, m, n, k, x.stride(0), weight.stride(0),
        HAS_BIAS=bias is not None, EVEN_K=k % block_k == 0, BLOCKS=blocks, AHEAD=min(ahead, blocks),
        ROWS=next_power_of_2(m), BLOCK_N=block_n, BLOCK_K=block_k, PDL=False, num_warps=1,
    )  # fmt: skip
    return y


def operands(rows: int, n: int, k: int, bias: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return x (a slice of wider rows), weight and bias in bf16."""
    random = torch.Generator().manual_seed(rows * 1000 + n + k)
    x = torch.randn(rows, k + 8, generator=random).bfloat16()[:, :k]
    weight = torch.randn(n, k, generator=random).bfloat16()
    return x, weight, torch.randn(n, generator=random).bfloat16() if bias else None


def wanted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product in fp64."""
    y = x.double() @ weight.double().t()
    return y if bias is None else y + bias.double()


@interpreted
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("n", "k"), [(8, 96), (5, 72), (3, 31)])
def test_agrees_with_float64_whatever_is_ahead(rows: int, n: int, k: int) -> None:
    x, weight, bias = operands(rows, n, k)
    found = [product(vector.vector_kernel, x, weight, bias, 2, 32, ahead) for ahead in (1, 2, 9)]
    for y in found:
        torch.testing.assert_close(y.double(), wanted(x, weight, bias), rtol=8e-3, atol=2e-2)
        assert torch.equal(y, found[0])


@interpreted
def test_rows_do_not_depend_on_each_other() -> None:
    x, weight, bias = operands(4, 6, 64)
    together = product(vector.vector_kernel, x, weight, bias, 2, 32, 2)
    for row in range(4):
        alone = product(vector.vector_kernel, x[row : row + 1], weight, bias, 2, 32, 2)
        assert torch.equal(alone[0], together[row])


VECTOR = {"VECTOR": 1, "BLOCK_N": 2, "num_warps": 1, "AHEAD": 1}


@interpreted
@pytest.mark.parametrize("rows", [4, 5, 16])
def test_a_table_with_vectors_alone_serves_more_rows_by_the_rule(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Tuned at 1 and 4 tokens, a ladder's last rung has the vector kernel: a prompt is not unrolled by it."""
    unrolled: list[int] = []

    class Spied:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def at(self, *given: Any, **constants: Any) -> Any:
            unrolled.append(constants["ROWS"])
            return self.kernel.at(*given, **constants)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*given: Any, **constants: Any) -> None:
                unrolled.append(constants["ROWS"])
                self.kernel[grid](*given, **constants)

            return launch

    monkeypatch.setattr(linear_triton, "vector_kernel", Spied(vector.vector_kernel))
    name = "_weight_only_vector_kernel"
    monkeypatch.setattr(weight_only, name, Spied(getattr(weight_only, name)))
    linear_triton._launches.cache_clear()
    x, weight, _ = operands(rows, 24, 160, bias=False)
    dense = linear_triton.TritonLinear(LinearConfig(160, 24), VECTOR | {"BLOCK_K": 64})(x, weight, None)
    torch.testing.assert_close(dense.double(), wanted(x, weight, None), rtol=8e-3, atol=2e-2)
    cfg = WeightOnlyLinearConfig(160, 24, group_size=32)
    stored, scale, _ = quantize_weight_only(weight, group_size=32)
    coded = weight_only.TritonWeightOnlyLinear(cfg, VECTOR | {"BYTES": 64})(x, stored, scale, None, None, None)
    # Of weights that are not rounded.
    exact = (x.double() @ decoded("w4a16", 32, stored, scale, None).double().T).float()
    torch.testing.assert_close(coded.float(), exact, rtol=8e-3, atol=2e-2)
    assert unrolled == ([4, 4] if rows == 4 else [])
    linear_triton._launches.cache_clear()


MUTANTS = {
    "first tile again": ("held[i].to", "held[0].to"),
    "last tile dropped": ("if i + AHEAD < BLOCKS:", "if i + AHEAD < BLOCKS - 1:"),
    "tile after the next": ("(i + AHEAD) * BLOCK_K", "(i + AHEAD + 1) * BLOCK_K"),
    "no bias": ("axis=1) + bias", "axis=1)"),
    "sums not kept": ("sums[row] + x", "x"),
    "first row for all": ("(row % M)", "0"),
    "no wait": ("    await_inputs(PDL)\n", ""),
    "edge not masked": (", mask=k[None, :] < K, other=0.0", ""),
}


def mutated(name: str, folder: Path) -> ModuleType:
    """Return the kernel's module with one expression changed."""
    return planted(vector, folder, MUTANTS[name])


@interpreted
@pytest.mark.parametrize("name", [name for name in MUTANTS if name != "no wait"])
def test_planted_bug_shows(name: str, tmp_path: Path) -> None:
    x, weight, bias = operands(2, 5, 72)
    # Behind every row lie numbers that no result may hold.
    wide = torch.full((5, 96), 1e3, dtype=torch.bfloat16)
    wide[:, :72] = weight
    mutant = mutated(name, tmp_path)
    try:
        y = product(mutant.vector_kernel, x, wide[:, :72], bias, 2, 32, 2)
    except Exception:  # an index that is none
        return
    close = torch.isclose(y.double(), wanted(x, weight, bias), rtol=8e-3, atol=2e-2)
    assert not close.all(), f"{name} changes nothing"


def test_rule_and_candidates_fit_registers() -> None:
    for n, k in ((5120, 2048), (2048, 4096), (5120, 2880), (4096, 12288), (128, 2048), (8, 40)):
        for rows in (1, 2, 4):
            for found in linear_triton.candidates(LinearConfig(k, n), rows):
                if found["VECTOR"]:
                    threads = 32 * found["num_warps"]
                    assert found["BLOCK_N"] * found["BLOCK_K"] * rows <= 64 * threads, found
                    assert found["BLOCK_N"] * found["BLOCK_K"] * found["AHEAD"] <= 128 * threads, found


@pytest.mark.compile
@pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")
def test_only_weights_are_read_before_the_wait() -> None:
    pointers = {name: "*bf16" for name in ("x_ptr", "weight_ptr", "bias_ptr", "y_ptr")}
    sizes = {name: "i32" for name in ("N", "K", "x_stride", "weight_stride")}
    constants = {
        "M": 1, "HAS_BIAS": False, "EVEN_K": True, "BLOCKS": 4, "AHEAD": 4, "ROWS": 1, "BLOCK_N": 2, "BLOCK_K": 1024,
        "PDL": True,
    }  # fmt: skip
    build = KernelBuild("vector", vector.vector_kernel, pointers | sizes, constants, 4, 2, tuple(sizes))
    before, wait, after = compiled_for(build).asm["ptx"].partition("griddepcontrol.wait")
    assert wait
    loads = re.compile(r"ld\.global[.\w:]*v4")
    # 2 rows x 4096 columns over 128 threads, 16 bytes each: all of the weight, and nothing else, is on its way.
    assert len(loads.findall(before)) == 8 and len(re.findall(r"ld\.global", before)) == 8
    assert not re.search(r"st\.global", before) and len(loads.findall(after)) == 4


@kernel
def slow_copy_kernel(x_ptr, y_ptr, size, loops, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy, long after the next kernel may have started."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    release_dependents(PDL)
    await_inputs(PDL)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    for _ in range(loops):
        x = x * 1.0 + 0.0 * tl.sqrt(tl.abs(x))
    tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty), mask=at < size)


def behind_a_slow_copy(product_of: Any, rounds: int) -> bool:
    """Return whether the product reads what the kernel in front writes at its end, and not what lies there before."""
    random = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(2048, 4096, device="cuda", generator=random).bfloat16()
    x = torch.randn(1, 4096, device="cuda", generator=random).bfloat16()
    launch = dependent_launch(x.device)
    late, right = torch.empty_like(x), []
    wanted = x.double() @ weight.double().t()
    for _ in range(rounds):
        late.fill_(float("nan"))
        y = torch.full((1, 2048), float("nan"), dtype=x.dtype, device="cuda")
        # Some 300 us: longer than the host takes to launch the product, which nothing may come between.
        slow_copy_kernel[(4,)](x, late, 4096, 30_000, BLOCK=1024, num_warps=4, **launch)
        product_of[(1024,)](
            late, weight, y, y, 1, 2048, 4096, 4096, 4096, HAS_BIAS=False, EVEN_K=True, BLOCKS=4, AHEAD=4, ROWS=1,
            BLOCK_N=2, BLOCK_K=1024, num_warps=4, **launch,
        )  # fmt: skip
        right.append(torch.allclose(y.double(), wanted, rtol=2e-2, atol=0.3))
    return all(right)


@pytest.mark.gpu
def test_gpu_input_is_read_after_the_wait() -> None:
    assert behind_a_slow_copy(vector.vector_kernel, 20)


@pytest.mark.gpu
def test_gpu_input_read_before_the_wait_shows(tmp_path: Path) -> None:
    without = mutated("no wait", tmp_path)
    if dependent_launch(torch.device("cuda"))["PDL"]:
        assert not behind_a_slow_copy(without.vector_kernel, 3)
