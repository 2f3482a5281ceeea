"""What blocks of MXFP4 tokens share, whatever multiplies them: memory, alignment, the order of their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.align.layer import num_blocks
from fastlayers.moe.align.triton import FEW, launch_few
from fastlayers.moe.fused_moe.triton.mxfp4.plans import HopperLaunchConfig
from fastlayers.runtime.launch import Part, side_by_side
from fastlayers.triton_lang import dependent_launch

Parts = tuple[tuple[int, Part], ...]


class Blocks(NamedTuple):
    """What lies around two products of one shape.

    ``ordered``, ``rows``, ``partial``: the tokens' rows, what the first product makes of them, and the pairs' rows,
    in ``size`` bytes. ``align``: ``None`` where there are so many pairs that they are aligned by themselves; else the
    products find what it wrote in ``first`` and ``second``, at their arguments' places. ``grids``: of both.
    """

    size: int
    ordered: Part
    rows: Part
    partial: Part
    align: Callable[..., None] | None
    order: Callable[..., None]
    first: Parts
    second: Parts
    grids: tuple[tuple[int], tuple[int]]


def blocks_of(
    order: Any, tokens: int, per_token: int, experts: int, hidden: int, inner: int, columns: tuple[int, int],
    x_stride: int, dtype: torch.dtype, plan: HopperLaunchConfig, device: torch.device,
) -> Blocks:  # fmt: skip
    """Return it for blocks of pairs of one expert.

    ``order``: the kernel that writes the tokens' rows by slots; ``columns``: what rows of both products take.
    """
    pairs, i32 = tokens * per_token, torch.int32
    few, blocks = pairs <= FEW, num_blocks(pairs, experts, plan.tokens)
    slots = blocks * plan.tokens
    size, (ordered, rows, partial, *aligned) = side_by_side(
        (slots * columns[0], dtype), (slots * columns[1], dtype), (pairs * hidden, torch.float32),
        *(((slots, i32), (blocks, i32), (1, i32)) if few else ()),
    )  # fmt: skip
    gathered = (*zip((1, 2), aligned[::2], strict=False), (3, ordered))
    return Blocks(
        size, ordered, rows, partial,
        launch_few(pairs, experts, plan.tokens, device, tuple(zip((1, 2, 3), aligned, strict=True))) if few else None,
        order.at(
            (slots,), x_stride, hidden, pairs, parts=gathered, PER_TOKEN=per_token, BLOCK=next_power_of_2(hidden),
            num_warps=4, **dependent_launch(device),
        ),
        tuple(zip((5, 6, 7), aligned, strict=False)), tuple(zip((6, 7, 8), aligned, strict=False)),
        ((blocks * cdiv(2 * inner, 16 * plan.r1 * plan.w1),), (blocks * cdiv(hidden, 16 * plan.r2 * plan.w2),)),
    )  # fmt: skip
