"""The sampler in Triton: every pass over the logits takes one program a block of them, so that one row fills the GPU.

    best        [B, blocks]    largest logit of the block, its first id, smallest finite logit
    histogram   [B, blocks]    how many logits of the block lie in each of BINS slices of [m - span, m]
    plan        [B]            the slices that hold the threshold: bracket [first, last], at most CANDIDATES tokens
    gather      [B, blocks]    the bracket's logits, packed in order; the weight above it and the whole weight
    refine      [B]            the exact threshold of top-k and top-p, by bisection over the packed logits' bits
    weigh       [B, blocks]    the kept weight of the block
    draw        [B]            the block in which u falls, the token in it, offset + 1

Mode "greedy" is best and draw, "sampled" leaves out what finds thresholds, and so do rows without filters in mode
"filtered": their programs return at once. span = min(m - smallest, 64 temperatures): what lies below weighs less than
e^-64, nothing in an fp64 sum that holds 1, and is neither counted nor kept by a search.

Histograms are exact for top-k. For top-p they give an estimate of the weights, good enough to choose the bracket; gather
and refine then compute with fp64 weights and know if the bracket does not hold the threshold. In that case, or if no
bracket fits (a hundred thousand equal logits, top-k of thousands with top-p), the row's program in refine searches the
whole row alone: slow, and as exact. Blocks have one size, so a row's sums do not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.operators import operator
from fastlayers.sampler.layer import MODES, RowParams, SamplerConfig
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import await_inputs, dependent_launch, release_dependents

BLOCK = 2048
BINS = 256
CANDIDATES = 4096
# Integers of a row's plan: state, first slice, last slice, tokens in the bracket, tokens above it, is top-k in force.
PLAN = 8
NO_SEARCH, IN_BRACKET, IN_ROW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LOWEST_KEY = tl.constexpr(-2147483648)
NO_ID = tl.constexpr(2147483647)


@triton.jit
def _load_logits(x_ptr, column, vocab_size):
    x = tl.load(x_ptr + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _key(x):
    """Return an int32 with the order of fp32 ``x``; both zeros are the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _logit(key):
    """Return the fp32 number of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, largest, temperature):
    weight = tl.exp((x.to(tl.float64) - largest.to(tl.float64)) / temperature)
    return tl.where(x == largest, 1.0, weight)  # also where inf - inf is NaN


@triton.jit
def _best_kernel(
    x_ptr, best_ptr, best_id_ptr, lowest_ptr, x_stride, vocab_size,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    await_inputs(PDL)
    release_dependents(PDL)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = _load_logits(x_ptr + row * x_stride, column, vocab_size)
    largest = tl.max(x, axis=0)
    tl.store(best_ptr + row * BLOCKS + block, largest)
    tl.store(best_id_ptr + row * BLOCKS + block, tl.min(tl.where(x == largest, column, NO_ID), axis=0))
    lowest = tl.min(tl.where(x > float("-inf"), x, float("inf")), axis=0)
    tl.store(lowest_ptr + row * BLOCKS + block, lowest)


@triton.jit
def _largest(best_ptr, row, vocab_size, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    return tl.max(tl.load(best_ptr + row * BLOCKS + block, mask=block * BLOCK < vocab_size, other=float("-inf")), axis=0)


@triton.jit
def _span(best_ptr, lowest_ptr, row, temperature, top_k, top_p, vocab_size, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a row's largest logit and how far below it a threshold can lie; 0 where there is none to be found."""
    block = tl.arange(0, BLOCKS)
    lowest = tl.min(tl.load(lowest_ptr + row * BLOCKS + block, mask=block * BLOCK < vocab_size, other=float("inf")), axis=0)
    largest = _largest(best_ptr, row, vocab_size, BLOCKS, BLOCK)
    has_filter = ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0)
    finite = (largest > float("-inf")) & (largest < float("inf"))
    # Below the second bound neither logits of one slice nor the reciprocal of its width could be told from 0 and inf.
    span = tl.maximum(tl.minimum(largest - lowest, 64.0 * temperature), 1e-30)
    return largest, tl.where(has_filter & finite & (temperature > 0.0) & (largest > lowest), span, 0.0)


@triton.jit
def _slices(x, largest, span, BINS: tl.constexpr):
    """Return the slice of each logit, from the top, and whether it is in reach of a threshold."""
    below = largest - x
    return tl.minimum(below * (BINS / span), BINS - 1.0).to(tl.int32), below <= span


@triton.jit
def _histogram_kernel(
    x_ptr, temperature_ptr, top_k_ptr, top_p_ptr, best_ptr, lowest_ptr, histogram_ptr, x_stride, vocab_size,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    await_inputs(PDL)
    release_dependents(PDL)
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    x = _load_logits(x_ptr + row * x_stride, block * BLOCK + tl.arange(0, BLOCK), vocab_size)
    largest, span = _span(best_ptr, lowest_ptr, row, temperature, top_k, top_p, vocab_size, BLOCKS, BLOCK)
    if span > 0.0:
        slices, live = _slices(x, largest, span, BINS)
        counts = tl.histogram(tl.where(live, slices, 0), BINS, mask=live)
        tl.store(histogram_ptr + (row * BLOCKS + block) * BINS + tl.arange(0, BINS), counts.to(tl.int16))


@triton.jit
def _bracket(counts, top_k, top_p, has_top_p, slice_weight, BINS: tl.constexpr, CANDIDATES: tl.constexpr):
    """Return the state of a search, its first and last slice, and whether top-k is in force.

    ``slice_weight`` is the logarithm of what a token weighs less than one of the slice above.
    """
    index = tl.arange(0, BINS)
    below = tl.cumsum(counts, axis=0)
    live = tl.max(below, axis=0)
    # Top-k of more than what is in reach keeps all that has weight.
    has_top_k = (top_k > 0) & (top_k <= live)
    head = tl.cumsum(counts.to(tl.float64) * tl.exp(-slice_weight * index.to(tl.float64)), axis=0)
    whole = tl.max(head, axis=0)
    # A slice's tokens weigh between e^-slice_weight and 1 of the estimate, so the tail's share is within that factor.
    safe_tail = (1.0 - top_p) * tl.exp(-slice_weight) * whole
    safe = tl.minimum(tl.sum((whole - head > safe_tail).to(tl.int32), axis=0), BINS - 1)
    by_weight = tl.minimum(tl.sum((head < top_p * whole).to(tl.int32), axis=0), BINS - 1)
    by_count = tl.sum((below < top_k).to(tl.int32), axis=0)
    last = tl.where(has_top_k, by_count, safe)
    first = tl.full((), 0, tl.int32)
    fits = tl.sum(tl.where(index == last, below, 0), axis=0) <= CANDIDATES
    if (not fits) & has_top_k:
        first = last
        fits = (tl.sum(tl.where(index == last, counts, 0), axis=0) <= CANDIDATES) & (not has_top_p)
    elif not fits:
        # As many slices on both sides of the likely one as fit.
        radius = (1 << tl.arange(0, 8)) - 1
        near = tl.abs(index - by_weight)[:, None] <= radius[None, :]
        fitting = tl.sum(tl.where(near, counts[:, None], 0), axis=0) <= CANDIDATES
        widest = tl.max(tl.where(fitting, radius, -1), axis=0)
        first, last = tl.maximum(by_weight - widest, 0), tl.minimum(by_weight + widest, BINS - 1)
        fits = widest >= 0
    return tl.where(fits, IN_BRACKET, IN_ROW), first, last, has_top_k


@triton.jit
def _plan_kernel(
    temperature_ptr, top_k_ptr, top_p_ptr, best_ptr, lowest_ptr, histogram_ptr, plan_ptr, start_ptr, vocab_size,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, CANDIDATES: tl.constexpr, PLAN: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    await_inputs(PDL)
    release_dependents(PDL)
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    _, span = _span(best_ptr, lowest_ptr, row, temperature, top_k, top_p, vocab_size, BLOCKS, BLOCK)
    plan_ptr += row * PLAN
    state = NO_SEARCH + tl.full((), 0, tl.int32)
    if span > 0.0:
        index = tl.arange(0, BINS)
        histogram_ptr += row * BLOCKS * BINS
        counts = tl.zeros((BINS,), tl.int32)
        for start in tl.static_range(0, BLOCKS, CHUNK):
            block = start + tl.arange(0, CHUNK)
            inside = (block * BLOCK < vocab_size)[:, None]
            part = tl.load(histogram_ptr + block[:, None] * BINS + index[None, :], mask=inside, other=0)
            counts += tl.sum(part.to(tl.int32), axis=0)
        slice_weight = span.to(tl.float64) / temperature.to(tl.float64) / BINS
        wanted_k = tl.where(top_k < vocab_size, top_k, 0)
        state, first, last, has_top_k = _bracket(
            counts, wanted_k, top_p.to(tl.float64), top_p < 1.0, slice_weight, BINS, CANDIDATES
        )
        # A top-k that keeps everything in reach, and nothing else to do.
        state = tl.where(has_top_k | (top_p < 1.0), state, NO_SEARCH)
        chosen = (index >= first) & (index <= last)
        before = tl.full((), 0, tl.int32)
        for start in tl.static_range(0, BLOCKS, CHUNK):
            block = start + tl.arange(0, CHUNK)
            inside = (block * BLOCK < vocab_size)[:, None] & chosen[None, :]
            part = tl.load(histogram_ptr + block[:, None] * BINS + index[None, :], mask=inside, other=0)
            found = tl.sum(part.to(tl.int32), axis=1)
            tl.store(start_ptr + row * BLOCKS + block, before + tl.cumsum(found, axis=0) - found)
            before += tl.sum(found, axis=0)
        tl.store(plan_ptr + 1, first)
        tl.store(plan_ptr + 2, last)
        tl.store(plan_ptr + 3, before)
        tl.store(plan_ptr + 4, tl.sum(tl.where(index < first, counts, 0), axis=0))
        tl.store(plan_ptr + 5, has_top_k.to(tl.int32))
    tl.store(plan_ptr, state)


@triton.jit
def _gather_kernel(
    x_ptr, temperature_ptr, top_k_ptr, top_p_ptr, best_ptr, lowest_ptr, plan_ptr, start_ptr, list_ptr, above_ptr,
    whole_ptr, x_stride, vocab_size,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, CANDIDATES: tl.constexpr, PLAN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    await_inputs(PDL)
    release_dependents(PDL)
    plan_ptr += row * PLAN
    if tl.load(plan_ptr) == IN_BRACKET:
        temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        first, last, has_top_k = tl.load(plan_ptr + 1), tl.load(plan_ptr + 2), tl.load(plan_ptr + 5)
        start = tl.load(start_ptr + row * BLOCKS + block)
        x = _load_logits(x_ptr + row * x_stride, block * BLOCK + tl.arange(0, BLOCK), vocab_size)
        largest, span = _span(best_ptr, lowest_ptr, row, temperature, top_k, top_p, vocab_size, BLOCKS, BLOCK)
        slices, live = _slices(x, largest, span, BINS)
        chosen = live & (slices >= first) & (slices <= last)
        place = start + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(list_ptr + row * CANDIDATES + place, x, mask=chosen)
        if has_top_k == 0:
            weight = tl.where(live, _weight(x, largest, temperature.to(tl.float64)), 0.0)
            above = tl.sum(tl.where(slices < first, weight, 0.0), axis=0)
            tl.store(above_ptr + row * BLOCKS + block, above)
            tl.store(whole_ptr + row * BLOCKS + block, tl.sum(weight, axis=0))


@triton.jit
def _bisect(key, value, low, high, wanted):
    """Return the largest key t in [low, high] for which the values with key ≥ t sum to ``wanted``; low's must."""
    low, high = low.to(tl.int64), high.to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum(tl.where(key >= middle.to(tl.int32), value, 0), axis=0) >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low.to(tl.int32)


@triton.jit
def _search_list(
    list_ptr, count, count_above, has_top_k, top_k, top_p, above, whole, largest, temperature, N: tl.constexpr
):
    """Return the threshold's key among ``count`` packed logits, and whether it is there."""
    index = tl.arange(0, N)
    inside = index < count
    x = tl.load(list_ptr + index, mask=inside, other=float("-inf"))
    key = _key(x)
    low, high = tl.min(tl.where(inside, key, NO_ID), axis=0), tl.max(tl.where(inside, key, LOWEST_KEY), axis=0)
    if has_top_k:
        low = _bisect(key, inside.to(tl.int32), low, high, top_k - count_above)
    found = low == low
    if top_p < 1.0:
        weight = tl.where(inside & (key >= low), _weight(x, largest, temperature), 0.0)
        here = tl.sum(weight, axis=0)
        # Under top-k the list holds all that is kept.
        wanted = tl.where(has_top_k, top_p * here, top_p * whole - above)
        found = (has_top_k | (wanted > 0.0)) & (here >= wanted)
        if found:
            low = _bisect(key, weight, low, high, wanted)
    return low, found


@triton.jit
def _sum_row(x_ptr, vocab_size, largest, temperature, threshold, BLOCK: tl.constexpr):
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        x = _load_logits(x_ptr, start + tl.arange(0, BLOCK), vocab_size)
        total += tl.sum(tl.where(_key(x) >= threshold, _weight(x, largest, temperature), 0.0), axis=0)
    return total


@triton.jit
def _search_row(
    x_ptr, vocab_size, largest, temperature, low, wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the largest key t ≥ ``low`` for which the row's tokens with key ≥ t weigh (or number) ``wanted``."""
    way = tl.arange(0, 8)
    low, high = low.to(tl.int64), _key(largest).to(tl.int64) + 1
    while high - low > 1:
        step = (high - low + 7) // 8
        pivot = low + way * step
        sums = tl.zeros((8,), tl.float64)
        for start in range(0, vocab_size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = _load_logits(x_ptr, column, vocab_size)
            if COUNT:
                weight = (column < vocab_size).to(tl.float64)
            else:
                weight = _weight(x, largest, temperature)
            sums += tl.sum(tl.where(_key(x).to(tl.int64)[:, None] >= pivot[None, :], weight[:, None], 0.0), axis=0)
        # The first way is known to satisfy it, whatever the order of additions says.
        good = ((sums >= wanted) & (pivot < high)) | (way == 0)
        index = tl.sum(good.to(tl.int64), axis=0) - 1
        high = tl.minimum(high, low + (index + 1) * step)
        low = low + index * step
    return low.to(tl.int32)


@triton.jit
def _refine_kernel(
    x_ptr, temperature_ptr, top_k_ptr, top_p_ptr, best_ptr, plan_ptr, list_ptr, above_ptr, whole_ptr, limit_ptr,
    x_stride, vocab_size,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr, PLAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the smallest logit that a row keeps."""
    row = tl.program_id(0).to(tl.int64)
    await_inputs(PDL)
    release_dependents(PDL)
    plan_ptr += row * PLAN
    state = tl.load(plan_ptr)
    limit = tl.full((), float("-inf"), tl.float32)
    if state != NO_SEARCH:
        temperature, top_p = tl.load(temperature_ptr + row).to(tl.float64), tl.load(top_p_ptr + row).to(tl.float64)
        top_k, has_top_k = tl.load(top_k_ptr + row), tl.load(plan_ptr + 5) != 0
        largest = _largest(best_ptr, row, vocab_size, BLOCKS, BLOCK)
        key = LOWEST_KEY + tl.full((), 0, tl.int32)
        found = state < 0
        if state == IN_BRACKET:
            block = tl.arange(0, BLOCKS)
            counted = (block * BLOCK < vocab_size) & (not has_top_k)
            above = tl.sum(tl.load(above_ptr + row * BLOCKS + block, mask=counted, other=0.0), axis=0)
            whole = tl.sum(tl.load(whole_ptr + row * BLOCKS + block, mask=counted, other=0.0), axis=0)
            count, count_above = tl.load(plan_ptr + 3), tl.load(plan_ptr + 4)
            list_ptr += row * CANDIDATES
            if count <= CANDIDATES // 8:
                key, found = _search_list(
                    list_ptr, count, count_above, has_top_k, top_k, top_p, above, whole, largest, temperature,
                    CANDIDATES // 8,
                )  # fmt: skip
            else:
                key, found = _search_list(
                    list_ptr, count, count_above, has_top_k, top_k, top_p, above, whole, largest, temperature, CANDIDATES
                )
        if not found:
            x_ptr += row * x_stride
            key = LOWEST_KEY + tl.full((), 0, tl.int32)
            if has_top_k:
                key = _search_row(x_ptr, vocab_size, largest, temperature, key, top_k, True, BLOCK)
            if top_p < 1.0:
                wanted = top_p * _sum_row(x_ptr, vocab_size, largest, temperature, key, BLOCK)
                key = _search_row(x_ptr, vocab_size, largest, temperature, key, wanted, False, BLOCK)
        limit = _logit(key)
    tl.store(limit_ptr + row, limit)


@triton.jit
def _kept(x, largest, temperature, limit, min_p):
    weight = _weight(x, largest, temperature)
    return tl.where((x >= limit) & (weight >= min_p), weight, 0.0)


@triton.jit
def _weigh_kernel(
    x_ptr, temperature_ptr, min_p_ptr, best_ptr, limit_ptr, kept_ptr, x_stride, vocab_size,
    FILTERED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    await_inputs(PDL)
    release_dependents(PDL)
    temperature = tl.load(temperature_ptr + row).to(tl.float64)
    if temperature > 0.0:
        x = _load_logits(x_ptr + row * x_stride, block * BLOCK + tl.arange(0, BLOCK), vocab_size)
        min_p = tl.load(min_p_ptr + row).to(tl.float64)
        limit = tl.load(limit_ptr + row) if FILTERED else float("-inf")
        largest = _largest(best_ptr, row, vocab_size, BLOCKS, BLOCK)
        kept = tl.sum(_kept(x, largest, temperature, limit, min_p), axis=0)
        tl.store(kept_ptr + row * BLOCKS + block, kept)


@triton.jit
def _uniform(seed, offset):
    """Return 53 bits of Philox4x32-10 as an fp64 number in [0, 1)."""
    MASK: tl.constexpr = 0xFFFFFFFF
    k0 = seed.to(tl.uint64) & MASK
    k1 = (seed.to(tl.uint64) >> 32) & MASK
    c0 = offset.to(tl.uint64) & MASK
    c1 = (offset.to(tl.uint64) >> 32) & MASK
    c2 = c0 & 0
    c3 = c0 & 0
    for _ in tl.static_range(10):
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0 = (p1 >> 32) ^ c1 ^ k0
        c2 = (p0 >> 32) ^ c3 ^ k1
        c1 = p1 & MASK
        c3 = p0 & MASK
        k0 = (k0 + 0x9E3779B9) & MASK
        k1 = (k1 + 0xBB67AE85) & MASK
    bits = (c0 >> 5) * 67108864 + (c1 >> 6)
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _draw_kernel(
    x_ptr, temperature_ptr, min_p_ptr, seed_ptr, offset_ptr, best_ptr, best_id_ptr, limit_ptr, kept_ptr, id_ptr,
    x_stride, vocab_size,
    MODE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the id: the lowest that has the largest logit, or the first whose running kept weight exceeds u's share."""
    row = tl.program_id(0).to(tl.int64)
    await_inputs(PDL)
    release_dependents(PDL)
    offset = tl.load(offset_ptr + row)
    block = tl.arange(0, BLOCKS)
    inside = block * BLOCK < vocab_size
    best = tl.load(best_ptr + row * BLOCKS + block, mask=inside, other=float("-inf"))
    best_id = tl.load(best_id_ptr + row * BLOCKS + block, mask=inside, other=NO_ID)
    largest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == largest, best_id, NO_ID), axis=0)
    if MODE > 0:
        temperature = tl.load(temperature_ptr + row).to(tl.float64)
        if (temperature > 0.0) & (largest > float("-inf")):
            kept = tl.load(kept_ptr + row * BLOCKS + block, mask=inside, other=0.0)
            limit = tl.load(limit_ptr + row) if MODE > 1 else float("-inf")
            min_p = tl.load(min_p_ptr + row).to(tl.float64)
            target = _uniform(tl.load(seed_ptr + row), offset) * tl.sum(kept, axis=0)
            running = tl.cumsum(kept, axis=0)
            # Where rounding leaves no running sum above the target: the last block, and in it the last token, that
            # adds to it.
            chosen = tl.minimum(
                tl.min(tl.where(running > target, block, NO_ID), axis=0),
                tl.max(tl.where(kept > 0.0, block, 0), axis=0),
            )
            before = tl.max(tl.where(block < chosen, running, 0.0), axis=0)
            column = chosen * BLOCK + tl.arange(0, BLOCK)
            x = _load_logits(x_ptr + row * x_stride, column, vocab_size)
            weight = _kept(x, largest, temperature, limit, min_p)
            over = before + tl.cumsum(weight, axis=0) > target
            last = tl.max(tl.where(weight > 0.0, column, 0), axis=0)
            token = tl.minimum(tl.min(tl.where(over, column, NO_ID), axis=0), last)
    tl.store(id_ptr + row, token.to(tl.int64))
    tl.store(offset_ptr + row, offset + 1)


def _fake(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p:
    torch.Tensor, seed: torch.Tensor, offset: torch.Tensor, mode: int,
) -> torch.Tensor:  # fmt: skip
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


@operator(
    "sampler(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, "
    "Tensor(a!) offset, int mode) -> Tensor",
    _fake,
)
def _sampler(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p:
    torch.Tensor, seed: torch.Tensor, offset: torch.Tensor, mode: int,
) -> torch.Tensor:  # fmt: skip
    batch, vocab_size = logits.shape
    device = logits.device
    ids = torch.empty(batch, dtype=torch.int64, device=device)
    if not batch:
        return ids
    blocks = triton.cdiv(vocab_size, BLOCK)
    sizes = {"BLOCKS": triton.next_power_of_2(blocks), "BLOCK": BLOCK} | dependent_launch(logits)
    shape, grid = (batch, sizes["BLOCKS"]), (blocks, batch)
    x, strides = logits, (logits.stride(0), vocab_size)
    best = torch.empty(shape, dtype=torch.float32, device=device)
    best_id = torch.empty(shape, dtype=torch.int32, device=device)
    lowest = torch.empty(shape, dtype=torch.float32, device=device)
    limit = torch.empty(batch, dtype=torch.float32, device=device)
    kept = torch.empty(shape if mode else 0, dtype=torch.float64, device=device)
    _best_kernel[grid](x, best, best_id, lowest, *strides, num_warps=4, **sizes)
    if mode == 2:
        _find_limits(x, (temperature, top_k, top_p), best, lowest, limit, sizes)
    if mode:
        _weigh_kernel[grid](
            x, temperature, min_p, best, limit, kept, *strides, FILTERED=mode == 2, num_warps=4, **sizes
        )
    _draw_kernel[(batch,)](
        x, temperature, min_p, seed, offset, best, best_id, limit, kept, ids, *strides, MODE=mode, num_warps=8, **sizes
    )
    return ids


def _find_limits(
    x: torch.Tensor, filters: tuple[torch.Tensor, ...], best: torch.Tensor, lowest: torch.Tensor, limit: torch.Tensor,
    sizes: dict[str, int],
) -> None:  # fmt: skip
    """Write the smallest logit that each row keeps into ``limit``."""
    batch, vocab_size = x.shape
    device, strides, grid = x.device, (x.stride(0), vocab_size), (triton.cdiv(vocab_size, BLOCK), batch)
    histogram = torch.empty(*best.shape, BINS, dtype=torch.int16, device=device)
    plan = torch.empty(batch, PLAN, dtype=torch.int32, device=device)
    start = torch.empty(best.shape, dtype=torch.int32, device=device)
    packed = torch.empty(batch, CANDIDATES, dtype=torch.float32, device=device)
    above, whole = torch.empty(2, *best.shape, dtype=torch.float64, device=device)
    _histogram_kernel[grid](x, *filters, best, lowest, histogram, *strides, BINS=BINS, num_warps=4, **sizes)
    _plan_kernel[(batch,)](
        *filters, best, lowest, histogram, plan, start, vocab_size, BINS=BINS, CANDIDATES=CANDIDATES, PLAN=PLAN,
        CHUNK=min(64, sizes["BLOCKS"]), num_warps=16, **sizes,
    )  # fmt: skip
    _gather_kernel[grid](
        x, *filters, best, lowest, plan, start, packed, above, whole, *strides, BINS=BINS, CANDIDATES=CANDIDATES,
        PLAN=PLAN, num_warps=4, **sizes,
    )  # fmt: skip
    _refine_kernel[(batch,)](
        x, *filters, best, plan, packed, above, whole, limit, *strides, CANDIDATES=CANDIDATES, PLAN=PLAN, num_warps=16,
        **sizes,
    )  # fmt: skip


class TritonSampler:
    """Two launches in mode "greedy", three in "sampled", seven in "filtered"; rows that need no search make none."""

    def __init__(self, cfg: SamplerConfig) -> None:
        self.cfg = cfg

    def __call__(self, logits: torch.Tensor, rows: RowParams, mode: str) -> torch.Tensor:
        """Return ids ``[B]`` and advance the offsets in place."""
        ids: torch.Tensor = _sampler(logits, *rows, MODES.index(mode))
        return ids


_ARGUMENTS = {
    "x_ptr": "*bf16", "temperature_ptr": "*fp32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32",
    "seed_ptr": "*i64", "offset_ptr": "*i64", "best_ptr": "*fp32", "best_id_ptr": "*i32", "lowest_ptr": "*fp32",
    "histogram_ptr": "*i16", "plan_ptr": "*i32", "start_ptr": "*i32", "list_ptr": "*fp32", "above_ptr": "*fp64",
    "whole_ptr": "*fp64", "limit_ptr": "*fp32", "kept_ptr": "*fp64", "id_ptr": "*i64", "x_stride": "i64",
    "vocab_size": "i32",
}  # fmt: skip
_SIZES = {"BLOCKS": 128, "BLOCK": BLOCK, "BINS": BINS, "CANDIDATES": CANDIDATES, "PLAN": PLAN, "CHUNK": 64, "PDL": True}


def _build(name: str, kernel: triton.JITFunction, num_warps: int, **constants: int) -> KernelBuild:
    known = _SIZES | constants
    arguments = {name: kind for name, kind in _ARGUMENTS.items() if name in kernel.arg_names}
    constexprs = {name: known[name] for name in kernel.arg_names if name in known}
    return KernelBuild(f"sampler_{name}", kernel, arguments, constexprs, num_warps)


COMPILE = [
    _build("best", _best_kernel, 4),
    _build("histogram", _histogram_kernel, 4),
    _build("plan", _plan_kernel, 16),
    _build("gather", _gather_kernel, 4),
    _build("refine", _refine_kernel, 16),
    _build("weigh_sampled", _weigh_kernel, 4, FILTERED=False),
    _build("weigh_filtered", _weigh_kernel, 4, FILTERED=True),
    *(_build(f"draw_{mode}", _draw_kernel, 8, MODE=MODES.index(mode)) for mode in MODES),
]
