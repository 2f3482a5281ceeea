"""MXFP8 quantisation: padding and quantising at once equals one after the other, formula, edge values, errors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fastlayers.errors import ArgumentError
from fastlayers.quant.mxfp8_quant.layer import MXFP8Quant, MXFP8QuantConfig

BACKENDS = ("torch", "triton")


def nearest_codes(values: torch.Tensor) -> torch.Tensor:
    """Return the e4m3 values nearest to fp64 ``values``, ties to the even code, by search through all codes."""
    codes = torch.arange(127, dtype=torch.uint8)
    grid = codes.view(torch.float8_e4m3fn).double()
    # An odd code loses a tie by being a little further away than it is.
    distance = (values.abs()[..., None] - grid).abs() * (1 + 1e-12 * (codes % 2))
    return grid[distance.argmin(-1)].copysign(values)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("features", "alignment"), [(2880, 128), (2880, 256), (70, 64), (96, 96), (5, 32), (64, 64)])
def test_equals_padding_then_quantising(backend: str, features: int, alignment: int) -> None:
    x = (torch.randn(3, features) * torch.logspace(-3, 3, features)).bfloat16()
    q, scales = MXFP8Quant(alignment, backend=backend)(x)
    padded = -(-features // alignment) * alignment
    # Padding by hand, then the layer without anything to pad.
    wanted_q, wanted_scales = MXFP8Quant(backend=backend)(F.pad(x, (0, padded - features)))
    assert q.shape == (3, padded) and scales.shape == (3, padded // 32)
    assert torch.equal(q.view(torch.uint8), wanted_q.view(torch.uint8)) and torch.equal(scales, wanted_scales)
    assert not q[:, features:].float().any() and not scales[:, -(-features // 32) :].any()
    assert q.is_contiguous() and scales.is_contiguous() and scales.dtype == torch.uint8


@pytest.mark.parametrize("backend", BACKENDS)
def test_formula(backend: str) -> None:
    x = torch.randn(4, 96) * torch.logspace(-4, 6, 96)
    q, scales = MXFP8Quant(backend=backend)(x)
    groups = x.double().unflatten(1, (-1, 32))
    power = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1) / 448)))
    assert torch.equal(torch.exp2(scales.double() - 127), power)
    assert torch.equal(q.double(), nearest_codes(groups / power[..., None]).flatten(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_powers_of_two_are_not_rounded_further_up(backend: str) -> None:
    x = torch.zeros(1, 96)
    x[0, 0], x[0, 32], x[0, 64] = 448 * 2.0**5, 448 * 2.0**-9, torch.tensor(448.0).nextafter(torch.tensor(1e9))
    q, scales = MXFP8Quant(backend=backend)(x)
    assert scales.tolist() == [[132, 118, 128]]
    assert q[0, [0, 32, 64]].float().tolist() == [448.0, 448.0, 224.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_subnormal_huge_and_not_finite_groups(backend: str) -> None:
    x = torch.zeros(1, 192)
    x[0, 32], x[0, 64], x[0, 96], x[0, 128], x[0, 160] = 1e-40, 3.4e38, float("nan"), float("inf"), -float("inf")
    x[0, 97] = x[0, 161] = 5.0
    q, scales = MXFP8Quant(alignment=256, backend=backend)(x)
    assert scales.tolist() == [[0, 1, 247, 255, 255, 255, 0, 0]]
    assert q[0, 64].float().item() == nearest_codes(torch.tensor(3.4e38).double() * 2.0**-120).item()
    assert q[0, 32].float().item() == 0.0078125  # 1e-40 · 2^126, the nearest multiple of 2^-9
    assert not q[0, 96:].float().any()


def test_bytes_behind_a_strided_row_are_not_read() -> None:
    wide = torch.full((3, 160), float("nan"))
    wide[:, :100] = torch.randn(3, 100)
    for backend in BACKENDS:
        layer = MXFP8Quant(128, backend=backend)
        (q, scales), (other_q, other) = layer(wide[:, :100]), layer(wide[:, :100].contiguous())
        assert torch.equal(q.float(), other_q.float()) and torch.equal(scales, other) and (scales < 255).all()


def test_leading_dimensions_are_kept_and_the_input_unchanged() -> None:
    x = torch.randn(2, 3, 40)
    before = x.clone()
    q, scales = MXFP8Quant(64)(x)
    assert q.shape == (2, 3, 64) and scales.shape == (2, 3, 2) and torch.equal(x, before)
    q, scales = MXFP8Quant(64)(x[:0])
    assert q.shape == (0, 3, 64) and scales.shape == (0, 3, 2)


def test_one_launch_and_no_padded_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers.quant.mxfp8_quant import triton as module

    launches: list[tuple[int, ...]] = []

    class Counting:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launches.append(grid)
            return original[grid]

    original = module._mxfp8_quant_kernel
    monkeypatch.setattr(module, "_mxfp8_quant_kernel", Counting())
    monkeypatch.setattr(F, "pad", None)
    q, _ = MXFP8Quant(256, backend="triton")(torch.randn(2, 2880))
    assert q.shape == (2, 3072) and launches == [(-(-2 * 96 // 16),)]


def test_bad_arguments_are_named() -> None:
    for alignment in (0, 48, -32):
        with pytest.raises(ArgumentError, match=f"MXFP8Quant: alignment is {alignment}"):
            MXFP8Quant(alignment)
    layer = MXFP8Quant(128)
    for bad, message in (
        (torch.zeros(3, 64, dtype=torch.float64), "x is float64"),
        (torch.zeros(3, 0), r"x is of shape \[3, 0\]"),
        (torch.tensor(1.0), r"x is of shape \[\]"),
    ):
        with pytest.raises(ArgumentError, match=f"MXFP8Quant: {message}"):
            layer(bad)


def test_configuration_can_be_read_back() -> None:
    cfg = MXFP8QuantConfig(256)
    assert eval(repr(cfg)) == cfg and cfg.padded(2880) == 3072 and MXFP8QuantConfig(128).padded(2880) == 2944
