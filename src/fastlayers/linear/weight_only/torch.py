"""WeightOnlyLinear in native torch: weights stay packed, a slab of rows at a time becomes fp32 for the product."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fastlayers.linear.fp8_scaled.torch import SLAB_ELEMENTS
from fastlayers.linear.weight_only.layer import ZERO, WeightOnlyLinearConfig
from fastlayers.quant.block_quant import E4M3, decode_e4m3
from fastlayers.quant.packed_codes import unpack_nibbles


def decoded(
    format: str, group_size: int, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None,
    index: torch.Tensor | None = None, *, scaled: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Return fp32 ``(code - zero) · scale`` ``[..., N, K]``; without ``scaled`` a scale per channel is left out.

    ``scale`` and ``zero`` are ``[..., G, N]``.
    """
    if weight.dtype == E4M3:
        codes = decode_e4m3(weight)
    else:
        codes = (unpack_nibbles(weight) if format == "w4a16" else weight).float()
    if not group_size:
        codes -= ZERO[format] if zero is None else zero.mT
        return codes.mul_(scale.mT) if scaled else codes
    if index is not None:
        codes -= ZERO[format] if zero is None else zero.mT[..., index]
        return codes.mul_(scale.mT[..., index])
    grouped = codes.unflatten(-1, (-1, group_size))
    grouped -= ZERO[format] if zero is None else zero.mT[..., None]
    grouped *= scale.mT[..., None]
    return codes


class TorchWeightOnlyLinear:
    """Any device, no synchronisation: fp32 sums, rounded once."""

    def __init__(self, cfg: WeightOnlyLinearConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_zero: torch.Tensor | None,
        group_index: torch.Tensor | None, bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``y`` ``[..., N]``, a new tensor of ``x``'s dtype."""
        cfg = self.cfg
        n, k = cfg.out_features, cfg.in_features
        rows = x.reshape(-1, k).float()
        y = x.new_empty((rows.shape[0], n), dtype=torch.float32)
        step = max(1, SLAB_ELEMENTS.get(x.device.type, 2**17) // k)
        for start in range(0, n, step):
            some = slice(start, start + step)
            zero = None if weight_zero is None else weight_zero[:, some]
            w = decoded(
                cfg.format, cfg.group_size, weight[some], weight_scale[:, some], zero, group_index, scaled=False
            )
            y[:, some] = F.linear(rows, w.to(cfg.dtype).float() if cfg.group_size else w)
        if not cfg.group_size:
            y.mul_(weight_scale[0])
        if bias is not None:
            y += bias
        return y.to(x.dtype).view(*x.shape[:-1], n)
