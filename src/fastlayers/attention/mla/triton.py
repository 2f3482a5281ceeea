"""MLA's core in Triton: split paged decode over latents, ragged flash prefill over expanded keys and values.

    decode    one program = (request, block of M query rows, split of the cached rows); a query row is a pair
              (new token, head), so few heads with several new tokens fill a tile as well as many heads do.
              Each cached row is loaded once and used as key and as value.
    reduce    adds the splits of a row in ascending order: no atomics, same bits every time.
    prefill   one program = (request, head, block of M query tokens); blocks below the diagonal run unmasked.

Softmax runs in base 2 inside; LSE leaves as the natural logarithm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.attention.meta import AttentionMeta
from fastlayers.attention.mla.configs import decode_config, num_splits, prefill_config
from fastlayers.attention.mla.core import MLAConfig, Varlen
from fastlayers.device import as_device
from fastlayers.operators import operator
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import cast

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["splits", "num_rows"])
def _decode_kernel(
    q_ptr, cache_ptr, table_ptr, starts_ptr, cu_ptr, positions_ptr, o_ptr, lse_ptr,
    q_stride_t, q_stride_h, page_stride, row_stride, table_stride, scale, splits, num_rows,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, ROW_BLOCKS: tl.constexpr,
    CAUSAL: tl.constexpr, DIRECT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    request, block, split = tl.program_id(0) // ROW_BLOCKS, tl.program_id(0) % ROW_BLOCKS, tl.program_id(1)
    first_token = tl.load(cu_ptr + request)
    rows = (tl.load(cu_ptr + request + 1) - first_token) * HEADS
    if block * BLOCK_M >= rows:
        return
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < rows
    token, head = (first_token + row // HEADS).to(tl.int64), row % HEADS
    position = tl.load(positions_ptr + token, mask=real, other=-1).to(tl.int32)
    start, end = tl.load(starts_ptr + request), tl.max(position, axis=0) + 1
    part = tl.cdiv(tl.cdiv(tl.maximum(end - start, 0), splits), BLOCK_N) * BLOCK_N
    low = start + split * part
    high = tl.minimum(low + part, end)

    latent_column, rope_column, column = tl.arange(0, RANK), tl.arange(0, ROPE), tl.arange(0, BLOCK_N)
    q_row = q_ptr + token * q_stride_t + head * q_stride_h
    q_latent = tl.load(q_row[:, None] + latent_column[None, :], mask=real[:, None], other=0.0)
    q_rope = tl.load(q_row[:, None] + RANK + rope_column[None, :], mask=real[:, None], other=0.0)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, RANK], tl.float32)
    table = table_ptr + request * table_stride
    page = tl.load(table + (low + column) // PAGE, mask=low + column < high, other=0)
    for n in range(low, high, BLOCK_N):
        key = n + column
        inside = key < high
        cached = cache_ptr + page.to(tl.int64) * page_stride + (key % PAGE) * row_stride
        # One tile ahead, so that the rows' addresses never wait for the page table.
        page = tl.load(table + (key + BLOCK_N) // PAGE, mask=key + BLOCK_N < high, other=0)
        # Rows outside the request are never read: a stale page may hold NaN, and 0 · NaN is NaN.
        latent = tl.load(cached[:, None] + latent_column[None, :], mask=inside[:, None], other=0.0)
        rope = tl.load(cached[:, None] + RANK + rope_column[None, :], mask=inside[:, None], other=0.0)
        latent, rope = latent.to(q_latent.dtype), rope.to(q_latent.dtype)
        score = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        score = tl.dot(q_rope, tl.trans(rope), score, input_precision="ieee") * scale
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= position[:, None])
        score = tl.where(seen, score, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, axis=1))
        finite = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weight = tl.exp2(score - finite[:, None])
        decay = tl.exp2(highest - finite)
        total = total * decay + tl.sum(weight, axis=1)
        acc = tl.dot(cast(weight, latent.dtype), latent, acc * decay[:, None], input_precision="ieee")
        highest = new_highest

    out_row = token * HEADS + head
    if not DIRECT:
        out_row += split.to(tl.int64) * num_rows
    lse = tl.where(total > 0.0, (highest + tl.log2(total)) * LN_2, float("-inf"))
    tl.store(lse_ptr + out_row, lse, mask=real)
    if DIRECT or low < high:
        o = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        o = cast(o, o_ptr.dtype.element_ty)
        tl.store(o_ptr + out_row[:, None] * RANK + latent_column[None, :], o, mask=real[:, None])


@triton.jit(do_not_specialize=["splits", "num_rows"])
def _reduce_kernel(partial_ptr, partial_lse_ptr, o_ptr, lse_ptr, splits, num_rows, RANK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, RANK)
    highest = float("-inf")
    for split in range(splits):
        highest = tl.maximum(highest, tl.load(partial_lse_ptr + split * num_rows.to(tl.int64) + row))
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    total = 0.0
    acc = tl.zeros([RANK], tl.float32)
    for split in range(splits):
        at = split * num_rows.to(tl.int64) + row
        lse = tl.load(partial_lse_ptr + at)
        weight = tl.exp(lse - finite)
        # A split without rows wrote no output.
        kept = (column >= 0) & (lse > float("-inf"))
        acc += weight * tl.load(partial_ptr + at * RANK + column, mask=kept, other=0.0)
        total += weight
    o = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(o_ptr + row * RANK + column, cast(o, o_ptr.dtype.element_ty))
    tl.store(lse_ptr + row, tl.where(total > 0.0, finite + tl.log(total), float("-inf")))


@triton.jit
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, cu_q_ptr, cu_k_ptr,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, scale,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, CAUSAL: tl.constexpr,
    NEED_LSE: tl.constexpr, BLOCK_NOPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The last blocks attend to the most keys: they go first.
    block, head, request = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_start, k_start = tl.load(cu_q_ptr + request), tl.load(cu_k_ptr + request)
    q_len, k_len = tl.load(cu_q_ptr + request + 1) - q_start, tl.load(cu_k_ptr + request + 1) - k_start
    if block * BLOCK_M >= q_len:
        return
    row, key = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    nope, rope, value = tl.arange(0, BLOCK_NOPE), tl.arange(0, BLOCK_ROPE), tl.arange(0, BLOCK_VALUE)
    real = row[:, None] < q_len
    q_row = q_ptr + (q_start + row).to(tl.int64)[:, None] * q_stride_t + head * q_stride_h
    q_nope = tl.load(q_row + nope[None, :], mask=real & (nope[None, :] < NOPE), other=0.0)
    q_rope = tl.load(q_row + NOPE + rope[None, :], mask=real & (rope[None, :] < ROPE), other=0.0)
    k_head = k_ptr + k_start.to(tl.int64) * k_stride_t + head * k_stride_h
    v_head = v_ptr + k_start.to(tl.int64) * v_stride_t + head * v_stride_h
    end, whole = k_len, k_len
    if CAUSAL:
        end = tl.minimum(k_len, k_len - q_len + (block + 1) * BLOCK_M)
        whole = k_len - q_len + block * BLOCK_M + 1
    # Keys that every row of the block sees, in whole tiles; then the rest under a mask.
    whole = tl.maximum(tl.minimum(whole, k_len), 0) // BLOCK_N * BLOCK_N
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
    for masked in tl.static_range(2):
        for n in range(whole if masked else 0, end if masked else whole, BLOCK_N):
            at = (n + key).to(tl.int64)
            inside = (at < k_len)[:, None]
            k_row, v_row = k_head + at[:, None] * k_stride_t, v_head + at[:, None] * v_stride_t
            k_nope = tl.load(k_row + nope[None, :], mask=inside & (nope[None, :] < NOPE), other=0.0)
            k_rope = tl.load(k_row + NOPE + rope[None, :], mask=inside & (rope[None, :] < ROPE), other=0.0)
            v = tl.load(v_row + value[None, :], mask=inside & (value[None, :] < VALUE), other=0.0)
            score = tl.dot(q_nope, tl.trans(k_nope), input_precision="ieee")
            score = tl.dot(q_rope, tl.trans(k_rope), score, input_precision="ieee") * scale
            if masked:
                seen = at[None, :] < k_len
                if CAUSAL:
                    seen = seen & (at[None, :] <= row[:, None] + (k_len - q_len))
                score = tl.where(seen, score, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(score, axis=1))
            finite = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weight = tl.exp2(score - finite[:, None])
            decay = tl.exp2(highest - finite)
            total = total * decay + tl.sum(weight, axis=1)
            acc = tl.dot(cast(weight, v.dtype), v, acc * decay[:, None], input_precision="ieee")
            highest = new_highest
    o = cast(acc / tl.where(total > 0.0, total, 1.0)[:, None], o_ptr.dtype.element_ty)
    out_row = (q_start + row).to(tl.int64) * HEADS + head
    tl.store(o_ptr + out_row[:, None] * VALUE + value[None, :], o, mask=real & (value[None, :] < VALUE))
    if NEED_LSE:
        lse = tl.where(total > 0.0, (highest + tl.log2(total)) * LN_2, float("-inf"))
        tl.store(lse_ptr + out_row, lse, mask=row < q_len)
