"""The sampler in Triton: several programs a row find its largest logit, one draws; thresholds by eight-way search
over the logits' bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.operators import operator
from fastlayers.sampler.layer import MODES, RowParams, SamplerConfig
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import await_inputs, dependent_launch, release_dependents

BLOCK = 4096
# About four programs a multiprocessor of a large GPU.
TARGET_PROGRAMS = 512


@triton.jit
def _load_logits(x_ptr, column, vocab_size):
    x = tl.load(x_ptr + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _key(x):
    """Return an integer with the order of fp32 ``x``; both zeros are the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _argmax_kernel(
    x_ptr, best_ptr, best_id_ptr, x_stride, vocab_size, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Write the largest logit of each part of a row and the first id that has it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x_ptr += row * x_stride
    await_inputs(PDL)
    release_dependents(PDL)
    steps = tl.cdiv(tl.cdiv(vocab_size, BLOCK), PARTS)
    best = tl.full((), float("-inf"), tl.float32)
    best_id = tl.full((), 0, tl.int32)
    for step in range(part * steps, part * steps + steps):
        column = step * BLOCK + tl.arange(0, BLOCK)
        x = _load_logits(x_ptr, column, vocab_size)
        largest = tl.max(x, axis=0)
        first = tl.min(tl.where(x == largest, column, 2147483647), axis=0)
        best_id = tl.where(largest > best, first, best_id)
        best = tl.maximum(best, largest)
    tl.store(best_ptr + row * PARTS + part, best)
    tl.store(best_id_ptr + row * PARTS + part, best_id)


@triton.jit
def _argmax(best_ptr, best_id_ptr, row, PARTS: tl.constexpr):
    """Return a row's largest logit and the lowest id that has it, from its parts (0 for a row of -inf)."""
    part = row * PARTS + tl.arange(0, PARTS)
    best, best_id = tl.load(best_ptr + part), tl.load(best_id_ptr + part)
    largest = tl.max(best, axis=0)
    first = tl.min(tl.where(best == largest, best_id, 2147483647), axis=0)
    return largest, first


@triton.jit
def _fill_weights(x_ptr, weight_ptr, vocab_size, largest, temperature, BLOCK: tl.constexpr):
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = _load_logits(x_ptr, column, vocab_size)
        weight = tl.exp((x.to(tl.float64) - largest.to(tl.float64)) / temperature)
        weight = tl.where(x == largest, 1.0, weight)  # also where inf - inf is NaN
        tl.store(weight_ptr + column, weight, mask=column < vocab_size)


@triton.jit
def _total(x_ptr, weight_ptr, vocab_size, threshold, min_weight, BLOCK: tl.constexpr):
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        keep = (column < vocab_size) & (_key(_load_logits(x_ptr, column, vocab_size)) >= threshold)
        weight = tl.load(weight_ptr + column, mask=keep, other=0.0)
        total += tl.sum(tl.where(weight >= min_weight, weight, 0.0), axis=0)
    return total


@triton.jit
def _search(x_ptr, weight_ptr, vocab_size, low, high, wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest key t in [low, high) for which the tokens with key ≥ t weigh (or number) ``wanted``.

    ``low`` must satisfy that and ``high`` must not.
    """
    way = tl.arange(0, 8)
    while high - low > 1:
        step = (high - low + 7) // 8
        pivot = low + way * step
        sums = tl.zeros((8,), tl.float64)
        for start in range(0, vocab_size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < vocab_size
            key = _key(_load_logits(x_ptr, column, vocab_size))
            if COUNT:
                weight = tl.where(inside, 1.0, 0.0).to(tl.float64)
            else:
                weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
            sums += tl.sum(tl.where(key[:, None] >= pivot[None, :], weight[:, None], 0.0), axis=0)
        # The first way is known to satisfy it, whatever the order of additions says.
        good = ((sums >= wanted) & (pivot < high)) | (way == 0)
        index = tl.sum(good.to(tl.int64), axis=0) - 1
        high = tl.minimum(high, low + (index + 1) * step)
        low = low + index * step
    return low


@triton.jit
def _draw(x_ptr, weight_ptr, vocab_size, threshold, min_weight, target, BLOCK: tl.constexpr):
    """Return the first id whose running sum of kept weights exceeds ``target``."""
    running = tl.full((), 0.0, tl.float64)
    found_start = tl.full((), -1, tl.int32)
    found_before = tl.full((), 0.0, tl.float64)
    last_start = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        keep = (column < vocab_size) & (_key(_load_logits(x_ptr, column, vocab_size)) >= threshold)
        weight = tl.load(weight_ptr + column, mask=keep, other=0.0)
        after = running + tl.sum(tl.where(weight >= min_weight, weight, 0.0), axis=0)
        hit = (found_start < 0) & (after > target)
        found_before = tl.where(hit, running, found_before)
        found_start = tl.where(hit, start, found_start)
        last_start = tl.where(after > running, start, last_start)
        running = after
    start = tl.where(found_start < 0, last_start, found_start)
    column = start + tl.arange(0, BLOCK)
    keep = (column < vocab_size) & (_key(_load_logits(x_ptr, column, vocab_size)) >= threshold)
    weight = tl.load(weight_ptr + column, mask=keep, other=0.0)
    weight = tl.where(weight >= min_weight, weight, 0.0)
    over = (found_before + tl.cumsum(weight, axis=0) > target) & (found_start >= 0)
    # Where rounding leaves no running sum above the target: the last token that adds to it.
    last = tl.max(tl.where(weight > 0, column, 0), axis=0)
    return tl.minimum(tl.min(tl.where(over, column, 2147483647), axis=0), last)


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
def _sampler_kernel(
    x_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, offset_ptr, weight_ptr, id_ptr,
    best_ptr, best_id_ptr, x_stride, vocab_size,
    MODE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, SEARCH_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    await_inputs(PDL)
    release_dependents(PDL)
    offset = tl.load(offset_ptr + row)
    largest, token = _argmax(best_ptr, best_id_ptr, row, PARTS)
    if MODE > 0:
        temperature = tl.load(temperature_ptr + row).to(tl.float64)
        if (temperature > 0.0) & (largest > float("-inf")):
            weight_ptr += row * vocab_size
            min_p = tl.load(min_p_ptr + row).to(tl.float64)
            _fill_weights(x_ptr, weight_ptr, vocab_size, largest, temperature, BLOCK)
            tl.debug_barrier()  # weights are read by other threads than wrote them
            threshold = tl.full((), -2147483648, tl.int64)
            if MODE > 1:
                top_k = tl.load(top_k_ptr + row)
                top_p = tl.load(top_p_ptr + row).to(tl.float64)
                above = _key(largest) + 1
                if (top_k > 0) & (top_k < vocab_size):
                    wanted = top_k.to(tl.float64)
                    threshold = _search(x_ptr, weight_ptr, vocab_size, threshold, above, wanted, True, SEARCH_BLOCK)
                if top_p < 1.0:
                    wanted = top_p * _total(x_ptr, weight_ptr, vocab_size, threshold, 0.0, BLOCK)
                    threshold = _search(x_ptr, weight_ptr, vocab_size, threshold, above, wanted, False, SEARCH_BLOCK)
            target = _uniform(tl.load(seed_ptr + row), offset)
            target *= _total(x_ptr, weight_ptr, vocab_size, threshold, min_p, BLOCK)
            token = _draw(x_ptr, weight_ptr, vocab_size, threshold, min_p, target, BLOCK)
    tl.store(id_ptr + row, token.to(tl.int64))
    tl.store(offset_ptr + row, offset + 1)


def _parts(batch: int, vocab_size: int, block: int) -> int:
    """Return how many programs share a row's search for its largest logit: a power of two, from shapes only."""
    wanted = max(1, min(64, triton.cdiv(vocab_size, block), TARGET_PROGRAMS // batch))
    return 1 << (wanted.bit_length() - 1)


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
    ids = torch.empty(batch, dtype=torch.int64, device=logits.device)
    weights = torch.empty(batch if mode else 0, vocab_size, dtype=torch.float64, device=logits.device)
    if batch:
        block = min(BLOCK, triton.next_power_of_2(vocab_size))
        parts, launch = _parts(batch, vocab_size, block), dependent_launch(logits)
        best = torch.empty(batch, parts, dtype=torch.float32, device=logits.device)
        best_id = torch.empty(batch, parts, dtype=torch.int32, device=logits.device)
        _argmax_kernel[(batch, parts)](
            logits, best, best_id, logits.stride(0), vocab_size, PARTS=parts, BLOCK=block, num_warps=8, **launch
        )
        _sampler_kernel[(batch,)](
            logits, temperature, top_k, top_p, min_p, seed, offset, weights, ids, best, best_id, logits.stride(0),
            vocab_size, MODE=mode, PARTS=parts, BLOCK=block, SEARCH_BLOCK=min(block, 2048),
            num_warps=16 if mode else 1, **launch,
        )  # fmt: skip
    return ids


class TritonSampler:
    """Two launches; rows that need no search make none."""

    def __init__(self, cfg: SamplerConfig) -> None:
        self.cfg = cfg

    def __call__(self, logits: torch.Tensor, rows: RowParams, mode: str) -> torch.Tensor:
        """Return ids ``[B]`` and advance the offsets in place."""
        ids: torch.Tensor = _sampler(logits, *rows, MODES.index(mode))
        return ids


COMPILE = [
    KernelBuild(
        f"sampler_{mode}",
        _sampler_kernel,
        {
            "x_ptr": "*fp32", "temperature_ptr": "*fp32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32",
            "min_p_ptr": "*fp32", "seed_ptr": "*i64", "offset_ptr": "*i64", "weight_ptr": "*fp64",
            "id_ptr": "*i64", "best_ptr": "*fp32", "best_id_ptr": "*i32",
            "x_stride": "i64", "vocab_size": "i32",
        },
        {"MODE": MODES.index(mode), "PARTS": 32, "BLOCK": BLOCK, "SEARCH_BLOCK": 2048, "PDL": True},
        num_warps=16 if MODES.index(mode) else 1,
    )
    for mode in MODES
]  # fmt: skip
COMPILE.append(
    KernelBuild(
        "sampler_argmax",
        _argmax_kernel,
        {"x_ptr": "*bf16", "best_ptr": "*fp32", "best_id_ptr": "*i32", "x_stride": "i64", "vocab_size": "i32"},
        {"PARTS": 32, "BLOCK": BLOCK, "PDL": True},
        num_warps=8,
    )
)
