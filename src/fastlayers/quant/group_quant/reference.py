"""Group quantisation's oracle: one step a line."""

from __future__ import annotations

import torch

from fastlayers.quant.group_quant.layer import LARGEST, PACKED, GroupQuantConfig, empty_scales


class ReferenceGroupQuant:
    """See :mod:`fastlayers.quant.group_quant.layer` for the formula. Codes are returned as fp32 values."""

    def __init__(self, cfg: GroupQuantConfig) -> None:
        self.cfg, self.largest = cfg, LARGEST[cfg.dtype]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(q, s)`` for ``x`` ``[T, K]``, computed in fp64 where a step is rounded to fp32 once."""
        rows, features = x.shape
        groups = x.double().reshape(rows, features // self.cfg.group, self.cfg.group)
        broken = ~groups.isfinite().all(-1)
        eps = torch.tensor(self.cfg.eps, dtype=torch.float32, device=x.device).double()
        absmax = groups.abs().amax(-1).masked_fill(broken, 1.0).maximum(eps)
        # A quotient of two fp32 numbers, rounded first to fp64 and then to fp32, is correctly rounded.
        scale = (absmax / self.largest).float().double()
        if self.cfg.scale_fmt == "ue8m0":
            mantissa, exponent = torch.frexp(scale)
            scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
        ratio = (groups.masked_fill(broken[..., None], 0.0) / scale[..., None]).float()
        ratio = ratio.clamp(-self.largest, self.largest)
        codes = ratio.round() if self.cfg.dtype == torch.int8 else ratio.to(self.cfg.dtype).float()
        scales = empty_scales(x, rows, features // self.cfg.group, self.cfg.scale_layout)
        if self.cfg.scale_layout == PACKED:
            scales.zero_()
            byte = (torch.frexp(scale)[1] + 126).masked_fill(broken, 255)
            for group in range(features // self.cfg.group):
                # The highest byte may set the sign.
                scales[:, group // 4] |= (byte[:, group].long() << 8 * (group % 4)).to(torch.int32)
            return codes.reshape(rows, features), scales
        scales.copy_(scale.masked_fill(broken, torch.nan))
        return codes.reshape(rows, features), scales
