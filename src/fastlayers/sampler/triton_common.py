"""What the sampler's Triton kernels share: how logits are read, what a token weighs, what a row's blocks leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from fastlayers.testing.compile_check import KernelBuild

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


ARGUMENTS = {
    "x_ptr": "*bf16", "temperature_ptr": "*fp32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32",
    "seed_ptr": "*i64", "offset_ptr": "*i64", "best_ptr": "*fp32", "best_id_ptr": "*i32", "lowest_ptr": "*fp32",
    "histogram_ptr": "*i16", "plan_ptr": "*i32", "start_ptr": "*i32", "list_ptr": "*fp32", "above_ptr": "*fp64",
    "whole_ptr": "*fp64", "limit_ptr": "*fp32", "kept_ptr": "*fp64", "id_ptr": "*i64", "x_stride": "i64",
    "vocab_size": "i32",
}  # fmt: skip
SIZES = {"BLOCKS": 128, "BLOCK": BLOCK, "BINS": BINS, "CANDIDATES": CANDIDATES, "PLAN": PLAN, "CHUNK": 64, "PDL": True}


def build(name: str, kernel: Any, num_warps: int, constants: Mapping[str, Any] | None = None) -> KernelBuild:
    """Return the build of one of the sampler's kernels at a real vocabulary's sizes."""
    known = SIZES | dict(constants or {})
    arguments = {argument: kind for argument, kind in ARGUMENTS.items() if argument in kernel.arg_names}
    constexprs = {constant: known[constant] for constant in kernel.arg_names if constant in known}
    return KernelBuild(f"sampler_{name}", kernel, arguments, constexprs, num_warps)
