"""MLA's core in Triton: split paged decode over latents, ragged flash prefill over expanded keys and values.

    decode    one program = (request, block of M query rows, split of the cached rows); a query row is a pair
              (new token, head), so few heads with several new tokens fill a tile as well as many heads do.
              Each cached row is loaded once and used as key and as value. From eight requests on a request has as many
              splits as its length is worth, which each program finds out from all lengths.
    reduce    one program = (row, some of its columns) adds the row's splits: no atomics, same bits every time.
    prefill   one program = (request, head, block of M query tokens); blocks below the diagonal run unmasked.

Softmax runs in base 2 inside; LSE leaves as the natural logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
import triton
import triton.language as tl

from fastlayers.attention.meta import AttentionMeta
from fastlayers.attention.mla.config import MLAConfig, RaggedLengths, empty_decode, empty_prefill
from fastlayers.attention.mla.launch_config import (
    NOMINAL_SM_COUNT,
    SPLIT_ROWS,
    decode_candidates,
    decode_launch,
    knobs,
    prefill_candidates,
    prefill_config,
    reduce_tile,
    tuned,
)
from fastlayers.attention.mla.triton_reduce import LOWEST, or_one, reduce_launch
from fastlayers.device import as_device
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.operators import operator
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, dot, e4m3_to_fp16, release_dependents, to_e4m3

LOG2_E = 1.4426950408889634
E4M3_BLOCK = 1024
LN_2 = tl.constexpr(0.6931471805599453)
# In fp16: a row's largest query lies at this one's reciprocal or above, below twice as much; a softmax weight of 1 is
# that large; and below this nothing is told from 0.
QUERY_UNIT = tl.constexpr(2.0**-14)
WEIGHT_UNIT = tl.constexpr(2.0**14)
SMALLEST = tl.constexpr(2.0**-100)
AT_ONCE = tl.constexpr(8)
# More than all parts of a launch.
PARTS = tl.constexpr(1 << 16)


@triton.jit
def _natural_lse(highest, total):
    """Return the natural LSE of a base-2 softmax state, -inf for rows that saw nothing."""
    return tl.where(total > 0.0, (highest + tl.log2(or_one(total))) * LN_2, float("-inf"))


@triton.jit
def _in_fp16(latent, rope):
    """Return a row's queries in fp16, their largest below 2^15, and what they are multiples of: a power of two.

    What bf16 holds is exact in fp16 down to 2^-29 of the row's largest; below that it counts multiples of 2^-39.
    """
    latent, rope = latent.to(tl.float32), rope.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(latent), axis=1), tl.max(tl.abs(rope), axis=1))
    # The power of two at or below it: its bits without the mantissa.
    power = (tl.maximum(largest, SMALLEST).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    unit = power * QUERY_UNIT
    times = (1.0 / unit)[:, None]
    return (latent * times).to(tl.float16), (rope * times).to(tl.float16), unit


@triton.jit
def _part_of(
    slot, lens_ptr, starts_ptr, requests, wanted, splits, REQUESTS: tl.constexpr, BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """Return whose part a program computes, the how manieth, its length, and how many its request has.

    All parts are alike long, ``wanted`` a request in the mean; one of a request with more than ``splits`` is longer.
    Programs that are left over get a request that does not exist.
    """
    every = tl.arange(0, REQUESTS)
    real = every < requests
    first = tl.load(starts_ptr + every, mask=real, other=0) // BLOCK_N * BLOCK_N
    keys = tl.where(real, tl.maximum(tl.load(lens_ptr + every, mask=real, other=0) - first, 1), 0)
    usual = tl.maximum(tl.cdiv(tl.sum(keys, axis=0), requests * wanted), LEAST)
    part = tl.cdiv(tl.maximum(tl.cdiv(keys, splits), usual), BLOCK_N) * BLOCK_N
    parts = tl.cdiv(keys, part)
    last = tl.cumsum(parts, axis=0)
    # Of the requests whose parts are all in front: how many, and how many parts. There are at most 64 parts each.
    before = tl.max(tl.where(last <= slot, (every + 1) * PARTS + last, 0), axis=0)
    request, gone = before // PARTS, before % PARTS
    # The same for this request alone: one more load instead of two more sums over all.
    known = request < requests
    first = tl.load(starts_ptr + request, mask=known, other=0) // BLOCK_N * BLOCK_N
    keys = tl.maximum(tl.load(lens_ptr + request, mask=known, other=0) - first, 1)
    part = tl.cdiv(tl.maximum(tl.cdiv(keys, splits), usual), BLOCK_N) * BLOCK_N
    return request, slot - gone, part, tl.cdiv(keys, part)


@kernel(do_not_specialize=("splits", "wanted", "requests", "num_rows"))
def _decode_kernel(
    q_ptr, cache_ptr, table_ptr, starts_ptr, cu_ptr, positions_ptr, lens_ptr, tree_ptr, o_ptr, lse_ptr, parts_ptr,
    q_stride_t, q_stride_h, page_stride, row_stride, table_stride, scale, splits, wanted, requests, num_rows,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, ROW_BLOCKS: tl.constexpr,
    SINGLE: tl.constexpr, CAUSAL: tl.constexpr, TREE: tl.constexpr, DIRECT: tl.constexpr, REQUESTS: tl.constexpr,
    LEAST: tl.constexpr, AHEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``REQUESTS``: a power of two that holds all requests, whose keys are shared out by their lengths; or 0.

    ``SINGLE``: each request brings one token, which has its number: nothing is read to know which one that is.
    """
    # Whether a tile lies inside one page: then one entry of the page table serves it.
    ONE_PAGE: tl.constexpr = PAGE % BLOCK_N == 0
    # e4m3 is fp16 by one conversion of two values, which is exact; bf16 would take four.
    AS_FP16: tl.constexpr = (
        (cache_ptr.dtype.element_ty == tl.float8e4nv) & (q_ptr.dtype.element_ty != tl.float32) & (BLOCK_M <= 16)
    )
    await_inputs(PDL)
    release_dependents(PDL)
    block = tl.program_id(0) % ROW_BLOCKS
    if REQUESTS:
        request, split, part, parts = _part_of(
            tl.program_id(0) // ROW_BLOCKS, lens_ptr, starts_ptr, requests, wanted, splits, REQUESTS, BLOCK_N, LEAST
        )
        if request >= requests:
            return
    else:
        request, split = tl.program_id(0) // ROW_BLOCKS, tl.program_id(1)
    if SINGLE:
        first_token, rows = request, HEADS
    else:
        first_token = tl.load(cu_ptr + request)
        rows = (tl.load(cu_ptr + request + 1) - first_token) * HEADS
    if block * BLOCK_M >= rows:
        return
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < rows
    if REQUESTS:
        tl.store(parts_ptr + first_token.to(tl.int64) * HEADS + row, parts, mask=real & (split == 0))
    token, head = (first_token + row // HEADS).to(tl.int64), row % HEADS
    start = tl.load(starts_ptr + request)
    if SINGLE:
        end = tl.load(lens_ptr + request)
    elif TREE:
        # Cached rows stand in the order of the tokens, and positions follow the paths.
        first = tl.load(lens_ptr + request) - rows // HEADS
        position = tl.where(real, first + row // HEADS, -1)
        tree = tl.load(tree_ptr + token, mask=real, other=0)
        end = tl.max(position, axis=0) + 1
    else:
        position = tl.load(positions_ptr + token, mask=real, other=-1).to(tl.int32)
        end = tl.max(position, axis=0) + 1
    latent_column, rope_column, column = tl.arange(0, RANK), tl.arange(0, ROPE), tl.arange(0, BLOCK_N)
    # Asked for while lengths are on their way.
    q_row = q_ptr + token * q_stride_t + head * q_stride_h
    q_latent = tl.load(q_row[:, None] + latent_column[None, :], mask=real[:, None], other=0.0)
    q_rope = tl.load(q_row[:, None] + RANK + rope_column[None, :], mask=real[:, None], other=0.0)
    low, high = start, end
    if ONE_PAGE:
        low = start // BLOCK_N * BLOCK_N
    if not DIRECT:
        if not REQUESTS:
            part = tl.cdiv(tl.cdiv(tl.maximum(end - low, 0), splits), BLOCK_N) * BLOCK_N
        low += split * part
        high = tl.minimum(low + part, end)
    if CAUSAL:
        limit = tl.minimum(position + 1, high)
    at_once = latent_column
    if AS_FP16:
        # Eight values a thread are the 16 bytes that it stores as fp16; more would meet in shared memory's banks.
        at_once = tl.max_contiguous(latent_column, AT_ONCE)
    factor = scale
    if AS_FP16:
        q_latent, q_rope, unit = _in_fp16(q_latent, q_rope)
        factor = (unit * scale)[:, None]
    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, RANK], tl.float32)
    table = table_ptr + request * table_stride
    if ONE_PAGE:
        latent_at = column[:, None] * row_stride + at_once[None, :]
        rope_at = column[:, None] * row_stride + RANK + rope_column[None, :]
        page = tl.load(table + low // PAGE, mask=low < high, other=0)
    elif AHEAD:
        page = tl.load(table + (low + column) // PAGE, mask=low + column < high, other=0)
    for n in range(low, high, BLOCK_N):
        key = n + column
        # Rows outside the request are never read: a stale page may hold NaN, and 0 · NaN is NaN.
        inside = key < high
        if ONE_PAGE:
            inside = inside & (key >= start)
            tile = cache_ptr + page.to(tl.int64) * page_stride + (n % PAGE) * row_stride
            page = tl.load(table + (n + BLOCK_N) // PAGE, mask=n + BLOCK_N < high, other=0)
            latent = tl.load(tile + latent_at, mask=inside[:, None], other=0.0)
            rope = tl.load(tile + rope_at, mask=inside[:, None], other=0.0)
        else:
            if not AHEAD:
                page = tl.load(table + key // PAGE, mask=inside, other=0)
            rows_at = cache_ptr + page.to(tl.int64) * page_stride + (key % PAGE) * row_stride
            if AHEAD:
                page = tl.load(table + (key + BLOCK_N) // PAGE, mask=key + BLOCK_N < high, other=0)
            latent = tl.load(rows_at[:, None] + latent_column[None, :], mask=inside[:, None], other=0.0)
            rope = tl.load(rows_at[:, None] + RANK + rope_column[None, :], mask=inside[:, None], other=0.0)
        if AS_FP16:
            latent, rope = e4m3_to_fp16(latent), e4m3_to_fp16(rope)
        else:
            latent, rope = latent.to(q_latent.dtype), rope.to(q_latent.dtype)
        score = dot(q_latent, tl.trans(latent), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        score = dot(q_rope, tl.trans(rope), score) * factor
        if CAUSAL:
            seen = key[None, :] < limit[:, None]
            if TREE:
                path = tree[:, None] >> tl.minimum(tl.maximum(key - first, 0), 62).to(tl.int64)[None, :]
                seen = seen & ((key < first)[None, :] | ((path & 1) != 0))
            if ONE_PAGE:
                seen = seen & (key >= start)[None, :]
        else:
            seen = inside[None, :]
        score = tl.where(seen, score, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, axis=1))
        weight = tl.exp2(score - new_highest[:, None])
        decay = tl.exp2(highest - new_highest)
        total = total * decay + tl.sum(weight, axis=1)
        if AS_FP16:
            weight *= WEIGHT_UNIT
        acc = dot(cast(weight, latent.dtype), latent, acc * decay[:, None])
        highest = new_highest

    # Rows of a request are consecutive in [T, H]; offsets within a request fit 32 bits.
    base = first_token.to(tl.int64) * HEADS
    if not DIRECT:
        base += split.to(tl.int64) * num_rows
    tl.store(lse_ptr + base + row, _natural_lse(highest, total), mask=real)
    if DIRECT or low < high:
        share = 1.0 / or_one(total)
        if AS_FP16:
            share *= 1.0 / WEIGHT_UNIT
        o = cast(acc * share[:, None], o_ptr.dtype.element_ty)
        tl.store(o_ptr + base * RANK + row[:, None] * RANK + latent_column[None, :], o, mask=real[:, None])


@kernel
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
    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
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
            score = dot(q_nope, tl.trans(k_nope), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            score = dot(q_rope, tl.trans(k_rope), score) * scale
            if masked:
                seen = at[None, :] < k_len
                if CAUSAL:
                    seen = seen & (at[None, :] <= row[:, None] + (k_len - q_len))
                score = tl.where(seen, score, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(score, axis=1))
            weight = tl.exp2(score - new_highest[:, None])
            decay = tl.exp2(highest - new_highest)
            total = total * decay + tl.sum(weight, axis=1)
            acc = dot(cast(weight, v.dtype), v, acc * decay[:, None])
            highest = new_highest
    o = cast(acc * (1.0 / or_one(total))[:, None], o_ptr.dtype.element_ty)
    out_row = (q_start + row).to(tl.int64) * HEADS + head
    tl.store(o_ptr + out_row[:, None] * VALUE + value[None, :], o, mask=real & (value[None, :] < VALUE))
    if NEED_LSE:
        tl.store(lse_ptr + out_row, _natural_lse(highest, total), mask=row < q_len)


@kernel
def _to_e4m3_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_inputs(PDL)
    release_dependents(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, to_e4m3(x), mask=at < size)


def rounded_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous ``x`` in e4m3, clamped to ±448 (scale 1); for other backends' operators."""
    y = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    launch = dependent_launch(x.device)
    _to_e4m3_kernel[(cdiv(x.numel(), E4M3_BLOCK),)](x, y, x.numel(), BLOCK=E4M3_BLOCK, num_warps=4, **launch)
    return y


@lru_cache(maxsize=4096)
def _decode_launches(
    shape: tuple[int, ...], rank: int, requests: int, strides: tuple[int, ...], scale: float, max_query_len: int,
    max_seq_len: int, dtype: torch.dtype, kv_dtype: torch.dtype, page: int, tree: bool, rounded: bool,
    knobs: tuple[int, ...], device: torch.device,
) -> tuple[int, bool, Callable[..., None], Callable[..., None]]:  # fmt: skip
    """Return the most splits of one shape, whether lengths settle them, what launches the attention, and what adds up.

    ``rounded``: with a power of two blocks of rows a request, as their number is compiled in: those without rows end.
    """
    (tokens, heads, width), launch = shape, dependent_launch(device)
    sm_count = as_device(device).sm_count if device.type == "cuda" else NOMINAL_SM_COUNT
    config, row_blocks, wanted, splits, block = decode_launch(
        heads * max_query_len, requests, max_query_len, max_seq_len, dtype, kv_dtype, page, knobs, sm_count
    )
    row_blocks = next_power_of_2(row_blocks) if rounded else row_blocks
    rows = tokens * heads
    # Parts by length: each request may have one more than it would have of the mean length.
    grid = (requests * (wanted + 1) * row_blocks, 1) if block else (requests * row_blocks, splits)
    decode = _decode_kernel.at(
        grid, *strides, scale * LOG2_E, splits, wanted, requests, rows,
        HEADS=heads, RANK=rank, ROPE=width - rank, PAGE=page, ROW_BLOCKS=row_blocks,
        SINGLE=max_query_len == 1 and tokens == requests, CAUSAL=max_query_len > 1, TREE=tree, DIRECT=splits == 1,
        REQUESTS=block, LEAST=config.split_rows, AHEAD=config.ahead, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages, **launch,
    )  # fmt: skip
    return splits, block > 0, decode, reduce_launch(rows, rank, wanted, splits, block > 0, device)


@operator("mla_decode", empty_decode)
def _decode(
    q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, starts: torch.Tensor, cu_seqlens_q: torch.Tensor,
    positions: torch.Tensor, seq_lens: torch.Tensor, tree: torch.Tensor | None, rank: int, scale: float,
    max_query_len: int, max_seq_len: int, rounded: bool, knobs: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    tokens, heads, _ = q.shape
    o, lse = q.new_empty(tokens, heads, rank), q.new_empty(tokens, heads, dtype=torch.float32)
    if tokens == 0:
        return o, lse
    splits, by_length, decode, reduce = _decode_launches(
        q.shape, rank, page_table.shape[0], (*q.stride()[:2], *cache.stride()[:2], page_table.stride()[0]), scale,
        # No split ends within so many rows, so that the longest request may be rounded down.
        max_query_len, max_seq_len - max_seq_len % SPLIT_ROWS, q.dtype, cache.dtype, cache.shape[1], tree is not None,
        rounded, tuple(knobs), q.device,
    )  # fmt: skip
    partial, partial_lse, parts = o, lse, seq_lens
    if splits > 1:
        partial = q.new_empty(splits, tokens, heads, rank, dtype=torch.float32)
        partial_lse = q.new_empty(splits, tokens, heads, dtype=torch.float32)
    if by_length:
        parts = q.new_empty(tokens, heads, dtype=torch.int32)
    decode(
        q, cache, page_table, starts, cu_seqlens_q, positions, seq_lens, positions if tree is None else tree,
        partial, partial_lse, parts,
    )  # fmt: skip
    if splits > 1:
        reduce(partial, partial_lse, parts, o, lse)
    return o, lse


@lru_cache(maxsize=4096)
def _prefill_launch(
    requests: int, heads: int, width: int, value: int, strides: tuple[int, ...], nope: int, scale: float,
    max_query_len: int, causal: bool, need_lse: bool, dtype: torch.dtype, knobs: tuple[int, ...], device: torch.device,
) -> Callable[..., None]:  # fmt: skip
    """Return what launches one shape; another ``device`` has a launch of its own."""
    config = tuned(prefill_config(dtype), knobs, 1)
    return _prefill_kernel.at(  # type: ignore[no-any-return]
        (cdiv(max_query_len, config.block_m), heads, requests), *strides, scale * LOG2_E,
        HEADS=heads, NOPE=nope, ROPE=width - nope, VALUE=value, CAUSAL=causal, NEED_LSE=need_lse,
        BLOCK_NOPE=_block(nope), BLOCK_ROPE=_block(width - nope), BLOCK_VALUE=_block(value),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


@operator("mla_prefill", empty_prefill)
def _prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, nope: int,
    scale: float, max_query_len: int, causal: bool, need_lse: bool, knobs: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    tokens, heads, width = q.shape
    value = v.shape[2]
    o = q.new_empty(tokens, heads, value)
    lse = q.new_empty(tokens if need_lse else 0, heads, dtype=torch.float32)
    if max_query_len == 0:
        return o, lse
    launch = _prefill_launch(
        cu_q.shape[0] - 1, heads, width, value, (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]), nope, scale,
        max_query_len, causal, need_lse, q.dtype, tuple(knobs), q.device,
    )  # fmt: skip
    launch(q, k, v, o, lse, cu_q, cu_k)
    return o, lse


def _block(size: int) -> int:
    """Return the block that holds ``size`` columns: a power of two that a matrix product accepts."""
    return max(16, next_power_of_2(size))


class TritonMLA:
    """Capture-safe: grids and split counts come from host bounds (``meta.max_*``, ``lens.q_lens``), never from data."""

    def __init__(self, cfg: MLAConfig, config: Mapping[str, int] | None = None) -> None:
        self.cfg = cfg
        self.rank, self.nope, self.scale = cfg.kv_lora_rank, cfg.qk_nope_head_dim, cfg.softmax_scale
        self.knobs = knobs(config)

    @staticmethod
    def candidates(cfg: MLAConfig, num_tokens: int) -> list[dict[str, int]]:
        """Return the configurations that a tuner tries for this phase, the heuristic's own first."""
        if cfg.phase == "extend":
            return prefill_candidates(cfg.dtype)
        return decode_candidates(cfg.num_heads, cfg.dtype, cfg.kv_dtype, cfg.page_size)

    def decode(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o [T,H,L] of q's dtype, lse [T,H] fp32)``."""
        o, lse = _decode(
            q, cache, meta.page_table, meta.starts, meta.cu_seqlens_q, meta.positions, meta.seq_lens, meta.tree,
            self.rank, self.scale, meta.max_query_len, meta.max_seq_len,
            # A bucket's is one of few; prompts bring any number of tokens.
            meta.bucket is None and meta.max_query_len > 1, self.knobs,
        )  # fmt: skip
        return o, lse

    def kernels_of(self, requests: int, max_query_len: int, max_seq_len: int) -> tuple[tuple[int, ...], tuple[()]]:
        """Return what of a step over latents is compiled into kernels; it does not change back with the length."""
        cfg = self.cfg
        sm_count = as_device("cuda").sm_count if torch.cuda.is_available() else NOMINAL_SM_COUNT
        config, row_blocks, usual, splits, block = decode_launch(
            cfg.num_heads * max_query_len, requests, max_query_len, max_seq_len - max_seq_len % SPLIT_ROWS, cfg.dtype,
            cfg.kv_dtype, cfg.page_size, tuple(self.knobs), sm_count,
        )  # fmt: skip
        blocks = next_power_of_2(row_blocks) if max_query_len > 1 else row_blocks
        tile = config.block_m, config.block_n, config.num_warps, config.num_stages, config.ahead
        adding = reduce_tile(usual, cfg.kv_lora_rank).block if splits > 1 else 0
        return (*tile, blocks, adding, block, max_query_len > 1), ()

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: RaggedLengths, need_lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(o [T,H,V] of q's dtype, lse [T,H] fp32 or None)``."""
        longest = max(lens.q_lens, default=0)
        o, lse = _prefill(
            q, k, v, lens.cu_q, lens.cu_k, self.nope, self.scale, longest, lens.causal, need_lse, self.knobs
        )
        return o, lse if need_lse else None
