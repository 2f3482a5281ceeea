"""NVFP4 quantisation's oracle: expert by expert, codes by the nearest of the sixteen values, places one by one."""

from __future__ import annotations

import torch

from fastlayers.quant.nvfp4_quant.layer import GROUP, LARGEST, NVFP4QuantConfig

# Of codes 0 to 7; the eighth bit is the sign.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nearest_codes(ratio: torch.Tensor) -> torch.Tensor:
    """Return the codes of the nearest values, the even one where two are as near; the sign of what is not 0."""
    distance = (ratio.double().abs()[..., None] - torch.tensor(VALUES, dtype=torch.float64, device=ratio.device)).abs()
    near = distance == distance.amin(-1, keepdim=True)
    # Of two neighbours one is even.
    even_first = torch.tensor([1, 0] * 4, device=ratio.device)
    code = (near * (1 + even_first)).argmax(-1)
    return code + 8 * ((ratio < 0) & (code > 0))


class ReferenceNVFP4Quant:
    """See :mod:`fastlayers.quant.nvfp4_quant.layer` for the formula."""

    def __init__(self, cfg: NVFP4QuantConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, x: torch.Tensor, global_scale: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(codes, scale bytes)``."""
        (rows, features), groups = x.shape, x.shape[1] // GROUP
        codes = torch.zeros(rows, features // 2, dtype=torch.uint8, device=x.device)
        linear = torch.zeros(rows, groups, dtype=torch.uint8, device=x.device)
        wide = -(-groups // 4) * 4
        swizzled = torch.zeros(self.cfg.scale_rows(rows) * wide, dtype=torch.uint8, device=x.device)
        begin = 0
        for expert, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            mine = slice(first, min(last, rows))
            y = (x[mine].float() * global_scale[expert]).view(-1, groups, GROUP)
            broken = ~y.isfinite().all(-1)
            largest = y.abs().amax(-1).masked_fill(broken, 0.0)
            scale = (largest.double() / LARGEST).float().clamp(max=448.0).to(torch.float8_e4m3fn)
            ratio = (y.double() / scale.double()[..., None]).float()
            empty = broken | (scale.float() == 0)
            found = nearest_codes(ratio.masked_fill(empty[..., None], 0.0)).view(-1, features // 2, 2)
            codes[mine] = (found[..., 0] + 16 * found[..., 1]).to(torch.uint8)
            linear[mine] = scale.view(torch.uint8).masked_fill(broken, 0x7F)
            for row in range(first, min(last, rows)):
                for group in range(groups):
                    at = begin + row - first
                    tile = (at // 128) * (wide // 4) + group // 4
                    place = 512 * tile + 16 * (at % 32) + 4 * (at % 128 // 32) + group % 4
                    swizzled[place] = linear[row, group]
            begin += -(-(last - first) // 128) * 128
        return codes, linear if self.cfg.scale_layout == "linear" else swizzled
