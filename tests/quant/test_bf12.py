"""bfloat16 weights in 12 bits: the same numbers again, how they lie in words, what is refused."""

from __future__ import annotations

import pytest
import torch

from fastlayers.errors import ArgumentError
from fastlayers.quant import bf12
from fastlayers.quant.bf12 import CODES, LEAST, MAX_OUTLIERS, pack_bf12, run_of, unpack_bf12, why_not_bf12

# Columns and words a run: odd multiples of 64 and of 128, multiples of 256.
WIDTHS = {64: 8, 192: 8, 2880: 8, 128: 16, 384: 16, 256: 32, 1024: 32, 4096: 32, 32768: 32}


def normal(rows: int, k: int, scale: float = 0.02, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed + k)
    return (torch.randn(rows, k, generator=random) * scale).bfloat16()


def bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16)


def assert_same_numbers(weight: torch.Tensor) -> bf12.BF12Weights:
    """Pack and unpack; all bits are the same but for the sign of zeros. Return what was packed."""
    packed = pack_bf12(weight)
    assert packed is not None
    found = unpack_bf12(packed)
    assert found.dtype == torch.bfloat16 and found.shape == weight.shape
    wrong = (bits(found) != bits(weight)) & ~((found == 0) & (weight == 0))
    assert not bool(wrong.any()), (weight[wrong], found[wrong])
    return packed


@pytest.mark.parametrize("k", WIDTHS)
def test_the_same_bits_at_every_run(k: int) -> None:
    assert run_of(k) == WIDTHS[k]
    packed = assert_same_numbers(normal(5, k))
    assert packed.words.shape == (5, 3 * k // 8) and packed.words.dtype == torch.int32
    beside = packed.columns.shape[1]
    assert packed.nbytes == 5 * (k * 3 // 2 + 4 + beside * (4 + 2))


def test_rows_have_scales_of_their_own() -> None:
    weight = normal(30, 256, 1.0)
    scales = torch.tensor([2.0 ** (8 * i - 120) for i in range(25)] + [1.0, 3e-5, 1e4, 2.0**66, 1e-37])
    scaled = (weight.double() * scales[:, None].double()).bfloat16()
    # Rows that reach below the smallest normal number, or to 2^80, have outliers there.
    inside = (scaled.abs() >= 2.0**-126).all(1) & (scaled.abs() < 2.0**79).all(1)
    assert int(inside.sum()) >= 24
    packed = assert_same_numbers(scaled[inside])
    assert len(packed.scale.unique()) >= 20 and bool(packed.scale.isfinite().all())


@pytest.mark.parametrize("largest", [2.0**79.5, 2.0**80, 2.0**100, 2.0**127])
def test_rows_so_large_that_their_scale_would_be_infinite(largest: float) -> None:
    weight = torch.full((2, 128), largest).bfloat16()
    weight[1] = 0.5
    weight[1, :MAX_OUTLIERS] = largest
    if largest < 2.0**80:
        packed = assert_same_numbers(weight)
        assert float(packed.scale[0]) == 2.0**127
        return
    assert pack_bf12(weight) is None  # all of the first row are outliers
    packed = assert_same_numbers(weight[1:])
    assert packed.values.shape[1] == MAX_OUTLIERS


def test_zeros_need_nothing_beside_them() -> None:
    packed = assert_same_numbers(torch.zeros(3, 64).bfloat16())
    assert not packed.words.any() and not packed.values.any()
    weight = normal(4, 192)
    weight[0], weight[1, ::2], weight[2, 5], weight[3, 7] = 0.0, -0.0, 0.0, -0.0
    packed = assert_same_numbers(weight)
    assert not packed.values[0].any()
    # The sign of zero is what may get lost: it is no other number.
    assert torch.equal(unpack_bf12(packed), weight)


def test_subnormal_numbers_are_outliers() -> None:
    weight = normal(2, 64)
    bits(weight)[0, :3] = torch.tensor([1, 127, -32768 + 5], dtype=torch.int16)
    packed = assert_same_numbers(weight)
    assert packed.columns[0, :3].tolist() == [0, 1, 2]
    bits(weight)[1] = torch.arange(1, 65, dtype=torch.int16)  # nothing else
    assert_same_numbers(weight)


def test_what_is_not_finite_stays_what_it_is() -> None:
    weight = normal(3, 128)
    weight[0, 3], weight[0, 100], weight[1, 127], weight[2, 0] = torch.inf, -torch.inf, torch.inf, torch.nan
    packed = pack_bf12(weight)
    assert packed is not None
    found = unpack_bf12(packed)
    assert torch.equal(found.isnan(), weight.isnan())
    assert torch.equal(found.nan_to_num(0.0, 7.0, -7.0), weight.nan_to_num(0.0, 7.0, -7.0))
    assert bool(packed.scale.isfinite().all())


def test_all_fifteen_exponents_and_the_next_at_both_ends() -> None:
    powers = torch.arange(1, 1 + CODES).repeat(4)[:60]
    weight = torch.zeros(1, 64, dtype=torch.bfloat16)
    weight[0, :60] = (2.0 ** (powers.double() - 20)).bfloat16()
    assert not assert_same_numbers(weight).values.any()
    weight[0, 60], weight[0, 62] = 2.0 ** (0 - 20), -1.5 * 2.0 ** (CODES + 1 - 20)
    packed = assert_same_numbers(weight)
    assert packed.columns.tolist() == [[60, 62]]
    assert packed.values.float().tolist() == [[2.0**-20, -1.5 * 2.0 ** (CODES - 19)]]
    # Every mantissa and both signs, at both ends.
    every = torch.arange(128, dtype=torch.int16)
    both = torch.cat((every | (100 << 7), every | (114 << 7)))
    assert not assert_same_numbers(torch.cat((both, both | -32768)).view(1, 512).view(torch.bfloat16)).values.any()


@pytest.mark.parametrize("count", [1, 2, 3, 33, 63, 64, 65])
def test_sixty_four_outliers_a_row_and_no_more(count: int) -> None:
    weight = normal(4, 512, 1.0).clamp(-2, 2)
    weight[weight.abs() < 2.0**-6] = 0.25
    weight[2, torch.randperm(512)[:count]] = 2.0**20
    if count > MAX_OUTLIERS:
        assert pack_bf12(weight) is None
        return
    packed = assert_same_numbers(weight)
    wide = packed.columns.shape[1]
    assert wide == packed.values.shape[1] and count <= wide < 2 * count
    assert int((packed.values[2] != 0).sum()) == count and not packed.values[[0, 1, 3]].any()


def test_any_bits_that_are_numbers_come_back_or_are_refused() -> None:
    random = torch.Generator().manual_seed(5)
    packed, refused = 0, 0
    for spread in (1, 8, 15, 16, 20, 40, 120):
        exponents = torch.randint(0, spread, (8, 320), generator=random) + torch.randint(
            0, 254 - spread, (8, 1), generator=random
        )
        rest = torch.randint(0, 256, (8, 320), generator=random)
        weight = (((rest & 128) << 8) | (exponents << 7) | (rest & 127)).to(torch.int16).view(torch.bfloat16)
        for row in weight.split(1):
            if pack_bf12(row) is None:
                refused += 1
            else:
                assert_same_numbers(row)
                packed += 1
    assert packed > 20 and refused > 10


def test_rows_are_packed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(7, 64)
    weight[1, 3] = 50.0
    weight[5, 8:11] = 80.0
    whole = pack_bf12(weight)
    monkeypatch.setattr(bf12, "_AT_ONCE", 3 * 64)
    parts = assert_same_numbers(weight)
    assert whole is not None and parts.columns.shape == (7, 4)
    assert all(torch.equal(*each) for each in zip(whole, parts, strict=True))


def test_where_a_weight_lies() -> None:
    """Column 8 R c + R j + i is word i of chunk c: the halves of three runs, as the kernels read them."""
    k, run = 128, 16
    for column in range(k):
        weight = torch.zeros(1, k, dtype=torch.bfloat16)
        weight[0, column] = -1.5
        packed = pack_bf12(weight)
        assert packed is not None and int(packed.words.count_nonzero()) == 2
        j, i = divmod(column, run)
        word = int(packed.words[0, i + run * (j // 4)]) & 0xFFFFFFFF
        codes = int(packed.words[0, i + 2 * run]) & 0xFFFFFFFF
        turn = lambda value, left: ((value << left) | (value >> (32 - left))) & 0xFFFFFFFF  # noqa: E731
        pair = (turn(word, 8 * (j // 2 % 2)) & bf12.SIGNS_AND_MANTISSAS) | (turn(codes, 4 * (j // 2)) & bf12.EXPONENTS)
        half = pair >> 16 if j % 2 else pair & 0xFFFF
        assert pair == half << (16 if j % 2 else 0)
        assert half >> 15 == 1 and half & 127 == 64 and 1 <= (half >> 7) & 255 <= CODES


def test_a_strided_weight_is_packed_as_it_reads() -> None:
    wide = normal(4, 512)
    assert_same_numbers(wide[:, 100:228])
    assert_same_numbers(normal(64, 64).t())


@pytest.mark.parametrize(
    ("weight", "given"),
    [
        (torch.zeros(2, 64), "float32[2, 64]"),
        (torch.zeros(2, 96).bfloat16(), "bfloat16[2, 96]"),
        (torch.zeros(2, 2, 64).bfloat16(), "bfloat16[2, 2, 64]"),
        (torch.zeros(0, 64).bfloat16(), "bfloat16[0, 64]"),
        (torch.zeros(1, 32768 + 64).bfloat16(), "bfloat16[1, 32832]"),
        (None, "None"),
    ],
)
def test_what_is_no_such_weight_is_refused(weight: torch.Tensor, given: str) -> None:
    with pytest.raises(ArgumentError) as error:
        pack_bf12(weight)
    assert given in str(error.value) and "bfloat16 [N, K], K a multiple of 64 up to 32768" in str(error.value)


def test_why_not_in_words() -> None:
    large = torch.empty(LEAST // 64, 64, dtype=torch.bfloat16)
    assert why_not_bf12(large) == "" and why_not_bf12(large.view(2, -1, 64)) == ""
    assert why_not_bf12(large[1:]) == f"{LEAST - 64} weights are fewer than {LEAST}"
    assert why_not_bf12(large.float()) == "weights are float32, not bfloat16"
    assert why_not_bf12(large.half()) == "weights are float16, not bfloat16"
    assert why_not_bf12(large.view(-1, 32)) == "32 input features are no multiple of 64 up to 32768"
    assert why_not_bf12(large.view(-1, 65536)) == "65536 input features are no multiple of 64 up to 32768"
    assert why_not_bf12(large.to("meta")) == "weights have no values yet"
    assert run_of(0) is run_of(63) is run_of(32768 + 64) is None
