"""Linear on sgl_kernel's ``dsv3_fused_a_gemm``: DeepSeek-V3's fused latent projection at up to 16 tokens.

The kernel is written for one weight, 2112 × 7168 in bf16 (q_a and kv_a fused), and 1 to 16 rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fastlayers.linear.dense.layer import LinearConfig
from fastlayers.operators import operator

MAX_ROWS = 16


def _fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@operator("linear_dsv3_fused_a", _fake)
def _fused_a(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x, y = x.contiguous(), _fake(x, weight)
    for start in range(0, x.shape[0], MAX_ROWS):
        rows = slice(start, start + MAX_ROWS)
        torch.ops.sgl_kernel.dsv3_fused_a_gemm.default(y[rows], x[rows], weight.t())
    return y


class SglKernelLinear:
    """More than 16 rows run 16 at a time: right, but a ladder should give them to another backend."""

    def __init__(self, cfg: LinearConfig, config: Mapping[str, int] | None = None) -> None:
        self.cfg = cfg

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``y`` ``[..., N]``, a new contiguous tensor."""
        y: torch.Tensor = _fused_a(x.reshape(-1, self.cfg.in_features), weight)
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], self.cfg.out_features)
