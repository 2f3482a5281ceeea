"""Casts, products and launch order shared by all Triton kernels, exact on hardware and in Triton's interpreter.

Triton 3.6's interpreter truncates fp32 to bf16 and neither saturates nor rounds e4m3 to even, so under it these
helpers round in integer arithmetic. On hardware they are the plain cast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastlayers import env
from fastlayers.device import as_device

INTERPRET = tl.constexpr(env.triton_interpret())
E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Return fp32 ``x`` rounded to nearest even in ``dtype`` (fp32, fp16, bf16)."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        kept = tl.where(x == x, rounded, bits)
        return kept.to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return x.to(dtype)


@triton.jit
def dot(a, b, acc=None):
    """Return ``a · b`` (``+ acc``) in fp32 (int8 operands: int32). Triton's interpreter cannot multiply bf16."""
    if a.dtype == tl.int8:
        return tl.dot(a, b, acc, out_dtype=tl.int32)
    elif INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def to_e4m3(x):
    """Return fp32 ``x`` as e4m3, rounded to nearest even, clamped to ±448 first; NaN stays NaN."""
    clamped = tl.minimum(tl.maximum(x, -E4M3_MAX), E4M3_MAX)
    if INTERPRET:
        bits = clamped.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Normal numbers: round the mantissa to 3 bits, rebias the exponent from 127 to 7.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 codes count multiples of 2^-9; adding 1.5 * 2^23 rounds to even.
        steps = (magnitude.to(tl.float32, bitcast=True) * 512.0 + 12582912.0) - 12582912.0
        code = tl.where(magnitude < 0x3C800000, steps.to(tl.uint32), normal)
        code = tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        # Hardware's minimum and maximum drop NaN.
        return tl.where(x == x, clamped, x).to(tl.float8e4nv)


@triton.jit
def e4m3_to_fp16(x):
    """Return e4m3 ``x`` as fp16, exactly, where it is: not as each product that reads it would like to have it.

    Triton moves a conversion of its own behind the copy into a product's layout; a tile that two products read is then
    converted twice, byte by byte, and no longer loaded ahead.
    """
    if INTERPRET:
        return x.to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b16 low, high; mov.b32 {low, high}, $2;"
            " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high;}",
            "=r,=r,r", [x], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip


# By device, as found once.
_DEPENDENT: dict[torch.device, dict[str, bool]] = {}


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return launch arguments with which a kernel on ``device`` may start before the kernels in front have ended.

    The kernel has a constexpr ``PDL`` and calls :func:`await_inputs`; without programmatic dependent launch (older
    GPUs, the interpreter) ``PDL`` is false and nothing changes.
    """
    try:
        return _DEPENDENT[device]
    except KeyError:
        early = device.type == "cuda" and not INTERPRET.value and (as_device(device).capability or (0, 0)) >= (9, 0)
        return _DEPENDENT.setdefault(device, {"PDL": True, "launch_pdl": True} if early else {"PDL": False})


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Wait for the kernels in front; before this, a kernel may read weights and must write nothing."""
    if PDL:
        gdc_wait()


@triton.jit
def release_dependents(PDL: tl.constexpr):
    """Let the next kernel start its prologue; it still waits for this one's end before it reads its inputs.

    Never called by a kernel that may write weights: the next one may read those in its prologue. Called after
    :func:`await_inputs`, so that the next kernel may also read what kernels before the one in front wrote. Norms call
    it before: what follows a norm reads nothing else early than weights and what a step's plan wrote.
    """
    if PDL:
        gdc_launch_dependents()
