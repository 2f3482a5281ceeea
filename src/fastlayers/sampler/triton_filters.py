"""The thresholds of top-k and top-p: a histogram, a bracket, and a search among the few logits in it.

See :mod:`fastlayers.sampler.triton` for the data flow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv
from fastlayers.runtime.launch import kernel
from fastlayers.sampler.triton_common import (
    BINS,
    BLOCK,
    CANDIDATES,
    NO_ID,
    PLAN,
    load_logits,
    of_blocks,
    weight_of,
)
from fastlayers.triton_lang import await_inputs, release_dependents

NO_SEARCH, IN_BRACKET, IN_ROW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LOWEST_KEY = tl.constexpr(-2147483648)


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
def _span(best_ptr, lowest_ptr, row, temperature, top_k, top_p, vocab_size, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a row's largest logit and how far below it a threshold can lie; 0 where there is none to be found."""
    largest = tl.max(of_blocks(best_ptr, row, vocab_size, float("-inf"), BLOCKS, BLOCK), axis=0)
    lowest = tl.min(of_blocks(lowest_ptr, row, vocab_size, float("inf"), BLOCKS, BLOCK), axis=0)
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


@kernel
def _histogram_kernel(
    x_ptr, temperature_ptr, top_k_ptr, top_p_ptr, best_ptr, lowest_ptr, histogram_ptr, x_stride, vocab_size,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    await_inputs(PDL)
    release_dependents(PDL)
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    # Before it is known whether there is a threshold to be found, so that the loads do not wait for that.
    wanted = (temperature > 0.0) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0))
    x = load_logits(x_ptr + row * x_stride, block * BLOCK + tl.arange(0, BLOCK), tl.where(wanted, vocab_size, 0))
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


@kernel
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


@kernel
def _gather_kernel(
    x_ptr, temperature_ptr, top_k_ptr, top_p_ptr, best_ptr, lowest_ptr, plan_ptr, start_ptr, list_ptr, above_ptr,
    whole_ptr, x_stride, vocab_size,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, CANDIDATES: tl.constexpr, PLAN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    await_inputs(PDL)
    release_dependents(PDL)
    plan_ptr += row * PLAN
    if tl.load(plan_ptr) == IN_BRACKET:
        temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        first, last, has_top_k = tl.load(plan_ptr + 1), tl.load(plan_ptr + 2), tl.load(plan_ptr + 5)
        start = tl.load(start_ptr + row * BLOCKS + block)
        largest, span = _span(best_ptr, lowest_ptr, row, temperature, top_k, top_p, vocab_size, BLOCKS, BLOCK)
        # Under top-k only blocks whose largest logit is in the bracket or above are read.
        nearest, _ = _slices(tl.load(best_ptr + row * BLOCKS + block), largest, span, BINS)
        wanted = (has_top_k == 0) | (nearest <= last)
        x = load_logits(x_ptr + row * x_stride, block * BLOCK + tl.arange(0, BLOCK), tl.where(wanted, vocab_size, 0))
        slices, live = _slices(x, largest, span, BINS)
        chosen = live & (slices >= first) & (slices <= last)
        place = start + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(list_ptr + row * CANDIDATES + place, x, mask=chosen)
        if has_top_k == 0:
            weight = tl.where(live, weight_of(x, largest, temperature.to(tl.float64)), 0.0)
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
        weight = tl.where(inside & (key >= low), weight_of(x, largest, temperature), 0.0)
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
        x = load_logits(x_ptr, start + tl.arange(0, BLOCK), vocab_size)
        total += tl.sum(tl.where(_key(x) >= threshold, weight_of(x, largest, temperature), 0.0), axis=0)
    return total


@triton.jit
def _search_row(x_ptr, vocab_size, largest, temperature, low, wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest key t ≥ ``low`` for which the row's tokens with key ≥ t weigh (or number) ``wanted``."""
    way = tl.arange(0, 8)
    low, high = low.to(tl.int64), _key(largest).to(tl.int64) + 1
    while high - low > 1:
        step = (high - low + 7) // 8
        pivot = low + way * step
        sums = tl.zeros((8,), tl.float64)
        for start in range(0, vocab_size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = load_logits(x_ptr, column, vocab_size)
            if COUNT:
                weight = (column < vocab_size).to(tl.float64)
            else:
                weight = weight_of(x, largest, temperature)
            sums += tl.sum(tl.where(_key(x).to(tl.int64)[:, None] >= pivot[None, :], weight[:, None], 0.0), axis=0)
        # The first way is known to satisfy it, whatever the order of additions says.
        good = ((sums >= wanted) & (pivot < high)) | (way == 0)
        index = tl.sum(good.to(tl.int64), axis=0) - 1
        high = tl.minimum(high, low + (index + 1) * step)
        low = low + index * step
    return low.to(tl.int32)


@kernel
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
        largest = tl.max(of_blocks(best_ptr, row, vocab_size, float("-inf"), BLOCKS, BLOCK), axis=0)
        key = LOWEST_KEY + tl.full((), 0, tl.int32)
        found = state < 0
        if state == IN_BRACKET:
            # Under top-k neither was written, nor is it read.
            above = tl.sum(of_blocks(above_ptr, row, vocab_size, 0.0, BLOCKS, BLOCK), axis=0)
            whole = tl.sum(of_blocks(whole_ptr, row, vocab_size, 0.0, BLOCKS, BLOCK), axis=0)
            count, count_above = tl.load(plan_ptr + 3), tl.load(plan_ptr + 4)
            list_ptr += row * CANDIDATES
            if count <= CANDIDATES // 8:
                key, found = _search_list(
                    list_ptr, count, count_above, has_top_k, top_k, top_p, above, whole, largest, temperature,
                    CANDIDATES // 8,
                )  # fmt: skip
            else:
                key, found = _search_list(
                    list_ptr, count, count_above, has_top_k, top_k, top_p, above, whole, largest, temperature,
                    CANDIDATES,
                )  # fmt: skip
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


def find_limits(
    x: torch.Tensor, filters: tuple[torch.Tensor, ...], best: torch.Tensor, lowest: torch.Tensor, limit: torch.Tensor,
    sizes: dict[str, int],
) -> None:  # fmt: skip
    """Write the smallest logit that each row keeps into ``limit``."""
    batch, vocab_size = x.shape
    device, strides, grid = x.device, (x.stride(0), vocab_size), (batch, cdiv(vocab_size, BLOCK))
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
