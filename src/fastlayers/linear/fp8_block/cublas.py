"""FP8BlockLinear on cuBLASLt, through torch's ``F.scaled_mm`` with 1×128 and 128×128 scales."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fastlayers.linear.fp8_block.package_gemm import PackageGemm, empty_product

# cuBLASLt reads whole groups of four scales along K.
SCALE_COLUMNS = 4


class CublasFP8Linear(PackageGemm):
    """x is quantised into a buffer whose rows are a multiple of 16, as cuBLASLt wants; what lies beyond is cut off.

    torch knows the operation, so it needs no operator of ours.
    """

    scale_layout = "col"
    row_multiple = 16

    def gemm(self, q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return ``y`` ``[rows of q, N]``."""
        if q.shape[0] == 0:
            return empty_product(q, weight)
        if missing := -scale.shape[1] % SCALE_COLUMNS:
            scale = F.pad(scale, (0, missing))
        return F.scaled_mm(
            q, weight.t(), s, F.ScalingType.BlockWise1x128, scale.t(), F.ScalingType.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )  # fmt: skip
