"""SiLU·mul·quantise in native torch operations: the two separate layers' own code, one after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastlayers.activation.silu_mul_quant.layer import FLOOR, SiluMulQuantConfig
from fastlayers.quant.group_quant.layer import GroupQuantConfig
from fastlayers.quant.group_quant.torch import TorchGroupQuant


class TorchSiluMulQuant:
    """Any device; traceable."""

    def __init__(self, cfg: SiluMulQuantConfig) -> None:
        self.cfg = cfg
        self.quantize = TorchGroupQuant(
            GroupQuantConfig(cfg.group_size, scale_fmt=cfg.scale_fmt, scale_layout=cfg.scale_layout, eps=FLOOR)
        )

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(q, s)``, new tensors."""
        size, padded = self.cfg.size, self.cfg.groups * self.cfg.group_size
        y = F.silu(x[:, :size]) * x[:, size:]
        q, s = self.quantize(y if padded == size else F.pad(y, (0, padded - size)))
        return (q if padded == size else q[:, :size].contiguous()), s
