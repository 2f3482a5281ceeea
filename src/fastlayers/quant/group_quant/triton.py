"""Group quantisation in Triton: a program takes a few (token, group) pairs, each group in registers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv
from fastlayers.operators import operator
from fastlayers.quant.group_quant.layer import LARGEST, LAYOUTS, PACKED, GroupQuantConfig, empty_scales
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import INTERPRET, to_e4m3


@triton.jit
def corrected(quotient, x, divisor, inverse):
    """Return a better ``x / divisor``: ``quotient`` plus what its exact remainder says.

    Markstein's theorem: with ``quotient`` one unit off at most, the result is rounded as a division rounds it. A
    product with the rounded reciprocal is two units off at most, so that two corrections do. A division costs more
    than all else that is done to a value here.
    """
    return tl.fma(tl.fma(quotient, -divisor, x), inverse, quotient)


@triton.jit
def scale_of(absmax, MAX: tl.constexpr, UE8M0: tl.constexpr):
    """Return fp32 ``absmax / MAX``, correctly rounded; for ue8m0 the next power of two that is not below."""
    if INTERPRET:  # its fma rounds twice
        scale = tl.div_rn(absmax, MAX)
    else:
        scale = corrected(corrected(absmax * (1.0 / MAX), absmax, MAX, 1.0 / MAX), absmax, MAX, 1.0 / MAX)
    if UE8M0:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def round_to_int8(x):
    """Return fp32 ``x`` (within ±127) as int8, rounded to even: 1.5 · 2^23 leaves no fraction bits."""
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def quantize_tile(x, eps, MAX: tl.constexpr, UE8M0: tl.constexpr, INT8: tl.constexpr, NARROW: tl.constexpr = False):
    """Return (codes, scales) of an fp32 tile whose rows are groups; a group that is not finite: 0 and NaN.

    ``NARROW``: all of ``x`` are values of a 16-bit type, which saves a correction (see ``divide_rows``).
    """
    # As integers, magnitudes keep their order; infinity and NaN are above all finite ones.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = largest < 0x7F800000
    absmax = tl.where(finite, largest, 0).to(tl.float32, bitcast=True)
    scale = scale_of(tl.maximum(absmax, eps), MAX, UE8M0)
    # |x / scale| exceeds MAX by rounding at most, so nothing needs to be clamped: the cast saturates.
    ratio = divide_rows(tl.where(finite[:, None], x, 0.0), scale, UE8M0, NARROW)
    if INT8:
        codes = round_to_int8(ratio)
    elif INTERPRET:
        codes = to_e4m3(ratio)
    else:
        codes = ratio.to(tl.float8e4nv)
    return codes, tl.where(finite, scale, float("nan"))


@triton.jit
def divide_rows(x, scale, POWER_OF_TWO: tl.constexpr, NARROW: tl.constexpr):
    """Return fp32 ``x / scale`` with one normal ``scale`` a row, correctly rounded.

    ``NARROW``: for ``x`` with 11 bits or fewer and a scale made of one of them. Of the quotients that can occur none
    is so near to a tie that a second correction moves a code: tests/quant/test_group_quant.py tries them.
    """
    if INTERPRET:  # its fma rounds twice
        return tl.div_rn(x, scale[:, None])
    inverse = 1.0 / scale
    inverse = tl.fma(tl.fma(inverse, -scale, 1.0), inverse, inverse)[:, None]
    ratio = x * inverse
    if not POWER_OF_TWO:
        ratio = corrected(ratio, x, scale[:, None], inverse)
        if not NARROW:
            ratio = corrected(ratio, x, scale[:, None], inverse)
    return ratio


@triton.jit
def requantized(x, scale, eps, MAX: tl.constexpr, UE8M0: tl.constexpr, NARROW: tl.constexpr = False):
    """Return fp32 ``x`` ``[K]`` as the values of its e4m3 codes in groups of 128, times fp32 ``scale`` ``[K / 128]``.

    For products without tensor cores: a group's own scale and ``scale``, a weight's, are multiplied first, then the
    codes by both. Rounded twice. A group that is not finite is NaN. ``NARROW``: see :func:`quantize_tile`.
    """
    codes, own = quantize_tile(tl.reshape(x, [x.shape[0] // 128, 128]), eps, MAX, UE8M0, False, NARROW)
    return tl.reshape(codes.to(tl.float32) * (own * scale)[:, None], [x.shape[0]])


@triton.jit
def tile_row():
    """Return which row of tiles this program has, in the grid of :class:`QuantTile`."""
    return tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)


@kernel(do_not_specialize=("rows", "groups", "s_stride_row", "s_stride_group"))
def _group_quant_kernel(
    x_ptr, q_ptr, s_ptr, rows, groups, x_stride, q_stride, s_stride_row, s_stride_group, eps,
    MAX: tl.constexpr, UE8M0: tl.constexpr, INT8: tl.constexpr, PACK: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, ROWS * GROUPS)
    row, group = tile_row() * ROWS + index // GROUPS, tl.program_id(0) * GROUPS + index % GROUPS
    inside = (row < rows) & (group < groups)
    row, column = row.to(tl.int64), group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + (row * x_stride)[:, None] + column, mask=inside[:, None], other=0.0)
    narrow: tl.constexpr = x.dtype.primitive_bitwidth == 16
    codes, scale = quantize_tile(x.to(tl.float32), eps, MAX, UE8M0, INT8, narrow)
    tl.store(q_ptr + (row * q_stride)[:, None] + column, codes, mask=inside[:, None])
    if PACK:  # a byte each, also behind the last group, to whole integers
        byte = tl.where(group < groups, scale.to(tl.int32, bitcast=True) >> 23, 0).to(tl.uint8)
        place = 4 * (row * s_stride_row + group // 4 * s_stride_group) + group % 4
        tl.store(s_ptr + place, byte, mask=(row < rows) & (group < (groups + 3) // 4 * 4))
    else:
        tl.store(s_ptr + row * s_stride_row + group * s_stride_group, scale, mask=inside)


@dataclass(frozen=True)
class QuantTile:
    """Rows and groups of one program, and its warps."""

    rows: int
    groups: int
    warps: int

    def grid(self, rows: int, groups: int) -> tuple[int, int, int]:
        """Return the grid: tiles along the groups, tiles along the rows, and how often the latter exceed a grid."""
        down, max_programs = cdiv(rows, self.rows), 65535
        return cdiv(groups, self.groups), min(down, max_programs), cdiv(down, max_programs)


def quant_tile(rows: int, groups: int, group: int) -> QuantTile:
    """Return the tile of one program: small where there is little to do, 4096 values where there is much."""
    wide, values = 128 // group, rows * groups * group
    if values <= 2**15:
        return QuantTile(1, wide, 1)
    if values <= 2**18:
        return QuantTile(1, 4 * wide, 4)
    # Four rows together write whole sectors of column-major scales.
    return QuantTile(4, (4 if values <= 2**24 else 8) * wide, 4)


def _fake(
    x: torch.Tensor, group: int, dtype: torch.dtype, ue8m0: bool, layout: int, eps: float, row_multiple: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, features = x.shape
    rows = -(-rows // row_multiple) * row_multiple
    return x.new_empty(rows, features, dtype=dtype), empty_scales(x, rows, features // group, LAYOUTS[layout])


@operator("group_quant", _fake)
def _group_quant(
    x: torch.Tensor, group: int, dtype: torch.dtype, ue8m0: bool, layout: int, eps: float, row_multiple: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.stride(-1) != 1:
        x = x.contiguous()
    (rows, features), groups = x.shape, x.shape[1] // group
    padded = -(-rows // row_multiple) * row_multiple
    q = torch.empty((padded, features), dtype=dtype, device=x.device)
    s = empty_scales(x, padded, groups, LAYOUTS[layout])
    if rows:
        tile, pack = quant_tile(rows, groups, group), LAYOUTS[layout] == PACKED
        _group_quant_kernel[tile.grid(rows, (groups + 3) // 4 * 4 if pack else groups)](
            x, q, s.t().view(torch.uint8) if pack else s, rows, groups, x.stride(0), features, *s.stride(), eps,
            MAX=LARGEST[dtype], UE8M0=ue8m0, INT8=dtype == torch.int8, PACK=pack,
            GROUP=group, ROWS=tile.rows, GROUPS=tile.groups, num_warps=tile.warps,
        )  # fmt: skip
    return q, s


class TritonGroupQuant:
    """Memory bound: reads x once, writes codes and scales once, in the layout asked for."""

    def __init__(self, cfg: GroupQuantConfig) -> None:
        self.group, self.dtype, self.eps = cfg.group, cfg.dtype, cfg.eps
        self.ue8m0, self.layout = cfg.scale_fmt == "ue8m0", LAYOUTS.index(cfg.scale_layout)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(q, s)`` for ``x`` ``[T, K]``, rows of any stride."""
        return self.padded(x, 1)

    def padded(self, x: torch.Tensor, row_multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(q, s)`` with T rounded up to a multiple; the rows beyond T are not initialised."""
        q, s = _group_quant(x, self.group, self.dtype, self.ue8m0, self.layout, self.eps, row_multiple)
        return q, s
