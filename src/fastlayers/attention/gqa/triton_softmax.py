"""What the kernels of gqa share: masked scores in base 2, the online softmax over a run of blocks, the sink."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from fastlayers.attention.batch import MAX_TREE
from fastlayers.triton_lang import cast, dot

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))
LONGEST_PATH = tl.constexpr(MAX_TREE)


@triton.jit
def _bits(x):
    """Return how many bits of a non-negative int64 are set."""
    x -= (x >> 1) & 0x5555555555555555
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (x * 0x0101010101010101) >> 56


@triton.jit
def scores(
    q, k, at, place, start, high, scale, softcap, tree, first,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Return scores times log2(e): rows ``at`` against keys at ``place``; masked unless every row sees every key.

    Of a tree, whose keys begin at ``first``, each row sees those of its bits in ``tree``.
    """
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        inner = tl.exp2(dot(q, k) * (scale * (2.0 * LOG2E) / softcap))
        s = (softcap * LOG2E) * (1.0 - 2.0 / (inner + 1.0))
    else:
        s = dot(q, k) * (scale * LOG2E)
    if MASKED:
        if TREE:
            # Bits from a key on: whether it is on the row's path, and how many keys follow it there.
            onward = tree[:, None] >> tl.minimum(tl.maximum(place - first, 0), 62).to(tl.int64)[None, :]
            before = (place < first)[None, :]
            seen = (before | ((onward & 1) != 0)) & (place < high)[None, :]
            if WINDOW > 0:
                seen = seen & ((at[:, None] - place[None, :] < WINDOW) | (place >= first)[None, :])
                if WINDOW < LONGEST_PATH:
                    seen = seen & (before | (_bits(onward) <= WINDOW))
        else:
            seen = (place[None, :] <= at[:, None]) & ((place >= start) & (place < high))[None, :]
            if WINDOW > 0:
                seen = seen & (at[:, None] - place[None, :] < WINDOW)
        s = tl.where(seen, s, -float("inf"))
    return s


@triton.jit
def add_sink(acc, m, l, sink):
    """Add exp(sink) to the denominator; ``m`` and ``sink`` are base 2."""
    m_new = tl.maximum(m, sink)
    shift = tl.where(m_new == -float("inf"), 0.0, m_new)
    keep = tl.exp2(m - shift)
    return acc * keep[:, None], m_new, l * keep + tl.exp2(sink - shift)


@triton.jit
def attend(
    acc, m, l, q, k_ptr, v_ptr, pages_ptr, kv_head, at, start, high, scale, softcap, column, tree, first,
    low, stop, gap_at, gap,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    TREE: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the blocks from ``low`` to ``stop`` to a running softmax; from ``gap_at`` on, ``gap`` keys are skipped.

    ``low``, ``gap_at`` and ``gap`` are multiples of BLOCK_N, and so is ``stop`` unless MASKED.
    """
    wide = (column < HEAD_DIM) if HEAD_DIM != column.shape[0] else (column >= 0)
    for n in range(low, stop, BLOCK_N):
        block = n
        if MASKED:
            block = tl.where(n >= gap_at, n + gap, n)
        place = block + tl.arange(0, BLOCK_N)
        if PAGE % BLOCK_N == 0:
            slot = tl.load(pages_ptr + block // PAGE).to(tl.int64) * PAGE + block % PAGE + tl.arange(0, BLOCK_N)
        elif MASKED:
            page = tl.load(pages_ptr + place // PAGE, mask=place < high, other=0).to(tl.int64)
            slot = page * PAGE + place % PAGE
        else:
            slot = tl.load(pages_ptr + place // PAGE).to(tl.int64) * PAGE + place % PAGE
        offset = (slot * KV_HEADS + kv_head) * HEAD_DIM
        k_at, v_at = k_ptr + offset[None, :] + column[:, None], v_ptr + offset[:, None] + column[None, :]
        if MASKED:
            valid = place < high
            k = tl.load(k_at, mask=valid[None, :] & wide[:, None], other=0.0).to(q.dtype)
        elif HEAD_DIM != column.shape[0]:
            k = tl.load(k_at, mask=wide[:, None], other=0.0).to(q.dtype)
        else:
            k = tl.load(k_at).to(q.dtype)
        s = scores(q, k, at, place, start, high, scale, softcap, tree, first, WINDOW, SOFTCAP, MASKED, TREE)
        m_new = tl.maximum(m, tl.max(s, axis=1))
        shift = m_new
        if MASKED:
            shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        keep, p = tl.exp2(m - shift), tl.exp2(s - shift[:, None])
        if MASKED:
            v = tl.load(v_at, mask=valid[:, None] & wide[None, :], other=0.0).to(q.dtype)
        elif HEAD_DIM != column.shape[0]:
            v = tl.load(v_at, mask=wide[None, :], other=0.0).to(q.dtype)
        else:
            v = tl.load(v_at).to(q.dtype)
        l = l * keep + tl.sum(p, axis=1)
        acc = dot(cast(p, q.dtype), v, acc * keep[:, None])
        m = m_new
    return acc, m, l
