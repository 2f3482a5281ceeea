"""Heads of latent attention that come in two parts, a part of its own and one that is turned, put side by side.

    joined[t, h] = [nope[t, h] (N) | turned[t, h] (R)]

torch's concatenation takes four times as long as a copy, because the turned part of keys is one row for all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.operators import nothing, operator
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, dependent_launch, release_dependents

# Heads of tokens a program: 12 KB of DeepSeek's in 16 bits.
BLOCK = 32


# A prompt's length is nothing to compile for.
@kernel(do_not_specialize=("rows",))
def _join_kernel(
    nope_ptr, turned_ptr, out_ptr, rows, nope_token, nope_head, turned_token, turned_head, out_token, out_head,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, BOTH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_NOPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_ROWS heads, of one token or more; not BOTH: the turned part alone."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    column, turn = tl.arange(0, BLOCK_NOPE), tl.arange(0, BLOCK_ROPE)
    target = (out_ptr + token * out_token + head * out_head)[:, None]
    inside = (row < rows)[:, None]
    await_inputs(PDL)
    release_dependents(PDL)
    turned_here = inside & (turn < ROPE)[None, :]
    turned_row = (turned_ptr + token * turned_token + head * turned_head)[:, None]
    turned = tl.load(turned_row + turn[None, :], mask=turned_here, other=0.0)
    if BOTH:
        here = inside & (column < NOPE)[None, :]
        nope_row = (nope_ptr + token * nope_token + head * nope_head)[:, None]
        tl.store(target + column[None, :], tl.load(nope_row + column[None, :], mask=here, other=0.0), mask=here)
    tl.store(target + NOPE + turn[None, :], turned, mask=turned_here)


@lru_cache(maxsize=4096)
def _launch(
    rows: int, heads: int, nope: int, rope: int, strides: tuple[int, ...], both: bool, device: torch.device
) -> Callable[..., None]:
    return _join_kernel.at(
        (cdiv(rows, BLOCK),), rows, *strides, HEADS=heads, NOPE=nope, ROPE=rope, BOTH=both, BLOCK_ROWS=BLOCK,
        BLOCK_NOPE=next_power_of_2(nope), BLOCK_ROPE=next_power_of_2(rope), num_warps=4, **dependent_launch(device),
    )  # fmt: skip


@operator("mla_join_heads", nothing, writes=("out",))
def join_heads(nope: torch.Tensor | None, turned: torch.Tensor, out: torch.Tensor) -> None:
    """Write both parts of all heads into ``out`` ``[T, H, N+R]``, or, without ``nope``, the turned part alone.

    ``nope`` ``[T, H, N]`` and ``turned`` ``[T, H, R]`` (one row for all heads: expanded) have values of ``out``'s
    dtype next to each other in a head, and share no memory with what is written. Capture-safe.
    """
    tokens, heads, width = out.shape
    if not out.numel():
        return
    rope = turned.shape[2]
    given = turned if nope is None else nope
    strides = (*given.stride()[:2], *turned.stride()[:2], *out.stride()[:2])
    _launch(tokens * heads, heads, width - rope, rope, strides, nope is not None, out.device)(given, turned, out)
