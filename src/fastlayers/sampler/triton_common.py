"""What the sampler's Triton kernels share: how logits are read, what a token weighs, what a row's blocks leave."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048
BINS = 256
CANDIDATES = 4096
# Integers of a row's plan: state, first slice, last slice, tokens in the bracket, tokens above it, is top-k in force.
PLAN = 8
NO_ID = tl.constexpr(2147483647)


@triton.jit
def load_logits(x_ptr, column, vocab_size):
    """Return logits in fp32, NaN and what lies behind the vocabulary as -inf."""
    x = tl.load(x_ptr + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def weight_of(x, largest, temperature):
    """Return what tokens weigh in fp64, the largest 1."""
    below = x.to(tl.float64) - largest.to(tl.float64)
    # The quotient by the reciprocal and one correction: a third of a division's time, and all but always its bits.
    inverse = 1.0 / temperature
    quotient = below * inverse
    quotient = tl.fma(tl.fma(-quotient, temperature, below), inverse, quotient)
    weight = tl.where(below > float("-inf"), tl.exp(quotient), 0.0)
    return tl.where(x == largest, 1.0, weight)  # also where inf - inf is NaN


@triton.jit
def of_blocks(pointer, row, vocab_size, other, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return what a row's blocks left, padded with ``other``."""
    block = tl.arange(0, BLOCKS)
    return tl.load(pointer + row * BLOCKS + block, mask=block * BLOCK < vocab_size, other=other)
