"""Grouped-query attention in Triton: tiles of queries, plus the reduction of split keys.

Of one new token a request, or a few: triton_decode.py.

A tile holds BLOCK_M rows, one row a (token, query head) pair of one request and one key head, so that a group of
query heads fills the matrix units even for few tokens. Blocks of keys that every row of a tile sees are taken
without masks. Where tiles are too few for the GPU, each request's keys are split over several programs, whose
results a second kernel adds up in fixed order. Grids and splits depend on the host bounds in the metadata only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
import triton.language as tl

from fastlayers.attention.gqa import launch_config, triton_decode
from fastlayers.attention.gqa.config import GQAConfig
from fastlayers.attention.gqa.triton_softmax import LN2, LOG2E, add_sink, attend
from fastlayers.attention.meta import AttentionMeta
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.operators import operator
from fastlayers.runtime.launch import New, kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents

# Two programs a multiprocessor of a large GPU; a constant, so that results do not depend on the GPU.
TARGET_PROGRAMS = 264
MIN_SPLIT, MAX_SPLITS = 256, 64
# A small tree of drafts behind many keys is one tile of rows: what counts is how long one program takes, so parts are
# shorter; but up to ALONE keys are one part.
MIN_FEW = 128
ALONE = tl.constexpr(MIN_SPLIT)
# Capacity of a captured step up to which a row's keys are read by one program.
SHORT = 256


@kernel(do_not_specialize=("requests",))
def _gqa_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, o_ptr, lse_ptr, part_ptr, part_lse_ptr, table_ptr, lens_ptr, starts_ptr, cu_ptr,
    tree_ptr, positions_ptr, q_token, q_head, table_row, scale, softcap, requests,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, TREE: tl.constexpr, CAUSAL: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Long tiles (late rows see more keys) start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, split = tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
    request = tl.program_id(2).to(tl.int64)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    # The step's plan is read before the kernel in front has ended: that one writes queries and keys.
    if BLOCK_B > 0:
        # The tiles of all requests lie one behind the other: of which request is this one, and which of its tiles?
        each = tl.arange(0, BLOCK_B)
        begin = tl.load(cu_ptr + each, mask=each < requests, other=0)
        end = tl.load(cu_ptr + each + 1, mask=each < requests, other=0)
        tiles = tl.cdiv((end - begin) * GROUP, BLOCK_M)
        earlier = tl.cumsum(tiles, axis=0) <= tile
        if tl.sum(tiles, axis=0) <= tile:
            return
        request = tl.sum(earlier.to(tl.int32), axis=0).to(tl.int64)
        tile = tile - tl.sum(tl.where(earlier, tiles, 0), axis=0)
    first_token = tl.load(cu_ptr + request)
    queries = tl.load(cu_ptr + request + 1) - first_token
    if tile * BLOCK_M >= queries * GROUP:
        return
    length, start = tl.load(lens_ptr + request), tl.load(starts_ptr + request)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < queries * GROUP
    head = kv_head * GROUP + row % GROUP
    token = (first_token + row // GROUP).to(tl.int64)
    first = length - queries
    at = first + row // GROUP
    tree = at
    if TREE:
        # Rows stand in the order of the tokens, and positions follow the paths.
        tree = tl.load(tree_ptr + token, mask=inside, other=0)
        at = tl.load(positions_ptr + token, mask=inside, other=0).to(tl.int32)
    # Keys that some row of the tile sees: [low, high); this split's part of them in whole blocks.
    first_at = first + (tile * BLOCK_M) // GROUP
    last_at = tl.minimum(first + (tile * BLOCK_M + BLOCK_M - 1) // GROUP, length - 1)
    if not CAUSAL:
        # As the last token of the request sees.
        at = tl.zeros_like(row) + (length - 1)
        first_at, last_at = length - 1, length - 1
    seen_by_all = first_at + 1
    if TREE:
        first_at, seen_by_all = first, first
    low = tl.maximum(start, 0)
    all_from = low
    if WINDOW > 0:
        low = tl.maximum(low, first_at - WINDOW + 1)
        all_from = tl.maximum(all_from, last_at - WINDOW + 1)
    low = low // BLOCK_N * BLOCK_N
    seen = tl.maximum(last_at + 1 - low, 0)
    part, parts = seen, 1
    if SPLITS > 1:
        # Of few keys, which a bucket's bounds do not know of, the first programs take all; the others end here.
        part = tl.where(seen > ALONE, tl.maximum(tl.cdiv(tl.cdiv(seen, BLOCK_N), SPLITS) * BLOCK_N, LEAST), ALONE)
        parts = tl.maximum(tl.cdiv(seen, part), 1)
        if split >= parts:
            return
    column = tl.arange(0, BLOCK_D)
    wide = column < HEAD_DIM
    await_inputs(PDL)
    release_dependents(PDL)
    q = tl.load(
        q_ptr + token[:, None] * q_token + head[:, None] * q_head + column[None, :],
        mask=inside[:, None] & wide[None, :], other=0.0,
    )  # fmt: skip
    low = low + split * part
    high = tl.minimum(last_at + 1, low + part)
    # Keys that every row sees, in whole blocks: [whole, whole_end). They come first; then what is left and right.
    whole = tl.minimum(tl.maximum(tl.cdiv(all_from, BLOCK_N) * BLOCK_N, low), tl.maximum(high, low))
    whole = whole // BLOCK_N * BLOCK_N
    whole_end = tl.maximum(tl.minimum(seen_by_all, high) // BLOCK_N * BLOCK_N, whole)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    pages_ptr = table_ptr + request * table_row
    acc, m, l = attend(
        acc, m, l, q, k_ptr, v_ptr, pages_ptr, kv_head, at, start, high, scale, softcap, column, tree, first,
        whole, whole_end, 0, 0,
        KV_HEADS, HEAD_DIM, PAGE, WINDOW, SOFTCAP, TREE, False, BLOCK_N,
    )  # fmt: skip
    acc, m, l = attend(
        acc, m, l, q, k_ptr, v_ptr, pages_ptr, kv_head, at, start, high, scale, softcap, column, tree, first,
        low, high - (whole_end - whole), whole, whole_end - whole,
        KV_HEADS, HEAD_DIM, PAGE, WINDOW, SOFTCAP, TREE, True, BLOCK_N,
    )  # fmt: skip
    if SINKS:
        # Where there are parts, it counts when they are added up.
        sink = tl.load(sinks_ptr + head, mask=inside & (parts == 1), other=-float("inf")) * LOG2E
        acc, m, l = add_sink(acc, m, l, sink)
    some = l > 0
    total = tl.where(some, l, 1.0)
    lse = tl.where(some, (tl.where(some, m, 0.0) + tl.log2(total)) * LN2, -float("inf"))
    o = acc / total[:, None]
    target = token * HEADS + head
    if SPLITS > 1:
        # [T, Hq, SPLITS + 1]: the last column says how many parts there are.
        if split == 0:
            tl.store(part_lse_ptr + target * (SPLITS + 1) + SPLITS, (parts + tl.zeros_like(l)), mask=inside)
    if parts == 1:
        tl.store(lse_ptr + target, lse, mask=inside)
        tl.store(
            o_ptr + target[:, None] * HEAD_DIM + column[None, :], cast(o, o_ptr.dtype.element_ty),
            mask=inside[:, None] & wide[None, :],
        )  # fmt: skip
    elif SPLITS > 1:
        tl.store(part_lse_ptr + target * (SPLITS + 1) + split, lse, mask=inside)
        target = target * SPLITS + split
        tl.store(
            part_ptr + target[:, None] * HEAD_DIM + column[None, :], o, mask=(inside & some)[:, None] & wide[None, :]
        )


@kernel
def _reduce_kernel(
    part_ptr, part_lse_ptr, sinks_ptr, o_ptr, lse_ptr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SINKS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    await_inputs(PDL)
    release_dependents(PDL)
    split, column = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    lse_at = part_lse_ptr + row * (SPLITS + 1)
    parts, part_lse = tl.load(lse_at + SPLITS), tl.load(lse_at + split)
    if parts > 1:
        part_lse = tl.where(split < parts, part_lse, -float("inf"))
        m = tl.max(part_lse, axis=0)
        if SINKS:
            sink = tl.load(sinks_ptr + row % HEADS)
            m = tl.maximum(m, sink)
        shift = tl.where(m == -float("inf"), 0.0, m)
        weight = tl.exp(part_lse - shift)
        total = tl.sum(weight, axis=0)
        if SINKS:
            # Once, here: the parts know nothing of the sink.
            total += tl.exp(sink - shift)
        some = total > 0
        divisor = tl.where(some, total, 1.0)
        part = tl.load(
            part_ptr + (row * SPLITS + split[:, None]) * HEAD_DIM + column[None, :],
            # A part that saw nothing wrote nothing.
            mask=(part_lse > -float("inf"))[:, None] & (column < HEAD_DIM)[None, :], other=0.0,
        )  # fmt: skip
        o = tl.sum(part * weight[:, None], axis=0) / divisor
        tl.store(lse_ptr + row, tl.where(some, shift + tl.log(divisor), -float("inf")))
        tl.store(o_ptr + row * HEAD_DIM + column, cast(o, o_ptr.dtype.element_ty), mask=column < HEAD_DIM)


# Of a tile's configuration, in the operator's order.
NUMBERS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")


def tile_config(max_query_len: int, cfg: GQAConfig) -> dict[str, int]:
    """Return block sizes, warps and stages for queries of at most this length, taken without a tuned table."""
    rows = max(16, next_power_of_2(max(1, max_query_len) * cfg.group))
    if cfg.dtype == torch.float32:
        # fp32 products run outside the matrix units, out of registers: larger tiles spill.
        tall = min(rows, 32 if cfg.head_dim <= 128 else 16)
        return {"BLOCK_M": tall, "BLOCK_N": 16, "num_warps": 8, "num_stages": 2}
    if cfg.head_dim > 128:
        tall = min(rows, 128)
        return {"BLOCK_M": tall, "BLOCK_N": 32, "num_warps": 8 if tall == 128 else 4, "num_stages": 2}
    # Half of the stages hold page numbers. Few blocks in a window: nothing to run ahead for.
    return {"BLOCK_M": min(rows, 64), "BLOCK_N": 64, "num_warps": 4, "num_stages": 5 if cfg.window is None else 2}


@lru_cache
def _num_splits(programs: int, max_keys: int, least: int = MIN_SPLIT) -> int:
    """Return how many programs share one tile's keys, ``least`` of them at least each if there are more than 256.

    From host bounds, so fixed under capture. A power of two, so that few variants of the kernel are compiled.
    """
    least = least if max_keys > MIN_SPLIT else MIN_SPLIT
    wanted = max(1, min(TARGET_PROGRAMS // max(1, programs), -(-max_keys // least), MAX_SPLITS))
    return 1 << (wanted.bit_length() - 1)


def _least_part(max_query_len: int, group: int, window: int) -> int:
    """Return how many keys a program takes at least of a request with others."""
    return MIN_FEW if max_query_len * group <= launch_config.FEW_ROWS and not window else MIN_SPLIT


@lru_cache(maxsize=4096)
def _parts(programs: int, max_query_len: int, max_seq_len: int, group: int, window: int) -> tuple[int, int]:
    """Return how many programs share one tile's keys, and how many of them each takes at least."""
    keys = min(max_seq_len, window + max_query_len - 1) if window else max_seq_len
    least = _least_part(max_query_len, group, window)
    splits = _num_splits(programs, keys, least)
    # Of one part one variant of the kernel, whatever the others would take.
    return splits, MIN_SPLIT if splits == 1 else least


def _fake(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sinks: torch.Tensor | None,
    page_table: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor, cu_seqlens_q: torch.Tensor,
    positions: torch.Tensor, tree: torch.Tensor | None, page_size: int, max_query_len: int, max_seq_len: int,
    scale: float, window: int, softcap: float, causal: bool, packed: bool, block_m: int, block_n: int, warps: int,
    stages: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return q.new_empty(*q.shape), q.new_empty(*q.shape[:2], dtype=torch.float32)


@lru_cache(maxsize=4096)
def _launches(
    shape: tuple[int, ...], strides: tuple[int, ...], kv_heads: int, tiles: int, each: int, requests: int,
    table_row: int, scale: float, softcap: float, page: int, window: int, sinks: bool, tree: bool, causal: bool,
    splits: int, least: int, block_m: int, block_n: int, block_b: int, warps: int, stages: int, dtype: torch.dtype,
    device: torch.device,
) -> tuple[Callable[..., tuple[torch.Tensor, ...]], Callable[..., None]]:  # fmt: skip
    """Return what launches the attention of one shape, and what adds its splits.

    The first makes ``o`` and ``lse``, and those of its splits.
    """
    (tokens, heads, head_dim), launch = shape, dependent_launch(device)
    shared = {"HEADS": heads, "HEAD_DIM": head_dim, "SINKS": sinks, "SPLITS": splits} | launch
    shared["BLOCK_D"] = max(16, next_power_of_2(head_dim))
    makes = {4: New(shape, dtype), 5: New(shape[:2], torch.float32)}
    if splits > 1:
        makes |= {6: New((tokens, heads, splits, head_dim), torch.float32)}
        makes |= {7: New((tokens, heads, splits + 1), torch.float32)}
    attend = _gqa_kernel.at(
        (tiles, kv_heads * splits, each), *strides[:2], table_row, scale, softcap, requests, makes=makes,
        **shared, KV_HEADS=kv_heads, PAGE=page, WINDOW=window, SOFTCAP=softcap > 0, TREE=tree, CAUSAL=causal,
        LEAST=least, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_B=block_b, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return attend, _reduce_kernel.at((tokens * heads,), **shared, BLOCK_S=next_power_of_2(splits), num_warps=4)


@operator("gqa", _fake)
def _gqa(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sinks: torch.Tensor | None,
    page_table: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor, cu_seqlens_q: torch.Tensor,
    positions: torch.Tensor, tree: torch.Tensor | None, page_size: int, max_query_len: int, max_seq_len: int,
    scale: float, window: int, softcap: float, causal: bool, packed: bool, block_m: int, block_n: int, warps: int,
    stages: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    shape, kv_heads, requests = q.shape, k_cache.shape[2], seq_lens.shape[0]
    tokens, heads, head_dim = shape
    if not tokens or not requests:
        return q.new_empty(tokens, heads, head_dim), q.new_empty(tokens, heads, dtype=torch.float32)
    tiles, each = cdiv(max_query_len * (heads // kv_heads), block_m), requests
    if packed:
        # Each request but one may begin a tile that it does not fill.
        tiles, each = cdiv(tokens * (heads // kv_heads), block_m) + requests - 1, 1
    splits, least = _parts(tiles * kv_heads * each, max_query_len, max_seq_len, heads // kv_heads, window)
    logits = q if sinks is None else sinks
    attend, reduce = _launches(
        shape, q.stride(), kv_heads, tiles, each, requests, page_table.stride()[0], scale, softcap, page_size, window,
        sinks is not None, tree is not None, causal, splits, least, block_m, block_n,
        next_power_of_2(requests) if packed else 0, warps, stages, q.dtype, q.device,
    )  # fmt: skip
    step = page_table, seq_lens, starts, cu_seqlens_q, positions if tree is None else tree, positions
    if splits == 1:  # what stands for the splits' is not read
        o, lse = attend(q, k_cache, v_cache, logits, q, q, *step)
        return o, lse
    o, lse, part, part_lse = attend(q, k_cache, v_cache, logits, *step)
    reduce(part, part_lse, logits, o, lse)
    return o, lse


class TritonGQA:
    """Flash-style tiles over the pages themselves: keys and values are read once a tile, never gathered.

    ``config`` holds what a tuned table found for ``cfg.phase``; without one a rule of this file holds.
    """

    def __init__(self, cfg: GQAConfig, config: Mapping[str, int] | None = None) -> None:
        self.cfg, self.config = cfg, dict(config or {})
        # For how many tokens a request the kernel of decode is made that serves a step; 0: tiles do.
        self._decodes = int(launch_config.serves(cfg.group, cfg.dtype))
        # What was decided for batches and query lengths that came before.
        self._for_requests: dict[tuple[int, bool], tuple[int, ...]] = {}
        self._for_queries: dict[int, tuple[int, ...]] = {}
        self._each: dict[int, int] = {}

    def _tokens_each(self, max_query_len: int) -> int:
        found = self._each.get(max_query_len)
        if found is None:
            cfg = self.cfg
            found = launch_config.tokens_each(cfg.group, max_query_len, cfg.dtype) if cfg.causal else 0
            self._each[max_query_len] = found
        return found

    def _decode_numbers(self, requests: int, max_seq_len: int) -> tuple[int, ...]:
        short = self.cfg.captured and max_seq_len <= SHORT
        found = self._for_requests.get((requests, short))
        if found is None:
            it = launch_config.decode_config(self.cfg, requests)
            if short:
                # So few keys are not worth splitting: one program a row and key head, nothing to add up.
                it["PROGRAMS"] = requests * self.cfg.num_kv_heads
            elif self.cfg.phase == "decode":
                it |= self.config
            found = self._for_requests[requests, short] = tuple(it[name] for name in launch_config.NUMBERS)
        return found

    def _extend_numbers(self, max_query_len: int) -> tuple[int, ...]:
        rows = next_power_of_2(max_query_len)
        found = self._for_queries.get(rows)
        if found is None:
            it = tile_config(rows, self.cfg)
            # Tables are timed without keys in front of the new ones, of which a few tokens have many.
            if self.cfg.phase == "extend" and rows * self.cfg.group > launch_config.FEW_ROWS:
                it |= self.config
            found = self._for_queries[rows] = tuple(it[name] for name in NUMBERS)
        return found

    def kernels_of(
        self, requests: int, max_query_len: int, max_seq_len: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return what of a step is compiled into kernels: constants that differ between steps, and numbers.

        Neither changes back as ``max_seq_len`` grows. A warm-up runs one step of each kind.
        """
        cfg = self.cfg
        window = cfg.window or 0
        if each := self._decodes if max_query_len == 1 else self._tokens_each(max_query_len):
            keys = min(max_seq_len, window + each - 1) if window else max_seq_len
            numbers = self._decode_numbers(requests, max_seq_len)
            return launch_config.kernels_of(cfg.group, each, requests * cfg.num_kv_heads, cfg.head_dim, keys, *numbers)
        numbers = self._extend_numbers(max_query_len)
        programs = cdiv(max_query_len * cfg.group, numbers[0]) * cfg.num_kv_heads * requests
        return (*numbers, *_parts(programs, max_query_len, max_seq_len, cfg.group, window)), ()

    @staticmethod
    def candidates(cfg: GQAConfig, num_tokens: int) -> list[dict[str, int]]:
        """Return what is worth timing for ``cfg.phase``, the rule's own choice first."""
        if cfg.phase == "decode":
            return launch_config.candidates(cfg, num_tokens)
        if cfg.phase == "extend":
            own = tile_config(num_tokens, cfg)
            found = [
                {"BLOCK_M": m, "BLOCK_N": n, "num_warps": 8 if m == 128 else 4, "num_stages": stages}
                for m in (16, 32, 64, 128)
                for n in (32, 64, 128)
                for stages in (2, 3, 5)
                if m <= 2 * own["BLOCK_M"] and n * cfg.head_dim * (stages // 2) <= 16384
            ]
        else:
            return []
        if cfg.dtype == torch.float32:
            return [own]
        return [own, *(one for one in found if one != own)]

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMeta,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o, lse)``, both new contiguous tensors."""
        cfg = self.cfg
        window, softcap = cfg.window or 0, cfg.softcap or 0.0
        result: tuple[torch.Tensor, torch.Tensor]
        if meta.is_decode:
            each = self._decodes
        else:
            each = self._tokens_each(meta.max_query_len) if meta.tree is None else 0
        if each:
            counters: triton_decode.Counters = meta.plan_of(
                ("gqa", "triton", cfg.num_kv_heads), lambda step: triton_decode.Counters(step, cfg.num_kv_heads)
            )
            result = triton_decode.gqa_decode(
                q, k_cache, v_cache, sinks, meta.page_table, meta.seq_lens, meta.starts, meta.cu_seqlens_q,
                counters.done, meta.page_size, each, meta.max_seq_len, cfg.softmax_scale, window, softcap,
                *self._decode_numbers(meta.seq_lens.shape[0], meta.max_seq_len),
            )  # fmt: skip
            return result
        result = _gqa(
            q, k_cache, v_cache, sinks, meta.page_table, meta.seq_lens, meta.starts, meta.cu_seqlens_q,
            meta.positions, meta.tree, meta.page_size, meta.max_query_len, meta.max_seq_len, cfg.softmax_scale, window,
            softcap, cfg.causal,
            # A bucket's tokens may all be one request's: tiles are dealt out by what is there.
            meta.is_extend_bucket and meta.num_requests > 1, *self._extend_numbers(meta.max_query_len),
        )  # fmt: skip
        return result
