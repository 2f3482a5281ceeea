"""Linears, rotation and attention of ``decode_round4.py``: the library's kernels with one thing changed, or two in one.

Where a kernel takes a library kernel's place it has that one's arguments, in that order, and constants of its own
behind them. EVICT: what L2 does with weights that were read, "" or "evict_first".
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlayers.activation.silu_mul.triton import _silu
from fastlayers.attention.gqa import triton_decode
from fastlayers.attention.kv_write.triton import to_cache
from fastlayers.linear.triton_gemm import tile_origin
from fastlayers.rotary.triton import angles
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import INTERPRET, await_inputs, cast, dot, release_dependents


@triton.jit
def tile_of(rows, k, K, EVEN_K: tl.constexpr, EVICT: tl.constexpr):
    """Return a tile of rows of weights, or of one row of x."""
    if EVEN_K:
        return tl.load(rows + k[None, :], eviction_policy=EVICT)
    else:
        return tl.load(rows + k[None, :], mask=k[None, :] < K, other=0.0, eviction_policy=EVICT)


@triton.jit
def _silu_mul(gate, up, dtype: tl.constexpr):
    """Do what ``silu_mul_rounded`` does, for tiles that have no pairs of values in a thread: the same bits."""
    silu = cast(_silu(gate.to(tl.float32)), dtype)
    return cast(silu.to(tl.float32) * up.to(tl.float32), dtype)


@kernel
def vector_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, M, N, K, x_stride, weight_stride,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVICT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As the library's, of one row: the weight's place in L2 is given up first."""
    tl.static_assert(ROWS == 1)
    column, depth = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    known = column < N
    weight_rows = weight_ptr + tl.minimum(column, N - 1).to(tl.int64)[:, None] * weight_stride
    held = ()
    for i in tl.static_range(AHEAD):
        held = held + (tile_of(weight_rows, i * BLOCK_K + depth, K, EVEN_K, EVICT),)  # type: ignore[assignment]
    bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=known, other=0.0).to(tl.float32)
    await_inputs(PDL)
    release_dependents(PDL)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.static_range(BLOCKS):
        if i + AHEAD < BLOCKS:
            held = held + (tile_of(weight_rows, (i + AHEAD) * BLOCK_K + depth, K, EVEN_K, EVICT),)  # type: ignore[assignment]
        x = tile_of(x_ptr, i * BLOCK_K + depth, K, EVEN_K, "")
        total += x.to(tl.float32) * held[i].to(tl.float32)
    y = cast(tl.sum(total, axis=1) + bias, y_ptr.dtype.element_ty)
    tl.store(y_ptr + column, y, mask=known)


@kernel
def gate_up_silu_vector_kernel(
    x_ptr, weight_ptr, y_ptr, I, K, weight_stride,
    EVEN_K: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVICT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N gate and as many up rows by one row of x, round both as their launch does, and ``silu_mul``."""
    column, depth = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    inside = tl.minimum(column, I - 1).to(tl.int64)
    gate_rows, up_rows = (
        weight_ptr + inside[:, None] * weight_stride,
        weight_ptr + (inside + I)[:, None] * weight_stride,
    )
    gates = ()
    ups = ()
    for i in tl.static_range(AHEAD):
        gates = gates + (tile_of(gate_rows, i * BLOCK_K + depth, K, EVEN_K, EVICT),)  # type: ignore[assignment]
        ups = ups + (tile_of(up_rows, i * BLOCK_K + depth, K, EVEN_K, EVICT),)  # type: ignore[assignment]
    await_inputs(PDL)
    release_dependents(PDL)
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.static_range(BLOCKS):
        if i + AHEAD < BLOCKS:
            k = (i + AHEAD) * BLOCK_K + depth
            gates = gates + (tile_of(gate_rows, k, K, EVEN_K, EVICT),)  # type: ignore[assignment]
            ups = ups + (tile_of(up_rows, k, K, EVEN_K, EVICT),)  # type: ignore[assignment]
        x = tile_of(x_ptr, i * BLOCK_K + depth, K, EVEN_K, "").to(tl.float32)
        gate += x * gates[i].to(tl.float32)
        up += x * ups[i].to(tl.float32)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    y = _silu_mul(cast(tl.sum(gate, axis=1), dtype), cast(tl.sum(up, axis=1), dtype), dtype)
    tl.store(y_ptr + column, y, mask=column < I)


@kernel(do_not_specialize=("M",))
def gate_up_silu_tile_kernel(
    x_ptr, weight_ptr, y_ptr, M, I, K, x_stride, weight_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same of at most BLOCK_M rows on matrix units; K is a multiple of BLOCK_K."""
    row, depth = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns beyond the edge read a valid one again; their results are never stored.
    x_rows = x_ptr + (row % M).to(tl.int64)[:, None] * x_stride + depth[None, :]
    gate_rows = weight_ptr + (column % I).to(tl.int64)[None, :] * weight_stride + depth[:, None]
    up_rows = gate_rows + I.to(tl.int64) * weight_stride
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    await_inputs(PDL)
    release_dependents(PDL)
    for block in range(0, K // BLOCK_K):
        x = tl.load(x_rows + block * BLOCK_K)
        gate = dot(x, tl.load(gate_rows + block * BLOCK_K), gate)
        up = dot(x, tl.load(up_rows + block * BLOCK_K), up)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    y = _silu_mul(cast(gate, dtype), cast(up, dtype), dtype)
    target = y_ptr + row.to(tl.int64)[:, None] * I + column[None, :]
    tl.store(target, y, mask=(row[:, None] < M) & (column[None, :] < I))


@kernel(do_not_specialize=("M",))
def split_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, parts_ptr, counters_ptr, M, N, K, x_stride, weight_stride,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As ``_linear_kernel``, K a multiple of BLOCK_K; the last program of a tile to finish adds the parts, in order."""
    tl.static_assert(EVEN_K)
    row0, column0 = tile_origin(M, N, BLOCK_M, BLOCK_N)
    row, column, depth = row0 + tl.arange(0, BLOCK_M), column0 + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    x_rows = x_ptr + (row % M).to(tl.int64)[:, None] * x_stride
    weight_rows = weight_ptr + (column % N).to(tl.int64)[None, :] * weight_stride
    split = tl.program_id(1)
    blocks = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    first = split * blocks
    last = tl.minimum(first + blocks, tl.cdiv(K, BLOCK_K))
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    await_inputs(PDL)
    release_dependents(PDL)
    for block in range(first, last):
        k = block * BLOCK_K + depth
        acc = dot(tl.load(x_rows + k[None, :]), tl.load(weight_rows + k[:, None]), acc)
    inside = (row[:, None] < M) & (column[None, :] < N)
    place = row.to(tl.int64)[:, None] * N + column[None, :]
    rows = M.to(tl.int64) * N
    tl.store(parts_ptr + split * rows + place, acc, mask=inside)
    # Every thread's part is written before the one that counts says so.
    tl.debug_barrier()
    tile = counters_ptr + tl.program_id(0)
    if tl.atomic_add(tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
        tl.store(tile, 0)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for part in tl.static_range(SPLITS):
            total += tl.load(parts_ptr + part * rows + place, mask=inside, other=0.0, cache_modifier=".cg")
        if HAS_BIAS:
            total += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + place, cast(total, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _normed(x, inverse, weight):
    rounded = cast(x.to(tl.float32) * inverse[:, None], x.dtype).to(tl.float32)
    return cast(rounded * weight.to(tl.float32), x.dtype)


@triton.jit
def _turn(
    source, target, source_head, target_head, head, heads, cos_ptr, sin_ptr, positions_ptr, token, max_position,
    axis_stride, f, weight_ptr, eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Positions are the step's plan, angles and weights are constants: no kernel in front writes them. Each thread reads
    # those of its own values: nothing passes through shared memory behind the wait.
    ROWS: tl.constexpr = head.shape[0]
    c, s = angles(
        cos_ptr, sin_ptr, positions_ptr, token, max_position, axis_stride, HALF, BLOCK_HALF, 0, 0, 0, False, ROWS
    )  # fmt: skip
    if NORM:
        place = tl.broadcast_to(f[None, :], (ROWS, BLOCK_HALF))
        known = place < HALF
        weight_a = tl.load(weight_ptr + place, mask=known, other=0.0)
        weight_b = tl.load(weight_ptr + HALF + place, mask=known, other=0.0)
    rows, targets = source + head[:, None] * source_head, target + head[:, None] * target_head
    inside = (head < heads)[:, None] & (f < HALF)[None, :]
    dtype: tl.constexpr = source.dtype.element_ty
    await_inputs(PDL)
    release_dependents(PDL)
    a = tl.load(rows + f[None, :], mask=inside, other=0.0)
    b = tl.load(rows + HALF + f[None, :], mask=inside, other=0.0)
    if NORM:
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide_a * wide_a + wide_b * wide_b, axis=1) / HEAD_DIM + eps)
        a, b = _normed(a, inverse, weight_a), _normed(b, inverse, weight_b)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    first = cast(wide_a * c - wide_b * s, dtype)
    second = cast(wide_b * c + wide_a * s, dtype)
    tl.store(targets + f[None, :], to_cache(first, target.dtype.element_ty), mask=inside)
    tl.store(targets + HALF + f[None, :], to_cache(second, target.dtype.element_ty), mask=inside)


@kernel
def rotary_kv_write_kernel(
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
    """As the library's, of halves side by side and one position a token: what is constant is read before the wait."""
    tl.static_assert(REST == 0 and not INTERLEAVED_IN and not INTERLEAVED_OUT)
    tl.static_assert(SECTION_T + SECTION_H + SECTION_W == 0)
    blocks: tl.constexpr = Q_BLOCKS + KV_BLOCKS
    token, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    f = tl.arange(0, BLOCK_HALF)
    if block < Q_BLOCKS:
        head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        _turn(
            q_ptr + token * q_token, q_out_ptr + token * out_token, q_head, out_head, head, heads,
            cos_ptr, sin_ptr, positions_ptr, token, max_position, axis_stride, f, q_weight_ptr, eps,
            HEAD_DIM, HALF, BLOCK_HALF, NORM, PDL,
        )  # fmt: skip
    else:
        kv_head = (block - Q_BLOCKS) * BLOCK_KV_HEADS + tl.arange(0, BLOCK_KV_HEADS)
        slot = tl.load(loc_ptr + token).to(tl.int64)
        _turn(
            k_ptr + token * k_token, k_cache_ptr + slot * k_slot, k_head, HEAD_DIM, kv_head, kv_heads,
            cos_ptr, sin_ptr, positions_ptr, token, max_position, axis_stride, f, k_weight_ptr, eps,
            HEAD_DIM, HALF, BLOCK_HALF, NORM, PDL,
        )  # fmt: skip
        column = tl.arange(0, BLOCK_V)
        inside = (kv_head < kv_heads)[:, None] & (column < V_HEAD_DIM)[None, :]
        v = tl.load(v_ptr + token * v_token + kv_head[:, None] * v_head + column[None, :], mask=inside, other=0.0)
        target = v_cache_ptr + slot * v_slot + kv_head[:, None] * V_HEAD_DIM + column[None, :]
        tl.store(target, to_cache(v, v_cache_ptr.dtype.element_ty), mask=inside)


# The library's kernel as a function: what this trial adds runs in front of it, before its wait.
_attend, _share = triton_decode._decode_kernel.jit, triton_decode._share


@triton.jit
def _ask(pointers, wanted):
    """Ask L2 for the lines at ``pointers``, a thread each, where ``wanted``."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0;}",
            "=r,l,r", [pointers, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@kernel
def decode_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, o_ptr, lse_ptr, part_ptr, part_lse_ptr, counters_ptr, table_ptr, lens_ptr,
    starts_ptr, cu_ptr, q_token, q_head, table_row, splits, wanted, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, EACH: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ONE_PAGE: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, MAX_BLOCKS: tl.constexpr, SPLIT: tl.constexpr, FUSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As the library's; keys and values of a program's first block are asked into L2 before the wait."""
    tl.static_assert(EACH == 1)
    kv_head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    split = tl.num_programs(2) - 1 - tl.program_id(2)
    length, start = tl.load(lens_ptr + request), tl.load(starts_ptr + request)
    _, low, each, parts = _share(
        length, start, 1, splits, wanted, WINDOW, BLOCK_N, MIN_BLOCKS, MAX_BLOCKS, ONE_PAGE
    )  # fmt: skip
    if SPLIT:
        low += split * each * BLOCK_N
    # Lines of 128 bytes: half of a head of 128 values of 16 bits.
    LINE: tl.constexpr = 64
    LINES: tl.constexpr = (HEAD_DIM + LINE - 1) // LINE
    index = tl.arange(0, BLOCK_N * LINES)
    place = low + index // LINES
    known = (split < parts) & (place < length)
    page = tl.load(table_ptr + request * table_row + place // PAGE, mask=known, other=0)
    offset = ((page.to(tl.int64) * PAGE + place % PAGE) * KV_HEADS + kv_head) * HEAD_DIM + index % LINES * LINE
    _ask(k_ptr + offset, known)
    _ask(v_ptr + offset, known)
    _attend(
        q_ptr, k_ptr, v_ptr, sinks_ptr, o_ptr, lse_ptr, part_ptr, part_lse_ptr, counters_ptr, table_ptr, lens_ptr,
        starts_ptr, cu_ptr, q_token, q_head, table_row, splits, wanted, scale, softcap,
        HEADS, KV_HEADS, HEAD_DIM, EACH, PAGE, WINDOW, SOFTCAP, SINKS, ONE_PAGE, MIN_BLOCKS, MAX_BLOCKS, SPLIT, FUSED,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_G, BLOCK_S, PDL,
    )  # fmt: skip
