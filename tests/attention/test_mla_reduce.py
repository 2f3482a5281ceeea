"""What adds up the parts of latent attention: parts nobody wrote, rows without keys, any number of parts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fastlayers.attention.mla import triton_reduce
from fastlayers.attention.mla.cases import _decode
from fastlayers.attention.mla.config import MLA
from fastlayers.attention.mla.launch_config import MAX_SPLITS, reduce_tile
from fastlayers.tuning.parity import check_parity

sys.path.insert(0, str(Path(__file__).parents[1]))
from planted_faults import planted

CPU, NAN, NOTHING = torch.device("cpu"), float("nan"), float("-inf")
RANK = 128


def parts_of(counts: list[int], splits: int, rank: int = RANK) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return parts ``[splits, rows, rank]``, LSE and numbers; what nobody writes is NaN, every third part is empty.

    An empty part has an LSE, and no output. Of a row whose number is none nothing is there.
    """
    generator = torch.Generator().manual_seed(len(counts))
    partial = torch.randn(splits, len(counts), rank, generator=generator)
    lse = 4 * torch.randn(splits, len(counts), generator=generator)
    empty = torch.arange(splits)[:, None] % 3 == 1
    lse = torch.where(empty & torch.tensor([count > 1 for count in counts]), NOTHING, lse)
    beyond = torch.arange(splits)[:, None] >= torch.tensor([count if count <= splits else 0 for count in counts])
    partial[(lse == NOTHING) | beyond], lse = NAN, torch.where(beyond, NAN, lse)
    return partial, lse, torch.tensor(counts, dtype=torch.int32)


def added(
    given: tuple[torch.Tensor, ...], usual: int, own: bool, dtype: torch.dtype = torch.float32,
    module: ModuleType = triton_reduce,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    partial, lse, counts = given
    splits, rows, rank = partial.shape
    o, whole = torch.full((rows, rank), NAN, dtype=dtype), torch.full((rows,), NAN)
    module.reduce_launch(rows, rank, usual, splits, own, CPU)(partial, lse, counts, o, whole)
    return o, whole


def check(usual: int, splits: int, counts: list[int], own: bool, module: ModuleType = triton_reduce) -> None:
    """Hold sums against fp64."""
    given = parts_of(counts, splits)
    o, lse = added(given, usual, own, module=module)
    there = torch.arange(splits)[:, None] < given[2]
    shares = torch.where(there, given[1].double(), NOTHING)
    whole = shares.logsumexp(0)
    weight = (shares - torch.where(whole == NOTHING, 0.0, whole)).exp()
    expected = (torch.where(weight[..., None] > 0, given[0].double(), 0.0) * weight[..., None]).sum(0)
    torch.testing.assert_close(o, expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, whole.float(), rtol=1e-5, atol=1e-5)


OWN = {
    "usual 1": (1, 8, [1, 2, 8, 0, 5, 3]), "usual 4": (4, 32, [4, 1, 32, 0, 5, 8, 9, 3]),
    "usual 16": (16, MAX_SPLITS, [16, 1, MAX_SPLITS, 17, 0, 33]), "usual 32": (32, MAX_SPLITS, [MAX_SPLITS, 32, 7, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_rows_with_numbers_of_their_own(name: str) -> None:
    usual, splits, counts = OWN[name]
    check(usual, splits, counts, True)


@pytest.mark.parametrize("splits", [2, 4, 8, 16, 32, MAX_SPLITS])
def test_rows_with_as_many_parts_each(splits: int) -> None:
    check(splits, splits, [splits] * 3, False)


def test_rows_without_keys_and_rows_of_nobody() -> None:
    partial, lse, counts = parts_of([4, 4, -7, 1 << 20], 4)
    lse[:, 1], partial[:, 1] = NOTHING, NAN  # a request's tokens that see nothing: each part says so
    lse[:, 3], partial[:, 3] = 0.0, 2.0
    o, whole = added((partial, lse, counts), 4, True, torch.bfloat16)
    assert o[0].isfinite().all() and whole[0].isfinite()
    assert o[1:3].eq(0).all() and whole[1:3].eq(NOTHING).all()
    assert o[3].eq(2).all()  # of a number that nobody wrote no more than there may be


def test_a_rows_bits_are_its_own() -> None:
    """Neither other rows nor the most parts that a row may have change a sum."""
    for usual, counts in ((4, [9, 4, 30, 1]), (16, [16, 40, 3, 17])):
        partial, lse, numbers = parts_of(counts, MAX_SPLITS)
        o, whole = added((partial, lse, numbers), usual, True)
        for row, count in enumerate(counts):
            kept = max(count, usual)
            alone = partial[:kept, row : row + 1].contiguous(), lse[:kept, row : row + 1].contiguous()
            one, one_lse = added((*alone, numbers[row : row + 1]), usual, True)
            assert torch.equal(one[0], o[row]) and torch.equal(one_lse[0], whole[row])
    again = added((partial, lse, numbers), 16, True)
    assert torch.equal(again[0], o) and torch.equal(again[1], whole)


def test_tiles() -> None:
    for usual in (1, 2, 4, 8, 16, 32, MAX_SPLITS):
        tile = reduce_tile(usual, 512)
        assert usual <= tile.block and 512 % tile.columns == 0
        assert tile.block * tile.columns <= 32 * 32 * tile.num_warps  # registers of a thread: 32 of parts
        assert reduce_tile(usual, 32).columns == 32


def test_steps_of_one_token_or_none() -> None:
    """One token at most, but not of every request: whose tokens they are has to be read."""
    triton = MLA.named("triton")
    tiny = (32, 16, 16, 16)
    for name, query_lens in (("one each", (1, 1, 1)), ("one or none", (1, 0, 1))):
        check_parity(
            "mla", triton, _decode(name, 4, tiny, 16, torch.bfloat16, (290, 40, 17), query_lens=query_lens), CPU
        )


MUTANTS = {
    "what nobody wrote is multiplied by 0": (
        'part = tl.where((lse > float("-inf"))[:, None], part, 0.0)', "part = part", "usual 4"
    ),
    "parts beyond a row's number count": ("first + tl.arange(0, BLOCK) < parts, lse", "first < 999, lse", "usual 4"),
    "a block is left out": ("partial_lse_ptr, first + BLOCK,", "partial_lse_ptr, first + 2 * BLOCK,", "usual 4"),
    "sums keep an earlier largest": ("acc = acc * decay + tl.sum(part", "acc = acc + tl.sum(part", "usual 16"),
    "every program adds the same columns": (
        "column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)", "column = tl.arange(0, COLUMNS)", "columns"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_show(name: str, tmp_path: Path) -> None:
    right, wrong, case = MUTANTS[name]
    module = planted(triton_reduce, tmp_path, (right, wrong), once=True)
    usual, splits, counts = (MAX_SPLITS, MAX_SPLITS, [MAX_SPLITS]) if case == "columns" else OWN[case]
    with pytest.raises(AssertionError):
        check(usual, splits, counts, case != "columns", module)
