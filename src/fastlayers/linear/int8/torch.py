"""Int8Linear in native torch: exact integer products by ``torch._int_mm``, or by fp32 where that is exact.

``torch._int_mm`` on CUDA wants more than 16 rows and K, N multiples of 8: rows are padded, other sizes take
the second way. On a CPU it leaves results of K = 1 unwritten, which takes the second way, too; and old instruction
sets may saturate inside: a probe with the largest values decides, once a process.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn import functional as F

from fastlayers.linear.int8.layer import EPS, LARGEST, Int8LinearConfig

# Up to here an fp32 sum of int8 products is exact: 1024 · 127 · 128 < 2^24.
EXACT_DEPTH = 1024
CUDA_MIN_ROWS = 32


@lru_cache(maxsize=1)
def cpu_int_mm_is_exact() -> bool:
    """Return whether this CPU's ``torch._int_mm`` keeps sums of the largest products."""
    x = torch.full((4, 256), 127, dtype=torch.int8, device="cpu")
    x[1::2] = -128
    weight = torch.full((8, 256), -128, dtype=torch.int8, device="cpu")
    weight[1::2] = 127
    return torch.equal(torch._int_mm(x, weight.t()).double(), x.double() @ weight.t().double())


def exact_float_mm(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return int32 ``codes · weightᵀ`` by fp32 products over pieces of K short enough to be exact.

    fp64 on CUDA, where TF32 may be switched on.
    """
    wide, depth = (torch.float64, codes.shape[1]) if codes.is_cuda else (torch.float32, EXACT_DEPTH)
    total = torch.zeros((codes.shape[0], weight.shape[0]), dtype=torch.int32, device=codes.device)
    for start in range(0, codes.shape[1], depth):
        piece = slice(start, start + depth)
        total += F.linear(codes[:, piece].to(wide), weight[:, piece].to(wide)).to(torch.int32)
    return total


class TorchInt8Linear:
    """Any device, no synchronisation, int32 sums exact."""

    def __init__(self, cfg: Int8LinearConfig) -> None:
        self.cfg = cfg
        self.cpu_int_mm = cfg.in_features > 1 and cpu_int_mm_is_exact()
        self.cuda_int_mm = cfg.in_features % 8 == 0 and cfg.out_features % 8 == 0

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int8 codes ``[T, K]`` and fp32 scales ``[T, 1]``."""
        wide = rows.float()
        absmax = wide.abs().amax(-1, keepdim=True)
        broken = ~absmax.isfinite()
        # The divisor is a tensor: CUDA turns a division by a Python number into a product with 1/127.
        scale = absmax.clamp_min(EPS) / absmax.new_full((), LARGEST)
        codes = (wide / scale).round_().clamp_(-LARGEST, LARGEST).masked_fill_(broken, 0.0).to(torch.int8)
        return codes, scale.masked_fill(broken, torch.nan)

    def multiply(self, codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return int32 ``codes · weightᵀ`` ``[T, N]``, exact."""
        if not codes.is_cuda:
            return torch._int_mm(codes, weight.t()) if self.cpu_int_mm else exact_float_mm(codes, weight)
        if not self.cuda_int_mm:
            return exact_float_mm(codes, weight)
        rows = codes.shape[0]
        padded = F.pad(codes, (0, 0, 0, CUDA_MIN_ROWS - rows)) if rows < CUDA_MIN_ROWS else codes
        return torch._int_mm(padded, weight.t())[:rows]

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``y`` ``[..., N]``, a new tensor of ``x``'s dtype."""
        codes, scale = self.quantize(x.reshape(-1, x.shape[-1]))
        y = self.multiply(codes, weight).float().mul_(scale).mul_(weight_scale)
        if bias is not None:
            y += bias
        return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])
