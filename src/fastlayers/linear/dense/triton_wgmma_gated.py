"""SiLU and multiply in the last lines of a product by ``wgmma``, of a weight of gate rows and as many up rows (Gluon).

The product is that of :mod:`fastlayers.linear.dense.triton_wgmma`, with other rows of the weight for a program: 8 W of
the gate and the same 8 W of the up projection. Of each warp's 16 rows of an accumulator a thread has r and r + 8: those
are a gate row and its up row, so that nothing is exchanged between threads.

Bits are those of the two launches: the product, rounded, and :class:`TritonSiluMul`. In Triton's interpreter, which
knows no Gluon, and for a weight whose rows do not begin where copies of 16 bytes do, those two run.
"""

# Inside a Gluon kernel tuples grow in unrolled loops.
# mypy: disable-error-code="assignment, has-type, var-annotated"

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from fastlayers.activation.silu_mul.triton import _silu_mul, silu_mul_rounded
from fastlayers.integers import cdiv
from fastlayers.linear.dense.triton_wgmma import Plan, _by_twin, _launches_of, _turn, copied_by, tokens_for
from fastlayers.runtime.launch import New, kernel
from fastlayers.triton_lang import await_inputs, dependent_launch, release_dependents


@gluon.constexpr_function
def halves_by(warps, tokens):
    """Return how half of the rows of sums ``[16·W, TOKENS]`` lie, those of each warp without r + 8: as they came."""
    apart = [[0, 1]]
    while 4 << len(apart) < tokens:
        apart = [*apart, [0, 4 << len(apart)]]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    several = [[8 << warp, 0] for warp in range(5) if 1 << warp < warps]
    return gl.DistributedLinearLayout(apart, lanes, several, [], [8 * warps, tokens])


@gluon.constexpr_function
def inner_by(warps):
    """Return how what the activation gives, ``[8·W, TOKENS]``, is stored: eight rows of a half a lane."""
    return gl.BlockedLayout([8, 1], [warps, 32 // warps], [1, warps], [0, 1])


@kernel(do_not_specialize=("M",), jit=gluon.jit)
def gated_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, M, N, x_stride, weight_stride,
    K: gl.constexpr, HAS_BIAS: gl.constexpr, TOKENS: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Multiply 8 W gate rows and their up rows, of N each, by all rows of x; activate."""
    STEPS: gl.constexpr = K // 64
    ROWS: gl.constexpr = 16 * W
    gl.static_assert(K % 64 == 0, "whole steps")
    gl.static_assert(STEPS >= STAGES - 1, "no step ahead that there is not")
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, TOKENS, 16])
    copied: gl.constexpr = copied_by(W)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ring = ()
    xs = ()
    for _ in gl.static_range(STAGES):
        ring = ring + (gl.allocate_shared_memory(x_ptr.dtype.element_ty, [ROWS, 64], shared),)
        xs = xs + (gl.allocate_shared_memory(x_ptr.dtype.element_ty, [TOKENS, 64], shared),)
    first = gl.program_id(0) * (8 * W)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, copied))[None, :]
    # Of 16 rows the first eight are of the gate. Rows beyond the edge read a valid one again, as there.
    tiled = gl.arange(0, ROWS, layout=gl.SliceLayout(1, copied))
    row = gl.minimum(first + tiled // 16 * 8 + tiled % 8, N - 1) + tiled // 8 % 2 * N
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
    half: gl.constexpr = halves_by(W, TOKENS)
    gate, up = gl.split(gl.permute(gl.reshape(acc, [W, 2, 8, TOKENS]), (0, 2, 3, 1)))
    gate = gl.convert_layout(gl.reshape(gate, [8 * W, TOKENS]), half, assert_trivial=True)
    up = gl.convert_layout(gl.reshape(up, [8 * W, TOKENS]), half, assert_trivial=True)
    if HAS_BIAS:
        row = gl.minimum(first + gl.arange(0, 8 * W, layout=gl.SliceLayout(1, half)), N - 1)[:, None]
        gate += gl.load(bias_ptr + row).to(gl.float32)
        up += gl.load(bias_ptr + N + row).to(gl.float32)
    inner = silu_mul_rounded(gate.to(y_ptr.dtype.element_ty), up.to(y_ptr.dtype.element_ty))
    out: gl.constexpr = inner_by(W)
    row = first + gl.arange(0, 8 * W, layout=gl.SliceLayout(1, out))[:, None]
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, out))[None, :]
    place = y_ptr + token.to(gl.int64) * N + row
    gl.store(place, gl.convert_layout(inner, out), mask=(row < N) & (token < M))


@lru_cache(maxsize=4096)
def _launch(
    m: int, n: int, k: int, strides: tuple[int, int], bias: bool, out_dtype: torch.dtype, plan: Plan,
    device: torch.device,
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """Return what launches rows of one shape; ``n``: rows of the gate."""
    launch: Callable[..., torch.Tensor] = gated_rows_kernel.at(
        (cdiv(n, 8 * plan.W),), m, n, *strides, makes={3: New((m, n), out_dtype)},
        K=k, HAS_BIAS=bias, TOKENS=tokens_for(m), W=plan.W, STAGES=plan.STAGES, num_warps=plan.W,
        **dependent_launch(device),
    )  # fmt: skip
    return launch


def gated_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, plan: Plan
) -> torch.Tensor:
    """Return ``silu(gate) * up`` ``[M, N / 2]``, a new contiguous tensor, by a plan that fits and has no splits.

    Parameters
    ----------
    x : Tensor ``[M, K]``
        Up to 64 rows, which begin where copies of 16 bytes do.
    weight : Tensor ``[N, K]``
        Rows of the gate, then as many of the up projection.
    bias : Tensor ``[N]``, optional
    """
    if _by_twin(weight):
        y: torch.Tensor = _silu_mul(_launches_of(x, weight, bias, out_dtype, plan).run(x, weight, bias))
        return y
    (n, k), strides = weight.shape, (x.stride()[0], weight.stride()[0])
    launch = _launch(len(x), n // 2, k, strides, bias is not None, out_dtype, plan, x.device)
    return launch(x, weight, weight if bias is None else bias)
