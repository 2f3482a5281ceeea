"""rotary_kv_write in Triton: a program norms and turns a block of one token's heads; those of k write the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from fastlayers.attention.kv_write.triton import to_cache
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWriteConfig
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.operators import nothing, operator
from fastlayers.rotary.triton import angles
from fastlayers.runtime.launch import Heads, Kinds, New, kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents

# Of one program: enough to share the load of cos and sin, few enough to fill a GPU at decode.
MAX_VALUES = 2048


@triton.jit
def _load_pair(rows, f, inside_head, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_HALF)
        x = tl.load(rows + both[None, :], mask=inside_head & (both < 2 * HALF)[None, :], other=0.0)
        a, b = tl.split(tl.reshape(x, (rows.shape[0], BLOCK_HALF, 2)))
    else:
        inside = inside_head & (f < HALF)[None, :]
        a = tl.load(rows + f[None, :], mask=inside, other=0.0)
        b = tl.load(rows + HALF + f[None, :], mask=inside, other=0.0)
    return a, b


@triton.jit
def _scaled(x, inverse, weight_ptr, column, WIDTH: tl.constexpr):
    """RMSNorm of ``x`` given its rows' inverse root mean squares: rounded to the dtype, scaled, rounded again."""
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    rounded = cast(x.to(tl.float32) * inverse[:, None], x.dtype).to(tl.float32)
    return cast(rounded * weight[None, :], x.dtype)


@triton.jit
def _turn(
    source, target, source_head, target_head, head, heads, cos_ptr, sin_ptr, positions_ptr, token, max_position,
    axis_stride, f, weight_ptr, eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BLOCK_HALF: tl.constexpr,
    INTERLEAVED_IN: tl.constexpr, INTERLEAVED_OUT: tl.constexpr, NORM: tl.constexpr,
    SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr, ALTERNATE: tl.constexpr,
):  # fmt: skip
    rows, targets = source + head[:, None] * source_head, target + head[:, None] * target_head
    inside_head = (head < heads)[:, None]
    a, b = _load_pair(rows, f, inside_head, HALF, BLOCK_HALF, INTERLEAVED_IN)
    dtype: tl.constexpr = source.dtype.element_ty
    if REST > 0:
        column = 2 * HALF + tl.arange(0, REST)
        kept = inside_head & (column < HEAD_DIM)[None, :]
        rest = tl.load(rows + column[None, :], mask=kept, other=0.0)
    # After the loads that wait for nothing.
    c, s = angles(
        cos_ptr, sin_ptr, positions_ptr, token, max_position, axis_stride,
        HALF, BLOCK_HALF, SECTION_T, SECTION_H, SECTION_W, ALTERNATE,
    )  # fmt: skip
    if NORM:
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        square = tl.sum(wide_a * wide_a + wide_b * wide_b, axis=1)
        if REST > 0:
            wide_rest = rest.to(tl.float32)
            square += tl.sum(wide_rest * wide_rest, axis=1)
            inverse = tl.rsqrt(square / HEAD_DIM + eps)
            rest = _scaled(rest, inverse, weight_ptr, column, HEAD_DIM)
        else:
            inverse = tl.rsqrt(square / HEAD_DIM + eps)
        a = _scaled(a, inverse, weight_ptr, 2 * f if INTERLEAVED_IN else f, 2 * HALF if INTERLEAVED_IN else HALF)
        b = _scaled(b, inverse, weight_ptr, 2 * f + 1 if INTERLEAVED_IN else HALF + f, 2 * HALF)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    # Rounded to the model's dtype first, then to the cache's, as an unfused pair does.
    first = to_cache(cast(wide_a * c[None, :] - wide_b * s[None, :], dtype), target.dtype.element_ty)
    second = to_cache(cast(wide_b * c[None, :] + wide_a * s[None, :], dtype), target.dtype.element_ty)
    if INTERLEAVED_OUT:
        both = tl.arange(0, 2 * BLOCK_HALF)
        y = tl.reshape(tl.join(first, second), (rows.shape[0], 2 * BLOCK_HALF))
        tl.store(targets + both[None, :], y, mask=inside_head & (both < 2 * HALF)[None, :])
    else:
        inside = inside_head & (f < HALF)[None, :]
        tl.store(targets + f[None, :], first, mask=inside)
        tl.store(targets + HALF + f[None, :], second, mask=inside)
    if REST > 0:
        tl.store(targets + column[None, :], to_cache(rest, target.dtype.element_ty), mask=kept)


@kernel
def _rotary_kv_write_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, positions_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr, loc_ptr,
    q_weight_ptr, k_weight_ptr, q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, k_slot, v_slot,
    max_position, axis_stride, heads, kv_heads, eps,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED_IN: tl.constexpr, INTERLEAVED_OUT: tl.constexpr, NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, Q_BLOCKS: tl.constexpr, BLOCK_KV_HEADS: tl.constexpr, KV_BLOCKS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_V: tl.constexpr,
    SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr, ALTERNATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # Programs that run at the same time have neighbouring heads: whole pages of memory.
    blocks: tl.constexpr = Q_BLOCKS + KV_BLOCKS
    token, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    f = tl.arange(0, BLOCK_HALF)
    await_inputs(PDL)
    release_dependents(PDL)
    if block < Q_BLOCKS:
        head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        _turn(
            q_ptr + token * q_token, q_out_ptr + token * out_token, q_head, out_head, head, heads,
            cos_ptr, sin_ptr, positions_ptr, token, max_position, axis_stride, f, q_weight_ptr, eps,
            HEAD_DIM, HALF, REST, BLOCK_HALF, INTERLEAVED_IN, INTERLEAVED_OUT, NORM,
            SECTION_T, SECTION_H, SECTION_W, ALTERNATE,
        )  # fmt: skip
    else:
        kv_head = (block - Q_BLOCKS) * BLOCK_KV_HEADS + tl.arange(0, BLOCK_KV_HEADS)
        slot = tl.load(loc_ptr + token).to(tl.int64)
        _turn(
            k_ptr + token * k_token, k_cache_ptr + slot * k_slot, k_head, HEAD_DIM, kv_head, kv_heads,
            cos_ptr, sin_ptr, positions_ptr, token, max_position, axis_stride, f, k_weight_ptr, eps,
            HEAD_DIM, HALF, REST, BLOCK_HALF, INTERLEAVED_IN, INTERLEAVED_OUT, NORM,
            SECTION_T, SECTION_H, SECTION_W, ALTERNATE,
        )  # fmt: skip
        column = tl.arange(0, BLOCK_V)
        inside = (kv_head < kv_heads)[:, None] & (column < V_HEAD_DIM)[None, :]
        v = tl.load(v_ptr + token * v_token + kv_head[:, None] * v_head + column[None, :], mask=inside, other=0.0)
        target = v_cache_ptr + slot * v_slot + kv_head[:, None] * V_HEAD_DIM + column[None, :]
        tl.store(target, to_cache(v, v_cache_ptr.dtype.element_ty), mask=inside)


@lru_cache
def _blocks(
    num_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int, rotary_dim: int, interleaved_in: bool,
    interleaved_out: bool, norm: bool,
) -> dict[str, int | bool]:  # fmt: skip
    """Return the constants of a launch."""
    power = next_power_of_2
    rest = head_dim - rotary_dim
    most = max(1, MAX_VALUES // power(head_dim))
    heads, kv_heads = (min(most, power(count)) for count in (num_heads, num_kv_heads))
    return {
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "HALF": rotary_dim // 2,
        "REST": power(rest) if rest else 0,
        "INTERLEAVED_IN": interleaved_in,
        "INTERLEAVED_OUT": interleaved_out,
        "NORM": norm,
        "BLOCK_HEADS": heads,
        "Q_BLOCKS": cdiv(num_heads, heads),
        "BLOCK_KV_HEADS": kv_heads,
        "KV_BLOCKS": cdiv(num_kv_heads, kv_heads),
        "BLOCK_HALF": power(rotary_dim // 2),
        "BLOCK_V": power(v_head_dim),
    }


@lru_cache(maxsize=4096)
def _launch(
    q_shape: tuple[int, ...], kv_heads: int, v_head_dim: int, numbers: tuple[int, ...], eps: float | None,
    rotary_dim: int, interleaved_in: bool, interleaved_out: bool, section: tuple[int, ...], alternate: bool,
    device: torch.device, parts: tuple[tuple[int, Heads], ...] | None = None, turned: torch.dtype | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Return what launches one shape; ``numbers``: the kernel's, up to the positions' stride.

    With a dtype of the ``turned`` queries it makes them.
    """
    tokens, heads, head_dim = q_shape
    blocks = _blocks(
        heads, kv_heads, head_dim, v_head_dim, rotary_dim, interleaved_in, interleaved_out, eps is not None
    )
    sections = dict(zip(("SECTION_T", "SECTION_H", "SECTION_W"), section or (0, 0, 0), strict=True))
    return _rotary_kv_write_kernel.at(  # type: ignore[no-any-return]
        (tokens * (blocks["Q_BLOCKS"] + blocks["KV_BLOCKS"]),), *numbers, heads, kv_heads, eps or 0.0,
        parts=parts, makes=None if turned is None else {6: New(q_shape, turned)}, **blocks, **sections,
        ALTERNATE=alternate, **dependent_launch(device), num_warps=4,
    )  # fmt: skip


@operator("rotary_kv_write", nothing, writes=("q_out", "keys", "values"))
def _rotary_kv_write(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    positions: torch.Tensor, q_out: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, loc: torch.Tensor,
    q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, eps: float | None,
    rotary_dim: int, interleaved_in: bool, interleaved_out: bool, section: list[int], alternate: bool,
) -> None:  # fmt: skip
    shape = q.shape
    if not shape[0]:
        return
    # Slots of all pages, one behind the other; of latents the keys begin inside a row.
    k_slots, v_slots = (keys, values) if values is not None else (keys[..., v.shape[2] :], keys)
    k_slot = keys.stride()[1]
    numbers = (
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *q_out.stride()[:2], k_slot,
        k_slot if values is None else values.stride()[1], cos.shape[0], positions.stride()[0],
    )  # fmt: skip
    launch = _launch(
        shape, *v.shape[1:], numbers, eps, rotary_dim, interleaved_in, interleaved_out,
        # Text has one position a token also where images have three.
        tuple(section) if positions.dim() == 2 else (), alternate, q.device,
    )  # fmt: skip
    launch(
        q, k, v, cos, sin, positions, q_out, k_slots, v_slots, loc,
        cos if q_weight is None else q_weight, cos if k_weight is None else k_weight,
    )  # fmt: skip


class TritonRotaryKVWrite:
    """One launch: keys go from registers to the cache and are never stored elsewhere."""

    def __init__(self, cfg: RotaryKVWriteConfig) -> None:
        self.cfg = cfg
        self.static = (
            cfg.qk_norm, cfg.rotary_dim, cfg.interleaved_in, cfg.interleaved_out, list(cfg.mrope_section),
            cfg.mrope_interleaved,
        )  # fmt: skip
        # What launches kinds of heads side by side that came before.
        self._ready = Kinds()

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
        positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, loc: torch.Tensor,
        q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write into ``keys`` and ``values``, in place; return the turned ``q``: ``out``, or new and contiguous."""
        turned = q.new_empty(*q.shape) if out is None else out
        _rotary_kv_write(q, k, v, cos, sin, positions, turned, keys, values, loc, q_weight, k_weight, *self.static)
        return turned

    def side_by_side(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor,
        values: torch.Tensor, loc: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None,
    ) -> torch.Tensor | None:  # fmt: skip
        """Do so for heads ``[T, Hq + 2 Hkv, D]``, without a view of each; ``None`` where somebody looks on: nothing."""
        if not _rotary_kv_write.unwatched(qkv, cos, sin, positions, keys, values, loc, q_weight, k_weight):
            return None
        shape = qkv.shape
        kind = (
            shape, qkv.stride(), qkv.dtype, keys.stride(), values.stride(), cos.shape, positions.stride(), qkv.device,
        )  # fmt: skip
        launch = self._ready.get(kind) or self._ready.keep(kind, self._launch(*kind))
        turned: torch.Tensor = launch(
            qkv, cos, sin, positions, keys, values, loc, cos if q_weight is None else q_weight,
            cos if k_weight is None else k_weight,
        )  # fmt: skip
        return turned

    def _launch(
        self, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, keys: tuple[int, ...],
        values: tuple[int, ...], table: torch.Size, positions: tuple[int, ...], device: torch.device,
    ) -> Callable[..., torch.Tensor]:  # fmt: skip
        """Return what launches heads side by side of one kind; of keys, values and positions the strides."""
        tokens, _, width = shape
        heads, kv_heads, (eps, dim, first, second, section, alternate) = (
            self.cfg.num_heads, self.cfg.num_kv_heads, self.static
        )  # fmt: skip
        numbers = (*3 * strides[:2], heads * width, width, keys[1], values[1], table[0], positions[0])
        begins, counts = (0, heads, heads + kv_heads), (heads, kv_heads, kv_heads)
        parts = tuple(
            (place, Heads(begin * strides[1] * dtype.itemsize, begin, count))
            for place, (begin, count) in enumerate(zip(begins, counts, strict=True))
        )
        return _launch(
            (tokens, heads, width), kv_heads, width, numbers, eps, dim, first, second,
            tuple(section) if len(positions) == 2 else (), alternate, device, parts, dtype,
        )  # fmt: skip
