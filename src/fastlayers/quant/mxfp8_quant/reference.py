"""MXFP8 quantisation's oracle: pads, then quantises group by group, exponents by frexp in fp64."""

from __future__ import annotations

import torch

from fastlayers.quant.mxfp8_quant.layer import GROUP, LARGEST, MXFP8QuantConfig


class ReferenceMXFP8Quant:
    """See :mod:`fastlayers.quant.mxfp8_quant.layer` for the formula. Codes are returned as fp32 values."""

    def __init__(self, cfg: MXFP8QuantConfig) -> None:
        self.cfg = cfg

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(q, bytes)`` for ``x`` ``[T, K]``."""
        rows, features = x.shape
        padded = x.new_zeros(rows, self.cfg.padded(features), dtype=torch.float64)
        padded[:, :features] = x.double()
        groups = padded.reshape(rows, padded.shape[1] // GROUP, GROUP)
        broken = ~groups.isfinite().all(-1)
        groups = groups.masked_fill(broken[..., None], 0.0)
        absmax = groups.abs().amax(-1)
        # The quotient in fp32, as everywhere; then the power of two that is not below it.
        mantissa, exponent = torch.frexp((absmax / LARGEST).float().double())
        exponent = (exponent - (mantissa == 0.5).int() + 127).clamp_min(1)
        exponent = exponent.masked_fill(absmax == 0, 0)
        codes = torch.ldexp(groups, 127 - exponent[..., None]).float().to(torch.float8_e4m3fn).float()
        return codes.reshape(padded.shape), exponent.masked_fill(broken, 255).to(torch.uint8)
