"""Linear in native torch: cuBLAS on CUDA, oneDNN or MKL on the CPU."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fastlayers.linear.dense.layer import LinearConfig


def reads_beyond_rows(features: int, dtype: torch.dtype) -> bool:
    """Return whether a CPU's product may read one number behind each row: 16-bit numbers are taken in pairs.

    It multiplies that number by zero, which is harmless unless it is NaN or infinite: with rows that lie apart,
    whatever is between them.
    """
    return features % 2 == 1 and dtype.itemsize == 2


class TorchLinear:
    """``F.linear``; with a wider output the sum is kept in fp32, not widened after rounding."""

    def __init__(self, cfg: LinearConfig) -> None:
        self.widens, self.wide = cfg.y_dtype != cfg.dtype, cfg.y_dtype
        self.odd = reads_beyond_rows(cfg.in_features, cfg.dtype)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``y`` ``[..., N]``, a new tensor."""
        if self.odd and not x.is_cuda:
            x, weight = x.contiguous(), weight.contiguous()
        if not self.widens:
            return F.linear(x, weight, bias)
        if x.is_cuda and x.numel():
            # cuBLAS writes its fp32 sum; no fp32 copy of the weight.
            y = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=self.wide)
            y = y.view(*x.shape[:-1], weight.shape[0])
            return y if bias is None else y + bias
        return F.linear(x.to(self.wide), weight.to(self.wide), None if bias is None else bias.to(self.wide))
