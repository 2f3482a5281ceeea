"""Linear of up to 64 rows by ``wgmma``: rows of the weight on their way through a deep ring in shared memory (Gluon).

Few rows take as long as reading the weight. A program has 16 W of its rows and asks for STAGES - 1 steps of 64 columns
before the kernels in front have ended; x follows behind the wait, and both are copied asynchronously. Rows of the
weight are the left operand, so that even eight rows of x are whole instructions. Where a weight has few rows, its
columns are split, and a second launch adds the splits.

Sums are those of :mod:`fastlayers.linear.dense.triton` with steps of 64 columns to the last bit; that is what runs in
Triton's interpreter, which knows no Gluon.
"""

# Inside a Gluon kernel tuples grow in unrolled loops.
# mypy: disable-error-code="assignment, has-type, var-annotated"

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from fastlayers.errors import check_keys
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.linear.dense.layer import LinearConfig
from fastlayers.linear.dense.triton import PARAMETERS, Launches, adding
from fastlayers.linear.dense.triton import launches_of as twins_launches
from fastlayers.linear.split_rows import LEAVE, SplitRows, told
from fastlayers.operators import operator
from fastlayers.runtime.launch import New, kernel
from fastlayers.triton_lang import INTERPRET, await_inputs, dependent_launch, release_dependents

MAX_ROWS, STEP = 64, 64
# What a program may have of an SM's 227 KiB, and how many programs there should be: three quarters of an H200's SMs.
SHARED, ENOUGH = 224 << 10, 96


@gluon.constexpr_function
def copied_by(warps):
    """Return how rows of 64 columns are copied: 16 bytes a lane, whole lines."""
    return gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def stored_by(warps):
    """Return how sums ``[16·W, TOKENS]`` are stored: eight rows of the weight a lane."""
    return gl.BlockedLayout([8, 1], [2 * warps, 16 // warps], [1, warps], [0, 1])


@gluon.jit
def _turn(weights, x_rows, real, ring, xs, acc, step, here: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """Add the product of a step; ask for the one that is STAGES - 1 ahead, into the buffers of the step before."""
    async_copy.wait_group(STAGES - 2)
    hopper.fence_async_shared()
    acc = hopper.warpgroup_mma(ring[here], xs[here].permute((1, 0)), acc, is_async=True)
    ahead = step + (STAGES - 1)
    inside = ahead < STEPS
    async_copy.async_copy_global_to_shared(ring[(here + STAGES - 1) % STAGES], weights + ahead * 64, mask=inside)
    async_copy.async_copy_global_to_shared(xs[(here + STAGES - 1) % STAGES], x_rows + ahead * 64, mask=real & inside)
    async_copy.commit_group()
    return hopper.warpgroup_mma_wait(0, deps=[acc])


@kernel(do_not_specialize=("M",), jit=gluon.jit)
def wgmma_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, M, N, x_stride, weight_stride,
    K: gl.constexpr, HAS_BIAS: gl.constexpr, SPLITS: gl.constexpr, TOKENS: gl.constexpr, W: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply 16 W rows of the weight by all rows of x, over one of SPLITS runs of columns."""
    STEPS: gl.constexpr = K // 64 // SPLITS
    ROWS: gl.constexpr = 16 * W
    gl.static_assert(K % (64 * SPLITS) == 0, "whole steps")
    gl.static_assert(STEPS >= STAGES - 1, "no step ahead that there is not")
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, TOKENS, 16])
    copied: gl.constexpr = copied_by(W)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ring = ()
    xs = ()
    for _ in gl.static_range(STAGES):
        ring = ring + (gl.allocate_shared_memory(x_ptr.dtype.element_ty, [ROWS, 64], shared),)
        xs = xs + (gl.allocate_shared_memory(x_ptr.dtype.element_ty, [TOKENS, 64], shared),)
    first, split = gl.program_id(0) * ROWS, gl.program_id(1)
    column = split * (STEPS * 64) + gl.arange(0, 64, layout=gl.SliceLayout(0, copied))[None, :]
    # Rows beyond the edge read a valid one again; their results are never stored.
    row = gl.minimum(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copied)), N - 1)
    weights = weight_ptr + row.to(gl.int64)[:, None] * weight_stride + column
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, copied))
    x_rows = x_ptr + token.to(gl.int64)[:, None] * x_stride + column
    # What is not read of x is anything in memory; it is in sums that are not stored.
    real = (token < M)[:, None]
    for turn in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(ring[turn], weights + turn * 64)
    async_copy.commit_group()
    await_inputs(PDL)
    release_dependents(PDL)
    for turn in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(xs[turn], x_rows + turn * 64, mask=real)
        async_copy.commit_group()
    acc = gl.zeros([ROWS, TOKENS], gl.float32, mma)
    for start in range(0, STEPS // STAGES * STAGES, STAGES):
        for here in gl.static_range(STAGES):
            acc = _turn(weights, x_rows, real, ring, xs, acc, start + here, here, STEPS, STAGES)
    for here in gl.static_range(STEPS % STAGES):
        acc = _turn(weights, x_rows, real, ring, xs, acc, STEPS // STAGES * STAGES + here, here, STEPS, STAGES)
    async_copy.wait_group(0)
    out: gl.constexpr = stored_by(W)
    sums = gl.convert_layout(acc, out)
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, out))[:, None]
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, out))[None, :]
    if HAS_BIAS:
        sums += gl.load(bias_ptr + gl.minimum(row, N - 1)).to(gl.float32)
    place = y_ptr + (split * M + token).to(gl.int64) * N + row
    gl.store(place, sums.to(y_ptr.dtype.element_ty), mask=(row < N) & (token < M))


class Plan(NamedTuple):
    """A program's warps, how many parts columns are split into, and the turns of the ring."""

    W: int
    SPLITS: int
    STAGES: int

    def fits(self, rows: int, k: int) -> bool:
        """Return whether it is one for so many rows of x and so many columns."""
        whole, steps = k % (STEP * self.SPLITS) == 0, k // STEP // self.SPLITS
        return whole and steps >= self.STAGES - 1 and self.shared(rows) <= SHARED

    def shared(self, rows: int) -> int:
        """Return the bytes of its ring."""
        return self.STAGES * (self.W * 16 + tokens_for(rows)) * STEP * 2


def tokens_for(rows: int) -> int:
    """Return the columns of an instruction, of which so many rows of x are some."""
    return max(8, next_power_of_2(min(rows, MAX_ROWS)))


@lru_cache(maxsize=4096)
def rule(n: int, k: int) -> Plan:
    """Return the plan where no tuned table gives one: see ``benchmarks/notes/linear.md``."""
    tiles, steps = cdiv(n, STEP), k // STEP
    splits = next((s for s in (1, 2, 4, 8) if steps % s == 0 and tiles * s >= ENOUGH and steps // s >= 4), 1)
    # One program an SM has most of its memory; several share it.
    stages = 10 if tiles * splits <= 132 else 5
    return Plan(4, splits, max(2, min(stages, steps // splits + 1)))


def candidates(cfg: LinearConfig, num_tokens: int) -> list[dict[str, int]]:
    """Return the plans worth measuring for this many rows, :func:`rule`'s own first."""
    rows, n, k = min(num_tokens, MAX_ROWS), cfg.out_features, cfg.in_features
    found = [rule(n, k)]
    if num_tokens <= MAX_ROWS:
        # Of 16 turns the unrolled addresses spill.
        for warps, splits, stages in itertools.product((4, 8), (1, 2, 3, 4, 6), (4, 5, 6, 8, 10, 12)):
            plan, programs = Plan(warps, splits, stages), cdiv(n, 16 * warps) * splits
            many = programs >= ENOUGH and (splits == 1 or programs <= 3 * ENOUGH)
            if many and plan.fits(rows, k) and plan.shared(rows) >= 56 << 10:
                found.append(plan)
    return [plan._asdict() for plan in dict.fromkeys(found)]


@lru_cache(maxsize=4096)
def _launches(
    m: int, n: int, k: int, strides: tuple[int, int], bias: bool, out_dtype: torch.dtype, plan: Plan,
    device: torch.device,
) -> Launches:  # fmt: skip
    y = New((m, n), out_dtype)
    product = wgmma_rows_kernel.at(
        (cdiv(n, 16 * plan.W), plan.SPLITS), m, n, *strides,
        makes={3: y if plan.SPLITS == 1 else New((plan.SPLITS, m, n), torch.float32)},
        K=k, HAS_BIAS=bias and plan.SPLITS == 1, TOKENS=tokens_for(m), **plan._asdict(), num_warps=plan.W,
        **dependent_launch(device),
    )  # fmt: skip
    return adding(product, m, n, plan.SPLITS, bias, y, device)


def _aligned(x: torch.Tensor) -> bool:
    """Return whether Triton knows that rows begin where copies of 16 bytes do: it asks numbers for multiples of 16."""
    return x.stride()[1] == 1 and x.stride()[0] % 16 == 0 and x.data_ptr() % 16 == 0


def _fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, plan: list[int]
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)


@operator("linear_wgmma", _fake)
def _linear_wgmma(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, plan: list[int]
) -> torch.Tensor:
    if not len(x):
        return x.new_empty(0, len(weight), dtype=out_dtype)
    chosen = plan_for(len(x), *weight.shape, tuple(plan))
    x = x if _aligned(x) else x.clone(memory_format=torch.contiguous_format)
    parts = [x] if len(x) <= MAX_ROWS or _by_twin(weight) else x.split(MAX_ROWS)
    found = [_launches_of(part, weight, bias, out_dtype, chosen).run(part, weight, bias) for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found)


def _by_twin(weight: torch.Tensor) -> bool:
    return INTERPRET or not _aligned(weight)


def _launches_of(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, plan: Plan
) -> Launches:
    """Return the launches of so many rows, by the :func:`twin` where it computes; otherwise they are at most 64."""
    if _by_twin(weight):
        return twins_launches(x, weight, bias, out_dtype, twin(len(x), plan))
    strides = x.stride()[0], weight.stride()[0]
    return _launches(len(x), *weight.shape, strides, bias is not None, out_dtype, plan, x.device)


@lru_cache(maxsize=4096)
def plan_for(rows: int, n: int, k: int, plan: tuple[int, ...]) -> Plan:
    """Return the plan of a table if it is one for so many rows, else the rule's; an empty one: there is none."""
    given = Plan(*plan) if plan else rule(n, k)
    return given if given.fits(rows, k) else rule(n, k)


def twin(rows: int, plan: Plan) -> list[int]:
    """Return the parameters with which the Triton kernel computes the same bits."""
    block = max(16, tokens_for(rows))
    numbers = {"BLOCK_M": block, "BLOCK_N": 64, "BLOCK_K": STEP, "SPLITS": plan.SPLITS, "num_warps": 4, "num_stages": 4}
    return [numbers.get(name, 0) for name in PARAMETERS]


class WgmmaLinear:
    """Reads ``x`` with any row stride; sums in fp32 and rounds once, after the bias.

    More than 64 rows run 64 at a time: right, but a ladder should give them to another backend. A weight whose rows do
    not begin where copies of 16 bytes do runs by the :func:`twin`, and so does everything in Triton's interpreter.
    """

    candidates = staticmethod(candidates)

    def __init__(self, cfg: LinearConfig, config: Mapping[str, int] | None = None) -> None:
        self.out_dtype = cfg.y_dtype
        if config:
            check_keys("linear", "config of the wgmma backend", config, (*Plan._fields, LEAVE), (LEAVE,))
        self.plan = [config[name] for name in Plan._fields] if config else []
        self.leaves_splits = told(bool(config and config.get(LEAVE)))

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``y`` ``[..., N]``, a new contiguous tensor."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        y: torch.Tensor = _linear_wgmma(rows, weight, bias, self.out_dtype, self.plan)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], len(weight))

    def splits(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> SplitRows | None:
        """Return ``y`` of ``x`` ``[M, K]``, its splits left to who reads it; ``None``: the call is what there is."""
        if not self.leaves_splits or x.dim() != 2 or not 0 < len(x) <= MAX_ROWS or not _aligned(x):
            return None
        if not _linear_wgmma.unwatched(x, weight, bias):
            return None
        plan = plan_for(len(x), *weight.shape, tuple(self.plan))
        return _launches_of(x, weight, bias, self.out_dtype, plan).leave(x, weight, bias, self.out_dtype)
