"""Grouped-query attention in Triton where each request brings one token or a few: a program a request, key head, split.

How many splits there are follows from host bounds, so the grid under capture does not depend on lengths; how many of
them work for a request, from its length: a short one has a single part, which is the result. The parts of a longer
one are added up in fixed order: few by the last of its programs to finish (found by a counter, which is zero again
afterwards), many by a second kernel.

All query heads of a key head are rows of one tile, those of several tokens (drafts to verify, the end of a prompt) one
token behind the other. The next block's page number is read one block ahead, so that every stage of the pipeline holds
keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl

from fastlayers.attention.gqa.launch_config import FUSED_SPLITS, blocks_of, combine_block, one_page, splits_of
from fastlayers.attention.gqa.triton_softmax import LN2, LOG2E, add_sink
from fastlayers.attention.meta import AttentionMeta
from fastlayers.operators import operator
from fastlayers.runtime.launch import New, kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, dot, release_dependents


@triton.jit
def _pages(pages_ptr, n, high, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PAGE: tl.constexpr):
    """Return the page number of the block at ``n``, or that of each of its keys."""
    if ONE_PAGE:
        return tl.load(pages_ptr + n // PAGE, mask=n < high, other=0)
    else:
        place = n + tl.arange(0, BLOCK_N)
        return tl.load(pages_ptr + place // PAGE, mask=place < high, other=0)


@triton.jit
def _new_tokens(cu_ptr, request, EACH: tl.constexpr):
    """Return a request's first row of queries, and how many tokens it brings: in decode one, without a look."""
    if EACH == 1:
        return request, 1
    else:
        token = tl.load(cu_ptr + request)
        return token.to(tl.int64), tl.load(cu_ptr + request + 1) - token


@triton.jit
def _share(
    length, start, queries, splits, wanted, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, ONE_PAGE: tl.constexpr,
):  # fmt: skip
    """Return the first key that counts, where its block begins, blocks a program, and programs that have some.

    ``wanted`` programs, fewer if they had less than MIN_BLOCKS, more (up to ``splits``) against more than MAX_BLOCKS.
    """
    first = tl.maximum(start, 0)
    if WINDOW > 0:
        # As the first of the new tokens sees.
        first = tl.maximum(first, length - WINDOW - (queries - 1))
    low = first
    if ONE_PAGE:
        low = first // BLOCK_N * BLOCK_N
    blocks = tl.maximum(tl.cdiv(length - low, BLOCK_N), 1)
    usual, most = tl.minimum(tl.cdiv(blocks, MIN_BLOCKS), wanted), tl.minimum(tl.cdiv(blocks, MAX_BLOCKS), splits)
    each = tl.cdiv(blocks, tl.maximum(usual, most))
    return first, low, each, tl.cdiv(blocks, each)


@triton.jit
def _head(row, kv_head, GROUP: tl.constexpr, EACH: tl.constexpr):
    """Return the query head of each row of a tile."""
    if EACH == 1:
        return kv_head * GROUP + row
    else:
        return kv_head * GROUP + row % GROUP


@triton.jit
def _token(row, token, GROUP: tl.constexpr, EACH: tl.constexpr):
    """Return the token of each row of a tile, whose first one is ``token``."""
    if EACH == 1:
        return token
    else:
        return token + row // GROUP


@triton.jit
def _seen(valid, place, row, first, GROUP: tl.constexpr, EACH: tl.constexpr, WINDOW: tl.constexpr):
    """Return which ``valid`` keys each row sees; of several tokens the first one stands at ``first``."""
    seen = valid[None, :]
    if EACH > 1:
        behind = (first + row // GROUP)[:, None] - place[None, :]
        seen = seen & (behind >= 0)
        if WINDOW > 0:
            seen = seen & (behind < WINDOW)
    return seen


@triton.jit
def _add_up(
    part_ptr, part_lse_ptr, sinks_ptr, o_ptr, lse_ptr, request, token, queries, kv_head, parts, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SINKS: tl.constexpr, EACH: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add up at most BLOCK_S parts of a key head's query heads, in order; the sink counts once, here."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = GROUP * EACH
    row, column = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    inside, wide = row < queries * GROUP, column < HEAD_DIM
    head, first = _head(row, kv_head, GROUP, EACH), (request * KV_HEADS + kv_head) * splits
    sink = tl.full([BLOCK_G], -float("inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=inside, other=0.0).to(tl.float32)
    m = sink
    # Not by way of the first-level cache, which may hold what another launch wrote there.
    for part in tl.static_range(BLOCK_S):
        at = part_lse_ptr + (first + part) * ROWS + row
        m = tl.maximum(m, tl.load(at, mask=inside & (part < parts), other=-float("inf"), cache_modifier=".cg"))
    shift = tl.where(m == -float("inf"), 0.0, m)
    l = tl.exp(sink - shift)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for part in tl.static_range(BLOCK_S):
        index, some = (first + part) * ROWS + row, inside & (part < parts)
        lse = tl.load(part_lse_ptr + index, mask=some, other=-float("inf"), cache_modifier=".cg")
        o = tl.load(
            part_ptr + index[:, None] * HEAD_DIM + column[None, :], mask=some[:, None] & wide[None, :], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        weight = tl.exp(lse - shift)
        l += weight
        acc += o * weight[:, None]
    divisor = tl.where(l > 0, l, 1.0)
    target = _token(row, token, GROUP, EACH) * HEADS + head
    tl.store(lse_ptr + target, tl.where(l > 0, shift + tl.log(divisor), -float("inf")), mask=inside)
    tl.store(
        o_ptr + target[:, None] * HEAD_DIM + column[None, :], cast(acc / divisor[:, None], o_ptr.dtype.element_ty),
        mask=inside[:, None] & wide[None, :],
    )  # fmt: skip


@kernel
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, o_ptr, lse_ptr, part_ptr, part_lse_ptr, counters_ptr, table_ptr, lens_ptr,
    starts_ptr, cu_ptr, q_token, q_head, table_row, splits, wanted, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, EACH: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ONE_PAGE: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, MAX_BLOCKS: tl.constexpr, SPLIT: tl.constexpr, FUSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # Later parts first: only long requests have them.
    split = tl.num_programs(2) - 1 - tl.program_id(2)
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    # Read before the kernel in front has ended: that one writes queries and the newest keys, no lengths and no pages.
    length, start = tl.load(lens_ptr + request), tl.load(starts_ptr + request)
    token, queries = _new_tokens(cu_ptr, request, EACH)
    head = _head(row, kv_head, GROUP, EACH)
    inside, wide = row < queries * GROUP, column < HEAD_DIM
    first, low, each, parts = _share(
        length, start, queries, splits, wanted, WINDOW, BLOCK_N, MIN_BLOCKS, MAX_BLOCKS, ONE_PAGE
    )  # fmt: skip
    if split >= parts:
        return
    if EACH > 1:
        if queries == 0:
            return
    high = length
    if SPLIT:
        low += split * each * BLOCK_N
        high = tl.minimum(low + each * BLOCK_N, length)
    pages_ptr = table_ptr + request * table_row
    page = _pages(pages_ptr, low, high, PAGE, BLOCK_N, ONE_PAGE)
    await_inputs(PDL)
    release_dependents(PDL)
    rows_token = _token(row, token, GROUP, EACH)
    if EACH == 1:
        q_at = q_ptr + rows_token * q_token + head[:, None] * q_head
    else:
        q_at = q_ptr + rows_token[:, None] * q_token + head[:, None] * q_head
    q = tl.load(
        q_at + column[None, :],
        mask=inside[:, None] & wide[None, :], other=0.0,
    )  # fmt: skip
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    # In decode weights are added up over blocks column by column, and over columns at the end; of several tokens, whose
    # rows leave no registers for that, block by block.
    l = tl.zeros([BLOCK_M], tl.float32)
    weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in range(low, high, BLOCK_N):
        place = n + tl.arange(0, BLOCK_N)
        if ONE_PAGE:
            slot = page.to(tl.int64) * PAGE + n % PAGE + tl.arange(0, BLOCK_N)
        else:
            slot = page.to(tl.int64) * PAGE + place % PAGE
        page = _pages(pages_ptr, n + BLOCK_N, high, PAGE, BLOCK_N, ONE_PAGE)
        offset = (slot * KV_HEADS + kv_head) * HEAD_DIM
        valid = (place >= first) & (place < high)
        k = tl.load(
            k_ptr + offset[None, :] + column[:, None], mask=valid[None, :] & wide[:, None], other=0.0
        ).to(q.dtype)  # fmt: skip
        v = tl.load(
            v_ptr + offset[:, None] + column[None, :], mask=valid[:, None] & wide[None, :], other=0.0
        ).to(q.dtype)  # fmt: skip
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1)
            inner = tl.exp2(dot(q, k) * (scale * (2.0 * LOG2E) / softcap))
            s = (softcap * LOG2E) * (1.0 - 2.0 / (inner + 1.0))
        else:
            s = dot(q, k) * (scale * LOG2E)
        s = tl.where(_seen(valid, place, row, length - queries, GROUP, EACH, WINDOW), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        keep, p = tl.exp2(m - shift), tl.exp2(s - shift[:, None])
        if EACH == 1:
            weights = weights * keep[:, None] + p
        else:
            l = l * keep + tl.sum(p, axis=1)
        acc = dot(cast(p, q.dtype), v, acc * keep[:, None])
        m = m_new
    if EACH == 1:
        l = tl.sum(weights, axis=1)
    if SINKS:
        # Where there are parts, it counts when they are added up.
        sink = tl.load(sinks_ptr + head, mask=inside & (parts == 1), other=-float("inf"))
        acc, m, l = add_sink(acc, m, l, sink * LOG2E)
    some = l > 0
    divisor = tl.where(some, l, 1.0)
    lse = tl.where(some, (tl.where(some, m, 0.0) + tl.log2(divisor)) * LN2, -float("inf"))
    o = acc / divisor[:, None]
    store = inside[:, None] & wide[None, :]
    if parts == 1:
        target = rows_token * HEADS + head
        tl.store(lse_ptr + target, lse, mask=inside)
        tl.store(o_ptr + target[:, None] * HEAD_DIM + column[None, :], cast(o, o_ptr.dtype.element_ty), mask=store)
    elif SPLIT:
        tile = request * KV_HEADS + kv_head
        target = (tile * splits + split) * (GROUP * EACH) + row
        tl.store(part_lse_ptr + target, lse, mask=inside)
        tl.store(part_ptr + target[:, None] * HEAD_DIM + column[None, :], o, mask=store)
        if FUSED:
            # Every thread's part is written before the one that counts says so.
            tl.debug_barrier()
            if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu") == parts - 1:
                tl.store(counters_ptr + tile, 0)
                _add_up(
                    part_ptr, part_lse_ptr, sinks_ptr, o_ptr, lse_ptr, request, token, queries, kv_head, parts, splits,
                    HEADS, KV_HEADS, HEAD_DIM, SINKS, EACH, BLOCK_G, BLOCK_S, BLOCK_D,
                )  # fmt: skip


@kernel
def _combine_kernel(
    part_ptr, part_lse_ptr, sinks_ptr, o_ptr, lse_ptr, lens_ptr, starts_ptr, cu_ptr, splits, wanted,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, EACH: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr, ONE_PAGE: tl.constexpr, MIN_BLOCKS: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    request, head, nth = tl.program_id(0).to(tl.int64), tl.program_id(1), 0
    part, column = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    length, start = tl.load(lens_ptr + request), tl.load(starts_ptr + request)
    token, queries = _new_tokens(cu_ptr, request, EACH)
    if EACH > 1:
        nth = tl.program_id(2)
        if nth >= queries:
            return
    _, _, _, parts = _share(
        length, start, queries, splits, wanted, WINDOW, BLOCK_N, MIN_BLOCKS, MAX_BLOCKS, ONE_PAGE
    )  # fmt: skip
    await_inputs(PDL)
    release_dependents(PDL)
    if parts > 1:
        m, l = -float("inf"), 0.0
        if SINKS:
            # Once, here: the parts know nothing of the sink.
            m, l = tl.load(sinks_ptr + head).to(tl.float32), 1.0
        acc = tl.zeros([BLOCK_D], tl.float32)
        first = (request * KV_HEADS + head // GROUP) * splits
        for begin in range(0, parts, BLOCK_S):
            at = (first + begin + part) * (GROUP * EACH) + nth * GROUP + head % GROUP
            some = begin + part < parts
            lse = tl.load(part_lse_ptr + at, mask=some, other=-float("inf"))
            o = tl.load(
                part_ptr + at[:, None] * HEAD_DIM + column[None, :],
                mask=some[:, None] & (column < HEAD_DIM)[None, :], other=0.0,
            )  # fmt: skip
            m_new = tl.maximum(m, tl.max(lse, axis=0))
            shift = tl.where(m_new == -float("inf"), 0.0, m_new)
            weight, keep = tl.exp(lse - shift), tl.exp(m - shift)
            l = l * keep + tl.sum(weight, axis=0)
            acc = acc * keep + tl.sum(o * weight[:, None], axis=0)
            m = m_new
        some_keys = l > 0
        divisor = tl.where(some_keys, l, 1.0)
        target = (token + nth) * HEADS + head
        tl.store(lse_ptr + target, tl.where(some_keys, m + tl.log(divisor), -float("inf")))
        o = cast(acc / divisor, o_ptr.dtype.element_ty)
        tl.store(o_ptr + target * HEAD_DIM + column, o, mask=column < HEAD_DIM)


class Counters:
    """How many parts of each request and key head are done: zero between launches, one launch at a time."""

    def __init__(self, meta: AttentionMeta, kv_heads: int) -> None:
        self.kv_heads = kv_heads
        self.done = torch.zeros(meta.num_requests * kv_heads, dtype=torch.int32, device=meta.positions.device)

    def plan(self, meta: AttentionMeta) -> None:
        """Nothing depends on lengths; more requests than ever before need more counters."""
        if self.done.numel() < (needed := meta.seq_lens.shape[0] * self.kv_heads):
            self.done = self.done.new_zeros(needed)


@lru_cache(maxsize=4096)
def _launches(
    shape: tuple[int, ...], strides: tuple[int, ...], requests: int, each: int, kv_heads: int, table_row: int,
    scale: float, softcap: float, page: int, window: int, sinks: bool, splits: int, wanted: int, block_n: int,
    min_keys: int, max_keys: int, warps: int, stages: int, dtype: torch.dtype, device: torch.device,
) -> tuple[Callable[..., tuple[torch.Tensor, ...]], Callable[..., None]]:  # fmt: skip
    """Return what launches the attention of one shape, and what combines its splits.

    The first makes ``o`` and ``lse``, and those of its splits.
    """
    _, heads, head_dim = shape
    makes = {4: New(shape, dtype), 5: New(shape[:2], torch.float32)}
    if splits > 1:
        rows = requests * each * heads * splits
        makes |= {6: New((rows, head_dim), torch.float32), 7: New((rows,), torch.float32)}
    blocks = blocks_of(heads // kv_heads, each, head_dim, splits)
    shared = {
        "HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "EACH": each, "WINDOW": window, "SINKS": sinks,
        "ONE_PAGE": one_page(page, block_n, window),
        "MIN_BLOCKS": max(1, min_keys // block_n), "MAX_BLOCKS": max(1, max_keys // block_n),
        "BLOCK_N": block_n, **dependent_launch(device),
    }  # fmt: skip
    attend = _decode_kernel.at(
        (kv_heads, requests, splits), *strides[:2], table_row, splits, wanted, scale, softcap,
        makes=makes, PAGE=page, SOFTCAP=softcap > 0, SPLIT=splits > 1, FUSED=splits <= FUSED_SPLITS, **shared, **blocks,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    at_once = combine_block(splits, blocks["BLOCK_D"])
    combine = _combine_kernel.at(
        (requests, heads, each), splits, wanted, **shared, BLOCK_D=blocks["BLOCK_D"], BLOCK_S=at_once, num_warps=4
    )
    return attend, combine


def _fake(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sinks: torch.Tensor | None,
    page_table: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor, cu_seqlens_q: torch.Tensor,
    counters: torch.Tensor, page_size: int, each: int, max_seq_len: int, scale: float, window: int, softcap: float,
    block_n: int, programs: int, min_keys: int, max_keys: int, warps: int, stages: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return q.new_empty(*q.shape), q.new_empty(*q.shape[:2], dtype=torch.float32)


@operator("gqa_decode", _fake, writes=("counters",))
def gqa_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sinks: torch.Tensor | None,
    page_table: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor, cu_seqlens_q: torch.Tensor,
    counters: torch.Tensor, page_size: int, each: int, max_seq_len: int, scale: float, window: int, softcap: float,
    block_n: int, programs: int, min_keys: int, max_keys: int, warps: int, stages: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attend one token of each request, or up to ``each`` of them; ``(o, lse)``.

    ``counters`` are zero before and after. ``cu_seqlens_q`` is read where ``each`` is not 1.
    """
    shape, kv_heads, requests = q.shape, k_cache.shape[2], seq_lens.shape[0]
    tokens, heads, head_dim = shape
    if not tokens or not requests:
        return q.new_empty(tokens, heads, head_dim), q.new_empty(tokens, heads, dtype=torch.float32)
    keys = min(max_seq_len, window + each - 1) if window else max_seq_len
    splits, wanted = splits_of(requests * kv_heads, keys, programs, min_keys, max_keys)
    logits = q if sinks is None else sinks
    attend, combine = _launches(
        shape, q.stride(), requests, each, kv_heads, page_table.stride()[0], scale, softcap, page_size, window,
        sinks is not None, splits, wanted, block_n, min_keys, max_keys, warps, stages, q.dtype, q.device,
    )  # fmt: skip
    if splits == 1:  # what stands for the splits' is not read
        o, lse = attend(q, k_cache, v_cache, logits, q, q, counters, page_table, seq_lens, starts, cu_seqlens_q)
        return o, lse
    o, lse, part, part_lse = attend(
        q, k_cache, v_cache, logits, counters, page_table, seq_lens, starts, cu_seqlens_q
    )  # fmt: skip
    if splits > FUSED_SPLITS:
        combine(part, part_lse, logits, o, lse, seq_lens, starts, cu_seqlens_q)
    return o, lse
