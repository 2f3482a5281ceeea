"""Group quantisation in native torch operations, bit-equal on every device."""

from __future__ import annotations

import torch

from fastlayers.quant.group_quant.layer import LARGEST, GroupQuantConfig, empty_scales


def round_up_to_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two that is not below a positive normal fp32 ``scale``, by its bits."""
    bits = scale.view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


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
            scale = empty_scales(x, rows, features // self.cfg.group, self.cfg.scale_layout).copy_(scale)
        return codes.view(rows, features), scale
