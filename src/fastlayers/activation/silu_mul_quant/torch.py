"""SiLU·mul·quantise in native torch operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastlayers.activation.silu_mul_quant.layer import E4M3_MAX, FLOOR, SiluMulQuantConfig, empty_scales


class TorchSiluMulQuant:
    """Any device; traceable."""

    def __init__(self, cfg: SiluMulQuantConfig) -> None:
        self.cfg = cfg

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(q, s)``, new tensors."""
        cfg, tokens = self.cfg, x.shape[0]
        y = (F.silu(x[:, : cfg.size]) * x[:, cfg.size :]).float()
        if cfg.size % cfg.group_size:
            y = F.pad(y, (0, cfg.groups * cfg.group_size - cfg.size))
        grouped = y.view(tokens, cfg.groups, cfg.group_size)
        scale = grouped.abs().amax(-1).clamp_min(FLOOR) / E4M3_MAX
        if cfg.scale_fmt == "ue8m0":
            # Round the exponent up unless the mantissa is zero.
            scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        q = (grouped / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        if cfg.scale_layout != "row":
            scale = empty_scales(tokens, cfg.groups, cfg.scale_layout, x.device).copy_(scale)
        q = q.view(tokens, cfg.groups * cfg.group_size)
        return (q if q.shape[1] == cfg.size else q[:, : cfg.size].contiguous()), scale
