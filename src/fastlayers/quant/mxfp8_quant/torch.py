"""MXFP8 quantisation in native torch operations, bit-equal on every device."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fastlayers.quant.mxfp8_quant.layer import GROUP, LARGEST, MXFP8QuantConfig


def scale_byte(absmax: torch.Tensor) -> torch.Tensor:
    """Return the int32 exponent byte of the smallest power of two that is not below ``absmax / 448``."""
    # A tensor as divisor: CUDA turns a division by a Python number into a product with 1/448.
    bits = (absmax / absmax.new_full((), LARGEST)).view(torch.int32)
    byte = ((bits + 0x7FFFFF) >> 23).clamp_min(1)
    return torch.where(absmax == 0, 0, byte)


class TorchMXFP8Quant:
    """Any device, no synchronisation. Pads by a copy; only the kernel fuses."""

    def __init__(self, cfg: MXFP8QuantConfig) -> None:
        self.cfg = cfg

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(q, bytes)`` for ``x`` ``[T, K]``."""
        rows, features = x.shape
        padded = self.cfg.padded(features)
        groups = F.pad(x.float(), (0, padded - features)).view(rows, padded // GROUP, GROUP)
        absmax = groups.abs().amax(-1)
        broken = ~absmax.isfinite()
        byte = scale_byte(absmax.masked_fill(broken, 0.0))
        # 2^(127 - byte) as its bits; a power of two multiplies exactly.
        inverse = ((254 - byte.clamp_min(1)) << 23).view(torch.float32)
        codes = (groups.masked_fill(broken[..., None], 0.0) * inverse[..., None]).to(torch.float8_e4m3fn)
        return codes.view(rows, padded), byte.masked_fill(broken, 255).to(torch.uint8)
