"""Group quantisation in native torch operations, bit-equal on every device."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fastlayers.operators import operator
from fastlayers.quant.group_quant.layer import LARGEST, LAYOUTS, PACKED, GroupQuantConfig, empty_scales


def round_up_to_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two that is not below a positive normal fp32 ``scale``, by its bits."""
    bits = scale.view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def _strided(scale: torch.Tensor, layout: int) -> torch.Tensor:
    rows, groups = scale.shape
    return empty_scales(scale, rows, groups, LAYOUTS[layout])


@operator("group_scales_laid_out", _strided)
def _laid_out(scale: torch.Tensor, layout: int) -> torch.Tensor:
    """Return ``scale`` in a layout of its own: an operator, since a compiler chooses the strides of its buffers."""
    if LAYOUTS[layout] == PACKED:
        # The exponents' bits; NaN has all of them, as in ue8m0.
        exponents = (scale.view(torch.int32) >> 23).to(torch.uint8)
        return _strided(scale, layout).copy_(F.pad(exponents, (0, -scale.shape[1] % 4)).view(torch.int32))
    return _strided(scale, layout).copy_(scale)


class TorchGroupQuant:
    """Any device, no synchronisation."""

    def __init__(self, cfg: GroupQuantConfig) -> None:
        self.cfg, self.largest = cfg, LARGEST[cfg.dtype]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(q, s)`` for ``x`` ``[T, K]``."""
        rows, features = x.shape
        groups = x.float().view(rows, features // self.cfg.group, self.cfg.group)
        absmax = groups.abs().amax(-1)
        broken = ~absmax.isfinite()
        # A tensor as divisor: CUDA turns a division by a Python number into a product with 1/MAX.
        scale = absmax.clamp_min(self.cfg.eps) / absmax.new_full((), self.largest)
        if self.cfg.scale_fmt == "ue8m0":
            scale = round_up_to_power_of_two(scale)
        ratio = (groups / scale[..., None]).clamp_(-self.largest, self.largest)
        ratio = ratio.masked_fill(broken[..., None], 0.0)
        codes = (ratio.round_() if self.cfg.dtype == torch.int8 else ratio).to(self.cfg.dtype)
        scale = scale.masked_fill(broken, torch.nan)
        if self.cfg.scale_layout != "row":
            scale = _laid_out(scale, LAYOUTS.index(self.cfg.scale_layout))
        return codes.view(rows, features), scale
