"""Bmm on the packages' ``bmm_fp8`` (cuBLASLt): one scale for all of x, one for the whole weight.

A scale of each head is multiplied in afterwards, which rounds once more, so these are taken by name. The packages want
operands next to each other; views are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastlayers.linear.bmm.layer import BmmConfig
from fastlayers.linear.fp8_scaled.triton import quant_e4m3


class _PackageBmm:
    """Quantise (three launches), multiply; ``out`` and scales of heads take one more."""

    def __init__(self, cfg: BmmConfig) -> None:
        self.cfg = cfg
        self.multiply = self.load()

    def load(self) -> Callable[..., Any]:
        """Return the package's function."""
        raise TypeError(f"{type(self).__name__} does not say how to multiply")

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``y`` ``[H, T, N]``: ``out``, or a new contiguous tensor."""
        heads, tokens, k = x.shape
        if not tokens:
            return x.new_empty(heads, 0, weight.shape[1]) if out is None else out
        codes, scales = quant_e4m3(x.reshape(-1, k), "tensor", None)
        one = weight_scale.numel() == 1
        scale = weight_scale.reshape(1) if one else torch.ones_like(scales[:1])
        y: torch.Tensor = self.multiply(
            codes.view(heads, tokens, k), weight.contiguous().transpose(1, 2), scales[:1], scale, x.dtype
        )
        if not one:
            y = torch.mul(y, weight_scale[:, None, None], out=y if out is None else out)
        elif out is not None:
            y = out.copy_(y)
        return y


class SglKernelBmm(_PackageBmm):
    """By sgl_kernel."""

    def load(self) -> Callable[..., Any]:
        """Return ``sgl_kernel.bmm_fp8``."""
        from sgl_kernel import bmm_fp8

        found: Callable[..., Any] = bmm_fp8
        return found


class FlashInferBmm(_PackageBmm):
    """By FlashInfer; compiles its module at first use."""

    def load(self) -> Callable[..., Any]:
        """Return ``flashinfer.bmm_fp8``."""
        from flashinfer import bmm_fp8

        found: Callable[..., Any] = bmm_fp8
        return found
