"""Rows of experts in Triton: what stands around a grouped GEMM of another package.

    T tokens, k experts each, S shared experts (numbers E..E+S-1, every token that has a valid expert), n = k + S
    pair p = t*n + j;   row_of[p] is its row in the buffers that the GEMMs read and write, -1 for a dropped pair

    place      row_of, and of each expert the count, first row and end;     rows of an expert are neighbours
    scatter    xq[row_of[p]] = x[t], copied or quantised once a token and written n times
    activate   a[row] = act(h[row, gate], h[row, up]), maybe quantised
    combine    y[t] = factor * sum over j of w[t,j] * (o[row_of[t,j]] + b2)     fp32, in the order of j

First rows are multiples of ``align``, or (*masked*) ``capacity`` rows stand for each expert. An expert's pairs keep
their order: nothing depends on timing. Rows that no pair has are never written, read, or waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fastlayers.moe.align.layer import num_blocks
from fastlayers.moe.fused_moe.layer import FusedMoEConfig
from fastlayers.moe.fused_moe.weights import EPS, GROUP
from fastlayers.quant.group_quant.triton import quantize_tile
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import cast

# Up to this many pairs each program counts for itself, which spares a launch.
COUNT_ALONE = 2048
# How scales lie in memory: a row's are neighbours, or (column) a group's.
ROW_SCALES, COLUMN_SCALES = 0, 1
_GROUP = tl.constexpr(GROUP)


@triton.jit
def _load_ids(ids_ptr, start, tokens, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, TOKENS: tl.constexpr,
              BLOCK_K: tl.constexpr):  # fmt: skip
    """Return the experts of TOKENS tokens from ``start`` on ``[TOKENS, BLOCK_K]``; -1: none."""
    token = start + tl.arange(0, TOKENS)[:, None]
    j = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.load(ids_ptr + token * TOP_K + j, mask=(token < tokens) & (j < TOP_K), other=-1)
    return tl.where((ids >= 0) & (ids < EXPERTS), ids, -1)


@triton.jit(do_not_specialize=["tokens"])
def count_kernel(
    ids_ptr, counts_ptr, tokens,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Count the pairs of one expert; of a shared one the tokens that have a valid pair."""
    expert = tl.program_id(0)
    found = tl.zeros([TOKENS], tl.int32)
    for start in range(0, tokens, TOKENS):
        ids = _load_ids(ids_ptr, start, tokens, EXPERTS, TOP_K, TOKENS, BLOCK_K)
        if expert < EXPERTS:
            found += tl.sum((ids == expert).to(tl.int32), axis=1)
        else:
            found += (tl.max(ids, axis=1) >= 0).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, axis=0))


@triton.jit
def _count_all(ids_ptr, tokens, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
               TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """Return the counts of all experts ``[BLOCK_E]``."""
    every = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    used = tl.zeros([TOKENS], tl.int32)
    for start in range(0, tokens, TOKENS):
        ids = _load_ids(ids_ptr, start, tokens, EXPERTS, TOP_K, TOKENS, BLOCK_K)
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


@triton.jit(do_not_specialize=["tokens", "capacity", "hidden", "inner"])
def place_kernel(
    ids_ptr, counts_ptr, groups_ptr, row_ptr, token_ptr, sizes_ptr, strides_ptr, tokens, capacity, hidden, inner,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, ALIGN: tl.constexpr, MASKED: tl.constexpr,
    COUNTED: tl.constexpr, HAS_TOKENS: tl.constexpr, HAS_SIZES: tl.constexpr,
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
        if COUNTED:
            counts = tl.load(counts_ptr + every, mask=every < ALL, other=0)
        else:
            counts = _count_all(ids_ptr, tokens, EXPERTS, TOP_K, SHARED, TOKENS, BLOCK_K, BLOCK_E)
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
    count = row - first
    tl.store(groups_ptr + expert, count)
    tl.store(groups_ptr + ALL + expert, first)
    tl.store(groups_ptr + 2 * ALL + expert, row)
    if HAS_SIZES:  # rows, N and K of both products; their strides
        tl.store(sizes_ptr + expert * 3, count)
        tl.store(sizes_ptr + expert * 3 + 1, 2 * inner)
        tl.store(sizes_ptr + expert * 3 + 2, hidden)
        second = sizes_ptr + ALL * 3 + expert * 3
        tl.store(second, count)
        tl.store(second + 1, hidden)
        tl.store(second + 2, inner)
        tl.store(strides_ptr + expert, hidden.to(tl.int64))
        tl.store(strides_ptr + ALL + expert, 2 * inner.to(tl.int64))
        tl.store(strides_ptr + 2 * ALL + expert, inner.to(tl.int64))


@triton.jit
def _scale_offset(row, group, groups, stride, LAYOUT: tl.constexpr):
    # 0: rows of scales; 1: columns of ``stride`` rows; 2: the same within each expert's ``stride`` rows
    if LAYOUT == 0:
        return row * groups + group
    elif LAYOUT == 1:
        return group * stride + row
    else:
        return (row // stride) * stride * groups + group * stride + row % stride


@triton.jit
def scatter_kernel(
    x_ptr, row_ptr, q_ptr, s_ptr, x_stride, width, groups, s_stride, eps,
    PAIRS: tl.constexpr, QUANT: tl.constexpr, UE8M0: tl.constexpr, LAYOUT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Copy or quantise GROUPS groups of a token, and write them to the rows of all its pairs."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = column < width
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0)
    if QUANT:
        codes, scale = quantize_tile(x.to(tl.float32), eps, 448.0, UE8M0, False)
    for j in tl.static_range(PAIRS):
        row = tl.load(row_ptr + token * PAIRS + j).to(tl.int64)
        if row >= 0:
            if QUANT:
                tl.store(q_ptr + row * width + column, codes, mask=inside)
                tl.store(s_ptr + _scale_offset(row, group, groups, s_stride, LAYOUT), scale, mask=group < groups)
            else:
                tl.store(q_ptr + row * width + column, x, mask=inside)


@triton.jit
def activate_kernel(
    h_ptr, row_ptr, ids_ptr, bias_ptr, a_ptr, s_ptr, inner, groups, s_stride, alpha, limit, eps,
    PAIRS: tl.constexpr, QUANT: tl.constexpr, UE8M0: tl.constexpr, LAYOUT: tl.constexpr, OAI: tl.constexpr,
    HAS_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Apply the activation to GROUPS groups of a pair's row, and maybe quantise."""
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + pair).to(tl.int64)
    if row < 0:
        return
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = column < inner
    gate_column = column * 2 if INTERLEAVED else column
    up_column = gate_column + 1 if INTERLEAVED else gate_column + inner
    gate = tl.load(h_ptr + row * 2 * inner + gate_column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + row * 2 * inner + up_column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = bias_ptr + tl.load(ids_ptr + pair).to(tl.int64) * 2 * inner
        gate += tl.load(bias + gate_column, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + up_column, mask=inside, other=0.0).to(tl.float32)
    if OAI:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        gate = gate * tl.sigmoid(gate * alpha)
    else:
        gate = gate * tl.sigmoid(gate)
    result = gate * up
    if QUANT:
        codes, scale = quantize_tile(result, eps, 448.0, UE8M0, False)
        tl.store(a_ptr + row * inner + column, codes, mask=inside)
        tl.store(s_ptr + _scale_offset(row, group, groups, s_stride, LAYOUT), scale, mask=group < groups)
    else:
        tl.store(a_ptr + row * inner + column, cast(result, a_ptr.dtype.element_ty), mask=inside)


@triton.jit
def combine_kernel(
    o_ptr, row_ptr, weights_ptr, ids_ptr, bias_ptr, y_ptr, hidden, factor,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weigh and add a token's rows in order, apply the factor once, round once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(row_ptr + token * (TOP_K + SHARED) + j).to(tl.int64)
        valid = inside & (row >= 0)
        out = tl.load(o_ptr + row * hidden + column, mask=valid, other=0.0).to(tl.float32)
        if HAS_BIAS:
            expert = tl.load(ids_ptr + token * TOP_K + j).to(tl.int64)
            out += tl.load(bias_ptr + expert * hidden + column, mask=valid, other=0.0).to(tl.float32)
        weight = tl.load(weights_ptr + token * TOP_K + j)
        total += tl.where(valid, out * weight, 0.0)
    total = total * factor
    for j in tl.static_range(SHARED):
        row = tl.load(row_ptr + token * (TOP_K + SHARED) + TOP_K + j).to(tl.int64)
        total += tl.load(o_ptr + row * hidden + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    tl.store(y_ptr + token * hidden + column, cast(total, y_ptr.dtype.element_ty), mask=inside)


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
    """

    row_of: torch.Tensor
    groups: torch.Tensor
    capacity: int
    masked: bool = False
    token_of: torch.Tensor | None = None
    sizes: torch.Tensor | None = None
    strides: torch.Tensor | None = None

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
    block_k = triton.next_power_of_2(top_k)
    # Pairs that a program looks at in one step.
    step = min((1024 if pairs <= 8192 else 4096) // block_k, triton.next_power_of_2(tokens))
    warps = _warps(step * block_k)
    counted = capacity is None and tokens * top_k > COUNT_ALONE
    if counted:
        count_kernel[(every,)](
            ids, groups, tokens, EXPERTS=experts, TOP_K=top_k, TOKENS=step, BLOCK_K=block_k, num_warps=warps
        )
    hidden, inner = sizes or (0, 0)
    place_kernel[(every,)](
        ids, groups, groups, row_of, row_of if token_of is None else token_of, row_of if problem is None else problem,
        row_of if strides is None else strides,
        tokens, total, hidden, inner, EXPERTS=experts, TOP_K=top_k, SHARED=shared, ALIGN=align,
        MASKED=capacity is not None, COUNTED=counted, HAS_TOKENS=token_of is not None, HAS_SIZES=problem is not None,
        TOKENS=step, BLOCK_K=block_k, BLOCK_E=triton.next_power_of_2(every + 1), num_warps=warps,
    )  # fmt: skip
    return Rows(row_of, groups, total, capacity is not None, token_of, problem, strides)


def _scales(rows: Rows, groups: int, layout: int) -> tuple[torch.Tensor, int]:
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
    groups = triton.cdiv(width, GROUP)
    q = torch.empty(rows.total, width, dtype=torch.float8_e4m3fn if fp8 else x.dtype, device=x.device)
    s, stride = _scales(rows, groups, layout) if fp8 else (q, 0)
    each = min(8, triton.next_power_of_2(groups))
    scatter_kernel[(tokens, triton.cdiv(groups, each))](
        x, rows.row_of, q, s, x.stride(0), width, groups, stride, EPS,
        PAIRS=rows.row_of.shape[0] // tokens, QUANT=fp8, UE8M0=ue8m0, LAYOUT=2 * layout if rows.masked else layout,
        GROUPS=each, num_warps=max(1, each // 2),
    )  # fmt: skip
    return q, s


def activate(
    h: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None, rows: Rows, cfg: FusedMoEConfig, layout: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the activation of the first product ``[rows, 2I]`` and its scales, as :func:`scatter` does."""
    inner, fp8 = h.shape[1] // 2, cfg.quant == "fp8_block"
    groups = triton.cdiv(inner, GROUP)
    a = torch.empty(rows.total, inner, dtype=torch.float8_e4m3fn if fp8 else h.dtype, device=h.device)
    s, stride = _scales(rows, groups, layout) if fp8 else (a, 0)
    each = min(8, triton.next_power_of_2(groups))
    activate_kernel[(rows.row_of.shape[0], triton.cdiv(groups, each))](
        h, rows.row_of, ids, h if bias is None else bias, a, s, inner, groups, stride, cfg.alpha, cfg.limit, EPS,
        PAIRS=cfg.pairs_per_token, QUANT=fp8, UE8M0=cfg.scale_fmt == "ue8m0",
        LAYOUT=2 * layout if rows.masked else layout, OAI=cfg.activation == "swiglu_oai", HAS_BIAS=bias is not None,
        INTERLEAVED=cfg.interleaved, GROUPS=each, num_warps=max(1, each // 2),
    )  # fmt: skip
    return a, s


def combine(
    o: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None, rows: Rows,
    shared: int, factor: float, y: torch.Tensor,
) -> None:  # fmt: skip
    """Write the weighted sums of the second product's rows ``[rows, D]`` to ``y`` ``[T, D]``."""
    tokens, hidden = y.shape
    block = min(1024, triton.next_power_of_2(hidden))
    combine_kernel[(tokens, triton.cdiv(hidden, block))](
        o, rows.row_of, weights, ids, o if bias is None else bias, y, hidden, factor,
        TOP_K=ids.shape[1], SHARED=shared, HAS_BIAS=bias is not None, BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip


def _place_build(experts: int, top_k: int, shared: int, step: int, counted: bool, masked: bool) -> KernelBuild:
    block_k = triton.next_power_of_2(top_k)
    return KernelBuild(
        f"moe_rows_place_{experts}_{step}{'_counted' * counted}{'_masked' * masked}",
        place_kernel,
        {
            "ids_ptr": "*i32", "counts_ptr": "*i32", "groups_ptr": "*i32", "row_ptr": "*i32", "token_ptr": "*i32",
            "sizes_ptr": "*i32", "strides_ptr": "*i64", "tokens": "i32",
             "capacity": "i32", "hidden": "i32", "inner": "i32",
        },
        {
            "EXPERTS": experts, "TOP_K": top_k, "SHARED": shared, "ALIGN": 64, "MASKED": masked, "COUNTED": counted,
            "HAS_TOKENS": True, "HAS_SIZES": True, "TOKENS": step // block_k, "BLOCK_K": block_k,
            "BLOCK_E": triton.next_power_of_2(experts + shared + 1),
        },
        _warps(step),
    )  # fmt: skip


def _builds_of(fp8: bool) -> list[KernelBuild]:
    code = "fp8e4nv" if fp8 else "bf16"
    name = "fp8" if fp8 else "bf16"
    static = {"QUANT": fp8, "UE8M0": False, "GROUPS": 8}
    return [
        KernelBuild(
            f"moe_rows_scatter_{name}_{layout}",
            scatter_kernel,
            {
                "x_ptr": "*bf16", "row_ptr": "*i32", "q_ptr": f"*{code}", "s_ptr": "*fp32" if fp8 else "*bf16",
                "x_stride": "i32", "width": "i32", "groups": "i32", "s_stride": "i32", "eps": "fp32",
            },
            {**static, "PAIRS": 8, "LAYOUT": layout}, 4, aligned=("x_stride", "width"),
        )
        for layout in ((0, 1, 2) if fp8 else (0,))
    ] + [
        KernelBuild(
            f"moe_rows_activate_{name}",
            activate_kernel,
            {
                "h_ptr": "*bf16", "row_ptr": "*i32", "ids_ptr": "*i32", "bias_ptr": "*bf16", "a_ptr": f"*{code}",
                "s_ptr": "*fp32" if fp8 else "*bf16", "inner": "i32", "groups": "i32", "s_stride": "i32",
                "alpha": "fp32", "limit": "fp32", "eps": "fp32",
            },
            {
                **static, "PAIRS": 8, "LAYOUT": 1 if fp8 else 0, "OAI": not fp8, "HAS_BIAS": not fp8,
                "INTERLEAVED": not fp8,
            },
            4, aligned=("inner",),
        )
    ]  # fmt: skip


COMPILE = [
    _place_build(256, 8, 1, 32, False, True),
    _place_build(256, 8, 1, 1024, False, False),
    _place_build(256, 8, 0, 4096, True, False),
    KernelBuild(
        "moe_rows_count",
        count_kernel,
        {"ids_ptr": "*i32", "counts_ptr": "*i32", "tokens": "i32"},
        {"EXPERTS": 256, "TOP_K": 8, "TOKENS": 512, "BLOCK_K": 8},
        8,
    ),
    *_builds_of(True),
    *_builds_of(False),
    KernelBuild(
        "moe_rows_combine",
        combine_kernel,
        {
            "o_ptr": "*bf16", "row_ptr": "*i32", "weights_ptr": "*fp32", "ids_ptr": "*i32", "bias_ptr": "*bf16",
            "y_ptr": "*bf16", "hidden": "i32", "factor": "fp32",
        },
        {"TOP_K": 8, "SHARED": 1, "HAS_BIAS": True, "BLOCK": 1024}, 4, aligned=("hidden",),
    ),
]  # fmt: skip
