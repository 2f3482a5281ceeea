"""Planted bugs of ``group_quant``."""

from __future__ import annotations

import torch

from fastlayers.quant.group_quant.layer import empty_scales, packed_bytes
from fastlayers.quant.group_quant.torch import TorchGroupQuant

Pair = tuple[torch.Tensor, torch.Tensor]


class _HalfScale(TorchGroupQuant):
    def __call__(self, x: torch.Tensor) -> Pair:
        q, s = super().__call__(x)
        return q, s.mul_(0.5)


class _NeighboursScale(TorchGroupQuant):
    """Stores each scale one group too far."""

    def __call__(self, x: torch.Tensor) -> Pair:
        q, s = super().__call__(x)
        return q, s.copy_(s.roll(1, 1))


class _ReciprocalProduct(TorchGroupQuant):
    """Multiplies by a rounded 1/MAX: scales differ in the last bit."""

    def __call__(self, x: torch.Tensor) -> Pair:
        q, s = super().__call__(x)
        wide = x.float().view(x.shape[0], -1, self.cfg.group) if x.shape[0] else x.float()[:, None]
        off = wide.abs().amax(-1).clamp_min(self.cfg.eps) * torch.tensor(1.0 / self.largest)
        return q, s.copy_(off) if self.cfg.scale_fmt == "float" and x.shape[0] else s


class _RoundedDown(TorchGroupQuant):
    """Takes the power of two below: large values saturate."""

    def __call__(self, x: torch.Tensor) -> Pair:
        q, s = super().__call__(x)
        return q, s.mul_(0.5) if self.cfg.scale_fmt == "ue8m0" else s


class _Truncated(TorchGroupQuant):
    """Cuts int8 codes towards zero."""

    def __call__(self, x: torch.Tensor) -> Pair:
        q, s = super().__call__(x)
        if self.cfg.dtype != torch.int8:
            return q, s
        ratio = x.float().view(*s.shape, self.cfg.group) / s[..., None]
        return ratio.to(torch.int8).view(x.shape), s


class _LayoutIgnored(TorchGroupQuant):
    def __call__(self, x: torch.Tensor) -> Pair:
        q, s = super().__call__(x)
        return q, empty_scales(x, *s.shape, "row").copy_(s)


class _RowsNotPadded(TorchGroupQuant):
    def __call__(self, x: torch.Tensor) -> Pair:
        q, s = super().__call__(x)
        return q, empty_scales(x, *s.shape, "col").copy_(s) if self.cfg.scale_layout == "col_tma4" else s


class _HighestByteFirst(TorchGroupQuant):
    """Packs the first group's exponent into the highest byte."""

    def __call__(self, x: torch.Tensor) -> Pair:
        q, s = super().__call__(x)
        if s.dtype == torch.int32:
            turned = packed_bytes(s).unflatten(-1, (s.shape[1], 4)).flip(-1).contiguous().view(torch.int32)
            s.copy_(turned.view(s.shape))
        return q, s


class _BytesBehindAreLeft(TorchGroupQuant):
    """Leaves something behind the last group's exponent."""

    def __call__(self, x: torch.Tensor) -> Pair:
        q, s = super().__call__(x)
        if s.dtype == torch.int32 and x.shape[1] // self.cfg.group % 4:
            s[:, -1] |= 127 << 24
        return q, s


MUTANTS = {
    "highest_byte_first": _HighestByteFirst,
    "bytes_behind_are_left": _BytesBehindAreLeft,
    "half_scale": _HalfScale,
    "neighbours_scale": _NeighboursScale,
    "reciprocal_product": _ReciprocalProduct,
    "rounded_down": _RoundedDown,
    "truncated": _Truncated,
    "layout_ignored": _LayoutIgnored,
    "rows_not_padded": _RowsNotPadded,
}
