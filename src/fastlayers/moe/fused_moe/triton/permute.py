"""Tokens' rows in the order of experts, as grouped GEMMs of other packages take them, in Triton.

    T tokens, k experts each, S shared experts (numbers E..E+S-1, of every token that has a valid expert), n = k + S
    pair p = t*n + j;   row_of[p] is its row in the buffers that the GEMMs read and write, -1 for a dropped pair
    place      row_of
    scatter    xq[row_of[p]] = x[t], copied or quantised once a token and written for each of its pairs p

Rows of an expert are neighbours, in the order of its pairs: nothing depends on timing, and nothing is atomic. First
rows are multiples of ``align``, or (*masked*) ``capacity`` rows stand for each expert. Rows that no pair has are
neither written nor read. Our own GEMMs gather instead: :mod:`fastlayers.moe.align`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.align.layer import num_blocks
from fastlayers.moe.fused_moe.weights import EPS, GROUP
from fastlayers.quant.group_quant.triton import quantize_tile
from fastlayers.runtime.launch import kernel

# Up to this many pairs one program an expert looks at all of them: one launch. With more, chunks of this size.
COUNT_ALONE, CHUNK = 2048, 128
# Experts of a program that adds up the chunks' counts, and chunks of one step.
PREFIX_EXPERTS, PREFIX_STEP = 16, 128


@triton.jit
def _load_ids(ids_ptr, start, tokens, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, TOKENS: tl.constexpr,
              BLOCK_K: tl.constexpr):  # fmt: skip
    """Return the experts of TOKENS tokens from ``start`` on ``[TOKENS, BLOCK_K]``; -1: none."""
    token = start + tl.arange(0, TOKENS)[:, None]
    j = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.load(ids_ptr + token * TOP_K + j, mask=(token < tokens) & (j < TOP_K), other=-1)
    return tl.where((ids >= 0) & (ids < EXPERTS), ids, -1)


@triton.jit
def _count_all(ids_ptr, first, last, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
               TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """Return the counts of all experts ``[BLOCK_E]`` among some tokens."""
    every = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    used = tl.zeros([TOKENS], tl.int32)
    for start in range(first, last, TOKENS):
        ids = _load_ids(ids_ptr, start, last, EXPERTS, TOP_K, TOKENS, BLOCK_K)
        used += (tl.max(ids, axis=1) >= 0).to(tl.int32)
        flat = tl.reshape(ids, [TOKENS * BLOCK_K])
        counts += tl.histogram(tl.where(flat >= 0, flat, BLOCK_E - 1), BLOCK_E)
    counts = tl.where(every < EXPERTS, counts, 0)
    if SHARED > 0:
        counts = tl.where((every >= EXPERTS) & (every < EXPERTS + SHARED), tl.sum(used, axis=0), counts)
    return counts


@triton.jit
def _place_routed(
    ids, token, row, expert, row_ptr, token_ptr, tokens,
    TOP_K: tl.constexpr, PAIRS: tl.constexpr, HAS_TOKENS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Place the pairs of ``expert`` from ``row`` on, and return the next row."""
    j = tl.arange(0, BLOCK_K)[None, :]
    pair = token[:, None] * PAIRS + j
    if expert == 0:  # marks the dropped pairs, too
        tl.store(row_ptr + pair, ids, mask=(token < tokens)[:, None] & (j < TOP_K) & (ids < 0))
    flat = tl.reshape(pair, [TOKENS * BLOCK_K])
    match = tl.reshape((ids == expert).to(tl.int32), [TOKENS * BLOCK_K])
    to = row + tl.cumsum(match, axis=0) - 1
    tl.store(row_ptr + flat, to, mask=match == 1)
    if HAS_TOKENS:
        tl.store(token_ptr + to, flat // PAIRS, mask=match == 1)
    return row + tl.sum(match, axis=0)


@triton.jit
def _place_shared(
    ids, token, row, j, row_ptr, token_ptr, tokens, PAIRS: tl.constexpr, HAS_TOKENS: tl.constexpr
):  # fmt: skip
    """Place the pairs ``j`` of all tokens that have a valid one from ``row`` on, and return the next row."""
    used = (tl.max(ids, axis=1) >= 0).to(tl.int32)
    to = row + tl.cumsum(used, axis=0) - 1
    tl.store(row_ptr + token * PAIRS + j, tl.where(used == 1, to, -1), mask=token < tokens)
    if HAS_TOKENS:
        tl.store(token_ptr + to, token, mask=used == 1)
    return row + tl.sum(used, axis=0)


@triton.jit
def _store_groups(
    groups_ptr, sizes_ptr, strides_ptr, expert, count, first, hidden, inner, ALL: tl.constexpr, HAS_SIZES: tl.constexpr
):  # fmt: skip
    """Store counts, first rows and ends of some experts; rows, N and K of both their products, and strides."""
    inside = expert < ALL
    tl.store(groups_ptr + expert, count, mask=inside)
    tl.store(groups_ptr + ALL + expert, first, mask=inside)
    tl.store(groups_ptr + 2 * ALL + expert, first + count, mask=inside)
    if HAS_SIZES:
        second = sizes_ptr + ALL * 3
        tl.store(sizes_ptr + expert * 3, count, mask=inside)
        tl.store(sizes_ptr + expert * 3 + 1, 2 * inner, mask=inside)
        tl.store(sizes_ptr + expert * 3 + 2, hidden, mask=inside)
        tl.store(second + expert * 3, count, mask=inside)
        tl.store(second + expert * 3 + 1, hidden, mask=inside)
        tl.store(second + expert * 3 + 2, inner, mask=inside)
        tl.store(strides_ptr + expert, hidden.to(tl.int64), mask=inside)
        tl.store(strides_ptr + ALL + expert, 2 * inner.to(tl.int64), mask=inside)
        tl.store(strides_ptr + 2 * ALL + expert, inner.to(tl.int64), mask=inside)


@kernel(do_not_specialize=("tokens", "capacity", "hidden", "inner"))
def place_kernel(
    ids_ptr, groups_ptr, row_ptr, token_ptr, sizes_ptr, strides_ptr, tokens, capacity, hidden, inner,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, ALIGN: tl.constexpr, MASKED: tl.constexpr,
    HAS_TOKENS: tl.constexpr, HAS_SIZES: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Give each pair of one expert its row."""
    expert = tl.program_id(0)
    ALL: tl.constexpr = EXPERTS + SHARED
    PAIRS: tl.constexpr = TOP_K + SHARED
    every = tl.arange(0, BLOCK_E)
    if MASKED:
        first = expert * capacity
    else:
        counts = _count_all(ids_ptr, 0, tokens, EXPERTS, TOP_K, SHARED, TOKENS, BLOCK_K, BLOCK_E)
        first = tl.sum(tl.where(every < expert, (counts + (ALIGN - 1)) // ALIGN * ALIGN, 0), axis=0)
    row = first
    for start in range(0, tokens, TOKENS):
        ids = _load_ids(ids_ptr, start, tokens, EXPERTS, TOP_K, TOKENS, BLOCK_K)
        token = start + tl.arange(0, TOKENS)
        if expert < EXPERTS:
            row = _place_routed(
                ids, token, row, expert, row_ptr, token_ptr, tokens, TOP_K, PAIRS, HAS_TOKENS, TOKENS, BLOCK_K
            )
        else:
            row = _place_shared(
                ids, token, row, expert - EXPERTS + TOP_K, row_ptr, token_ptr, tokens, PAIRS, HAS_TOKENS
            )
    _store_groups(
        groups_ptr, sizes_ptr, strides_ptr, expert + tl.arange(0, 1), row - first + tl.zeros([1], tl.int32), first,
        hidden, inner, ALL, HAS_SIZES,
    )  # fmt: skip


@kernel(do_not_specialize=("tokens",))
def chunk_kernel(
    ids_ptr, chunks_ptr, tokens,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Count the experts of one chunk of TOKENS tokens."""
    chunk = tl.program_id(0)
    first, last = chunk * TOKENS, tl.minimum((chunk + 1) * TOKENS, tokens)
    counts = _count_all(ids_ptr, first, last, EXPERTS, TOP_K, SHARED, TOKENS, BLOCK_K, BLOCK_E)
    tl.store(chunks_ptr + chunk * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@kernel(do_not_specialize=("chunks",))
def prefix_kernel(
    chunks_ptr, groups_ptr, chunks, ALL: tl.constexpr, BLOCK_E: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Turn the chunks' counts of WIDE experts into how many pairs came before, and store the sums."""
    expert = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    before = tl.zeros([WIDE], tl.int32)
    for start in range(0, chunks, STEP):
        chunk = start + tl.arange(0, STEP)[:, None]
        at = chunks_ptr + chunk * BLOCK_E + expert[None, :]
        inside = (chunk < chunks) & (expert < ALL)[None, :]
        counts = tl.load(at, mask=inside, other=0)
        tl.store(at, before[None, :] + tl.cumsum(counts, axis=0) - counts, mask=inside)
        before += tl.sum(counts, axis=0)
    tl.store(groups_ptr + expert, before, mask=expert < ALL)


@kernel(do_not_specialize=("tokens", "hidden", "inner"))
def place_chunk_kernel(
    ids_ptr, chunks_ptr, groups_ptr, row_ptr, token_ptr, sizes_ptr, strides_ptr, tokens, hidden, inner,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, ALIGN: tl.constexpr, HAS_TOKENS: tl.constexpr,
    HAS_SIZES: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Give the pairs of one chunk their rows."""
    chunk = tl.program_id(0)
    ALL: tl.constexpr = EXPERTS + SHARED
    PAIRS: tl.constexpr = TOP_K + SHARED
    SIZE: tl.constexpr = TOKENS * BLOCK_K
    every = tl.arange(0, BLOCK_E)
    counts = tl.load(groups_ptr + every, mask=every < ALL, other=0)
    padded = (counts + (ALIGN - 1)) // ALIGN * ALIGN
    first = tl.cumsum(padded, axis=0) - padded
    if chunk == 0:
        _store_groups(groups_ptr, sizes_ptr, strides_ptr, every, counts, first, hidden, inner, ALL, HAS_SIZES)
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    ids = _load_ids(ids_ptr, chunk * TOKENS, tokens, EXPERTS, TOP_K, TOKENS, BLOCK_K)
    flat = tl.reshape(ids, [SIZE])
    place = tl.arange(0, SIZE)
    earlier = (flat[:, None] == flat[None, :]) & (place[None, :] < place[:, None])
    known = tl.where(flat >= 0, flat, 0)
    before = tl.load(chunks_ptr + chunk * BLOCK_E + known)
    row = tl.gather(first, known, axis=0) + before + tl.sum(earlier.to(tl.int32), axis=1)
    j = tl.arange(0, BLOCK_K)[None, :]
    pair = tl.reshape(token[:, None] * PAIRS + j, [SIZE])
    inside = tl.reshape((token < tokens)[:, None] & (j < TOP_K), [SIZE])
    tl.store(row_ptr + pair, tl.where(flat >= 0, row, -1), mask=inside)
    if HAS_TOKENS:
        tl.store(token_ptr + row, pair // PAIRS, mask=flat >= 0)
    used = (tl.max(ids, axis=1) >= 0).to(tl.int32)
    rank = tl.cumsum(used, axis=0) - used
    for expert in tl.static_range(EXPERTS, ALL):
        start = tl.sum(tl.where(every == expert, first, 0), axis=0) + tl.load(chunks_ptr + chunk * BLOCK_E + expert)
        to = tl.where(used == 1, start + rank, -1)
        tl.store(row_ptr + token * PAIRS + TOP_K + expert - EXPERTS, to, mask=token < tokens)
        if HAS_TOKENS:
            tl.store(token_ptr + to, token, mask=used == 1)


@dataclass(frozen=True)
class Rows:
    """Where the pairs of one call stand.

    Parameters
    ----------
    row_of : int32 Tensor ``[T * n]``
    groups : int32 Tensor ``[3, E]``
        Counts, first rows, ends of all experts.
    capacity : int
        Rows of the buffers; masked: rows of each expert.
    masked : bool
    token_of : int32 Tensor ``[capacity]`` or None
    sizes : int32 Tensor ``[2, E, 3]`` or None
        Rows, N and K of both products for each expert.
    strides : int64 Tensor ``[3, E]`` or None
        D, 2I and I: the strides of all operands, once for each expert.
    align : int
        First rows are multiples of it; 1: an expert's rows follow those of the one before.
    """

    row_of: torch.Tensor
    groups: torch.Tensor
    capacity: int
    masked: bool = False
    token_of: torch.Tensor | None = None
    sizes: torch.Tensor | None = None
    strides: torch.Tensor | None = None
    align: int = 1

    @property
    def total(self) -> int:
        """Rows of a buffer over all experts."""
        return self.capacity * self.groups.shape[1] if self.masked else self.capacity


def _warps(pairs: int) -> int:
    return max(1, min(8, pairs // 256))


def place(
    ids: torch.Tensor, experts: int, shared: int, *, align: int = 1, capacity: int | None = None,
    tokens_of_rows: bool = False, sizes: tuple[int, int] | None = None,
) -> Rows:  # fmt: skip
    """Give every pair of ``ids`` ``[T, k]`` (int32, contiguous, T > 0) a row.

    Parameters
    ----------
    experts, shared : int
    align : int
        First rows are multiples of it.
    capacity : int or None
        Rows of each expert, at least T: the masked layout.
    tokens_of_rows : bool
        Return the token of each row, too.
    sizes : tuple[int, int] or None
        hidden and inner size, to return the sizes and strides of the products, too.
    """
    (tokens, top_k), device, every = ids.shape, ids.device, experts + shared
    pairs = tokens * (top_k + shared)
    row_of = torch.empty(pairs, dtype=torch.int32, device=device)
    groups = torch.empty(3, every, dtype=torch.int32, device=device)
    total = num_blocks(pairs, every, align) * align if capacity is None else capacity
    token_of = torch.empty(total, dtype=torch.int32, device=device) if tokens_of_rows else None
    problem = torch.empty(2, every, 3, dtype=torch.int32, device=device) if sizes is not None else None
    strides = torch.empty(3, every, dtype=torch.int64, device=device) if sizes is not None else None
    hidden, inner = sizes or (0, 0)
    outputs = (
        groups, row_of, row_of if token_of is None else token_of, row_of if problem is None else problem,
        row_of if strides is None else strides,
    )  # fmt: skip
    static = {
        "EXPERTS": experts, "TOP_K": top_k, "SHARED": shared, "ALIGN": align, "HAS_TOKENS": token_of is not None,
        "HAS_SIZES": problem is not None, "BLOCK_K": next_power_of_2(top_k),
        "BLOCK_E": next_power_of_2(every + 1),
    }  # fmt: skip
    if capacity is None and tokens * top_k > COUNT_ALONE:
        _place_chunks(ids, outputs, hidden, inner, static)
    else:
        step = min(1024 // static["BLOCK_K"], next_power_of_2(tokens))
        place_kernel[(every,)](
            ids, *outputs, tokens, total, hidden, inner, **static, MASKED=capacity is not None, TOKENS=step,
            num_warps=_warps(step * static["BLOCK_K"]),
        )  # fmt: skip
    return Rows(row_of, groups, total, capacity is not None, token_of, problem, strides, align)


def _place_chunks(
    ids: torch.Tensor, outputs: tuple[torch.Tensor, ...], hidden: int, inner: int, static: dict[str, int]
) -> None:  # fmt: skip
    """Count chunks of the tokens, add up, place: three launches, whose work does not grow with the experts."""
    tokens, every = ids.shape[0], static["EXPERTS"] + static["SHARED"]
    step = max(1, CHUNK // static["BLOCK_K"])
    chunks = cdiv(tokens, step)
    counts = ids.new_empty(chunks, static["BLOCK_E"], dtype=torch.int32)
    counting = {name: static[name] for name in ("EXPERTS", "TOP_K", "SHARED", "BLOCK_K", "BLOCK_E")}
    chunk_kernel[(chunks,)](ids, counts, tokens, **counting, TOKENS=step, num_warps=2)
    prefix_kernel[(cdiv(every, PREFIX_EXPERTS),)](
        counts, outputs[0], chunks, ALL=every, BLOCK_E=static["BLOCK_E"], STEP=PREFIX_STEP, WIDE=PREFIX_EXPERTS
    )
    place_chunk_kernel[(chunks,)](ids, counts, *outputs, tokens, hidden, inner, **static, TOKENS=step, num_warps=4)


# How scales lie in memory: a row's are neighbours, or (column) a group's.
ROW_SCALES, COLUMN_SCALES = 0, 1
WIDTH = tl.constexpr(GROUP)


@triton.jit
def scale_offset(row, group, groups, stride, LAYOUT: tl.constexpr):
    # 0: rows of scales; 1: columns of ``stride`` rows; 2: the same within each expert's ``stride`` rows
    if LAYOUT == 0:
        return row * groups + group
    elif LAYOUT == 1:
        return group * stride + row
    else:
        return (row // stride) * stride * groups + group * stride + row % stride


@kernel
def scatter_kernel(
    x_ptr, row_ptr, q_ptr, s_ptr, x_stride, width, groups, s_stride, eps,
    PAIRS: tl.constexpr, QUANT: tl.constexpr, UE8M0: tl.constexpr, LAYOUT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Copy or quantise GROUPS groups of a token, and write them to the rows of all its pairs."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = column < width
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0)
    if QUANT:
        codes, scale = quantize_tile(x.to(tl.float32), eps, 448.0, UE8M0, False)
    for j in tl.static_range(PAIRS):
        row = tl.load(row_ptr + token * PAIRS + j).to(tl.int64)
        if row >= 0:
            if QUANT:
                tl.store(q_ptr + row * width + column, codes, mask=inside)
                tl.store(s_ptr + scale_offset(row, group, groups, s_stride, LAYOUT), scale, mask=group < groups)
            else:
                tl.store(q_ptr + row * width + column, x, mask=inside)


def empty_scales(rows: Rows, groups: int, layout: int) -> tuple[torch.Tensor, int]:
    """Return an empty buffer of scales and the stride between its groups."""
    where = rows.groups.device
    if layout == ROW_SCALES:
        return torch.empty(rows.total, groups, dtype=torch.float32, device=where), groups
    shape = (rows.groups.shape[1], groups, rows.capacity) if rows.masked else (groups, rows.capacity)
    return torch.empty(shape, dtype=torch.float32, device=where).mT, rows.capacity


def scatter(x: torch.Tensor, rows: Rows, quant: str, ue8m0: bool, layout: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs' inputs ``[rows, D]`` and their scales (of no use if not quantised).

    Scales are rows ``[rows, D/128]``, or columns: of the same shape with the rows' stride 1, masked
    ``[E, capacity, D/128]``.
    """
    (tokens, width), fp8 = x.shape, quant == "fp8_block"
    groups = cdiv(width, GROUP)
    q = x.new_empty(rows.total, width, dtype=torch.float8_e4m3fn if fp8 else x.dtype)
    s, stride = empty_scales(rows, groups, layout) if fp8 else (q, 0)
    each = min(8, next_power_of_2(groups))
    scatter_kernel[(tokens, cdiv(groups, each))](
        x, rows.row_of, q, s, x.stride(0), width, groups, stride, EPS,
        PAIRS=rows.row_of.shape[0] // tokens, QUANT=fp8, UE8M0=ue8m0, LAYOUT=2 * layout if rows.masked else layout,
        GROUPS=each, num_warps=max(1, each // 2),
    )  # fmt: skip
    return q, s
