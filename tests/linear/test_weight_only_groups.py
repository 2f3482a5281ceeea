"""4-bit weights in groups, in Triton: every way to walk over K, and who walks which way."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers import env
from fastlayers.linear.weight_only import triton as kernels
from fastlayers.linear.weight_only import triton_groups as groups
from fastlayers.linear.weight_only.layer import WeightOnlyLinearConfig, quantize_weight_only
from fastlayers.linear.weight_only.reference import ReferenceWeightOnlyLinear
from fastlayers.linear.weight_only.torch import decoded
from fastlayers.linear.weight_only.triton import TritonWeightOnlyLinear, candidates, rule, suits
from fastlayers.quant.packed_codes import pack_nibbles

sys.path.insert(0, str(Path(__file__).parents[1]))
from planted_faults import planted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TILE = {"VECTOR": 0, "BLOCK_M": 16, "BLOCK_N": 64, "SPLITS": 1, "num_warps": 4, "num_stages": 2}


def operands(cfg: WeightOnlyLinearConfig, rows: int) -> tuple[Any, ...]:
    """Return x, the weight, its scales, its zero points, no order, and a bias."""
    torch.manual_seed(rows)
    n, k = cfg.out_features, cfg.in_features
    weight = (torch.randn(n, k) + 0.3 * cfg.zero_point) * torch.exp(
        0.5 * torch.randn(n, k // 32).repeat_interleave(32, 1)
    )
    stored, scale, zero = quantize_weight_only(weight, "w4a16", cfg.group_size, cfg.zero_point)
    bias = torch.randn(n).to(cfg.dtype) if cfg.bias else None
    return torch.randn(rows, k).to(cfg.dtype), stored, scale, zero, None, bias


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found.float() - wanted.float()).norm() < 6e-3 * wanted.float().norm())


@pytest.mark.parametrize(
    ("rows", "k", "group", "zero", "bias", "dtype"),
    [
        (2, 160, 32, False, False, BF16),  # a last tile with a run of its four
        (16, 480, 32, True, True, BF16),
        (64, 96, 32, True, False, FP16),  # one tile, not whole
        (20, 256, 32, False, True, FP16),
        (16, 192, 64, True, True, BF16),
        (3, 288, 96, False, True, BF16),  # runs of 32 in groups that do not end with a tile
        (4, 384, 128, True, True, BF16),  # a group a tile, or two; the last is alone
        (40, 256, 128, False, False, FP16),
        (5, 256, 256, True, False, BF16),  # two tiles lie in one group
    ],
)
@pytest.mark.parametrize("depth", [0, 32, 128, 256])
def test_every_walk_gives_the_reference(
    rows: int, k: int, group: int, zero: bool, bias: bool, dtype: torch.dtype, depth: int
) -> None:
    cfg = WeightOnlyLinearConfig(k, 72, bias, dtype, "w4a16", group, zero)
    given = operands(cfg, rows)
    wanted = ReferenceWeightOnlyLinear(cfg)(*given)
    m = 16 if rows <= 16 else 64
    for splits in (1, 2, 4):  # with four some have no tiles at all
        way = TILE | {"BLOCK_M": m, "BLOCK_K": depth, "SPLITS": splits}
        found = TritonWeightOnlyLinear(cfg, way)(*given)
        assert near(found, wanted), splits
        # Where x passes through makes no difference.
        assert depth == 32 or torch.equal(TritonWeightOnlyLinear(cfg, way | {"CACHED": 1})(*given), found)
    # The next group's scales, as a walk that counts groups wrongly would read, are told apart.
    x, stored, scale, *rest = given
    moved = scale.roll(1, 1 if group == k else 0)  # a group alone has no next
    wrong = TritonWeightOnlyLinear(cfg, TILE | {"BLOCK_K": depth})(x, stored, moved, *rest)
    assert not near(wrong, wanted)


@pytest.mark.parametrize(("rows", "group", "zero"), [(2, 32, False), (16, 32, True), (64, 32, False), (16, 64, True)])
def test_all_that_a_tuner_tries_gives_the_reference(rows: int, group: int, zero: bool) -> None:
    cfg = WeightOnlyLinearConfig(1088, 72, True, BF16, "w4a16", group, zero)
    given, found = operands(cfg, rows), candidates(cfg, rows)
    wanted = ReferenceWeightOnlyLinear(cfg)(*given)
    assert {config.get("BLOCK_K", 0) for config in found} >= {32, 128, 256}
    assert {config.get("SPLITS", 1) for config in found} == {1, 2}
    for config in found:
        assert near(TritonWeightOnlyLinear(cfg, config)(*given), wanted), config


@pytest.mark.parametrize("rows", [4, 64])
def test_a_tuner_tries_old_and_new_walks_over_groups_of_128(rows: int) -> None:
    cfg = WeightOnlyLinearConfig(1152, 72, True, BF16, "w4a16", 128, True)
    given, found = operands(cfg, rows), candidates(cfg, rows)
    wanted = ReferenceWeightOnlyLinear(cfg)(*given)
    tiles = [config for config in found if "BLOCK_M" in config]
    assert {(config.get("BLOCK_K", 0), config.get("CACHED", 0)) for config in tiles} == {(0, 0), (128, 0), (128, 1)}
    for config in found:
        assert near(TritonWeightOnlyLinear(cfg, config)(*given), wanted), config
    # A quick run takes 14 at most from all over the list: none is left out where programs are too few.
    for k, n in ((4096, 6144), (12288, 4096), (4096, 24576)):
        assert len(candidates(WeightOnlyLinearConfig(k, n), 16)) <= 14


@pytest.mark.parametrize(
    ("group", "depth"), [(32, 128), (32, 256), (64, 128), (64, 256), (96, 128), (128, 128), (128, 256)]
)
@pytest.mark.parametrize("zero", [False, True])
def test_each_code_meets_its_input_feature_and_its_scale(group: int, depth: int, zero: bool) -> None:
    """Rows with one feature each: y is the dequantised weight, to the bit."""
    cfg = WeightOnlyLinearConfig({32: 224, 64: 320, 96: 192, 128: 384}[group], 40, False, BF16, "w4a16", group, zero)
    _, stored, scale, zeros, *_ = operands(cfg, 1)
    impl = TritonWeightOnlyLinear(cfg, TILE | {"BLOCK_M": 64, "BLOCK_K": depth})
    y = impl(torch.eye(cfg.in_features, dtype=BF16), stored, scale, zeros, None, None)
    wanted = decoded("w4a16", group, stored, scale, zeros, None, scaled=True).to(BF16)
    assert torch.equal(y, wanted.T)
    # A row of what is stored, exchanged with another, would show.
    assert not torch.equal(y, wanted.roll(1, 0).T)


def test_sums_are_scaled_and_nothing_is_rounded_before_the_end() -> None:
    """A scale that bf16 does not hold, on a sum that cancels: rounded weights would leave a rest."""
    cfg = WeightOnlyLinearConfig(128, 16, False, BF16, "w4a16", 32)
    codes = torch.full((16, 128), 8).index_fill(1, torch.tensor([40, 41, 44]), 9)
    codes[:, 41], codes[:, 44] = 11, 15
    x = torch.zeros(16, 128)
    x[:, 40], x[:, 41], x[:, 44] = 4.0, 1.0, -1.0  # 4 · 1 + 3 − 7
    scale = torch.full((4, 16), 1 / 3)
    given = (x.to(BF16), pack_nibbles(codes), scale, None, None, None)
    assert torch.equal(TritonWeightOnlyLinear(cfg)(*given), torch.zeros(16, 16, dtype=BF16))
    assert bool(TritonWeightOnlyLinear(cfg, TILE | {"BLOCK_K": 32})(*given).any())


MUTANTS = {
    "runs out of order": ("halves + (first, second)", "halves + (second, first)"),
    "halves in turns": ("(0, 1, 3, 2)", "(0, 1, 2, 3)"),
    "first run's scale for all": ("x) * scales[i]", "x) * scales[0]"),
    "first run's zero point for all": ("zeros[i], dtype", "zeros[0], dtype"),
    "scales of this tile again": ("zero_ptr, tile + 1,", "zero_ptr, tile,"),
    "sums not kept": ("acc += dot", "acc = dot"),
    "splits begin at zero": ("zero_ptr, first, known", "zero_ptr, 0, known"),
    "no bias": ("acc += tl.load(bias_ptr", "acc += 0 * tl.load(bias_ptr"),
    "last tile dropped": ("for tile in range(first, last):", "for tile in range(first, last - 1):"),
}  # fmt: skip


@pytest.mark.skipif(not env.triton_interpret(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = WeightOnlyLinearConfig(480, 40, True, BF16, "w4a16", 32, True)
    given = operands(cfg, 16)
    splits = 2 if "splits" in name else 1
    impl = TritonWeightOnlyLinear(cfg, TILE | {"SPLITS": splits})
    wanted = ReferenceWeightOnlyLinear(cfg)(*given)
    assert near(impl(*given), wanted)
    monkeypatch.setattr(kernels, "short_groups_kernel", planted(groups, tmp_path, MUTANTS[name]).short_groups_kernel)
    assert not near(impl(*given), wanted), f"{name} changes nothing"


class Refusing:
    """Stands for a kernel that nobody is to launch."""

    def __getitem__(self, grid: Any) -> Any:
        raise AssertionError("launched")


def test_who_walks_which_way(monkeypatch: pytest.MonkeyPatch) -> None:
    short = WeightOnlyLinearConfig(256, 40, False, BF16, "w4a16", 32)
    long = replace(short, group_size=128)
    others = (
        replace(short, group_size=0), replace(short, dtype=FP32), replace(long, dtype=FP32),
        replace(short, format="w8a16"), replace(short, format="w8a16", group_size=0),
    )  # fmt: skip
    for group, rows, cached in ((32, 16, None), (128, 2, 1), (128, 16, 1), (128, 17, None), (256, 64, None)):
        chosen = rule(rows, 40, 256, BF16, "w4a16", group, False)
        assert chosen["BLOCK_K"] == 128 and chosen.get("CACHED") == cached
    assert "BLOCK_K" not in rule(16, 40, 256, BF16, "w4a16", 32, True)
    assert "BLOCK_K" not in rule(16, 40, 256, BF16, "w4a16", 128, True)
    for cfg in (*others, replace(short, act_order=True)):
        assert not any("BLOCK_K" in config for config in candidates(cfg, 16))
    given = operands(short, 16)
    taken = [TritonWeightOnlyLinear(short, config)(*given) for config in (None, TILE, TILE | {"BLOCK_K": 128})]
    assert torch.equal(taken[0], taken[1]) and torch.equal(taken[0], taken[2])  # of one who says nothing: the rule's
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "short_groups_kernel", Refusing())
        with pytest.raises(AssertionError, match="launched"):
            TritonWeightOnlyLinear(short)(*given)
        of_long = operands(long, 16)
        for way in (None, TILE | {"BLOCK_K": 128}):
            with pytest.raises(AssertionError, match="launched"):
                TritonWeightOnlyLinear(long, way)(*of_long)
        # A ladder measured before groups of 128 could walk this way says no depth.
        TritonWeightOnlyLinear(long, TILE)(*of_long)
        # A ladder lent from groups of 32 changes nothing for those who have no use for it.
        for cfg in others:
            x, bits = given[0].to(cfg.dtype), torch.randn(40, 256)
            stored, scale, zero = quantize_weight_only(bits, cfg.format, cfg.group_size)
            ways = [TritonWeightOnlyLinear(cfg, TILE | more) for more in ({}, {"BLOCK_K": 128})]
            first, second = (way(x, stored, scale, zero, None, None) for way in ways)
            assert torch.equal(first, second)
        # Nor with more rows, or in the order of a file.
        TritonWeightOnlyLinear(short, TILE | {"BLOCK_M": 128, "BLOCK_K": 128})(*given)
        order = torch.arange(256, dtype=torch.int32) // 32
        ordered = TritonWeightOnlyLinear(replace(short, act_order=True), TILE | {"BLOCK_K": 128})
        ordered(*given[:4], order, None)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_weight_only_kernel", Refusing())
        TritonWeightOnlyLinear(short)(*given)
        with pytest.raises(AssertionError, match="launched"):
            TritonWeightOnlyLinear(short, TILE | {"BLOCK_K": 32})(*given)


def test_what_another_shape_lends_has_programs_enough() -> None:
    """Splits of N = 6144, K = 4096 for 64 rows left half of a GPU idle at N = 4096, K = 12288."""
    tall, wide = WeightOnlyLinearConfig(12288, 4096), WeightOnlyLinearConfig(4096, 6144)
    lent = TILE | {"BLOCK_M": 64, "BLOCK_N": 128, "SPLITS": 2}
    assert not suits(tall, lent) and suits(tall, lent | {"SPLITS": 8}) and suits(tall, lent | {"BLOCK_M": 128})
    assert suits(tall, {"WHOLE": 1}) and suits(tall, {"VECTOR": 1, "BLOCK_N": 2})
    assert suits(replace(wide, in_features=512), lent)  # nothing is left to be split
    assert suits(WeightOnlyLinearConfig(4096, 24576), lent)
    assert all(suits(cfg, rule(rows, cfg.out_features, cfg.in_features, BF16, "w4a16", 128, False))
               for cfg in (tall, wide) for rows in (1, 16, 64, 512))  # fmt: skip
