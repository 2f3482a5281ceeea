"""What kernels that norm a row on the way to something else share, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from fastlayers.quant.group_quant.triton import quantize_tile
from fastlayers.triton_lang import cast


@triton.jit
def normalised(h, weight, hidden, eps, ROUNDING: tl.constexpr):
    """Return RMSNorm of one row ``h`` (in the model's dtype) as fp32, rounded where the family rounds."""
    wide = h.to(tl.float32)
    unit = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
    if ROUNDING == 0:
        return weight.to(tl.float32) * cast(unit, h.dtype).to(tl.float32)
    elif ROUNDING == 1:
        return weight.to(tl.float32) * unit
    else:
        return (1.0 + weight.to(tl.float32)) * unit


@triton.jit
def quantised_row(y, BLOCK: tl.constexpr):
    """Return codes ``[BLOCK / 128, 128]`` and scales of one row, as GroupQuant makes them."""
    narrow: tl.constexpr = y.dtype.primitive_bitwidth == 16
    return quantize_tile(tl.reshape(y.to(tl.float32), (BLOCK // 128, 128)), 1e-10, 448.0, False, False, narrow)
