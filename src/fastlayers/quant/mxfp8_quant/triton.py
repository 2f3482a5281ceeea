"""MXFP8 quantisation in Triton: a program takes a few groups of a row, the tail included, which it does not load."""

from __future__ import annotations

import torch
import triton.language as tl

from fastlayers.integers import cdiv
from fastlayers.operators import operator
from fastlayers.quant.mxfp8_quant.layer import GROUP, LARGEST, MXFP8QuantConfig
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import to_e4m3

_GROUP, _LARGEST = tl.constexpr(GROUP), tl.constexpr(LARGEST)


@kernel(do_not_specialize=("pairs",))
def _mxfp8_quant_kernel(
    x_ptr, q_ptr, s_ptr, pairs, groups, features, x_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    row, group = pair // groups, pair % groups
    lane = tl.arange(0, _GROUP)[None, :]
    column = (group * _GROUP)[:, None] + lane
    mask = inside[:, None] & (column < features)
    x = tl.load(x_ptr + (row * x_stride)[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), axis=1) != 0
    x = tl.where(finite[:, None], x, 0.0)
    absmax = tl.max(tl.abs(x), axis=1)
    bits = tl.div_rn(absmax, _LARGEST).to(tl.int32, bitcast=True)
    # The next power of two that is not below, by its exponent byte; see the formula for the smallest ones.
    byte = tl.maximum((bits + 0x7FFFFF) >> 23, 1)
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    tl.store(q_ptr + pair[:, None] * _GROUP + lane, to_e4m3(x * inverse[:, None]), mask=inside[:, None])
    byte = tl.where(finite, tl.where(absmax == 0.0, 0, byte), 255)
    tl.store(s_ptr + pair, byte.to(tl.uint8), mask=inside)


def _fake(x: torch.Tensor, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[0]
    q = x.new_empty((rows, padded), dtype=torch.float8_e4m3fn)
    return q, x.new_empty((rows, padded // GROUP), dtype=torch.uint8)


@operator("mxfp8_quant", _fake)
def _mxfp8_quant(x: torch.Tensor, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
    if x.stride(-1) != 1:
        x = x.contiguous()
    q, scales = _fake(x, padded)
    if pairs := scales.numel():
        # Few pairs: small programs, so that a decode step spreads over the SMs.
        block, warps = (16, 1) if pairs <= 8192 else (128, 4)
        _mxfp8_quant_kernel[(cdiv(pairs, block),)](
            x, q, scales, pairs, scales.shape[1], x.shape[1], x.stride(0), BLOCK=block, num_warps=warps
        )  # fmt: skip
    return q, scales


class TritonMXFP8Quant:
    """Memory bound: reads x once, writes codes and scales once, padding included."""

    def __init__(self, cfg: MXFP8QuantConfig) -> None:
        self.cfg = cfg

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(q, bytes)`` for ``x`` ``[T, K]``, rows of any stride."""
        q, scales = _mxfp8_quant(x, self.cfg.padded(x.shape[1]))
        return q, scales
