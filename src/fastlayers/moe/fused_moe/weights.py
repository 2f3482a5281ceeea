"""The experts' weights as one typed object, and what their formats mean (torch helpers of two backends).

    w13[E, 2I, D]   gate rows, then up rows;   w2[E, D, I]

    format      weights   w13_scale                            w2_scale                         activations
    none        dtype     -                                    -                                dtype
    fp8_block   e4m3      [E, 2*ceil(I/128), ceil(D/128)]      [E, ceil(D/128), ceil(I/128)]    e4m3, scale per 1x128
    int8        int8      [E, 2I]                              [E, D]                           int8, scale per row
    mxfp4       uint8     uint8 [E, 2I, D/32]                  uint8 [E, D, I/32]               dtype
    w4a16       uint8     [E, D/g, 2I]                         [E, I/g, D]                      dtype
    w8a16       int8      [E, D/g, 2I]                         [E, I/g, D]                      dtype
    fp8_w8a16   e4m3      [E, 1, 2I]                           [E, 1, D]                        dtype

The gate and up halves keep scale rows of their own, so that a ragged I does not mix them in one block. MXFP4 weights
stay packed: w13 is [E, 2I, D/32, 16] and w2 [E, D, I/32, 16] (:mod:`fastlayers.quant.mxfp4.codes`). The last three are
those of :class:`fastlayers.WeightOnlyLinear`, an expert a matrix: g input features share a scale, or all; w4a16 holds
two codes a byte, w13 [E, 2I, D/2], w2 [E, D, I/2]; zero points, int16, have the scales' shapes. No weight is rounded:

    x @ w^T = sum over groups of scale[group, n] * (sum over k in the group of x[k] * (code[n, k] - zero[group, n]))

Where rows are *interleaved* (GPT-OSS), w13, its scales and its bias hold gate 0, up 0, gate 1, up 1, ….
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from fastlayers.linear.weight_only.torch import decoded
from fastlayers.quant.block_quant import decode_e4m3, scale_blocks_
from fastlayers.quant.group_quant.torch import round_up_to_power_of_two
from fastlayers.quant.mxfp4.codes import dequantize_mxfp4
from fastlayers.quant.weight_only_config import WEIGHT_ONLY

if TYPE_CHECKING:
    from fastlayers.moe.fused_moe.config import FusedMoEConfig

# The formats, in the order of the kernels' numbers for them.
FORMATS = ("none", "fp8_block", "int8", "mxfp4", *WEIGHT_ONLY)
# Formats whose activations are not quantised.
PLAIN_INPUTS = ("none", "mxfp4", *WEIGHT_ONLY)
GROUP = 128
EPS = 1e-10


@dataclass(frozen=True)
class MoEWeights:
    """Parameters of the local experts; see the file's head. Biases: ``[E, 2I]`` and ``[E, D]``.

    Zero points only with weights alone of 4 or 8 bits.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    w13_zero: torch.Tensor | None = None
    w2_zero: torch.Tensor | None = None

    def of(
        self, name: str, experts: int | slice | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the weights, scales and zero points of some experts; ``name``: ``"w13"`` or ``"w2"``."""
        weight, scale, zero = (getattr(self, f"{name}{part}") for part in ("", "_scale", "_zero"))
        return weight[experts], None if scale is None else scale[experts], None if zero is None else zero[experts]


def round_activations(x: torch.Tensor, quant: str, scale_fmt: str) -> torch.Tensor:
    """Return fp32 ``x`` as the values that its codes stand for; a group that is not finite becomes NaN.

    Where activations have no codes: ``x``, for weights alone of 4 or 8 bits in fp32.
    """
    if quant in PLAIN_INPUTS:
        return x.float() if quant in WEIGHT_ONLY else x
    width = x.shape[-1]
    largest = 448.0 if quant == "fp8_block" else 127.0
    wide = x.float()
    if quant == "fp8_block":
        wide = F.pad(wide, (0, -width % GROUP)).unflatten(-1, (-1, GROUP))
    absmax = wide.abs().amax(-1, keepdim=True)
    # The divisor is a tensor: CUDA turns a division by a Python number into a product with its reciprocal.
    scale = absmax.clamp_min(EPS) / absmax.new_full((), largest)
    if scale_fmt == "ue8m0":
        scale = round_up_to_power_of_two(scale)
    ratio = (wide / scale).clamp(-largest, largest)
    codes = ratio.to(torch.float8_e4m3fn).float() if quant == "fp8_block" else ratio.round()
    values = torch.where(absmax.isfinite(), codes * scale, torch.nan)
    return values.flatten(-2)[..., :width] if quant == "fp8_block" else values


def dequantize(
    weight: torch.Tensor, scale: torch.Tensor | None, quant: str, halves: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return weights ``[..., N, K]``: fp32, of ``dtype`` for mxfp4; ``halves`` parts of N have own scale rows."""
    if quant == "none" or scale is None:
        return weight
    if quant == "mxfp4":
        return dequantize_mxfp4(weight, scale, dtype)
    if quant == "int8":
        return weight.float() * scale.unsqueeze(-1)
    wide = decode_e4m3(weight).unflatten(-2, (halves, -1))
    return scale_blocks_(wide, scale.unflatten(-2, (halves, -1)), (GROUP, GROUP)).flatten(-3, -2)


def expert_weights(
    packed: MoEWeights, name: str, experts: int | slice | torch.Tensor, cfg: FusedMoEConfig, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weights ``[..., N, K]`` that codes of some experts stand for, see :func:`dequantize`.

    ``name``: ``"w13"`` or ``"w2"``.
    """
    weight, scale, zero = packed.of(name, experts)
    if cfg.quant not in WEIGHT_ONLY or scale is None:
        return dequantize(weight, scale, cfg.quant, 2 if name == "w13" else 1, dtype)
    return decoded(cfg.quant, cfg.group_size, weight, scale, zero)


def gate_and_up(gate_up: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gates and ups ``[..., I]`` of ``[..., 2I]``."""
    if interleaved:
        return gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def activate(
    gate_up: torch.Tensor, activation: str, alpha: float, limit: float, interleaved: bool = False
) -> torch.Tensor:
    """Return the activation of ``[..., 2I]``: computed in fp32, in the dtype of its input."""
    gate, up = gate_and_up(gate_up.float(), interleaved)
    if activation == "silu":
        return (F.silu(gate) * up).to(gate_up.dtype)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(gate * alpha) * (up + 1.0)).to(gate_up.dtype)
