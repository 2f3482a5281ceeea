"""Planted bugs of SiLU·mul·quantise."""

from __future__ import annotations

from dataclasses import replace

import torch

from fastlayers.activation.silu_mul_quant.layer import SiluMulQuantConfig
from fastlayers.activation.silu_mul_quant.torch import TorchSiluMulQuant

Pair = tuple[torch.Tensor, torch.Tensor]


class HalfScale(TorchSiluMulQuant):
    """Returns half the scale."""

    def __call__(self, x: torch.Tensor) -> Pair:
        q, s = super().__call__(x)
        return q, s * 0.5


class Inverse(TorchSiluMulQuant):
    """Returns the multiplier instead of the scale."""

    def __call__(self, x: torch.Tensor) -> Pair:
        q, s = super().__call__(x)
        return q, 1.0 / s


class Swapped(TorchSiluMulQuant):
    """Takes up for gate."""

    def __call__(self, x: torch.Tensor) -> Pair:
        return super().__call__(x.roll(x.shape[1] // 2, 1))


class RowScale(TorchSiluMulQuant):
    """One scale for a whole row."""

    def __call__(self, x: torch.Tensor) -> Pair:
        q, s = super().__call__(x)
        wide = q.float() * s.repeat_interleave(self.cfg.group_size, 1)[:, : q.shape[1]]
        whole = s.amax(1, keepdim=True)
        return (wide / whole).to(torch.float8_e4m3fn), whole.expand(s.shape).contiguous()


class FloorsPowerOfTwo(TorchSiluMulQuant):
    """Rounds the ue8m0 scale down: codes saturate."""

    def __init__(self, cfg: SiluMulQuantConfig) -> None:
        super().__init__(replace(cfg, scale_fmt="float"))
        self.down = cfg.scale_fmt == "ue8m0"

    def __call__(self, x: torch.Tensor) -> Pair:
        q, s = super().__call__(x)
        if not self.down:
            return q, s
        floored = (s.view(torch.int32) & 0x7F800000).view(torch.float32)
        wide = (s / floored).repeat_interleave(self.cfg.group_size, 1)[:, : q.shape[1]]
        return (q.float() * wide).clamp(-448, 448).to(torch.float8_e4m3fn), floored


MUTANTS = {
    "half_scale": HalfScale,
    "inverse": Inverse,
    "swapped": Swapped,
    "row_scale": RowScale,
    "floors_power_of_two": FloorsPowerOfTwo,
}
