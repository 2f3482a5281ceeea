"""FP8BlockLinear on DeepGEMM's ``fp8_gemm_nt``: e4m3 wgmma, promoted to fp32 with the scales per block of K.

It compiles a kernel the first time it meets a tile configuration (a few seconds); those depend on N, K and, in
steps, on the number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.linear.fp8_block.package_gemm import PackageGemm, empty_product
from fastlayers.operators import operator

TILE = 64


def token_counts(cfg: Any, most: int) -> range:
    """Return token counts up to ``most`` of which each may need a kernel of its own: what fills one more tile."""
    return range(TILE, most + 1, TILE)


@operator("fp8_linear_deep_gemm", empty_product)
def _gemm(q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    from deep_gemm import fp8_gemm_nt

    y = empty_product(q, weight)
    if q.shape[0]:
        fp8_gemm_nt((q, s), (weight, scale), y)
    return y


class DeepGemmFP8Linear(PackageGemm):
    """Scales of x go in with tokens next to each other and rows rounded up to 4: what its TMA loads."""

    token_counts = staticmethod(token_counts)

    def gemm(self, q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return ``y`` ``[M, N]``."""
        y: torch.Tensor = _gemm(q, s, weight, scale)
        return y
