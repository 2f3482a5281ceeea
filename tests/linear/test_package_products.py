"""The packages' products of codes: what they refuse, the edges of buckets, and our side of them over stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastlayers import env
from fastlayers.device import as_device
from fastlayers.linear.bmm.layer import BmmConfig
from fastlayers.linear.fp8_block.layer import FP8LinearConfig
from fastlayers.linear.fp8_scaled.layer import FP8ScaledLinearConfig
from fastlayers.linear.int8.layer import Int8LinearConfig
from fastlayers.linear.triton_gemm import tile_for
from fastlayers.quant.block_quant import decode_e4m3
from fastlayers.registry import registry
from fastlayers.registry.spec import spec_of
from fastlayers.testing.parity import ParityError, check_parity

sys.path.insert(0, str(Path(__file__).parents[1] / "moe"))
from fake_packages import FakeDeepGemm, modules

BF16, FP32 = torch.bfloat16, torch.float32
INT8, FP8, BMM = Int8LinearConfig(3072, 2048), FP8ScaledLinearConfig(3072, 2048), BmmConfig(16, 128, 512, "fp8_tensor")
interpreted = pytest.mark.skipif(not env.triton_interpret(), reason="our kernels run in Triton's interpreter here")


@pytest.mark.parametrize(
    ("layer", "name", "cfg", "device", "words"),
    [
        ("int8_linear", "sgl_kernel", INT8, "H200", None),
        ("int8_linear", "sgl_kernel", INT8, "H20", None),
        ("int8_linear", "sgl_kernel", INT8, "A100", "needs sm_90, this is sm_80"),
        ("int8_linear", "sgl_kernel", INT8, "B200", "needs sm_90, this is sm_100"),
        ("int8_linear", "sgl_kernel", INT8, "cpu", "needs sm_90, this is cpu"),
        ("int8_linear", "sgl_kernel", replace(INT8, dtype=FP32), "H200", "neither float16 nor bfloat16"),
        ("int8_linear", "sgl_kernel", replace(INT8, in_features=3080), "H200", "in_features 3080 is not a multiple of"),
        ("int8_linear", "sgl_kernel", replace(INT8, out_features=2056), "H200", None),
        ("int8_linear", "sgl_kernel", replace(INT8, out_features=2052), "H200", "out_features 2052 is not a multiple"),
        ("fp8_scaled_linear", "sgl_kernel", FP8, "H200", None),
        ("fp8_scaled_linear", "sgl_kernel", replace(FP8, activation_scale="tensor"), "H200", None),
        ("fp8_scaled_linear", "sgl_kernel", replace(FP8, out_features=2056), "H200", "2056 is not a multiple of 16"),
        ("fp8_scaled_linear", "sgl_kernel", replace(FP8, dtype=FP32), "H200", "neither float16 nor bfloat16"),
        ("fp8_scaled_linear", "sgl_kernel", FP8, "L40S", "needs sm_90, this is sm_89"),
        ("bmm", "sgl_kernel", BMM, "H200", None),
        ("bmm", "flashinfer", BMM, "H200", None),
        ("bmm", "flashinfer", BMM, "B200", "needs sm_90, this is sm_100"),
        ("bmm", "sgl_kernel", replace(BMM, format="fp8_block"), "H200", "'fp8_block' is not 'fp8_tensor'"),
        ("bmm", "flashinfer", replace(BMM, format="none"), "H200", "'none' is not 'fp8_tensor'"),
        ("bmm", "sgl_kernel", replace(BMM, dtype=FP32), "H200", "float16 or bfloat16"),
        ("bmm", "sgl_kernel", replace(BMM, in_features=120), "H200", "in_features 120 is not a multiple of 16"),
        ("bmm", "deep_gemm", replace(BMM, format="fp8_block"), "H200", None),
        ("bmm", "deep_gemm", BMM, "H200", "'fp8_tensor' is not 'fp8_block'"),
        ("bmm", "deep_gemm", replace(BMM, format="fp8_block"), "B200", "needs sm_90, this is sm_100"),
        ("bmm", "deep_gemm", replace(BMM, format="fp8_block", dtype=FP32), "H200", "it writes bfloat16"),
        ("bmm", "deep_gemm", replace(BMM, format="fp8_block", in_features=192), "H200", "192 is not a multiple of 128"),
        ("bmm", "deep_gemm", replace(BMM, format="fp8_block", out_features=96), "H200", "96 is not a multiple of 64"),
        # TensorRT-LLM's block product wants 256 features, on the hardware that it is for as well.
        ("fp8_linear", "trtllm", FP8LinearConfig(256, 512), "B200", None),
        ("fp8_linear", "trtllm", FP8LinearConfig(255, 512), "B200", "in_features 255 is less than 256"),
        ("fp8_linear", "trtllm", FP8LinearConfig(128, 512), "B200", "in_features 128 is less than 256"),
        ("fp8_linear", "trtllm", FP8LinearConfig(256, 512, dtype=FP32), "B200", "is not bfloat16"),
        ("fp8_linear", "trtllm", FP8LinearConfig(256, 512), "H200", "needs sm_100, this is sm_90"),
        # Its alternative on sm_90 has no such limit.
        ("fp8_linear", "flashinfer", FP8LinearConfig(128, 512), "H200", None),
    ],
)
def test_refusals(layer: str, name: str, cfg: Any, device: str, words: str | None) -> None:
    why = registry(layer).named(name).refusal(cfg, as_device(device))
    assert why is None if words is None else words in str(why)


def test_auto_ranks_what_was_measured_faster_first_and_never_what_rounds_twice() -> None:
    for layer, cfg in (("int8_linear", INT8), ("fp8_scaled_linear", FP8)):
        names = [row.name for row in registry(layer).ranked]
        assert names.index("sgl_kernel") < names.index("triton")
        rungs = registry(layer).choose(cfg, "H100").rungs
        assert {rung.backend.name for rung in rungs} == {"triton"}  # the package is not here
    assert registry("bmm").named("sgl_kernel").auto_on == registry("bmm").named("flashinfer").auto_on == ()


@pytest.mark.parametrize(
    ("rows", "tile"),
    [
        (1, (16, 64)), (16, (16, 64)), (17, (32, 64)), (32, (32, 64)), (33, (64, 64)), (64, (64, 64)),
        (65, (64, 128)), (256, (64, 128)), (257, (128, 128)), (4096, (128, 128)),
    ],
)  # fmt: skip
def test_our_tiles_change_at_the_edges_of_buckets(rows: int, tile: tuple[int, int]) -> None:
    found = tile_for(rows, 6144, 32)
    assert (found.m, found.n) == tile


def test_k_is_split_only_where_tiles_leave_programs_idle() -> None:
    assert tile_for(16, 2112, 56).splits == 8
    assert tile_for(16, 2112, 15).splits == 2  # at least four blocks of K each
    assert tile_for(16, 2112, 7).splits == 1
    assert tile_for(16, 264 * 64, 56).splits == 1
    assert tile_for(4096, 4096, 56).splits == 1
    assert tile_for(16, 2112, 56, split=False).splits == 1


def _multiply(a, b, scales_a, scales_b, dtype, bias):  # type: ignore[no-untyped-def]
    """The package's product: codes of rows times codes of columns, scales and bias in the epilogue."""
    assert a.is_contiguous() and b.t().is_contiguous() and a.shape[1] % 16 == 0
    for scale, size in ((scales_a, a.shape[0]), (scales_b, b.shape[1])):
        assert scale.dtype == FP32 and scale.is_contiguous() and scale.numel() == size
    assert bias is None or bias.dtype == dtype
    wide = [x.double() if x.dtype == torch.int8 else decode_e4m3(x.contiguous()).double() for x in (a, b)]
    y = (wide[0] @ wide[1]).float() * scales_a[:, None] * scales_b
    return (y if bias is None else y + bias.float()).to(dtype)


@pytest.fixture
def sgl_kernel() -> Iterator[None]:
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in ("int8_scaled_mm", "fp8_scaled_mm"):
        library.define(
            f"{name}(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, ScalarType out_dtype, Tensor? bias)"
            " -> Tensor"
        )
        library.impl(name, _multiply, "CPU")
    yield
    library._destroy()


def simulate(layer: str, name: str, case: str) -> dict[str, float]:
    """Check a row on the CPU as if its hardware and package were here."""
    row = registry(layer).named(name)
    return check_parity(layer, replace(row, needs=(), refuse=lambda cfg, device: None), case)


def accepted(layer: str, name: str) -> list[str]:
    """Return the small cases that the row takes on an H200."""
    row = registry(layer).named(name)
    found = [c.name for c in spec_of(layer).cases if c.small and row.refusal(c.cfg, as_device("H200")) is None]
    assert len(found) >= 2, found
    return found


@interpreted
@pytest.mark.parametrize("case", accepted("int8_linear", "sgl_kernel"))
def test_int8_simulated(case: str, sgl_kernel: None) -> None:
    assert simulate("int8_linear", "sgl_kernel", case)


@interpreted
@pytest.mark.parametrize("case", accepted("fp8_scaled_linear", "sgl_kernel"))
def test_fp8_simulated(case: str, sgl_kernel: None) -> None:
    assert simulate("fp8_scaled_linear", "sgl_kernel", case)


def _bmm_fp8(a, b, scale_a, scale_b, dtype, out=None):  # type: ignore[no-untyped-def]
    """The packages' batched product."""
    assert a.is_contiguous() and b.transpose(1, 2).is_contiguous() and out is None
    assert scale_a.shape == scale_b.shape == (1,) and scale_a.dtype == scale_b.dtype == FP32
    y = torch.bmm(decode_e4m3(a), decode_e4m3(b.contiguous()))
    return (y * scale_a * scale_b).to(dtype)


@interpreted
@pytest.mark.parametrize("package", ["sgl_kernel", "flashinfer"])
@pytest.mark.parametrize("case", ["tensor", "tensor_views_ragged", "empty"])
def test_bmm_simulated(case: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(bmm_fp8=_bmm_fp8))  # type: ignore[arg-type]
    assert simulate("bmm", package, case)


@interpreted
@pytest.mark.parametrize("case", accepted("bmm", "deep_gemm"))
def test_masked_grouped_simulated(case: str) -> None:
    """A group a head, as many rows in use as there are tokens, and none of a tile's others read."""
    with modules(deep_gemm=FakeDeepGemm()):
        assert simulate("bmm", "deep_gemm", case)


@interpreted
def test_masked_grouped_writes_where_it_was_told() -> None:
    cfg = BmmConfig(2, 128, 64, "fp8_block")
    x, weight = torch.randn(130, 2, 128).to(BF16), torch.randn(2, 64, 128).to(torch.float8_e4m3fn)
    out, scale = torch.zeros(130, 2, 70, dtype=BF16), torch.rand(2, 1, 1) + 0.5
    with modules(deep_gemm=FakeDeepGemm()):
        made = registry("bmm").named("deep_gemm").load()(cfg)
        y = made(x.transpose(0, 1), weight, scale, out[..., :64].transpose(0, 1))
        fresh = made(x.transpose(0, 1), weight.mT.contiguous().mT, scale)
    expected = registry("bmm").named("torch").load()(cfg)(x.transpose(0, 1), weight, scale)
    assert torch.equal(y, out[..., :64].transpose(0, 1)) and out[..., 64:].eq(0).all() and torch.equal(y, fresh)
    torch.testing.assert_close(y.float(), expected.float(), rtol=1e-2, atol=1e-2)


@interpreted
def test_a_wrong_scale_of_a_package_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(*operands: Any) -> torch.Tensor:
        y: torch.Tensor = _bmm_fp8(*operands)
        return y * 2

    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(bmm_fp8=doubled))  # type: ignore[arg-type]
    with pytest.raises(ParityError):
        simulate("bmm", "sgl_kernel", "tensor")


@interpreted
def test_one_scale_for_all_heads_is_the_packages_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []

    def noted(a: Any, b: Any, scale_a: Any, scale_b: Any, dtype: Any) -> torch.Tensor:
        given.append(scale_b)
        y: torch.Tensor = _bmm_fp8(a, b, scale_a, scale_b, dtype)
        return y

    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(bmm_fp8=noted))  # type: ignore[arg-type]
    cfg = BmmConfig(2, 16, 32, "fp8_tensor")
    made = registry("bmm").named("sgl_kernel").load()(cfg)
    x, weight = torch.randn(2, 3, 16).to(BF16), torch.randn(2, 32, 16).to(torch.float8_e4m3fn)
    out = torch.zeros(3, 2, 40, dtype=BF16)
    y = made(x, weight, torch.tensor([0.5]), out[..., :32].transpose(0, 1))
    assert given[0].tolist() == [0.5] and out[..., 32:].eq(0).all()
    expected = registry("bmm").named("torch").load()(cfg)(x, weight, torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(y.float(), expected.float(), rtol=1e-2, atol=1e-2)
