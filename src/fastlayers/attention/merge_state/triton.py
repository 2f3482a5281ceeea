"""merge_state in Triton: a block of (token, head) rows a program, both outputs in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.attention.merge_state.layer import MergeStateConfig
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.operators import operator
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import cast

# Rows a program; up to FEW rows fewer, and both sides are read at once instead of after their LSEs.
ROWS, FEW, ROWS_OF_FEW = 8, 4096, 2


@triton.jit
def _side(lse_ptr, offset, inside):
    lse = tl.load(lse_ptr + offset, mask=inside, other=-float("inf"))
    return tl.where(lse == float("inf"), -float("inf"), lse)


@triton.jit
def _offsets(row, num_heads, token_stride, head_stride, DENSE: tl.constexpr):
    """Return where the rows begin; without a division where tokens follow each other as heads do."""
    if DENSE:
        return row.to(tl.int64) * head_stride
    return (row // num_heads).to(tl.int64) * token_stride + (row % num_heads).to(tl.int64) * head_stride


@kernel(do_not_specialize=("rows",))
def _merge_state_kernel(
    o_a_ptr, lse_a_ptr, o_b_ptr, lse_b_ptr, o_ptr, lse_ptr, rows, num_heads,
    o_a_token, o_a_head, lse_a_token, lse_a_head, o_b_token, o_b_head, lse_b_token, lse_b_head,
    HEAD_DIM: tl.constexpr, DENSE: tl.constexpr, EAGER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    lse_a = _side(lse_a_ptr, _offsets(row, num_heads, lse_a_token, lse_a_head, DENSE), inside)
    lse_b = _side(lse_b_ptr, _offsets(row, num_heads, lse_b_token, lse_b_head, DENSE), inside)
    column = tl.arange(0, BLOCK)
    wide = inside[:, None] & (column < HEAD_DIM)[None, :]
    # A side with weight 0 does not count: it may hold anything, NaN included. Many rows do not even read it.
    seen_a, seen_b = (lse_a != -float("inf"))[:, None], (lse_b != -float("inf"))[:, None]
    a_rows = o_a_ptr + _offsets(row, num_heads, o_a_token, o_a_head, DENSE)[:, None] + column[None, :]
    b_rows = o_b_ptr + _offsets(row, num_heads, o_b_token, o_b_head, DENSE)[:, None] + column[None, :]
    if EAGER:
        o_a, o_b = tl.load(a_rows, mask=wide, other=0.0), tl.load(b_rows, mask=wide, other=0.0)
        o_a, o_b = tl.where(seen_a, o_a, 0.0).to(tl.float32), tl.where(seen_b, o_b, 0.0).to(tl.float32)
    else:
        o_a = tl.load(a_rows, mask=wide & seen_a, other=0.0).to(tl.float32)
        o_b = tl.load(b_rows, mask=wide & seen_b, other=0.0).to(tl.float32)
    largest = tl.maximum(lse_a, lse_b)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    weight_a, weight_b = tl.exp(lse_a - shift), tl.exp(lse_b - shift)
    total = weight_a + weight_b
    seen = total > 0
    share = tl.where(seen, 1.0 / tl.where(seen, total, 1.0), 0.0)
    lse = tl.where(seen, shift + tl.log(tl.where(seen, total, 1.0)), -float("inf"))
    tl.store(lse_ptr + row, lse, mask=inside)
    o = o_a * (weight_a * share)[:, None] + o_b * (weight_b * share)[:, None]
    tl.store(o_ptr + row.to(tl.int64)[:, None] * HEAD_DIM + column[None, :], cast(o, o_ptr.dtype.element_ty), mask=wide)


def _empty(o_a: torch.Tensor, lse_a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return o_a.new_empty(o_a.shape), lse_a.new_empty(lse_a.shape)


@operator("merge_state", _empty)
def _merge_state(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, head_dim = o_a.shape
    o, lse = _empty(o_a, lse_a)
    if o.numel():
        few = tokens * heads <= FEW
        rows = ROWS_OF_FEW if few else ROWS
        _merge_state_kernel[(cdiv(tokens * heads, rows),)](
            o_a, lse_a, o_b, lse_b, o, lse, tokens * heads, heads,
            o_a.stride(0), o_a.stride(1), lse_a.stride(0), lse_a.stride(1),
            o_b.stride(0), o_b.stride(1), lse_b.stride(0), lse_b.stride(1),
            HEAD_DIM=head_dim, DENSE=all(x.stride(0) == heads * x.stride(1) for x in (o_a, lse_a, o_b, lse_b)),
            EAGER=few, ROWS=rows, BLOCK=next_power_of_2(head_dim), num_warps=2,
        )  # fmt: skip
    return o, lse


class TritonMergeState:
    """One pass: reads both outputs once, writes one."""

    def __init__(self, cfg: MergeStateConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o, lse)``, both new contiguous tensors."""
        merged: tuple[torch.Tensor, torch.Tensor] = _merge_state(o_a, lse_a, o_b, lse_b)
        return merged
