"""bf12: bfloat16 weights in 12 bits each, without loss.

A row's weights lie within few powers of two: sign and mantissa keep their 8 bits, the exponent becomes 4 bits, its
distance from the row's base, of which 0 says zero. What lies outside of the 15 exponents that hold most of a row is
stored beside it, column and value.

    w[n, k] = ±1.m · 2^(code[n, k] - 127) · 2^base[n]        code 1 … 15; 0: zero, or one of the row's outliers

Stored of ``[N, K]``: int32 ``[N, 3 K / 8]``. With R = 32, or 16 or 8 where K asks for it, a chunk of 8 R columns is
three runs of R words; columns i, i + R, …, i + 7 R of the chunk share word i of each run: two runs have signs and
mantissas of two pairs of columns each, the last one all their codes. A pair is the halves of a word: ``word &
0x807F807F`` are the first pair's signs and mantissas, the same of the word turned left by 8 bits the second pair's;
codes turned left by 4 j bits, ``& 0x07800780``, are the exponents of pair j. So one operation puts two weights
together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastlayers.errors import ArgumentError, describe
from fastlayers.integers import next_power_of_2

RUNS = 32, 16, 8
CODES = 15
SIGNS_AND_MANTISSAS, EXPONENTS = 0x807F807F, 0x07800780
# Decoded weights are as small as numbers get: what multiplies them is made so much larger, an exact power of two.
RAISED = 64
# Beyond it the row's scale would be infinite: weights of 2^80 and more are outliers.
_LARGEST_BASE = 127 + RAISED
MAX_OUTLIERS = 64
TOO_MANY = f"a row has more than {MAX_OUTLIERS} weights outside of its {CODES} exponents"
NO_MEMORY = "no memory is left for a copy"
# Of fewer weights a product of one token takes as long as its launch and its sums do: benchmarks/notes/bf12.md.
LEAST = 12 << 20
_AT_ONCE = 1 << 25  # weights, of which packing needs 8 bytes each several times


class BF12Weights(NamedTuple):
    """What is stored of weights ``[N, K]``.

    Attributes
    ----------
    words : Tensor
        int32 ``[N, 3 K / 8]``.
    scale : Tensor
        fp32 ``[N]``: ``2^(base - 64)``, for sums over ``2^64 · x``.
    columns : Tensor
        int32 ``[N, E]``: of outliers; E is a power of two, at most 64.
    values : Tensor
        bfloat16 ``[N, E]``: theirs; zero where there is none.
    """

    words: torch.Tensor
    scale: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Return the bytes of all."""
        return sum(each.numel() * each.element_size() for each in self)


@dataclass(frozen=True)
class _Rows:
    """Some rows' codes: sign and mantissa, exponent, and which are outliers."""

    bits: torch.Tensor
    codes: torch.Tensor
    base: torch.Tensor
    outlying: torch.Tensor


def why_not_bf12(weight: torch.Tensor) -> str:
    """Return why weights ``[…, K]`` cannot be stored so, whatever their values are; an empty text: they can."""
    if weight.is_meta:
        return "weights have no values yet"
    if weight.dtype != torch.bfloat16:
        return f"weights are {str(weight.dtype).removeprefix('torch.')}, not bfloat16"
    if run_of(weight.shape[-1]) is None:
        return f"{weight.shape[-1]} input features are no multiple of 64 up to {1 << 15}"
    return "" if weight.numel() >= LEAST else f"{weight.numel()} weights are fewer than {LEAST}"


def run_of(k: int) -> int | None:
    """Return how many words a run has of so many columns; ``None``: they are not packed."""
    return next((run for run in RUNS if k % (8 * run) == 0 and 0 < k <= 1 << 15), None)


def pack_bf12(weight: torch.Tensor) -> BF12Weights | None:
    """Return weights ``[N, K]`` in 12 bits each; ``None``: a row has more than 64 outliers.

    Raises
    ------
    ArgumentError
        No bfloat16 matrix, or K is no multiple of 64 up to 32,768.
    """
    matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.numel()
    if not matrix or weight.dtype != torch.bfloat16 or run_of(weight.shape[1]) is None:
        accepted = f"bfloat16 [N, K], K a multiple of 64 up to {1 << 15}"
        raise ArgumentError("pack_bf12", "weight", describe(weight), accepted)
    n, k = weight.shape
    step = max(1, _AT_ONCE // k)
    words = torch.empty(n, k // 8 * 3, dtype=torch.int32, device=weight.device)
    scale = torch.empty(n, dtype=torch.float32, device=weight.device)
    beside: list[tuple[torch.Tensor, torch.Tensor]] = []
    for begin in range(0, n, step):
        part = weight[begin : begin + step]
        rows = _rows(part)
        most = int(rows.outlying.sum(-1).max())
        if most > MAX_OUTLIERS:
            return None
        words[begin : begin + step] = _words(rows)
        scale[begin : begin + step] = torch.ldexp(torch.ones_like(rows.base, dtype=torch.float32), rows.base - RAISED)
        beside.append(_outliers(part, rows.outlying, max(1, most)))
    most = next_power_of_2(max(each.shape[1] for each, _ in beside))
    columns, values = (
        torch.cat([torch.nn.functional.pad(each, (0, most - each.shape[1])) for each in parts])
        for parts in zip(*beside, strict=True)
    )
    return BF12Weights(words, scale, columns, values)


def unpack_bf12(packed: BF12Weights) -> torch.Tensor:
    """Return the weights ``[N, K]`` that were packed: equal numbers, zeros perhaps without their sign."""
    n, width = packed.words.shape
    words = packed.words.view(n, -1, 3, run_of(width // 3 * 8) or 1).to(torch.int64) & 0xFFFFFFFF
    found = []
    for pair in range(4):
        both = (_turned(words[:, :, pair // 2], 8 * (pair % 2)) & SIGNS_AND_MANTISSAS) | (
            _turned(words[:, :, 2], 4 * pair) & EXPONENTS
        )
        found += [both & 0xFFFF, both >> 16]
    bits = torch.stack(found, 2).flatten(1)
    small = torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.bfloat16).double()
    weight = small * packed.scale[:, None].double() * 2.0**RAISED
    weight.scatter_add_(1, packed.columns.to(torch.int64), packed.values.double())
    return weight.to(torch.bfloat16)


def _rows(weight: torch.Tensor) -> _Rows:
    bits = weight.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
    exponent = (bits >> 7) & 0xFF
    zero = (bits & 0x7FFF) == 0
    counts = torch.zeros(len(weight), 256, dtype=torch.int32, device=weight.device)
    counts.scatter_add_(1, exponent, (~zero).to(torch.int32))
    sums = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
    # Exponents base + 1 … base + 15, of which none is that of infinities or of numbers without a leading one.
    first = torch.arange(1, _LARGEST_BASE + 2, device=weight.device)
    base = (sums[:, first + CODES] - sums[:, first]).argmax(1)
    codes = exponent - base[:, None]
    inside = (codes >= 1) & (codes <= CODES)
    kept = ((bits >> 8) & 0x80) | (bits & 0x7F)
    return _Rows(kept.masked_fill(~inside, 0), codes.masked_fill(~inside, 0), base, ~inside & ~zero)


def _words(rows: _Rows) -> torch.Tensor:
    n, k = rows.bits.shape
    shape = n, -1, 8, run_of(k) or 1
    bits, codes = rows.bits.view(shape), rows.codes.view(shape)
    halves = ((bits & 0x80) << 8) | (bits & 0x7F)
    pairs = halves[:, :, 0::2] | (halves[:, :, 1::2] << 16)
    exponents = (codes[:, :, 0::2] << 7) | (codes[:, :, 1::2] << 23)
    first = pairs[:, :, 0::2] | _turned(pairs[:, :, 1::2], -8)  # [n, chunks, 2, R]
    last = sum(_turned(exponents[:, :, j], -4 * j) for j in range(4))
    assert isinstance(last, torch.Tensor)
    words = torch.cat((first, last[:, :, None]), 2).reshape(n, -1)
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
