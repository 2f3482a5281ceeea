"""SiluAndMul in Triton: one program a piece of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.activation.silu_mul.layer import SiluMulConfig
from fastlayers.operators import operator
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents

BLOCK = 1024


@triton.jit
def silu_mul_rounded(gate, up, dtype: tl.constexpr):
    """Return ``silu(gate).to(dtype) * up`` rounded to ``dtype``; ``gate`` and ``up`` are fp32."""
    silu = cast(gate / (1.0 + tl.exp(-gate)), dtype)
    return cast(silu.to(tl.float32) * up, dtype)


@triton.jit
def _silu_mul_kernel(x_ptr, y_ptr, x_stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    await_inputs(PDL)
    release_dependents(PDL)
    gate = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    y = silu_mul_rounded(gate, up, y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * size + column, y, mask=inside)


def _fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@operator("silu_mul(Tensor x) -> Tensor", _fake)
def _silu_mul(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], size))
    if y.numel():
        rows = x.reshape(-1, 2 * size)
        block = min(BLOCK, triton.next_power_of_2(size))
        grid = (rows.shape[0], triton.cdiv(size, block))
        _silu_mul_kernel[grid](
            rows, y, rows.stride(0), size, BLOCK=block, num_warps=max(1, block // 256), **dependent_launch(x)
        )
    return y


class TritonSiluMul:
    """Reads x once, writes y once."""

    def __init__(self, cfg: SiluMulConfig) -> None:
        self.cfg = cfg

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``y``, a new contiguous tensor of ``x``'s dtype."""
        y: torch.Tensor = _silu_mul(x)
        return y


COMPILE = [
    KernelBuild(
        f"silu_mul_{dtype}",
        _silu_mul_kernel,
        {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "x_stride": "i64", "size": "i32"},
        {"BLOCK": BLOCK, "PDL": True},
        num_warps=BLOCK // 256,
    )
    for dtype in ("bf16", "fp32")
]
