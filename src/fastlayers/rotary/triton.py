"""Rotary embedding in Triton: one launch rotates a block of heads of q or k for one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.operators import operator
from fastlayers.rotary.layer import RotaryConfig
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents

# Heads a program, of few tokens and of more.
FEW_TOKENS, HEADS_OF_FEW, MOST_HEADS = 16, 8, 32
WARPS = 2
# From so many heads on, of at most so many pairs, programs of a few tokens have one warp, and those of some have eight:
# all of DeepSeek-V3's run at once, up to 211 tokens, on 132 multiprocessors of 64 warps each.
MANY_HEADS, MANY_PAIRS = 128, 32
SOME_TOKENS, WARPS_OF_SOME = 128, 8


@triton.jit
def _load_pairs(rows, inside_head, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    f = tl.arange(0, BLOCK)
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)
        x = tl.load(rows + both[None, :], mask=inside_head[:, None] & (both < 2 * HALF)[None, :], other=0.0)
        a, b = tl.split(tl.reshape(x, (rows.shape[0], BLOCK, 2)))
    else:
        mask = inside_head[:, None] & (f < HALF)[None, :]
        a = tl.load(rows + f[None, :], mask=mask, other=0.0)
        b = tl.load(rows + HALF + f[None, :], mask=mask, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def angles(
    cos_ptr, sin_ptr, positions_ptr, token, max_position, axis_stride,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
    SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr, ALTERNATE: tl.constexpr,
    ROWS: tl.constexpr = 0,
):  # fmt: skip
    """Return cos and sin of one token for every frequency; ``ROWS``: so many times, as a tile."""
    f = tl.arange(0, BLOCK)
    if SECTION_T + SECTION_H + SECTION_W > 0:
        if ALTERNATE:
            axis = tl.where((f % 3 == 1) & (f < 3 * SECTION_H), 1, 0)
            axis += tl.where((f % 3 == 2) & (f < 3 * SECTION_W), 2, 0)
        else:
            axis = tl.where(f >= SECTION_T, 1, 0) + tl.where(f >= SECTION_T + SECTION_H, 1, 0)
        position = tl.load(positions_ptr + axis * axis_stride + token).to(tl.int64)
    else:
        position = tl.load(positions_ptr + token).to(tl.int64)
    # A position outside the table must not become a read outside it.
    position = tl.minimum(tl.maximum(position, 0), max_position - 1)
    if ROWS > 0:
        offset = tl.broadcast_to((position * HALF + f)[None, :], (ROWS, BLOCK))
        inside = tl.broadcast_to((f < HALF)[None, :], (ROWS, BLOCK))
        c = tl.load(cos_ptr + offset, mask=inside, other=0.0)
        s = tl.load(sin_ptr + offset, mask=inside, other=0.0)
    else:
        c = tl.load(cos_ptr + position * HALF + f, mask=f < HALF, other=0.0)
        s = tl.load(sin_ptr + position * HALF + f, mask=f < HALF, other=0.0)
    return c, s


@kernel
def _rotary_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, positions_ptr, max_position, axis_stride,
    q_heads, k_heads, q_token_stride, q_head_stride, k_token_stride, k_head_stride,
    HALF: tl.constexpr, DIM: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr, ALTERNATE: tl.constexpr,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # Programs that run at the same time have neighbouring heads: whole pages of memory.
    token, block = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS
    heads = block * HEADS + tl.arange(0, HEADS)
    q_blocks = tl.cdiv(q_heads, HEADS)
    x_ptr, y_ptr, num_heads = q_ptr + token * q_token_stride, q_out_ptr + token * q_heads * DIM, q_heads
    head_stride = q_head_stride
    if block >= q_blocks:
        x_ptr, y_ptr, num_heads = k_ptr + token * k_token_stride, k_out_ptr + token * k_heads * DIM, k_heads
        heads -= q_blocks * HEADS
        head_stride = k_head_stride
    inside_head = heads < num_heads
    rows, out = x_ptr + heads[:, None] * head_stride, y_ptr + heads[:, None] * DIM
    await_inputs(PDL)
    release_dependents(PDL)
    a, b = _load_pairs(rows, inside_head, HALF, BLOCK, IN)
    if REST > 0:
        column = 2 * HALF + tl.arange(0, REST)
        kept = inside_head[:, None] & (column < DIM)[None, :]
        rest = tl.load(rows + column[None, :], mask=kept, other=0.0)
    # After the loads that wait for nothing.
    c, s = angles(
        cos_ptr, sin_ptr, positions_ptr, token, max_position, axis_stride,
        HALF, BLOCK, SECTION_T, SECTION_H, SECTION_W, ALTERNATE, HEADS if TILE else 0,
    )  # fmt: skip
    if TILE:
        first = cast(a * c - b * s, y_ptr.dtype.element_ty)
        second = cast(b * c + a * s, y_ptr.dtype.element_ty)
    else:
        first = cast(a * c[None, :] - b * s[None, :], y_ptr.dtype.element_ty)
        second = cast(b * c[None, :] + a * s[None, :], y_ptr.dtype.element_ty)
    if OUT:
        both = tl.arange(0, 2 * BLOCK)
        y = tl.reshape(tl.join(first, second), (HEADS, 2 * BLOCK))
        tl.store(out + both[None, :], y, mask=inside_head[:, None] & (both < 2 * HALF)[None, :])
    else:
        f = tl.arange(0, BLOCK)
        mask = inside_head[:, None] & (f < HALF)[None, :]
        tl.store(out + f[None, :], first, mask=mask)
        tl.store(out + HALF + f[None, :], second, mask=mask)
    if REST > 0:
        tl.store(out + column[None, :], rest, mask=kept)


def _program(tokens: int, heads: int, angles_each: int) -> tuple[int, int, bool]:
    """Return the most heads of a program, its warps, and whether each thread reads the angles of its own values.

    A few tokens are spread over more programs, and there is no other work to hide behind: where each thread read other
    angles than it needs, they would pass through shared memory, behind three barriers after the last load.
    """
    few, warps = tokens <= FEW_TOKENS, WARPS
    if heads >= MANY_HEADS and angles_each <= MANY_PAIRS:
        # A thread of one warp has its loads under way at once; those of eight have few values each, and no barriers.
        warps = 1 if few else WARPS_OF_SOME if tokens <= SOME_TOKENS else WARPS
    return HEADS_OF_FEW if few else MOST_HEADS, warps, few and angles_each >= 32 * warps


def _fake(q: torch.Tensor, k: torch.Tensor | None, *rest: object) -> list[torch.Tensor]:
    return [x.new_empty(*x.shape) for x in (q, k) if x is not None]


@operator("rotary", _fake)
def _rotary(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor,
    interleaved_in: bool, interleaved_out: bool, section: list[int], alternate: bool,
) -> list[torch.Tensor]:  # fmt: skip
    tokens, q_heads, dim = q.shape
    key = q if k is None else k
    k_heads = 0 if k is None else key.shape[1]
    outputs = [x.new_empty(*x.shape) for x in (q, k) if x is not None]
    if tokens and q_heads + k_heads:
        half = cos.shape[1]
        most, warps, tile = _program(tokens, q_heads + k_heads, next_power_of_2(half))
        heads = min(most, next_power_of_2(max(q_heads, k_heads)))
        parts = section if positions.dim() == 2 else [0, 0, 0]
        positions = positions.contiguous()
        blocks = cdiv(q_heads, heads) + cdiv(k_heads, heads)
        _rotary_kernel[(tokens * blocks,)](
            q, key, outputs[0], outputs[-1], cos, sin, positions, cos.shape[0], positions.stride(0),
            q_heads, k_heads, q.stride(0), q.stride(1), key.stride(0), key.stride(1),
            HALF=half, DIM=dim, IN=interleaved_in, OUT=interleaved_out,
            SECTION_T=parts[0], SECTION_H=parts[1], SECTION_W=parts[2], ALTERNATE=alternate,
            HEADS=heads, BLOCKS=blocks, BLOCK=next_power_of_2(half),
            REST=next_power_of_2(dim - 2 * half) if dim > 2 * half else 0, TILE=tile,
            **dependent_launch(q.device), num_warps=warps,
        )  # fmt: skip
    return outputs


class TritonRotary:
    """Reads q and k once, writes them once."""

    def __init__(self, cfg: RotaryConfig) -> None:
        self.static = (
            cfg.interleaved_in,
            cfg.interleaved_out,
            list(cfg.mrope_section),
            cfg.mrope_interleaved,
        )

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(q, k)`` rotated, new contiguous tensors of the inputs' dtype."""
        outputs = _rotary(q, k, cos, sin, positions, *self.static)
        return outputs[0], None if k is None else outputs[1]
