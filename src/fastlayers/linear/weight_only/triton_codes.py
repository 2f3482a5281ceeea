"""Codes of weights in Triton, decoded in registers: what linears and experts with weights alone share."""

from __future__ import annotations

import triton
import triton.language as tl

from fastlayers.triton_lang import INTERPRET, cast

# Four bytes of codes ($4) become pairs of 16-bit numbers, of low halves ($0, $1) and of high ones ($2, $3): the bits of
# a code below those of 128 or 1024, and then less that number and the zero point ($5, $6). All of it is exact.
CODES_TO_BF16 = tl.constexpr("""
    {
    .reg .b32 p, q, s;
    prmt.b32 p, $4, 0, 0x4140;
    prmt.b32 q, $4, 0, 0x4342;
    lop3.b32 $0, p, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $1, q, 0x000F000F, 0x43004300, 0xEA;
    shr.b32 p, p, 4;
    shr.b32 q, q, 4;
    lop3.b32 $2, p, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $3, q, 0x000F000F, 0x43004300, 0xEA;
    mov.b32 s, 0x3F803F80;
    fma.rn.bf16x2 $0, $0, s, $5;
    fma.rn.bf16x2 $1, $1, s, $6;
    fma.rn.bf16x2 $2, $2, s, $5;
    fma.rn.bf16x2 $3, $3, s, $6;
    }
    """)
CODES_TO_FP16 = tl.constexpr(
    CODES_TO_BF16.value.replace("0x43004300", "0x64006400")
    .replace("0x3F803F80", "0x3C003C00")
    .replace("bf16x2", "f16x2")
)


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


@triton.jit
def load_columns(pointers, k, K, real, EVEN_K: tl.constexpr, FEW: tl.constexpr = True):
    """Load input features ``k`` ``[K, 1]`` of rows of x; FEW: only of those that are real ``[1, M]``.

    All programs want the same features at about the same time, past the first-level cache. Where most rows of a tile
    are not there and read a real one again, a whole GPU asks for a few lines of L2, each of which is in one place.
    """
    if not FEW:
        return load_tile(pointers, k, K, EVEN_K)
    elif EVEN_K:
        return tl.load(pointers, mask=real, other=0.0)
    else:
        return tl.load(pointers, mask=real & (k < K), other=0.0)


@triton.jit
def halves_of(packed, zero, dtype: tl.constexpr):
    """Return the low and the high codes of bytes ``[N, K]`` less their zero points ``[N, 1]``, exactly, in ``dtype``.

    Two codes share a register; each costs about one and a half instructions.
    """
    if INTERPRET or dtype == tl.float32:
        low, high = (packed & 15).to(tl.float32) - zero, (packed >> 4).to(tl.float32) - zero
        return cast(low, dtype), cast(high, dtype)
    elif dtype == tl.bfloat16:
        offset = tl.broadcast_to((-128.0 - zero).to(dtype), packed.shape)
        return tl.inline_asm_elementwise(
            CODES_TO_BF16,
            "=&r,=&r,=&r,=&r,r,r,r",
            [packed, offset],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        offset = tl.broadcast_to((-1024.0 - zero).to(dtype), packed.shape)
        return tl.inline_asm_elementwise(
            CODES_TO_FP16,
            "=&r,=&r,=&r,=&r,r,r,r",
            [packed, offset],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
