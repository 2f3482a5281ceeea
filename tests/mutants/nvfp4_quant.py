"""Planted bugs of NVFP4 quantisation."""

from __future__ import annotations

import torch

from fastlayers.quant.nvfp4_quant.torch import TorchNVFP4Quant

Result = tuple[torch.Tensor, torch.Tensor]


class NextExpertsScale(TorchNVFP4Quant):
    def __call__(self, x: torch.Tensor, global_scale: torch.Tensor, offsets: torch.Tensor) -> Result:
        return super().__call__(x, global_scale.roll(1), offsets)


class OneRowLate(TorchNVFP4Quant):
    """Lets every expert but the first begin one row late."""

    def __call__(self, x: torch.Tensor, global_scale: torch.Tensor, offsets: torch.Tensor) -> Result:
        late = offsets.clone()
        late[1:-1] += 1
        return super().__call__(x, global_scale, late)


class HighNibbleFirst(TorchNVFP4Quant):
    def __call__(self, x: torch.Tensor, global_scale: torch.Tensor, offsets: torch.Tensor) -> Result:
        codes, scales = super().__call__(x, global_scale, offsets)
        return codes << 4 | codes >> 4, scales


class TiesAwayFromZero(TorchNVFP4Quant):
    def encode(self, y: torch.Tensor) -> Result:
        codes, scale = super().encode(y)
        wide = scale.view(torch.float8_e4m3fn).float()[..., None]
        ratio = (y / wide).abs()
        return codes + ((ratio == 0.25) | (ratio == 1.25) | (ratio == 2.5) | (ratio == 5.0)).to(torch.uint8), scale


class HalfScale(TorchNVFP4Quant):
    def encode(self, y: torch.Tensor) -> Result:
        codes, scale = super().encode(y)
        return codes, (scale.view(torch.float8_e4m3fn).float() / 2).to(torch.float8_e4m3fn).view(torch.uint8)


class RowsOfATileInOrder(TorchNVFP4Quant):
    """Swizzles rows one after another instead of every thirty-second."""

    def place(self, row: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
        tile = row // 128 * (-(-groups // 4)) + group // 4
        return tile * 512 + row % 128 * 4 + group % 4


MUTANTS = {
    "next_experts_scale": NextExpertsScale,
    "one_row_late": OneRowLate,
    "high_nibble_first": HighNibbleFirst,
    "ties_away_from_zero": TiesAwayFromZero,
    "half_scale": HalfScale,
    "rows_of_a_tile_in_order": RowsOfATileInOrder,
}
