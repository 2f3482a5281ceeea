"""Bmm by packages, taken by name: operands have to lie next to each other there, and views are copied.

``bmm_fp8`` (cuBLASLt): one scale for all of x, one for the whole weight. A scale of each head is multiplied in
afterwards, which rounds once more.

deep_gemm's masked grouped product: block scales, a group a head. Tokens are padded to whole tiles, so that no tile
writes into the next head, and the rows in use are counted on the device. Source: SGLang's absorbed products (its
``SGL_USE_DEEPGEMM_BMM``), with our quantiser.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from fastlayers.linear.bmm.layer import BLOCK_EPS, BmmConfig
from fastlayers.linear.fp8_block.deep_gemm import token_counts
from fastlayers.linear.fp8_scaled.triton import quant_e4m3
from fastlayers.quant.group_quant.layer import GroupQuantConfig
from fastlayers.quant.group_quant.triton import TritonGroupQuant

# Rows of deep_gemm's largest tile.
TILE = 128


class _PackageBmm(ABC):
    """What all of these have in common: without tokens nothing is asked of a package."""

    def __init__(self, cfg: BmmConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``y`` ``[H, T, N]``: ``out``, or a new tensor or a part of one."""
        if not x.shape[1]:
            return x.new_empty(x.shape[0], 0, weight.shape[1]) if out is None else out
        return self.product(x, weight, weight_scale, out)

    @abstractmethod
    def product(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the same of one token or more."""


class _TensorBmm(_PackageBmm):
    """Quantise (three launches), multiply; ``out`` and scales of heads take one more."""

    def __init__(self, cfg: BmmConfig) -> None:
        super().__init__(cfg)
        self.multiply = self.load()

    @abstractmethod
    def load(self) -> Callable[..., Any]:
        """Return the package's function."""

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``out``, or a new contiguous tensor."""
        heads, tokens, k = x.shape
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


class SglKernelBmm(_TensorBmm):
    """By sgl_kernel."""

    def load(self) -> Callable[..., Any]:
        """Return ``sgl_kernel.bmm_fp8``."""
        from sgl_kernel import bmm_fp8

        found: Callable[..., Any] = bmm_fp8
        return found


class FlashInferBmm(_TensorBmm):
    """By FlashInfer; compiles its module at first use."""

    def load(self) -> Callable[..., Any]:
        """Return ``flashinfer.bmm_fp8``."""
        from flashinfer import bmm_fp8

        found: Callable[..., Any] = bmm_fp8
        return found


class DeepGemmBmm(_PackageBmm):
    """Copy into whole tiles, quantise, turn the scales, multiply, copy out."""

    token_counts = staticmethod(token_counts)

    def __init__(self, cfg: BmmConfig) -> None:
        from deep_gemm import fp8_m_grouped_gemm_nt_masked

        super().__init__(cfg)
        self.multiply = fp8_m_grouped_gemm_nt_masked
        self.quantise = TritonGroupQuant(GroupQuantConfig(eps=BLOCK_EPS))

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``out``, or a part of a new tensor."""
        heads, tokens, k = x.shape
        rows = -(-tokens // TILE) * TILE
        padded = x.new_zeros(heads, rows, k)
        padded[:, :tokens] = x
        codes, scales = self.quantise(padded.view(-1, k))
        groups = scales.shape[1]
        turned = scales.new_empty(heads, groups, rows).as_strided((heads, rows, groups), (groups * rows, 1, rows))
        turned.copy_(scales.view(heads, rows, groups))
        y = x.new_empty(heads, rows, weight.shape[1])
        used = torch.full((heads,), tokens, dtype=torch.int32, device=x.device)
        operands = (codes.view(heads, rows, k), turned), (weight.contiguous(), weight_scale.contiguous())
        self.multiply(*operands, y, used, tokens)
        return y[:, :tokens] if out is None else out.copy_(y[:, :tokens])
