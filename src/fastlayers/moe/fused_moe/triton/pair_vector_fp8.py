"""The FP8 experts of a token or a few as matrix-vector products: two launches, which quantise what they read.

    in    a[pair] = act(codes of x[row of pair] @ w13[expert of pair]^T)     fp32     programs: rows of w13 × pairs
    out   y[t] = factor * sum over j of weight[t, j] * codes of a[t, j] @ w2^T        programs: outputs × tokens

Every program quantises its row as :mod:`fastlayers.quant.group_quant` does, and multiplies the codes by both scales,
the group's and that of the weight's block: all rows of a program lie in one row of blocks. What is left of a weight is
a conversion and a product. The more rows a program has the less of its time goes into quantising; the fewer, the more
programs there are to read weights at once.

A row of weights is in the first product a tile by itself, so that it, the token and the scales lie in registers alike.
A tile of the second product is ROWS rows, which are of as many pairs, or, where fewer pairs are left, of several
outputs each: nine pairs of eight outputs are eight tiles of eight pairs and one of eight outputs. All tiles of a
program that are AHEAD are asked for before it waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl

from fastlayers.integers import next_power_of_2
from fastlayers.moe.fused_moe.launch_config import LaunchConfig
from fastlayers.moe.fused_moe.triton.activation import activated
from fastlayers.moe.fused_moe.triton.pair_gemm import expert_of
from fastlayers.moe.fused_moe.weights import EPS, GROUP, MoEWeights
from fastlayers.quant.group_quant.triton import requantized
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, e4m3_to_fp16, release_dependents

_GROUP = tl.constexpr(GROUP)


@triton.jit
def _tile(row, start: tl.constexpr, END: tl.constexpr, EVICT: tl.constexpr, SIZE: tl.constexpr):
    """Return SIZE values of a row from the ``start``-th on, 0 beyond the END of the row."""
    if start + SIZE <= END:
        return tl.load(row + start + tl.arange(0, SIZE), eviction_policy=EVICT)
    else:
        k = start + tl.arange(0, SIZE)
        return tl.load(row + k, mask=k < END, other=0.0, eviction_policy=EVICT)


@triton.jit
def _folded(x, w, FOLD: tl.constexpr):
    """Return the products of fp32 ``x`` and e4m3 ``w``, the FOLD values of a thread that follow each other added up."""
    product = x * e4m3_to_fp16(w).to(tl.float32)
    parts: tl.constexpr = product.shape[:-1] + [product.shape[-1] // FOLD, FOLD]
    return tl.sum(tl.reshape(product, parts), axis=len(parts) - 1)


@triton.constexpr_function
def _size(block, columns, most, tail):
    """Return the columns of a tile: the last one of a row may be smaller."""
    return most if (block + 1) * most <= columns else tail


@triton.constexpr_function
def _levels(count):
    return count.bit_length() - 1


@triton.jit
def joined(tiles, COUNT: tl.constexpr):
    """Return COUNT (a power of two) tensors as one with a further dimension, the last; each thread keeps its values."""
    SHAPE: tl.constexpr = tiles[0].shape
    for level in tl.static_range(_levels(COUNT)):
        pairs = ()
        for i in tl.static_range(COUNT >> (level + 1)):
            pairs = pairs + (tl.join(tiles[i], tiles[i + (COUNT >> (level + 1))]),)  # type: ignore[assignment]
        tiles = pairs
    return tl.reshape(tiles[0], SHAPE + [COUNT])


@kernel
def vector_in_fp8_kernel(
    x_ptr, w_ptr, ws_ptr, bias_ptr, ids_ptr, a_ptr, num_routed, x_stride, alpha, limit, eps,
    I: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, SPAN: tl.constexpr,
    HAS_BIAS: tl.constexpr, OAI: tl.constexpr, UE8M0: tl.constexpr, AHEAD: tl.constexpr, THREADS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TAIL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N gate rows and as many up rows of a pair's expert by its token, and apply the activation."""
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    NARROW: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    first, pair = tl.program_id(0) * BLOCK_N, tl.program_id(1).to(tl.int64)
    await_inputs(PDL)
    release_dependents(PDL)
    expert = expert_of(ids_ptr, pair, num_routed, TOP_K, SHARED, SPAN)
    if expert < 0:
        return
    x_row = x_ptr + pair // (TOP_K + SHARED) * x_stride
    # Gate rows, then up rows, and each half its rows of scales.
    rows = w_ptr + (expert * 2 * I + first) * K
    gate_scales = ws_ptr + (expert * 2 * (I // _GROUP) + first // _GROUP) * (K // _GROUP)
    up_scales = gate_scales + (I // _GROUP) * (K // _GROUP)
    held = ()
    for i in tl.static_range(BLOCKS + AHEAD):
        if i < BLOCKS:
            scales = (
                _tile(gate_scales, i * (BLOCK_K // _GROUP), K // _GROUP, "", _size(i, K, BLOCK_K, TAIL) // _GROUP),
                _tile(up_scales, i * (BLOCK_K // _GROUP), K // _GROUP, "", _size(i, K, BLOCK_K, TAIL) // _GROUP),
            )
            tiles = ()
            for row in tl.static_range(2 * BLOCK_N):
                origin = rows + (row + I - BLOCK_N if row >= BLOCK_N else row) * K
                tiles = tiles + (  # type: ignore[assignment]
                    _tile(origin, i * BLOCK_K, K, "evict_first", _size(i, K, BLOCK_K, TAIL)),
                )
            x = _tile(x_row, i * BLOCK_K, K, "", _size(i, K, BLOCK_K, TAIL))
            held = held + ((x, scales, tiles),)  # type: ignore[assignment]
        if i >= AHEAD:
            x, scales, tiles = held[i - AHEAD]
            made = ()
            for row in tl.static_range(2 * BLOCK_N):
                values = requantized(x.to(tl.float32), scales[row // BLOCK_N], eps, 448.0, UE8M0, NARROW)
                part = _folded(values, tiles[row], _size(i - AHEAD, K, BLOCK_K, TAIL) // THREADS)
                if i > AHEAD:
                    part += sums[row]  # noqa: F821
                made = made + (part,)
            sums = made
    halves = tl.sum(joined(sums, 2 * BLOCK_N), axis=0)
    column, inner = activated(halves, bias_ptr, expert, first, I, alpha, limit, BLOCK_N, HAS_BIAS, OAI)
    tl.store(a_ptr + pair * I + column, inner)


def _chunks(pairs: int, rows: int) -> tuple[int, ...]:
    """Return the pairs of each chunk: ``rows`` as long as so many are left, then powers of two."""
    left = pairs % rows
    rest = [1 << bit for bit in reversed(range(left.bit_length())) if left >> bit & 1]
    return (*[rows] * (pairs // rows), *rest)


@triton.constexpr_function
def _pairs_before(chunk, chunks):
    return sum(chunks[:chunk])


@triton.constexpr_function
def _number(chunk, tile, block, chunks, each, blocks):
    """Return the number of a tile."""
    return sum(chunks[:chunk]) * each + tile * blocks + block


@triton.constexpr_function
def _chunk_of(pair, chunks):
    chunk = 0
    while sum(chunks[: chunk + 1]) <= pair:
        chunk += 1
    return chunk


@triton.jit
def _experts_of(ids, slot, any_here, num_routed, TOP_K: tl.constexpr):
    """Return the experts of a token's pairs, -1 for dropped ones; shared ones follow the routed."""
    expert = tl.load(ids + slot, mask=slot < TOP_K, other=-1).to(tl.int64)
    expert = tl.where((expert >= 0) & (expert < num_routed), expert, -1)
    # A token without any expert here takes the shared ones neither.
    return tl.where(slot < TOP_K, expert, tl.where(any_here, num_routed + slot - TOP_K, -1))


@triton.jit
def _second_tile(
    rows, here, TILE: tl.constexpr, CHUNKS: tl.constexpr, EACH: tl.constexpr,
    I: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return a tile of the second product's weights, by its number: a pair has EACH of them, a column's blocks last."""
    chunk: tl.constexpr = _chunk_of(TILE // EACH, CHUNKS)
    inside: tl.constexpr = TILE - _pairs_before(chunk, CHUNKS) * EACH
    pointers = rows[chunk] + (inside // BLOCKS * I + inside % BLOCKS * BLOCK_K)
    known = here[chunk][:, None]
    if I % BLOCK_K != 0:
        known = known & (inside % BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K) < I)[None, :]
    return tl.load(pointers, mask=known, other=0.0, eviction_policy="evict_first")


@kernel
def vector_out_fp8_kernel(
    a_ptr, w_ptr, ws_ptr, bias_ptr, ids_ptr, weights_ptr, y_ptr, num_routed, factor, shared_weight, eps,
    D: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, SPAN: tl.constexpr,
    CHUNKS: tl.constexpr, HAS_BIAS: tl.constexpr, UE8M0: tl.constexpr, AHEAD: tl.constexpr, FOLD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N outputs of a token, whose pairs are taken in CHUNKS of so many."""
    PAIRS: tl.constexpr = TOP_K + SHARED
    BLOCKS: tl.constexpr = (I + BLOCK_K - 1) // BLOCK_K
    GROUPS: tl.constexpr = BLOCK_K // _GROUP
    # Tiles of a pair, of BLOCK_N outputs and all columns.
    EACH: tl.constexpr = BLOCK_N * BLOCKS // ROWS
    token, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_N
    row, depth, group = tl.arange(0, ROWS), tl.arange(0, BLOCK_K), tl.arange(0, GROUPS)
    # Ids and weights of the experts were there before the kernel in front began.
    ids, slots = ids_ptr + token * TOP_K, tl.arange(0, SPAN)
    all_ids = tl.load(ids + slots, mask=slots < TOP_K, other=-1)
    any_here = tl.max(((all_ids >= 0) & (all_ids < num_routed)).to(tl.int32), axis=0) > 0
    rows, here, scales, weights, biases = (), (), (), (), ()
    for chunk in tl.static_range(len(CHUNKS)):
        # A row of this chunk's tiles is of one of so many pairs, and of one output in each of so many.
        slot = _pairs_before(chunk, CHUNKS) + row * CHUNKS[chunk] // ROWS
        expert = _experts_of(ids, slot, any_here, num_routed, TOP_K)
        known = expert >= 0
        output = first + row % (ROWS // CHUNKS[chunk]) * (BLOCK_N * CHUNKS[chunk] // ROWS)
        origin = tl.where(known, expert, 0) * D + output
        rows = rows + (w_ptr + origin[:, None] * I + depth[None, :],)  # type: ignore[assignment]
        here = here + (known,)  # type: ignore[assignment]
    held = ()
    for i in tl.static_range(min(AHEAD, EACH * PAIRS)):
        held = held + (_second_tile(rows, here, i, CHUNKS, EACH, I, BLOCKS, BLOCK_K),)  # type: ignore[assignment]
    for chunk in tl.static_range(len(CHUNKS)):
        slot = _pairs_before(chunk, CHUNKS) + row * CHUNKS[chunk] // ROWS
        expert = _experts_of(ids, slot, any_here, num_routed, TOP_K)[:, None]
        for block in tl.static_range(BLOCKS):
            index = block * GROUPS + group[None, :]
            place = (expert * (D // _GROUP) + first // _GROUP) * (I // _GROUP) + index
            scale = tl.load(ws_ptr + place, mask=(expert >= 0) & (index < I // _GROUP), other=0.0)
            scales = scales + (tl.reshape(scale, [ROWS * GROUPS]),)  # type: ignore[assignment]
        slot = _pairs_before(chunk, CHUNKS) + tl.arange(0, CHUNKS[chunk])
        expert = _experts_of(ids, slot, any_here, num_routed, TOP_K)
        weight = tl.load(weights_ptr + token * TOP_K + slot, mask=slot < TOP_K, other=shared_weight)
        weights = weights + (tl.where(expert >= 0, weight, 0.0),)  # type: ignore[assignment]
        if HAS_BIAS:
            bias = bias_ptr + expert[:, None] * D + first + tl.arange(0, BLOCK_N)[None, :]
            bias = tl.load(bias, mask=expert[:, None] >= 0, other=0.0).to(tl.float32)
            biases = biases + (bias,)  # type: ignore[assignment]
    await_inputs(PDL)
    release_dependents(PDL)
    total = tl.zeros([BLOCK_N], tl.float32)
    for chunk in tl.static_range(len(CHUNKS)):
        # The rows of dropped pairs were never written.
        known = here[chunk][:, None]
        inner = ()
        for block in tl.static_range(BLOCKS):
            k = block * BLOCK_K + depth[None, :]
            inside = known if I % BLOCK_K == 0 else known & (k < I)
            slot = _pairs_before(chunk, CHUNKS) + row * CHUNKS[chunk] // ROWS
            place = (token * PAIRS + slot)[:, None] * I + k
            a = tl.reshape(tl.load(a_ptr + place, mask=inside, other=0.0), [ROWS * BLOCK_K])
            values = requantized(a, scales[chunk * BLOCKS + block], eps, 448.0, UE8M0)
            inner = inner + (tl.reshape(values, [ROWS, BLOCK_K]),)  # type: ignore[assignment]
        sums = ()
        for tile in tl.static_range(BLOCK_N * CHUNKS[chunk] // ROWS):
            for block in tl.static_range(BLOCKS):
                if _number(chunk, tile, block, CHUNKS, EACH, BLOCKS) + AHEAD < EACH * PAIRS:
                    held = held + (  # type: ignore[assignment]
                        _second_tile(
                            rows, here, _number(chunk, tile, block, CHUNKS, EACH, BLOCKS) + AHEAD, CHUNKS, EACH, I,
                            BLOCKS, BLOCK_K,
                        ),
                    )  # fmt: skip
                part = _folded(inner[block], held[_number(chunk, tile, block, CHUNKS, EACH, BLOCKS)], FOLD)
                if block == 0:
                    acc = part
                else:
                    acc += part
            sums = sums + (tl.sum(acc, axis=1),)  # type: ignore[assignment]
        each = tl.reshape(joined(sums, BLOCK_N * CHUNKS[chunk] // ROWS), [CHUNKS[chunk], BLOCK_N])
        if HAS_BIAS:
            each += biases[chunk]
        total += tl.sum(each * weights[chunk][:, None], axis=0)
    output = first + tl.arange(0, BLOCK_N)
    tl.store(y_ptr + token * D + output, cast(total * factor, y_ptr.dtype.element_ty))


@lru_cache(maxsize=4096)
def _launches(
    tokens: int, top_k: int, shared: int, routed: int, hidden: int, inner: int, x_stride: int, plan: LaunchConfig,
    ue8m0: bool, oai: bool, alpha: float, limit: float, factor: float, bias1: bool, bias2: bool, device: torch.device,
) -> tuple[Callable[..., None], Callable[..., None]]:  # fmt: skip
    """Return what launches both products of one shape."""
    first, second, launch, pairs = plan.first, plan.second, dependent_launch(device), top_k + shared
    rows, threads = 512 * second.warps // second.k, 32 * first.warps
    # What is left of a row behind whole tiles: groups, and a value for each thread.
    tail = next_power_of_2(max(GROUP, threads, hidden % first.k))
    both = {"I": inner, "TOP_K": top_k, "SHARED": shared, "SPAN": next_power_of_2(top_k), "UE8M0": ue8m0} | launch
    into = vector_in_fp8_kernel.at(
        (inner // first.n, tokens * pairs), routed, x_stride, alpha, limit, EPS,
        K=hidden, HAS_BIAS=bias1, OAI=oai, AHEAD=first.stages, THREADS=threads, BLOCK_N=first.n, BLOCK_K=first.k,
        TAIL=tail, num_warps=first.warps, **both,
    )  # fmt: skip
    out = vector_out_fp8_kernel.at(
        (hidden // second.n, tokens), routed, factor, 1.0 / factor, EPS,
        D=hidden, CHUNKS=_chunks(pairs, rows), HAS_BIAS=bias2, AHEAD=second.stages, FOLD=16, ROWS=rows,
        BLOCK_N=second.n, BLOCK_K=second.k, num_warps=second.warps, **both,
    )  # fmt: skip
    return into, out


def fp8_vector_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: MoEWeights, y: torch.Tensor, shared: int,
    plan: LaunchConfig, ue8m0: bool, oai: bool, alpha: float, limit: float, factor: float,
) -> None:  # fmt: skip
    """Write ``y`` ``[T, D]`` for ``x`` ``[T, D]``; ``ids`` and ``weights`` are the routed experts'.

    The last ``shared`` of the experts are shared. D and I are multiples of 128 (see ``launch_config.takes_vectors``).
    """
    (experts, hidden, inner), (tokens, top_k) = packed.w2.shape, ids.shape
    bias1, bias2 = packed.w13_bias, packed.w2_bias
    into, out = _launches(
        tokens, top_k, shared, experts - shared, hidden, inner, x.stride()[0], plan, ue8m0, oai, alpha, limit, factor,
        bias1 is not None, bias2 is not None, x.device,
    )  # fmt: skip
    # fp32 until it is quantised, so that the codes are those of the exact sums.
    a = x.new_empty(tokens * (top_k + shared), inner, dtype=torch.float32)
    into(x, packed.w13, packed.w13_scale, x if bias1 is None else bias1, ids, a)
    out(a, packed.w2, packed.w2_scale, x if bias2 is None else bias2, ids, weights, y)
