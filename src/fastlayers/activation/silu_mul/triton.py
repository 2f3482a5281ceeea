"""SiluAndMul in Triton: one program a piece of a row."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl

from fastlayers.activation.silu_mul.layer import SiluMulConfig, empty_output
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.operators import operator
from fastlayers.runtime.launch import New, kernel
from fastlayers.triton_lang import INTERPRET, await_inputs, cast, dependent_launch, release_dependents

BLOCK = 1024
MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)


@triton.jit
def _silu(x):
    """Return fp32 ``x / (1 + e^-x)``, two units off at most beside the exponential's own error."""
    if INTERPRET:
        return x / (1.0 + tl.exp(-x))
    # Plain tl.exp and "/" also serve subnormal numbers, at half as much again of all that is done to a value here;
    # what they would turn into subnormals is 0.
    power = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * MINUS_LOG2_E], tl.float32, True, 1)
    return x * tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], tl.float32, True, 1)


@triton.jit
def silu_mul_rounded(gate, up):
    """Return ``silu(gate) * up``, rounded to their dtype after silu and after the product."""
    dtype: tl.constexpr = up.dtype
    silu = cast(_silu(gate.to(tl.float32)), dtype)
    if dtype == tl.bfloat16 and not INTERPRET:  # two products an instruction; adding -0 changes none
        product: tl.constexpr = "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }"
        return tl.inline_asm_elementwise(product, "=r,r,r", [silu, up], tl.bfloat16, True, 2)
    return cast(silu.to(tl.float32) * up.to(tl.float32), dtype)


@kernel
def _silu_mul_kernel(x_ptr, y_ptr, x_stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    await_inputs(PDL)
    release_dependents(PDL)
    gate = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_stride + size + column, mask=inside, other=0.0)
    tl.store(y_ptr + row * size + column, silu_mul_rounded(gate, up), mask=inside)


@lru_cache(maxsize=4096)
def _launch(rows: int, size: int, stride: int, dtype: torch.dtype, device: torch.device) -> Callable[..., torch.Tensor]:
    """Return what launches rows of one shape."""
    block = min(BLOCK, next_power_of_2(size))
    return _silu_mul_kernel.at(  # type: ignore[no-any-return]
        (rows, cdiv(size, block)), stride, size, makes={1: New((rows, size), dtype)}, BLOCK=block,
        num_warps=max(1, block // 256), **dependent_launch(device),
    )  # fmt: skip


@operator("silu_mul", empty_output)
def _silu_mul(x: torch.Tensor) -> torch.Tensor:
    shape = x.shape
    rows = x if len(shape) == 2 else x.reshape(-1, shape[-1])
    count, size = rows.shape[0], shape[-1] // 2
    if not count or not size:
        return empty_output(x)
    y = _launch(count, size, rows.stride()[0], x.dtype, x.device)(rows)
    return y if rows is x else y.view(*shape[:-1], size)


class TritonSiluMul:
    """Reads x once, writes y once."""

    def __init__(self, cfg: SiluMulConfig) -> None:
        self.cfg = cfg

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``y``, a new contiguous tensor of ``x``'s dtype."""
        y: torch.Tensor = _silu_mul(x)
        return y
