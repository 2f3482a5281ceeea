"""Codes of weights in Triton, decoded in registers: what linears and experts with weights alone share."""

from __future__ import annotations

import triton
import triton.language as tl

from fastlayers.triton_lang import cast


@triton.jit
def _e4m3_bits(code):
    """Return the fp32 values of e4m3 codes in uint8, also on cards without instructions for e4m3."""
    code = code.to(tl.uint32)
    # Exponent and mantissa where fp32 has them, 120 too low in the exponent; subnormals come out right, too.
    value = (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def decode(code, scale, zero, dtype: tl.constexpr, GROUPED: tl.constexpr, E4M3: tl.constexpr):
    """Return weights rounded to ``dtype`` where groups have scales, else codes less their zero points: exact."""
    value = _e4m3_bits(code) if E4M3 else code.to(tl.float32)
    value -= zero
    return cast(value * scale, dtype) if GROUPED else cast(value, dtype)


@triton.jit
def scales_of(scale_ptr, zero_ptr, group, column, N, ZERO: tl.constexpr, HAS_ZERO: tl.constexpr):
    """Return scales and zero points of (group, column), which broadcast against each other."""
    at = group.to(tl.int64) * N + column
    scale = tl.load(scale_ptr + at)
    zero = tl.load(zero_ptr + at).to(tl.float32) if HAS_ZERO else tl.full(scale.shape, ZERO, tl.float32)
    return scale, zero


@triton.jit
def load_tile(pointers, k, K, EVEN_K: tl.constexpr):
    """Load what lies at input features ``k``; K is a multiple of 32 where codes are nibbles: no byte is half inside."""
    if EVEN_K:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=k < K, other=0)
