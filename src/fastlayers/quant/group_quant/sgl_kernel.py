"""Group quantisation by sgl_kernel's ahead-of-time kernel, called through ``torch.ops``.

It multiplies by ``448 / absmax`` where the formula divides, so a code may fall on the other side of a tie: it
serves layers that ask for ``exact=False``. A group that is not finite is not marked.
"""

from __future__ import annotations

import torch

from fastlayers.errors import ArgumentError, describe
from fastlayers.operators import operator
from fastlayers.quant.group_quant.layer import SCALE_LAYOUTS, GroupQuantConfig, empty_scales

E4M3 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16)


def _fake(x: torch.Tensor, group: int, layout: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows, features = x.shape
    return x.new_empty(*x.shape, dtype=E4M3), empty_scales(x, rows, features // group, SCALE_LAYOUTS[layout])


@operator("group_quant_sgl_kernel", _fake)
def _group_quant(x: torch.Tensor, group: int, layout: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    q, s = _fake(x, group, layout, eps)
    if x.numel():
        # The arguments after the range: ue8m0, silu·mul and masked rows, which it ignores with fp32 scales.
        torch.ops.sgl_kernel.sgl_per_token_group_quant_8bit_v2.default(
            x, q, s, group, eps, -448.0, 448.0, False, False, None
        )
    return q, s


class SglKernelGroupQuant:
    """One kernel; bf16 and fp16."""

    def __init__(self, cfg: GroupQuantConfig) -> None:
        self.group, self.eps, self.layout = cfg.group, cfg.eps, SCALE_LAYOUTS.index(cfg.scale_layout)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(q, s)`` for ``x`` ``[T, K]``."""
        if x.dtype not in DTYPES:
            raise ArgumentError("GroupQuant", "x", describe(x), "bfloat16 or float16 for sgl_kernel")
        q, s = _group_quant(x, self.group, self.layout, self.eps)
        return q, s
