"""FP8BlockLinear on FlashInfer's ``fp8_blockscale_gemm_sm90``, which swaps x and weight below 32 rows.

Called through its runner: the public function allocates ``N · K`` bytes of workspace a call, for quantising a
weight that is quantised already. x goes in quantised too, so its codes are those of every other backend. Two
stages of compilation at first use: the module itself, then a kernel for each tile configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastlayers.linear.fp8_block.layer import FP8LinearConfig
from fastlayers.linear.fp8_block.package_gemm import PackageGemm, empty_product
from fastlayers.operators import operator


def _runner() -> Any:
    from flashinfer.gemm.gemm_base import get_fp8_blockscale_gemm_runner_sm90

    return get_fp8_blockscale_gemm_runner_sm90()


@operator("fp8_linear_flashinfer", empty_product)
def _gemm(q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    y = empty_product(q, weight)
    if q.shape[0]:
        runner = _runner()
        # It wants to be told of a workspace, which this path (both operands quantised) never touches.
        runner.configure_workspace(s)
        runner.run_gemm(q, weight, y, s, scale)
    return y


class FlashInferFP8Linear(PackageGemm):
    """Scales of x: tokens next to each other, rows rounded up to 4."""

    def __init__(self, cfg: FP8LinearConfig, config: Mapping[str, int] | None = None) -> None:
        super().__init__(cfg, config)
        _runner()  # builds or loads the module now, not in the first step

    def gemm(self, q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return ``y`` ``[M, N]``."""
        y: torch.Tensor = _gemm(q, s, weight, scale)
        return y
