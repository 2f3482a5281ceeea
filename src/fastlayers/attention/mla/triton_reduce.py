"""What adds up the parts of a row whose keys several programs attended to, in fp32 and in a fixed order.

part[s, r, :] = softmax-weighted rows of split s       lse[s, r] = its natural LSE, -inf without keys
o[r] = Σ part[s, r] · exp(lse[s, r] - lse[r])          lse[r] = log Σ exp(lse[s, r])
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from fastlayers.attention.mla.launch_config import reduce_tile
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents

# Where a running maximum starts: finite, so that no difference is -inf - -inf, and below every score.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def or_one(total):
    """Return the softmax denominator, 1 for rows that saw nothing (their numerator is 0)."""
    return tl.where(total > 0.0, total, 1.0)


@triton.jit
def _block_of_parts(
    partial_ptr, partial_lse_ptr, first, end, row, num_rows, column, RANK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return LSE and outputs of a row's parts from ``first`` on, of those from 0 to ``end``; no load waits for one."""
    split = first + tl.arange(0, BLOCK)
    real = (split >= 0) & (split < end)
    at = split.to(tl.int64) * num_rows + row
    lse = tl.load(partial_lse_ptr + at, mask=real, other=float("-inf"))
    return lse, tl.load(partial_ptr + at[:, None] * RANK + column[None, :], mask=real[:, None], other=0.0)


@kernel(do_not_specialize=("usual", "splits", "num_rows"))
def _reduce_kernel(
    partial_ptr, partial_lse_ptr, parts_ptr, o_ptr, lse_ptr, usual, splits, num_rows,
    RANK: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``BLOCK``: ``usual`` parts fit it. ``OWN``: each row has a number of parts of its own, at most ``splits``.

    The usual parts are read beside their LSE and number, not behind: a trip to memory is most of the kernel's time. A
    loop adds them up although few rows have further ones: else ptxas puts sums over LSE, which wait, between reads.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    await_inputs(PDL)
    release_dependents(PDL)
    parts = splits
    if OWN:
        # Of rows that are nobody's nothing was written.
        parts = tl.minimum(tl.maximum(tl.load(parts_ptr + row), 0), splits)
    begin = usual - BLOCK
    lse, part = _block_of_parts(partial_ptr, partial_lse_ptr, begin, usual, row, num_rows, column, RANK, BLOCK)
    highest = tl.full([], LOWEST, tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for first in range(begin, parts, BLOCK):
        lse = tl.where(first + tl.arange(0, BLOCK) < parts, lse, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(lse, axis=0))
        weight = tl.exp(lse - new_highest)
        # A part without keys wrote no output: what lies there may be NaN, and 0 · NaN is NaN.
        part = tl.where((lse > float("-inf"))[:, None], part, 0.0)
        decay = tl.exp(highest - new_highest)
        total = total * decay + tl.sum(weight, axis=0)
        acc = acc * decay + tl.sum(part * weight[:, None], axis=0)
        highest = new_highest
        if OWN:
            lse, part = _block_of_parts(
                partial_ptr, partial_lse_ptr, first + BLOCK, parts, row, num_rows, column, RANK, BLOCK
            )
    tl.store(o_ptr + row * RANK + column, cast(acc / or_one(total), o_ptr.dtype.element_ty))
    lse = tl.where(total > 0.0, highest + tl.log(or_one(total)), float("-inf"))
    tl.store(lse_ptr + row, lse, mask=tl.program_id(1) == 0)


def reduce_launch(
    rows: int, rank: int, usual: int, splits: int, own: bool, device: torch.device
) -> Callable[..., None]:  # fmt: skip
    """Return what adds up the parts of so many rows: ``usual`` each, or with ``own`` numbers up to ``splits``.

    It takes parts ``[splits, rows, rank]`` and their LSE ``[splits, rows]`` in fp32, with ``own`` the rows' numbers of
    parts (int32), and writes the output ``[rows, rank]`` and LSE ``[rows]`` in fp32.
    """
    tile = reduce_tile(usual, rank)
    return _reduce_kernel.at(
        (rows, rank // tile.columns), usual, splits, rows, RANK=rank, COLUMNS=tile.columns, BLOCK=tile.block, OWN=own,
        num_warps=tile.num_warps, **dependent_launch(device),
    )  # fmt: skip
