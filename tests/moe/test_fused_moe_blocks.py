"""The activation between two products by blocks of rows: the bits of that by pairs, who takes it, and planted bugs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.moe.fused_moe import weights
from fastlayers.moe.fused_moe.layer import FusedMoEConfig
from fastlayers.moe.fused_moe.triton import activation
from fastlayers.moe.fused_moe.triton.permute import COLUMN_SCALES, ROW_SCALES, Rows, place
from fastlayers.quant.block_quant import decode_e4m3
from fastlayers.runtime.precompile import cover
from fastlayers.testing.parity import poisoned_memory

sys.path.insert(0, str(Path(__file__).parents[1]))
from planted_faults import planted

FP8 = FusedMoEConfig(256, 256, 5, 2, num_shared=1, quant="fp8_block", dtype=torch.bfloat16)
BF16 = replace(FP8, quant="none", num_shared=0)
OSS = replace(BF16, activation="swiglu_oai", bias=True, interleaved=True)


@dataclass(frozen=True)
class Problem:
    """The first product of some pairs, of which some are dropped, and of experts some have none."""

    h: torch.Tensor
    ids: torch.Tensor
    bias: torch.Tensor | None
    rows: Rows
    cfg: FusedMoEConfig
    layout: int

    def outputs(self, module: Any, blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all rows' codes or values and scales as bytes; what nobody writes is what memory was filled with."""
        with poisoned_memory():
            if blocks:
                a, s = module.by_blocks(self.h, self.bias, self.rows, self.cfg, self.layout)
            else:
                a, s = module.by_pairs(self.h, self.ids, self.bias, self.rows, self.cfg, self.layout)
        return a.view(torch.uint8), s.contiguous().view(torch.uint8)


def problem(cfg: FusedMoEConfig, tokens: int, align: int, layout: int, device: str = "cpu") -> Problem:
    """Return a problem whose padding is NaN, as a product may leave it."""
    draw = torch.Generator().manual_seed(tokens)
    # Expert 0 has most, the one before the last none, and a token in seven no expert at all.
    load = torch.rand(tokens, cfg.num_experts, generator=draw) + torch.arange(cfg.num_experts, 0, -1) / cfg.num_experts
    load[:, -2] = 0
    ids = load.topk(cfg.top_k).indices.int()
    ids[3::7] = -1
    rows = place(ids.to(device), cfg.num_experts, cfg.num_shared, align=align)
    h = torch.full((rows.total, 2 * cfg.intermediate_size), torch.nan)
    used = rows.row_of[rows.row_of >= 0].long().cpu()
    h[used] = 3 * torch.randn(len(used), h.shape[1], generator=draw)
    bias = torch.randn(cfg.num_experts, h.shape[1], generator=draw).bfloat16() if cfg.bias else None
    return Problem(
        h.bfloat16().to(device), ids.to(device), None if bias is None else bias.to(device), rows, cfg, layout
    )


# Groups of one, two, six and sixteen, none that is whole; padding up to whole blocks, and rows one behind the other;
# scales in rows and in columns.
CASES = {
    "two_groups": (FP8, 37, 64, COLUMN_SCALES),
    "six_groups": (replace(FP8, intermediate_size=768, num_shared=0), 41, 128, COLUMN_SCALES),
    "sixteen_groups_ue8m0": (replace(FP8, intermediate_size=2048, scale_fmt="ue8m0"), 19, 64, COLUMN_SCALES),
    "one_group_in_rows": (replace(FP8, intermediate_size=128), 37, 1, ROW_SCALES),
    "six_groups_in_rows": (replace(FP8, intermediate_size=768), 23, 1, ROW_SCALES),
    "part_of_a_group": (replace(BF16, intermediate_size=96), 37, 1, ROW_SCALES),
    "plain": (replace(BF16, intermediate_size=768), 41, 64, COLUMN_SCALES),
    "clamped": (OSS, 45, 64, COLUMN_SCALES),
    "clamped_part_of_a_group": (replace(OSS, intermediate_size=160, interleaved=False), 45, 128, COLUMN_SCALES),
    "one_row_in_the_last_block": (FP8, 13, 1, ROW_SCALES),
    "one_token": (FP8, 1, 1, ROW_SCALES),
}


@lru_cache
def by_pairs(name: str) -> tuple[Problem, tuple[torch.Tensor, torch.Tensor]]:
    given = problem(*CASES[name])
    return given, given.outputs(activation, blocks=False)


def same(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(*both) for both in zip(found, wanted, strict=True))


def wanted_of(given: Problem) -> torch.Tensor:
    """Return fp32 values of the pairs that have a row, by torch."""
    cfg, rows = given.cfg, given.rows
    pair = torch.nonzero(rows.row_of >= 0).flatten()
    h = given.h[rows.row_of[pair].long()].float()
    if given.bias is not None:
        h += given.bias[given.ids.flatten()[pair].long()].float()
    return weights.round_activations(
        weights.activate(h, cfg.activation, cfg.alpha, cfg.limit, cfg.interleaved), cfg.quant, cfg.scale_fmt
    ).float()


def check_values(given: Problem, a: torch.Tensor, s: torch.Tensor) -> None:
    """Compare each pair's row with what torch makes of it; e4m3 codes may be one off."""
    row = given.rows.row_of[given.rows.row_of >= 0].long()
    found = a[row].float()
    if given.cfg.quant == "fp8_block":
        found = (decode_e4m3(a[row]).unflatten(1, (-1, weights.GROUP)) * s[row].unsqueeze(2)).flatten(1)
    wanted = wanted_of(given)
    assert found.shape == wanted.shape and len(row)
    assert ((found - wanted).norm(dim=1) <= 0.01 * wanted.norm(dim=1)).all()


@pytest.mark.parametrize("name", CASES)
def test_blocks_have_the_bits_of_pairs_and_leave_the_rest(name: str) -> None:
    given, wanted = by_pairs(name)
    assert given.rows.total % activation.ROWS or given.rows.align > 1
    assert same(given.outputs(activation, blocks=True), wanted)
    check_values(given, *activation.by_blocks(given.h, given.bias, given.rows, given.cfg, given.layout))


def test_no_pair_at_all() -> None:
    given = problem(FP8, 33, 64, COLUMN_SCALES)
    given.ids.fill_(-1)
    given = replace(given, rows=place(given.ids, 5, 1, align=64))
    assert same(given.outputs(activation, blocks=True), given.outputs(activation, blocks=False))


def test_a_prompt_takes_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "by_pairs", None)
    cfg = replace(FP8, num_experts=3, intermediate_size=128, num_shared=0)
    given = problem(cfg, 4099, 64, COLUMN_SCALES)
    check_values(given, *activation.activate(given.h, given.ids, None, given.rows, cfg, COLUMN_SCALES))


def rows_of(tokens: int, experts: int, top_k: int, align: int = 128, masked: bool = False) -> Rows:
    nothing = torch.empty(tokens * top_k, dtype=torch.int32, device="meta")
    return Rows(nothing, torch.empty(3, experts, dtype=torch.int32, device="meta"), 0, masked, align=align)


def test_who_takes_blocks() -> None:
    """Prompts whose experts begin with a block, or follow one another without a bias; never the masked layout."""
    for experts, top_k, tokens in ((257, 9, 1828), (128, 8, 1024), (4, 2, 4096)):
        assert activation.takes_blocks(rows_of(tokens, experts, top_k), True, True)
        assert not activation.takes_blocks(rows_of(tokens - 1, experts, top_k), False, True)
        assert not activation.takes_blocks(rows_of(tokens, experts, top_k), True, False)
    taken = {(align, bias): activation.takes_blocks(rows_of(4096, 32, 2, align), bias, True)
             for align in (1, 4, 16, 32, 64, 128) for bias in (False, True)}  # fmt: skip
    assert [each for each, takes in taken.items() if not takes] == [
        (1, True), (4, False), (4, True), (16, False), (16, True)
    ]  # fmt: skip
    assert not activation.takes_blocks(rows_of(4096, 32, 2, masked=True), False, True)


@pytest.mark.parametrize("most", [1800, 1828, 2000, 5000, 8192])
def test_a_warm_up_meets_both_kernels(most: int) -> None:
    """What it runs has as many kernels as what it stands for."""
    counts = cover(most)
    met = {activation.takes_blocks(rows_of(tokens, 257, 9), False, True) for tokens in counts}
    assert met == {activation.takes_blocks(rows_of(tokens, 257, 9), False, True) for tokens in range(1, most + 1)}


MUTANTS = {
    "a row too many": ("used, wide = row < end,", "used, wide = row <= end,"),
    "only the first row's expert": ("tl.where(first < start + ROWS, end, 0)", "tl.where(first <= start, end, 0)"),
    "all rows in use": ("tl.where(first < start + ROWS, end, 0)", "end + 0 * first"),
    "the last block left out": ("cdiv(rows.total, ROWS)", "rows.total // ROWS"),
    "scales of the first group": ("scale_offset(wide, group,", "scale_offset(wide, group * 0,"),
    "groups half as wide": ("(group * WIDTH + tl.arange", "(group * (WIDTH // 2) + tl.arange"),
    "rows of half the width": ("wide[:, None] * 2 * inner", "wide[:, None] * inner"),
    "columns of the next row": ("inside = used[:, None] & (column < inner)", "inside = used[:, None] & (column >= 0)"),
    "rows in one block only": ("start, group = tl.program_id(0) * ROWS,", "start, group = tl.program_id(0) * 0,"),
    "the first expert's bias": ("bias_ptr + expert.to(tl.int64) * 2 * inner", "bias_ptr + expert * 0"),
    "the bias of the expert behind": ("tl.where(first <= start, expert", "tl.where(first <= start + 64, expert"),
    "scales of rows as of columns": ("wide, group, groups, s_stride, LAYOUT", "wide, group, groups, s_stride, 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name: str, tmp_path: Path) -> None:
    mutant = planted(activation, tmp_path, MUTANTS[name], once=True)
    outcomes = []
    # All have rows behind those in use: what a fault writes too far is still in the buffers.
    for case in ("two_groups", "six_groups_in_rows", "part_of_a_group", "clamped", "one_row_in_the_last_block"):
        given, wanted = by_pairs(case)
        outcomes.append(same(given.outputs(mutant, blocks=True), wanted))
    assert not all(outcomes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("align", [1, 64, 128])
@pytest.mark.parametrize("sizes", [(256, 1, 8, 256), (128, 0, 8, 768), (16, 0, 4, 2048)], ids=str)
def test_gpu_blocks_have_the_bits_of_pairs(sizes: tuple[int, int, int, int], align: int) -> None:
    experts, shared, top_k, inner = sizes
    layout = ROW_SCALES if align == 1 else COLUMN_SCALES
    for quant, fmt in (("fp8_block", "float"), ("fp8_block", "ue8m0"), ("none", "float")):
        cfg = FusedMoEConfig(2048, inner, experts, top_k, num_shared=shared, quant=quant, scale_fmt=fmt)
        for tokens in (61, 4096 - 5):
            given = problem(cfg, tokens, align, layout, "cuda")
            assert same(given.outputs(activation, blocks=True), given.outputs(activation, blocks=False)), (cfg, tokens)
