"""NVFP4 quantisation: every tie, the order of scales, rows of experts, what is refused."""

from __future__ import annotations

import pytest
import torch

import fastlayers as fl
from fastlayers.device import as_device
from fastlayers.errors import ArgumentError
from fastlayers.quant.nvfp4_quant.layer import NVFP4_QUANT, NVFP4Quant, NVFP4QuantConfig, swizzled_place

BACKENDS = ("torch", "triton", "reference")
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
ONE, ALL = torch.ones(1), torch.tensor([0, 1], dtype=torch.int32)


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of packed codes."""
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    return VALUES[both & 7] * torch.where(both > 7, -1.0, 1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_value_every_tie_and_both_sides_of_it(backend: str) -> None:
    """With 6 in each group its scale is 1; midpoints go to the even code, their neighbours to the nearer one."""
    middles = (VALUES[1:] + VALUES[:-1]) / 2
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    around = [(m + d, v) for m, v in zip(middles.tolist(), expected.tolist(), strict=True) for d in (0.0,)]
    around += [(m * (1 - 2**-12), v) for m, v in zip(middles.tolist(), VALUES[:-1].tolist(), strict=True)]
    around += [(m * (1 + 2**-12), v) for m, v in zip(middles.tolist(), VALUES[1:].tolist(), strict=True)]
    around += [(v, v) for v in VALUES.tolist()]
    around += [(-x, -v) for x, v in around]
    for start in range(0, len(around), 15):
        some = [*around[start : start + 15], (6.0, 6.0)]
        some = [(0.0, 0.0)] * (16 - len(some)) + some
        x, wanted = (torch.tensor(side)[None] for side in zip(*some, strict=True))
        codes, scales = NVFP4Quant(backend=backend)(x, ONE, ALL)
        assert scales.view(torch.float8_e4m3fn).float().tolist() == [[1.0]]
        assert torch.equal(unpacked(codes), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_of_groups_and_experts(backend: str) -> None:
    x = torch.cat([torch.full((2, 16), 12.0), torch.full((2, 16), 0.0), torch.full((2, 16), 1e6)], 1)
    x[1, 40] = float("nan")
    offsets, scale = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1.0, 0.5])
    codes, scales = NVFP4Quant(2, backend=backend)(x, scale, offsets)
    # The last scale cannot be larger than 448, so that its codes saturate.
    assert scales.view(torch.float8_e4m3fn).float()[0].tolist() == [2.0, 0.0, 448.0]
    assert scales[1, 0] == torch.tensor(1.0).to(torch.float8_e4m3fn).view(torch.uint8) and scales[1, 2] == 0x7F
    values = unpacked(codes)
    assert values[:, :16].eq(6.0).all() and values[:, 16:32].eq(0.0).all()
    assert values[0, 32:].eq(6.0).all() and values[1, 32:].eq(0.0).all()


def test_error_is_that_of_the_format() -> None:
    x = torch.randn(64, 512) * torch.exp(torch.randn(64, 1))
    scale = 448 * 6 / x.abs().max()
    offsets = torch.tensor([0, 64], dtype=torch.int32)
    codes, scales = NVFP4Quant()(x, scale[None], offsets)
    wide = scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    error = float((unpacked(codes) * wide / scale - x).norm() / x.norm())
    assert 0.06 < error < 0.12


def test_swizzle_is_a_permutation_of_each_tile() -> None:
    rows, groups = 256, 8
    row, group = torch.meshgrid(torch.arange(rows), torch.arange(groups), indexing="ij")
    place = swizzled_place(row, group, groups)
    assert sorted(place.flatten().tolist()) == list(range(rows * groups))
    assert [int(place[r, g]) for r, g in ((0, 0), (0, 3), (1, 0), (31, 3), (32, 0), (127, 3), (0, 4), (128, 0))] == [
        0, 3, 16, 499, 4, 511, 512, 1024,
    ]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_swizzled_scales_are_the_linear_ones(backend: str) -> None:
    """Each expert's rows begin at whole tiles; experts without rows take none; the rest is 0."""
    counts, groups = (3, 0, 130, 1), 5
    offsets = torch.tensor((0, *counts)).cumsum(0).to(torch.int32)
    x, scale = torch.randn(sum(counts), groups * 16), torch.tensor([1.0, 2.0, 0.5, 4.0])
    codes, linear = NVFP4Quant(4, backend=backend)(x, scale, offsets)
    same, swizzled = NVFP4Quant(4, "swizzled", backend=backend)(x, scale, offsets)
    assert torch.equal(codes, same)
    assert swizzled.shape == (NVFP4QuantConfig(4, "swizzled").scale_rows(sum(counts)) * 8,)
    wanted, begin = torch.zeros_like(swizzled), 0
    for count, first in zip(counts, offsets.tolist(), strict=False):
        for r in range(count):
            place = swizzled_place(torch.tensor(begin + r), torch.arange(groups), groups)
            wanted[place] = linear[first + r]
        begin += -(-count // 128) * 128
    assert torch.equal(swizzled, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_nobody_are_zeros_whatever_they_hold(backend: str) -> None:
    x = torch.randn(6, 32)
    x[4:] = float("nan")
    offsets = torch.tensor([0, 3, 4], dtype=torch.int32)
    codes, scales = NVFP4Quant(2, backend=backend)(x, torch.ones(2), offsets)
    assert not codes[4:].any() and not scales[4:].any() and codes[:4].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("given", "words"),
    [([-1, 3, 4, 5], "-1 at 0"), ([0, 3, 2, 5], "2 at 2, behind 3"), ([0, 3, 4, 6], "6 at 3, behind 4")],
    ids=("negative", "decreasing", "too_large"),
)
def test_offsets_that_are_no_rows_are_named(backend: str, given: list[int], words: str) -> None:
    layer = NVFP4Quant(3, backend=backend)
    with pytest.raises(ArgumentError, match=f"^NVFP4Quant: offsets is {words}; accepted: rows from 0 to 5, none below"):
        layer(torch.zeros(5, 16), torch.ones(3), torch.tensor(given, dtype=torch.int32))
    layer(torch.zeros(5, 16), torch.ones(3), torch.tensor([1, 1, 3, 4], dtype=torch.int32))


def test_refusals_and_bad_arguments() -> None:
    triton, guard = NVFP4_QUANT.named("triton"), NVFP4_QUANT.named("flashinfer")
    assert triton.refusal(NVFP4QuantConfig(), as_device("A100")) == "e4m3 scales need sm_89 or newer, this is sm_80"
    assert triton.refusal(NVFP4QuantConfig(), as_device("H200")) is None
    assert guard.refusal(NVFP4QuantConfig(), as_device("H200")) == "needs sm_100, this is sm_90"
    assert guard.refusal(NVFP4QuantConfig(), as_device("B200")) is None
    assert not next(row for row in fl.backends("nvfp4_quant", device="B200") if row.name == "flashinfer").automatic
    layer = NVFP4Quant()
    for x in (torch.zeros(2, 24), torch.zeros(2, 0), torch.zeros(16), torch.zeros(2, 16).long()):
        with pytest.raises(ArgumentError, match="NVFP4Quant: x "):
            layer(x, ONE, ALL)
    for scale, offsets, named in ((torch.ones(2), ALL, "global_scale"), (ONE, ALL.long(), "offsets")):
        with pytest.raises(ArgumentError, match=f"NVFP4Quant: {named} "):
            layer(torch.zeros(1, 16), scale, offsets)
    with pytest.raises(ArgumentError, match="scale_layout"):
        NVFP4Quant(1, "tiled")
    cfg = NVFP4QuantConfig(3, "swizzled")
    assert eval(repr(cfg)) == cfg
