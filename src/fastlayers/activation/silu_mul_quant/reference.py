"""The oracle of SiLU·mul·quantise: group by group, fp32 after the roundings that the contract names."""

from __future__ import annotations

import torch

from fastlayers.activation.silu_mul_quant.layer import E4M3_MAX, FLOOR, SiluMulQuantConfig


class ReferenceSiluMulQuant:
    """See :mod:`fastlayers.activation.silu_mul_quant.layer` for the formula."""

    def __init__(self, cfg: SiluMulQuantConfig) -> None:
        self.cfg = cfg

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(q, s)`` with row-major scales."""
        gate, up = x[:, : self.cfg.size].float(), x[:, self.cfg.size :].float()
        silu = (gate * torch.sigmoid(gate)).to(x.dtype).float()
        y = (silu * up).to(x.dtype).float()
        codes, scales = [], []
        for group in y.split(self.cfg.group_size, dim=1):
            finite = group.isfinite().all(1, keepdim=True)
            group = group.where(finite, 0.0)
            scale = group.abs().amax(1, keepdim=True).clamp_min(FLOOR) / E4M3_MAX
            if self.cfg.scale_fmt == "ue8m0":
                mantissa, exponent = torch.frexp(scale)  # scale = mantissa · 2^exponent, mantissa in [0.5, 1)
                scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
            codes.append((group / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn))
            scales.append(scale.where(finite, torch.nan))
        return torch.cat(codes, 1), torch.cat(scales, 1)
