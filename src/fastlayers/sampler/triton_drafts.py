"""Which drafts of a step are right, and what its requests keep of it, in one launch where torch takes some twenty.

    T = tokens of the step; rows of ``known [4, T]``: row of the table, depth, place of the token before (a token that
    is no draft: its own; padding: any), draft (RIGHT: whatever is drawn; padding: -1)
    match[t]  = drafts[t] = RIGHT  or  drafts[t] = drawn[parent[t]]
    right[t]  = match of t and of all before it; so many are looked at
    last[t]   = right[t], and no draft behind t matches
    told[t]   = drawn[t] where right, -1 there where the logits are not finite, else PASSED
    table[1 and 2, row[t]] = offset[t], the same token                 where last: of one token a request

Each token is a program of its own: it walks back by itself, and drafts behind it are at most :data:`BEHIND` places on.
Who verifies takes this kernel where the sampler's run, too.
"""

from __future__ import annotations

import torch
import triton.language as tl

from fastlayers.attention.batch import MAX_TREE
from fastlayers.integers import next_power_of_2
from fastlayers.operators import operator
from fastlayers.runtime.launch import kernel

BEHIND = next_power_of_2(MAX_TREE)


@kernel(do_not_specialize=("tokens", "looks", "right", "passed"))
def _drafts_kernel(
    known_ptr, drawn_ptr, largest_ptr, offset_ptr, table_ptr, told_ptr, tokens, looks, right, passed, table_stride,
    BEHIND: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    parent_ptr, draft_ptr = known_ptr + 2 * tokens, known_ptr + 3 * tokens
    drawn = tl.load(drawn_ptr + place)
    at, wrong = place.to(tl.int64), place * 0
    for _ in range(looks):
        draft, parent = tl.load(draft_ptr + at), tl.load(parent_ptr + at)
        wrong += ((draft != right) & (draft != tl.load(drawn_ptr + parent))).to(tl.int32)
        at = parent
    behind = place + 1 + tl.arange(0, BEHIND)
    inside = behind < tokens
    draft = tl.load(draft_ptr + behind, mask=inside, other=0)
    child = tl.load(parent_ptr + behind, mask=inside, other=-1) == place
    onward = tl.max((child & ((draft == right) | (draft == drawn))).to(tl.int32), axis=0)
    largest = tl.load(largest_ptr + place).to(tl.float32)
    shown = tl.where(tl.abs(largest) < float("inf"), drawn, -1)
    tl.store(told_ptr + place, tl.where(wrong == 0, shown, passed))
    keeps = (wrong == 0) & (onward == 0)
    row = tl.load(known_ptr + place)
    tl.store(table_ptr + table_stride + row, tl.load(offset_ptr + place), mask=keeps)
    tl.store(table_ptr + 2 * table_stride + row, shown, mask=keeps)


def _fake(
    known: torch.Tensor, drawn: torch.Tensor, largest: torch.Tensor, offset: torch.Tensor, table: torch.Tensor,
    looks: int, right: int, passed: int,
) -> torch.Tensor:  # fmt: skip
    return torch.empty_like(drawn)


@operator("settle_drafts", _fake, writes=("table",))
def settle_drafts(
    known: torch.Tensor, drawn: torch.Tensor, largest: torch.Tensor, offset: torch.Tensor, table: torch.Tensor,
    looks: int, right: int, passed: int,
) -> torch.Tensor:  # fmt: skip
    """Return what is told ``[T]`` of draws; ``largest [T]``: logits; writes rows 1 and 2 of ``table``."""
    told, tokens = torch.empty_like(drawn), drawn.shape[0]
    if tokens:
        _drafts_kernel[(tokens,)](
            known, drawn, largest, offset, table, told, tokens, looks, right, passed, table.stride(0),
            BEHIND=BEHIND, num_warps=1,
        )  # fmt: skip
    return told
