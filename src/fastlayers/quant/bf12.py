"""bfloat16 weights in 12 bits each, without loss.

A row's weights lie within few powers of two: sign and mantissa keep their 8 bits, the exponent becomes 4 bits, its
distance from the row's base, of which 0 says zero. What lies outside of the 15 exponents that hold most of a row is
stored beside it, column and value.

    w[n, k] = ±1.m · 2^(code[n, k] - 127) · 2^base[n]        code 1 … 15; 0: zero, or one of the row's outliers

Stored of ``[N, K]``: int32 ``[N / 16, K / 64, 3, 32, 4]``, a tile of 16 rows × 64 columns as the 32 lanes of a warp hold
the left operands of four m16n8k16 products. Lane 4 g + t has rows g and g + 8, and of each the columns

    32 (q / 2) + 8 t + 4 (q % 2) + 2 h + c         product q, half h of its 16 columns, one of a pair c

so that a lane finds the right operand's numbers side by side in a row of x. Its three times four words are: signs and
mantissas of row g, a word a product; those of row g + 8; codes, two words a row. ``word & 0x807F807F`` are signs and
mantissas of pair h = 0, the same of the word turned left by 8 bits those of h = 1; codes turned left by 4 (2 (q % 2) + h)
bits, ``& 0x07800780``, are a pair's exponents. So two weights are put together by one operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastlayers.errors import ArgumentError, describe
from fastlayers.integers import next_power_of_2

ROWS, COLUMNS = 16, 64
CODES = 15
SIGNS_AND_MANTISSAS, EXPONENTS = 0x807F807F, 0x07800780
# Decoded weights are as small as numbers get: what multiplies them is made so much larger, an exact power of two.
RAISED = 64
MAX_OUTLIERS = 32
_AT_ONCE = 1 << 25  # weights, of which packing needs 8 bytes each several times


class BF12Weights(NamedTuple):
    """What is stored of weights ``[N, K]``.

    Attributes
    ----------
    words : Tensor
        int32 ``[N / 16, K / 64, 3, 32, 4]``.
    scale : Tensor
        fp32 ``[N]``: ``2^(base - 64)``, for sums over ``2^64 · x``.
    columns : Tensor
        int32 ``[N, E]``: of outliers; E is a power of two, at most 32.
    values : Tensor
        bfloat16 ``[N, E]``: theirs; zero where there is none.
    """

    words: torch.Tensor
    scale: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class _Codes:
    """Some rows: sign and mantissa, exponent, and which are outliers."""

    bits: torch.Tensor
    codes: torch.Tensor
    base: torch.Tensor
    outlying: torch.Tensor


def refuses(n: int, k: int, dtype: torch.dtype) -> str | None:
    """Return why weights ``[N, K]`` are not packed, whatever their values are."""
    if dtype != torch.bfloat16:
        return f"weights are {str(dtype).removeprefix('torch.')}, not bfloat16"
    if n % ROWS or k % COLUMNS:
        return f"{n} x {k} weights are no multiple of {ROWS} x {COLUMNS}"
    return None


def pack_bf12(weight: torch.Tensor) -> BF12Weights | None:
    """Return weights ``[N, K]`` in 12 bits each; ``None``: a row has more than 32 outliers.

    Raises
    ------
    ArgumentError
        No bfloat16 matrix of a multiple of 16 × 64 weights.
    """
    matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.numel()
    if not matrix or refuses(*weight.shape, weight.dtype):
        raise ArgumentError("pack_bf12", "weight", describe(weight), f"bfloat16 [N, K], multiples of {ROWS} and {COLUMNS}")
    n, k = weight.shape
    step = max(1, _AT_ONCE // k // ROWS) * ROWS
    words = torch.empty(n // ROWS, k // COLUMNS, 3, 32, 4, dtype=torch.int32, device=weight.device)
    scale = torch.empty(n, dtype=torch.float32, device=weight.device)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for begin in range(0, n, step):
        part = weight[begin : begin + step]
        rows = _codes(part)
        words[begin // ROWS : (begin + step) // ROWS] = _words(rows)
        scale[begin : begin + step] = torch.ldexp(torch.ones_like(rows.base, dtype=torch.float32), rows.base - RAISED)
        most = int(rows.outlying.sum(-1).max())
        if most > MAX_OUTLIERS:
            return None
        kept.append(_outliers(part, rows.outlying, max(1, most)))
    most = next_power_of_2(max(each.shape[1] for each, _ in kept))
    columns, values = (
        torch.cat([torch.nn.functional.pad(each, (0, most - each.shape[1])) for each in parts])
        for parts in zip(*kept, strict=True)
    )
    return BF12Weights(words, scale, columns.contiguous(), values.contiguous())


def unpack_bf12(packed: BF12Weights) -> torch.Tensor:
    """Return the weights ``[N, K]`` that were packed: equal numbers."""
    words = packed.words.to(torch.int64) & 0xFFFFFFFF
    tiles, steps = words.shape[:2]
    weight = torch.empty(tiles, 2, 8, steps, 2, 4, 2, 2, 2, dtype=torch.float64, device=words.device)
    for b in range(2):
        for q in range(4):
            for h in range(2):
                signs = _turned(words[:, :, b, :, q], 8 * h) & SIGNS_AND_MANTISSAS
                both = signs | (_turned(words[:, :, 2, :, 2 * b + q // 2], 4 * (2 * (q % 2) + h)) & EXPONENTS)
                for c in range(2):
                    half = (both >> (16 * c)) & 0xFFFF
                    small = torch.where(half >= 1 << 15, half - (1 << 16), half).to(torch.int16).view(torch.bfloat16)
                    # [tiles, steps, g, t] to [tiles, g, steps, t]
                    lanes = small.double().view(tiles, steps, 8, 4).transpose(1, 2)
                    weight[:, b, :, :, q // 2, :, q % 2, h, c] = lanes
    found = weight.view(tiles * ROWS, steps * COLUMNS) * packed.scale[:, None].double() * 2.0**RAISED
    found.scatter_add_(1, packed.columns.to(torch.int64), packed.values.double())
    return found.to(torch.bfloat16)


def _codes(weight: torch.Tensor) -> _Codes:
    bits = weight.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
    exponent = (bits >> 7) & 0xFF
    zero = (bits & 0x7FFF) == 0
    counts = torch.zeros(len(weight), 256, dtype=torch.int32, device=weight.device)
    counts.scatter_add_(1, exponent, (~zero).to(torch.int32))
    sums = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
    # Exponents base + 1 … base + 15, of which none is that of infinities or of numbers without a leading one.
    base = (sums[:, CODES + 1 : 256] - sums[:, 1 : 256 - CODES]).argmax(1)
    codes = exponent - base[:, None]
    inside = (codes >= 1) & (codes <= CODES)
    kept = ((bits >> 8) & 0x80) | (bits & 0x7F)
    zeros = torch.zeros_like(bits)
    return _Codes(torch.where(inside, kept, zeros), torch.where(inside, codes, zeros), base, ~inside & ~zero)


def _words(rows: _Codes) -> torch.Tensor:
    """Return ``[tiles, steps, 3, 32, 4]``."""
    n, k = rows.bits.shape
    # Rows (b, g), columns (q // 2, t, q % 2, h, c).
    shape = n // ROWS, 2, 8, k // COLUMNS, 2, 4, 2, 2, 2
    bits, codes = rows.bits.view(shape), rows.codes.view(shape)
    signs = ((bits & 0x80) << 8) | (bits & 0x7F)
    pairs = signs[..., 0] | (signs[..., 1] << 16)
    exponents = (codes[..., 0] << 7) | (codes[..., 1] << 23)  # [tiles, b, g, steps, q // 2, t, q % 2, h]
    first = pairs[..., 0] | _turned(pairs[..., 1], -8)
    last = torch.zeros_like(exponents[..., 0, 0])
    for j in range(4):
        last |= _turned(exponents[..., j // 2, j % 2], -4 * j)
    # Behind tiles and steps: b, g, t, q // 2, q % 2; and g, t, b, q // 2.
    first = first.permute(0, 3, 1, 2, 5, 4, 6).reshape(n // ROWS, k // COLUMNS, 2, 32, 4)
    last = last.permute(0, 3, 2, 5, 1, 4).reshape(n // ROWS, k // COLUMNS, 1, 32, 4)
    words = torch.cat((first, last), 2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _outliers(weight: torch.Tensor, outlying: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return columns, in order, and values of each row's outliers."""
    row, column = outlying.nonzero(as_tuple=True)
    counts = outlying.sum(-1)
    slot = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    columns = torch.zeros(len(weight), most, dtype=torch.int32, device=weight.device)
    values = torch.zeros(len(weight), most, dtype=weight.dtype, device=weight.device)
    columns[row, slot], values[row, slot] = column.to(torch.int32), weight[row, column]
    return columns, values


def _turned(words: torch.Tensor, left: int) -> torch.Tensor:
    """Return 32 bits, in int64, turned left."""
    left %= 32
    return ((words << left) | (words >> (32 - left))) & 0xFFFFFFFF
