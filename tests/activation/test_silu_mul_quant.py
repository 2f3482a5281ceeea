"""SiLU·mul·quantise: layouts, scales, and equality with the separate layers."""

from __future__ import annotations

import math

import pytest
import torch

import fastlayers as fl
from fastlayers.activation.silu_mul.layer import SiluAndMul
from fastlayers.activation.silu_mul_quant.layer import SiluMulQuant
from fastlayers.errors import ArgumentError
from fastlayers.quant.group_quant.layer import GroupQuant

BACKENDS = ["torch", "triton"]


def product(value: torch.Tensor) -> torch.Tensor:
    """Return an input whose silu·mul is exactly ``value``: silu(64) rounds to 64."""
    return torch.cat((torch.full_like(value, 64.0), value / 64), -1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("layout", "strides"), [("row", (3, 1)), ("col", (1, 5)), ("col_tma4", (1, 8))])
def test_scale_layouts(backend: str, layout: str, strides: tuple[int, int]) -> None:
    x = torch.randn(5, 600).bfloat16()
    q, s = SiluMulQuant(300, scale_layout=layout, backend=backend)(x)
    assert (q.dtype, q.shape, q.is_contiguous()) == (torch.float8_e4m3fn, (5, 300), True)
    assert (s.dtype, s.shape, s.stride()) == (torch.float32, (5, 3), strides)
    expected = SiluMulQuant(300, backend=backend)(x)
    assert torch.equal(q.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(s, expected[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_by_hand(backend: str) -> None:
    value = torch.zeros(1, 128)
    value[0, :4] = torch.tensor([448.0, -224.0, 17.0, 1.0])  # e4m3 has 16 and 18: 17 is a tie, to even
    q, s = SiluMulQuant(128, backend=backend)(product(value))
    assert s.item() == 1.0
    assert q[0, :5].float().tolist() == [448.0, -224.0, 16.0, 1.0, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ue8m0_never_below(backend: str) -> None:
    largest = [448.0, 449.0, 447.0, 896.0, 3.5, 1e-30]
    value = torch.zeros(len(largest), 128)
    value[:, 7] = torch.tensor(largest)
    s = SiluMulQuant(128, scale_fmt="ue8m0", backend=backend)(product(value))[1][:, 0].tolist()
    floor = 2.0 ** math.ceil(math.log2(1e-10 / 448))
    assert s == [1.0, 2.0, 1.0, 2.0, 2.0**-7, floor]


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_and_floor(backend: str) -> None:
    q, s = SiluMulQuant(128, backend=backend)(torch.zeros(2, 256))
    assert torch.equal(q.float(), torch.zeros(2, 128))
    torch.testing.assert_close(s, torch.full((2, 1), 1e-10 / 448))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounds_to_the_models_dtype_first(backend: str) -> None:
    x = torch.randn(4, 512).bfloat16()
    q, s = SiluMulQuant(256, backend=backend)(x)
    y = SiluAndMul(256, backend=backend)(x).float().view(4, 2, 128)
    scale = y.abs().amax(-1) / 448
    assert torch.equal(s, scale)
    expected = (y / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(4, 256)
    assert torch.equal(q.float(), expected.float())


def test_errors() -> None:
    layer = SiluMulQuant(128)
    for bad in (
        torch.zeros(2, 128),
        torch.zeros(1, 2, 256),
        torch.zeros(2, 256).double(),
        torch.zeros(256, 2).t(),
    ):
        with pytest.raises(ArgumentError) as caught:
            layer(bad)
        assert (caught.value.layer, caught.value.argument) == ("SiluMulQuant", "x")
    for arguments, argument in (
        ({"group_size": 100}, "group_size"),
        ({"scale_layout": "diagonal"}, "scale_layout"),
        ({"scale_fmt": "fp4"}, "scale_fmt"),
    ):
        with pytest.raises(ArgumentError, match=argument):
            SiluMulQuant(128, **arguments)


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_groups_that_are_not_finite_are_those_of_the_two_layers(backend: str, scale_fmt: str) -> None:
    x = torch.randn(3, 256)
    x[0, 5], x[1, 200], x[2, 130] = float("nan"), float("inf"), 3e38
    q, s = SiluMulQuant(128, group_size=32, scale_fmt=scale_fmt, backend=backend)(x)
    wanted_q, wanted_s = GroupQuant(32, scale_fmt=scale_fmt)(fl.SiluAndMul(128)(x))
    assert torch.equal(s.isnan(), wanted_s.isnan()) and int(s.isnan().sum()) == 2
    assert torch.equal(q.float(), wanted_q.float()) or backend == "reference"
    torch.testing.assert_close(s, wanted_s, equal_nan=True, rtol=1e-6, atol=0.0)
    assert q[0, :32].float().abs().max() == 0
