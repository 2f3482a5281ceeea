"""sgl_kernel's products of codes with a scale a token and one an output channel: what int8 and e4m3 linears share.

Its binaries choose a tile by the number of rows (up to 16, 64, 256, more) and apply scales and bias to fp32 sums before
they round once. Codes are made by our own kernels, so they are those of every other backend.
"""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.device import Device
from fastlayers.linear.scaled_product import empty_product
from fastlayers.operators import operator
from fastlayers.registry import not_multiple

HALVES = (torch.float16, torch.bfloat16)


def refuses(cfg: Any, device: Device, columns: int) -> str | None:
    """Return why the package cannot multiply; ``columns``: what out_features must be a multiple of."""
    if (why := device.refuses_all_but(9)) is not None:
        return why
    if cfg.dtype not in HALVES:
        return f"dtype {cfg.dtype} is neither float16 nor bfloat16"
    return not_multiple(cfg, in_features=16, out_features=columns)


@operator("scaled_gemm_sgl_kernel", empty_product)
def scaled_gemm(
    q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return ``y`` ``[M, N]`` for codes ``q`` ``[M, K]`` with scales ``s`` ``[M]``, ``weight`` ``[N, K]``."""
    if not q.shape[0]:
        return empty_product(q, weight, dtype)
    package = torch.ops.sgl_kernel
    multiply = package.int8_scaled_mm if q.dtype == torch.int8 else package.fp8_scaled_mm
    y: torch.Tensor = multiply.default(q, weight.t(), s, scale, dtype, bias)
    return y
