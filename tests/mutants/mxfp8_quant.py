"""Planted bugs of MXFP8 quantisation."""

from __future__ import annotations

import torch

from fastlayers.quant.mxfp8_quant.layer import GROUP, MXFP8QuantConfig
from fastlayers.quant.mxfp8_quant.torch import TorchMXFP8Quant

Result = tuple[torch.Tensor, torch.Tensor]


class RoundedDown(TorchMXFP8Quant):
    """Rounds scales down: the largest values saturate."""

    def __call__(self, x: torch.Tensor) -> Result:
        q, scales = super().__call__(x)
        return (q.float() * 2).clamp(-448, 448).to(q.dtype), scales - (scales > 1).to(torch.uint8)


class ReadsTail(TorchMXFP8Quant):
    """Fills the tail with the last feature instead of zeros."""

    def __call__(self, x: torch.Tensor) -> Result:
        tail = x[:, -1:].expand(-1, self.cfg.padded(x.shape[1]) - x.shape[1])
        return super().__call__(torch.cat([x, tail], 1))


class StaleTailScales(TorchMXFP8Quant):
    """Leaves 1.0 where the tail's scales are."""

    def __call__(self, x: torch.Tensor) -> Result:
        q, scales = super().__call__(x)
        scales[:, -(-x.shape[1] // GROUP) :] = 127
        return q, scales


class TruncatedGroup(TorchMXFP8Quant):
    """Drops a last group that is not whole."""

    def __call__(self, x: torch.Tensor) -> Result:
        x = x.clone()
        x[:, x.shape[1] // GROUP * GROUP :] = 0
        return super().__call__(x)


class NextPower(TorchMXFP8Quant):
    """Adds one to every exponent, also where the quotient is a power of two."""

    def __call__(self, x: torch.Tensor) -> Result:
        q, scales = super().__call__(x)
        return (q.float() * 0.5).to(q.dtype), scales + (scales > 0).to(torch.uint8)


class WrongAlignment(TorchMXFP8Quant):
    """Pads to whole groups only."""

    def __init__(self, cfg: MXFP8QuantConfig) -> None:
        super().__init__(MXFP8QuantConfig(GROUP))


MUTANTS = {
    "rounded_down": RoundedDown,
    "reads_tail": ReadsTail,
    "stale_tail_scales": StaleTailScales,
    "truncated_group": TruncatedGroup,
    "next_power": NextPower,
    "wrong_alignment": WrongAlignment,
}
