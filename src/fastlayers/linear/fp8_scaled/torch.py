"""FP8ScaledLinear in native torch: weights stay e4m3, a slab of rows at a time becomes fp32 for the product."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fastlayers.linear.fp8_scaled.layer import EPS, FP8ScaledLinearConfig
from fastlayers.quant.block_quant import E4M3, E4M3_MAX, decode_e4m3

# Weights decoded at a time. On a CPU half a megabyte of fp32: larger pieces were four times slower, since the memory
# allocator gave each back to the system and fetched it again.
SLAB_ELEMENTS = {"cpu": 2**17, "cuda": 2**25}


def dynamic_scale(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return fp32 ``sx`` of fp32 ``x`` ``[..., T, K]``, NaN where ``x`` is not finite.

    Shape ``[..., T, 1]`` (``"token"``) or ``[..., 1, 1]`` (``"tensor"``: one for T and K).
    """
    if x.shape[-2] == 0:
        return x.new_ones((*x.shape[:-1], 1))
    absmax = x.abs().amax(-1, keepdim=True) if kind == "token" else x.abs().amax((-2, -1), keepdim=True)
    # The divisor is a tensor: CUDA turns a division by a Python number into a product with 1/448.
    scale = absmax.clamp_min(EPS) / absmax.new_full((), E4M3_MAX)
    return scale.masked_fill(~absmax.isfinite(), torch.nan)


def encode(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return fp32 ``x / scale`` as e4m3, saturated."""
    return (x / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


class TorchFP8ScaledLinear:
    """Any device, no synchronisation: fp32 sums of e4m3 values, scaled afterwards, rounded once."""

    def __init__(self, cfg: FP8ScaledLinearConfig) -> None:
        self.cfg = cfg

    def scale(self, rows: torch.Tensor, input_scale: torch.Tensor | None) -> torch.Tensor:
        """Return ``sx`` of fp32 ``rows`` ``[T, K]``, which broadcasts against them."""
        return dynamic_scale(rows, self.cfg.activation_scale) if input_scale is None else input_scale

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``y`` ``[..., N]``, a new tensor of ``x``'s dtype."""
        n, k = weight.shape
        rows = x.reshape(-1, k).float()
        scale = self.scale(rows, input_scale)
        codes = decode_e4m3(encode(rows, scale))
        y = x.new_empty((rows.shape[0], n), dtype=torch.float32)
        step = max(1, SLAB_ELEMENTS.get(x.device.type, 2**17) // k)
        for start in range(0, n, step):
            y[:, start : start + step] = F.linear(codes, decode_e4m3(weight[start : start + step]))
        y.mul_(scale).mul_(weight_scale)
        if bias is not None:
            y += bias
        return y.to(x.dtype).view(*x.shape[:-1], n)
