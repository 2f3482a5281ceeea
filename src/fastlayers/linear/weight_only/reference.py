"""WeightOnlyLinear's oracle: weights decoded one formula at a time, multiplied in fp64."""

from __future__ import annotations

import torch

from fastlayers.linear.weight_only.layer import ZERO, WeightOnlyLinearConfig


class ReferenceWeightOnlyLinear:
    """See :mod:`fastlayers.linear.weight_only.layer` for the formula. Returns fp32, not rounded further."""

    def __init__(self, cfg: WeightOnlyLinearConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_zero: torch.Tensor | None,
        group_index: torch.Tensor | None, bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``y`` ``[..., N]``."""
        cfg, k = self.cfg, torch.arange(self.cfg.in_features, device=x.device)
        if cfg.format == "w4a16":
            byte, high = k // 32 * 16 + k % 16, k % 32 >= 16
            codes = torch.where(high, weight[:, byte] >> 4, weight[:, byte] & 15).double()
        else:
            codes = weight.to(torch.float32).double()
        group = group_index.long() if group_index is not None else k // (cfg.group_size or cfg.in_features)
        zero = ZERO[cfg.format] if weight_zero is None else weight_zero.double()[group].T
        scale = weight_scale.double()[group].T
        if cfg.group_size:
            y = x.double() @ ((codes - zero) * scale).to(cfg.dtype).double().T
        else:
            y = (x.double() @ (codes - zero).T) * scale[:, 0]
        return (y if bias is None else y + bias.double()).float()
