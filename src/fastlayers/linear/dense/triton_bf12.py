"""The product of one row of x with bf12 weights (:mod:`fastlayers.quant.bf12`).

As the vector kernel of 16 bits a program asks for weights, and for its rows' outliers, before the kernels in front have
ended: BLOCK_N rows of BLOCK_G groups of eight columns, AHEAD tiles held in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl

from fastlayers.integers import cdiv
from fastlayers.operators import operator
from fastlayers.quant.bf12 import RUNS, BF12Weights, run_of
from fastlayers.quant.bf12_tiles import add_products, outliers_of, outlying_sum, row_words, words_at
from fastlayers.runtime.launch import New, kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents


@kernel
def bf12_vector_kernel(
    x_ptr, words_ptr, scale_ptr, columns_ptr, values_ptr, bias_ptr, y_ptr, N, CHUNKS,
    HAS_BIAS: tl.constexpr, MASKED: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr, OUTLIERS: tl.constexpr,
    RUN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N rows of the weight by the row of x, BLOCKS tiles of groups each."""
    G = CHUNKS * 8  # so that rows are known to begin at 16 bytes
    column, group = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_G)
    known = column < N
    # Rows beyond the edge read a valid one again; their results are never stored.
    row = tl.minimum(column, N - 1)
    rows = row_words(words_ptr, row, G)
    held = ()
    for i in tl.static_range(AHEAD):
        at = i * BLOCK_G + group
        held = held + (words_at(rows, at, (at < G)[None, :], RUN, MASKED),)  # type: ignore[assignment]
    scale = tl.load(scale_ptr + row)
    outlying, values = outliers_of(columns_ptr, values_ptr, row, OUTLIERS)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + row).to(tl.float32)
    await_inputs(PDL)
    release_dependents(PDL)
    gathered = tl.load(x_ptr + outlying)
    acc = tl.zeros([BLOCK_N, BLOCK_G], tl.float32)
    for i in tl.static_range(BLOCKS):
        if i + AHEAD < BLOCKS:
            at = (i + AHEAD) * BLOCK_G + group
            held = held + (words_at(rows, at, (at < G)[None, :], RUN, MASKED),)  # type: ignore[assignment]
        at = i * BLOCK_G + group
        acc = add_products(acc, held[i], x_ptr, at, (at < G)[None, :], RUN, MASKED)
    y = tl.sum(acc, axis=1) * scale + outlying_sum(gathered, values) + bias
    tl.store(y_ptr + column, cast(y, y_ptr.dtype.element_ty), mask=known)


class Plan(NamedTuple):
    """A program's rows and groups, its warps, and how many tiles it holds."""

    n: int
    g: int
    warps: int
    ahead: int


# As whole decode steps were fastest on an H200: see benchmarks/notes/bf12.md.
WHOLE, SHORT = Plan(2, 128, 1, 2), Plan(4, 128, 1, 1)


def plan_of(k: int) -> Plan:
    """Return the plan of so many columns."""
    return WHOLE if run_of(k) == RUNS[0] else SHORT


@lru_cache(maxsize=4096)
def _launch(
    n: int, k: int, outliers: int, bias: bool, out_dtype: torch.dtype, plan: Plan, device: torch.device
) -> Callable[..., torch.Tensor]:
    groups = k // 8
    blocks = cdiv(groups, plan.g)
    return bf12_vector_kernel.at(
        (cdiv(n, plan.n),), n, k // 64, makes={6: New((1, n), out_dtype)},
        HAS_BIAS=bias, MASKED=groups % plan.g != 0, BLOCKS=blocks, AHEAD=min(plan.ahead, blocks), OUTLIERS=outliers,
        RUN=run_of(k), BLOCK_N=plan.n, BLOCK_G=plan.g, num_warps=plan.warps, **dependent_launch(device),
    )  # fmt: skip


def _fake(
    x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, columns: torch.Tensor, values: torch.Tensor,
    bias: torch.Tensor | None, out_dtype: torch.dtype, plan: list[int],
) -> torch.Tensor:  # fmt: skip
    return x.new_empty(1, words.shape[0], dtype=out_dtype)


@operator("linear_bf12", _fake)
def _linear_bf12(
    x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, columns: torch.Tensor, values: torch.Tensor,
    bias: torch.Tensor | None, out_dtype: torch.dtype, plan: list[int],
) -> torch.Tensor:  # fmt: skip
    how = Plan(*plan) if plan else plan_of(x.shape[1])
    launch = _launch(len(words), x.shape[1], columns.shape[1], bias is not None, out_dtype, how, x.device)
    y: torch.Tensor = launch(x.contiguous(), words, scale, columns, values, x if bias is None else bias)
    return y


def linear_bf12(
    x: torch.Tensor, weight: BF12Weights, bias: torch.Tensor | None, out_dtype: torch.dtype, plan: Plan | None = None
) -> torch.Tensor:
    """Return ``x`` ``[…, K]``, one row, times bf12 weights ``[N, K]``: ``[…, N]``, a new tensor; capture-safe."""
    row = x.view(1, x.shape[-1]) if x.is_contiguous() else x.reshape(1, x.shape[-1])
    y: torch.Tensor = _linear_bf12(row, *weight, bias, out_dtype, list(plan or ()))
    return y.view(*x.shape[:-1], y.shape[1])


class BF12Linear:
    """A backend's call with weights of its own: one token, whatever weight it is given."""

    def __init__(self, weight: BF12Weights, out_dtype: torch.dtype) -> None:
        self.weight, self.out_dtype, self.nbytes = weight, out_dtype, weight.nbytes

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``y`` ``[…, N]``, a new tensor."""
        return linear_bf12(x, self.weight, bias, self.out_dtype)
