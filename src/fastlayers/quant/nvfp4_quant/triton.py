"""NVFP4 quantisation in Triton: a program takes a few (row, group) pairs; a row's expert is found by halving."""

from __future__ import annotations

import torch
import triton.language as tl

from fastlayers.integers import cdiv
from fastlayers.operators import operator
from fastlayers.quant.nvfp4_quant.layer import GROUP, LARGEST, NVFP4QuantConfig, first_scale_rows
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import to_e4m3

_GROUP, _LARGEST = tl.constexpr(GROUP), tl.constexpr(LARGEST)


@kernel(do_not_specialize=("rows", "pairs"))
def _nvfp4_quant_kernel(
    x_ptr, global_ptr, offsets_ptr, first_ptr, q_ptr, s_ptr, rows, pairs, groups, x_stride,
    EXPERTS: tl.constexpr, STEPS: tl.constexpr, SWIZZLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    row, group = pair // groups, pair % groups
    # How many experts have begun: the last of them has the row, if it has not ended.
    low, high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + (EXPERTS + 1)
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        begun = tl.load(offsets_ptr + tl.minimum(middle, EXPERTS), mask=inside, other=0).to(tl.int64) <= row
        go = low < high
        low = tl.where(go & begun, middle + 1, low)
        high = tl.where(go & (begun == 0), middle, high)
    expert = low - 1
    somebodys = inside & (expert >= 0) & (expert < EXPERTS)
    expert = tl.minimum(tl.maximum(expert, 0), EXPERTS - 1)
    column = (group * _GROUP)[:, None] + tl.arange(0, _GROUP)[None, :]
    x = tl.load(x_ptr + (row * x_stride)[:, None] + column, mask=somebodys[:, None], other=0.0).to(tl.float32)
    y = x * tl.load(global_ptr + expert, mask=somebodys, other=0.0)[:, None]
    finite = tl.min((tl.abs(y) < float("inf")).to(tl.int32), axis=1) != 0
    y = tl.where(finite[:, None], y, 0.0)
    scale = to_e4m3(tl.div_rn(tl.max(tl.abs(y), axis=1), _LARGEST))
    wide = scale.to(tl.float32)
    ratio = tl.where((wide == 0.0)[:, None], 0.0, tl.div_rn(y, tl.where(wide == 0.0, 1.0, wide)[:, None]))
    size = tl.abs(ratio)
    # To nearest: ties below odd codes go down, those above go up, to the even one.
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    code = tl.where((ratio < 0.0) & (code > 0), code | 8, code)
    first, second = tl.split(tl.reshape(code, (BLOCK, _GROUP // 2, 2)))
    half = tl.arange(0, _GROUP // 2)[None, :]
    tl.store(q_ptr + pair[:, None] * (_GROUP // 2) + half, (first | second << 4).to(tl.uint8), mask=inside[:, None])
    byte = tl.where(finite, scale.to(tl.uint8, bitcast=True), 0x7F).to(tl.uint8)
    if SWIZZLED:
        at = row - tl.load(offsets_ptr + expert, mask=somebodys, other=0) + tl.load(first_ptr + expert, mask=somebodys)
        tile, lane = at // 128 * ((groups + 3) // 4) + group // 4, at % 128
        tl.store(s_ptr + tile * 512 + lane % 32 * 16 + lane // 32 * 4 + group % 4, byte, mask=somebodys)
    else:
        tl.store(s_ptr + pair, byte, mask=inside)


def _fake(
    x: torch.Tensor, global_scale: torch.Tensor, offsets: torch.Tensor, swizzled: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, groups = x.shape[0], x.shape[1] // GROUP
    codes = x.new_empty((rows, x.shape[1] // 2), dtype=torch.uint8)
    if not swizzled:
        return codes, x.new_empty((rows, groups), dtype=torch.uint8)
    cfg = NVFP4QuantConfig(global_scale.shape[0], "swizzled")
    return codes, x.new_empty((cfg.scale_rows(rows) * (-(-groups // 4) * 4),), dtype=torch.uint8)


@operator("nvfp4_quant", _fake)
def _nvfp4_quant(
    x: torch.Tensor, global_scale: torch.Tensor, offsets: torch.Tensor, swizzled: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.stride(-1) != 1:
        x = x.contiguous()
    codes, scales = _fake(x, global_scale, offsets, swizzled)
    if swizzled:
        scales.zero_()  # what belongs to no row
    (rows, features), experts = x.shape, global_scale.shape[0]
    groups = features // GROUP
    if pairs := rows * groups:
        block, warps = (32, 1) if pairs <= 16384 else (256, 4)
        first = first_scale_rows(offsets) if swizzled else offsets
        _nvfp4_quant_kernel[(cdiv(pairs, block),)](
            x, global_scale, offsets, first, codes, scales, rows, pairs, groups, x.stride(0),
            EXPERTS=experts, STEPS=(experts + 1).bit_length(), SWIZZLED=swizzled, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return codes, scales


class TritonNVFP4Quant:
    """Memory bound: reads x once, writes codes and scales once; swizzled scales are zeroed before."""

    def __init__(self, cfg: NVFP4QuantConfig) -> None:
        self.swizzled = cfg.scale_layout == "swizzled"

    def __call__(
        self, x: torch.Tensor, global_scale: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(codes, scale bytes)``."""
        codes, scales = _nvfp4_quant(x, global_scale, offsets, self.swizzled)
        return codes, scales
