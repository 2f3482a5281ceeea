"""NVFP4 quantisation in native torch operations, bit-equal on every device."""

from __future__ import annotations

import torch

from fastlayers.quant.nvfp4_quant.layer import GROUP, LARGEST, NVFP4QuantConfig, first_scale_rows, swizzled_place

# A magnitude above (or, where the tie goes up, at) the i-th of these has a code of at least i + 1.
TIES_DOWN, TIES_UP = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)


class TorchNVFP4Quant:
    """Any device, no synchronisation."""

    def __init__(self, cfg: NVFP4QuantConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, x: torch.Tensor, global_scale: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(codes, scale bytes)``."""
        (rows, features), groups = x.shape, x.shape[1] // GROUP
        row = torch.arange(rows, dtype=torch.int32, device=x.device)
        # An expert without rows begins where the next one does: the last one that has begun is meant.
        expert = torch.searchsorted(offsets, row, right=True) - 1
        nobody = (expert < 0) | (expert >= self.cfg.num_experts)
        expert = expert.clamp(0, self.cfg.num_experts - 1)
        y = (x.float() * global_scale[expert][:, None]).masked_fill(nobody[:, None], 0.0).view(rows, groups, GROUP)
        codes, scale = self.encode(y)
        packed = codes.view(rows, features // 2, 2)
        packed = packed[..., 0] | packed[..., 1] << 4
        if self.cfg.scale_layout == "linear":
            return packed, scale
        at = (row - offsets[expert] + first_scale_rows(offsets)[expert]).long()
        place = self.place(at[:, None], torch.arange(groups, device=x.device)[None], groups)
        out = x.new_zeros(self.cfg.scale_rows(rows) * (-(-groups // 4) * 4), dtype=torch.uint8)
        # Rows of nobody would meet those of the last expert: they lie behind all that is read.
        kept = torch.where(nobody[:, None], 0, scale)
        return packed, out.index_add_(0, place.masked_fill(nobody[:, None], out.numel() - 1).flatten(), kept.flatten())

    def place(self, row: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
        """Return where the scales go."""
        return swizzled_place(row, group, groups)

    def encode(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return uint8 codes ``[T, G, 16]`` and the bytes of scales ``[T, G]``."""
        absmax = y.abs().amax(-1)
        broken = ~absmax.isfinite()
        # A tensor as divisor: CUDA turns a division by a Python number into a product with 1/6.
        sixth = absmax.masked_fill(broken, 0.0) / absmax.new_full((), LARGEST)
        scale = sixth.clamp_(max=448.0).to(torch.float8_e4m3fn)
        wide = scale.float()[..., None]
        ratio = torch.where(broken[..., None] | (wide == 0), 0.0, y / wide)
        size = ratio.abs()
        above = [*(size > edge for edge in TIES_DOWN), *(size >= edge for edge in TIES_UP)]
        code = torch.stack(above).sum(0, dtype=torch.uint8)
        code = torch.where((ratio < 0) & (code > 0), code | 8, code)
        return code, scale.view(torch.uint8).masked_fill(broken, 0x7F)
