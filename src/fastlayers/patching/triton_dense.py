"""One query a row over dense keys and values in one launch, where torch takes a dozen: what has sinks, or plain masks.

    q[B, H, 1, D]    k, v[B, K, S, D], any strides but the last    mask[B or 1, 1, 1, S]: bool, or added to the scores
    o[B, 1, H, D] = softmax(q·k · scale | mask | sink) v           a row that a bool mask hides whole gives zeros

A program has a row and a key head: its query heads are one tile, and its keys pass once, so that few rows with very
many keys belong elsewhere (:data:`MAX_KEYS`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton.language as tl

from fastlayers.attention.gqa.triton_softmax import LOG2E, add_sink
from fastlayers.integers import next_power_of_2
from fastlayers.operators import operator
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, dot, release_dependents

# A multiprocessor reads this many keys of 128 values in about 0.1 ms, which is what the operations of torch take.
MAX_KEYS = 8192
# Tiles that fit a program's registers.
MAX_WIDTH, MAX_GROUP = 256, 64


@kernel(do_not_specialize=("keys", "mask_row"))
def _dense_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, sinks_ptr, o_ptr, q_row, q_head, k_row, k_head, k_key, v_row, v_head, v_key,
    mask_row, keys, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, MASK: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, kv_head = (tl.program_id(0) // KV_HEADS).to(tl.int64), tl.program_id(0) % KV_HEADS
    g, d, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    head = kv_head * GROUP + g
    inside = (g < GROUP)[:, None] & (d < DIM)[None, :]
    await_inputs(PDL)
    release_dependents(PDL)
    q = tl.load(q_ptr + row * q_row + head[:, None] * q_head + d[None, :], mask=inside, other=0.0)
    k_ptr += row * k_row + kv_head * k_head
    v_ptr += row * v_row + kv_head * v_head
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    m, total = tl.full([BLOCK_G], -float("inf"), tl.float32), tl.zeros([BLOCK_G], tl.float32)
    for first in tl.range(0, keys, BLOCK_N, num_stages=STAGES):
        place = (first + n).to(tl.int64)
        here = place < keys
        k = tl.load(k_ptr + place[None, :] * k_key + d[:, None], mask=here[None, :] & (d < DIM)[:, None], other=0.0)
        v = tl.load(v_ptr + place[:, None] * v_key + d[None, :], mask=here[:, None] & (d < DIM)[None, :], other=0.0)
        s = dot(q, k) * (scale * LOG2E)
        if MASK == "bool":
            here = here & (tl.load(mask_ptr + row * mask_row + place, mask=here, other=0) != 0)
        elif MASK == "added":
            added = tl.load(mask_ptr + row * mask_row + place, mask=here, other=0.0).to(tl.float32)
            # The lowest fp32 times LOG2E would be infinite, and a row that sees nothing weighs all keys alike.
            s += tl.maximum(added, -1e38)[None, :] * LOG2E
        s = tl.where(here[None, :], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        keep = tl.exp2(m - shift)
        p = tl.exp2(s - shift[:, None])
        total = total * keep + tl.sum(p, axis=1)
        acc = dot(cast(p, v.dtype), v, acc * keep[:, None])
        m = m_new
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=g < GROUP, other=0.0).to(tl.float32) * LOG2E
        acc, m, total = add_sink(acc, m, total, sink)
    o = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out = o_ptr + (row * KV_HEADS * GROUP + head[:, None]) * DIM + d[None, :]
    tl.store(out, cast(o, o_ptr.dtype.element_ty), mask=inside)


@lru_cache
def _bound(
    kv_heads: int, group: int, width: int, fp32: bool, mask: str, sinks: bool, device: torch.device
) -> Callable[..., None]:
    block_n = 16 if fp32 else 32 if width > 128 else 64
    return _dense_kernel.bind(
        KV_HEADS=kv_heads, MASK=mask, SINKS=sinks, GROUP=group, DIM=width, BLOCK_G=max(16, next_power_of_2(group)),
        BLOCK_D=max(16, next_power_of_2(width)), BLOCK_N=block_n, STAGES=1 if fp32 else 3,
        **dependent_launch(device), num_warps=4,
    )  # fmt: skip


def _fake(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3])


@operator("patched_dense_decode", _fake)
def attend_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """Return new ``[B, 1, H, D]``, see the file's head; ``sinks [H]``."""
    (rows, heads, _, width), kv_heads = q.shape, k.shape[1]
    o = q.new_empty(rows, 1, heads, width)
    kind = "none" if mask is None else "bool" if mask.dtype == torch.bool else "added"
    # The keys are a few more in each step: their number is no part of what is bound.
    bound = _bound(kv_heads, heads // kv_heads, width, q.dtype == torch.float32, kind, sinks is not None, q.device)
    bound(
        (rows * kv_heads,), q, k, v, q if mask is None else mask, q if sinks is None else sinks, o,
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3],
        0 if mask is None or mask.shape[0] == 1 else mask.stride()[0], k.shape[2], scale,
    )  # fmt: skip
    return o


class TritonDense:
    """What attention modules hold; none of it is pickled."""

    @staticmethod
    def serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
        """Return whether a call computes this, shapes as at the file's head."""
        group, (keys, width) = q.shape[1] // k.shape[1], k.shape[2:]
        if not (0 < keys <= MAX_KEYS and 0 < width <= MAX_WIDTH) or group > MAX_GROUP or v.shape != k.shape:
            return False
        if not q.dtype == k.dtype == v.dtype or not q.stride(3) == k.stride(3) == v.stride(3) == 1:
            return False
        if mask is None:
            return True
        plain = mask.dtype == torch.bool or mask.is_floating_point()
        return plain and mask.shape[1:] == (1, 1, keys) and mask.stride(3) == 1 and mask.shape[0] in (1, q.shape[0])

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
        sinks: torch.Tensor | None, scale: float,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``[B, 1, H, D]``."""
        o: torch.Tensor = attend_dense(q, k, v, mask, sinks, scale)
        return o
