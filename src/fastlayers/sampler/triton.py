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

Histograms are exact for top-k. For top-p they give an estimate of the weights, good enough to choose the bracket;
gather and refine then compute with fp64 weights and know if the bracket does not hold the threshold. In that case, or
if no bracket fits (thousands of equal logits at the threshold, top-k of thousands with top-p), the row's program in
refine searches the whole row alone: slow, and as exact. Blocks have one size, so a row's sums do not depend on the
batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.operators import operator
from fastlayers.runtime.launch import kernel
from fastlayers.sampler.layer import MODES, RowParams, SamplerConfig, fake_ids
from fastlayers.sampler.triton_common import BLOCK, NO_ID, load_logits, of_blocks, weight_of
from fastlayers.sampler.triton_filters import find_limits
from fastlayers.triton_lang import await_inputs, dependent_launch, release_dependents


@kernel
def _best_kernel(
    x_ptr, best_ptr, best_id_ptr, lowest_ptr, x_stride, vocab_size,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    await_inputs(PDL)
    release_dependents(PDL)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(x_ptr + row * x_stride, column, vocab_size)
    largest = tl.max(x, axis=0)
    tl.store(best_ptr + row * BLOCKS + block, largest)
    tl.store(best_id_ptr + row * BLOCKS + block, tl.min(tl.where(x == largest, column, NO_ID), axis=0))
    lowest = tl.min(tl.where(x > float("-inf"), x, float("inf")), axis=0)
    tl.store(lowest_ptr + row * BLOCKS + block, lowest)


@triton.jit
def _kept(x, largest, temperature, limit, min_p):
    weight = weight_of(x, largest, temperature)
    return tl.where((x >= limit) & (weight >= min_p), weight, 0.0)


@kernel
def _weigh_kernel(
    x_ptr, temperature_ptr, min_p_ptr, best_ptr, limit_ptr, kept_ptr, x_stride, vocab_size,
    FILTERED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    await_inputs(PDL)
    release_dependents(PDL)
    temperature, min_p = tl.load(temperature_ptr + row).to(tl.float64), tl.load(min_p_ptr + row).to(tl.float64)
    if temperature > 0.0:
        limit = float("-inf")
        kept = tl.full((), 0.0, tl.float64)
        if FILTERED:
            limit = tl.load(limit_ptr + row)
        if tl.load(best_ptr + row * BLOCKS + block) >= limit:
            largest = tl.max(of_blocks(best_ptr, row, vocab_size, float("-inf"), BLOCKS, BLOCK), axis=0)
            x = load_logits(x_ptr + row * x_stride, column, vocab_size)
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


@kernel
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
    best = of_blocks(best_ptr, row, vocab_size, float("-inf"), BLOCKS, BLOCK)
    best_id = of_blocks(best_id_ptr, row, vocab_size, NO_ID, BLOCKS, BLOCK)
    largest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == largest, best_id, NO_ID), axis=0)
    if MODE > 0:
        temperature = tl.load(temperature_ptr + row).to(tl.float64)
        if (temperature > 0.0) & (largest > float("-inf")):
            kept = of_blocks(kept_ptr, row, vocab_size, 0.0, BLOCKS, BLOCK)
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
            x = load_logits(x_ptr + row * x_stride, column, vocab_size)
            weight = _kept(x, largest, temperature, limit, min_p)
            over = before + tl.cumsum(weight, axis=0) > target
            last = tl.max(tl.where(weight > 0.0, column, 0), axis=0)
            token = tl.minimum(tl.min(tl.where(over, column, NO_ID), axis=0), last)
    tl.store(id_ptr + row, token.to(tl.int64))
    tl.store(offset_ptr + row, offset + 1)


@operator("sampler", fake_ids, writes=("offset",))
def _sampler(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p:
    torch.Tensor, seed: torch.Tensor, offset: torch.Tensor, mode: int,
) -> torch.Tensor:  # fmt: skip
    batch, vocab_size = logits.shape
    device = logits.device
    ids = torch.empty(batch, dtype=torch.int64, device=device)
    if not batch:
        return ids
    blocks = cdiv(vocab_size, BLOCK)
    sizes = {"BLOCKS": next_power_of_2(blocks), "BLOCK": BLOCK} | dependent_launch(logits.device)
    shape, grid = (batch, sizes["BLOCKS"]), (batch, blocks)
    x, strides = logits, (logits.stride(0), vocab_size)
    best = torch.empty(shape, dtype=torch.float32, device=device)
    best_id = torch.empty(shape, dtype=torch.int32, device=device)
    lowest = torch.empty(shape, dtype=torch.float32, device=device)
    limit = torch.empty(batch, dtype=torch.float32, device=device)
    kept = torch.empty(shape if mode else 0, dtype=torch.float64, device=device)
    _best_kernel[grid](x, best, best_id, lowest, *strides, num_warps=4, **sizes)
    if mode == 2:
        find_limits(x, (temperature, top_k, top_p), best, lowest, limit, sizes)
    if mode:
        _weigh_kernel[grid](
            x, temperature, min_p, best, limit, kept, *strides, FILTERED=mode == 2, num_warps=4, **sizes
        )
    _draw_kernel[(batch,)](
        x, temperature, min_p, seed, offset, best, best_id, limit, kept, ids, *strides, MODE=mode, num_warps=8, **sizes
    )
    return ids


class TritonSampler:
    """Two launches in mode "greedy", three in "sampled", seven in "filtered"; rows that need no search make none."""

    def __init__(self, cfg: SamplerConfig) -> None:
        self.cfg = cfg

    def __call__(self, logits: torch.Tensor, rows: RowParams, mode: str) -> torch.Tensor:
        """Return ids ``[B]`` and advance the offsets in place."""
        ids: torch.Tensor = _sampler(logits, *rows, MODES.index(mode))
        return ids
