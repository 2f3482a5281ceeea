"""MXFP4 for training and packing: blocks of 32 e2m1 numbers, each with one power of two.

The scale of a block is the smallest power of two at which nothing saturates, 6 being the largest e2m1 number.
Numbers in between go to the nearest, ties to the even code.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # what the codes 0 to 7 mean; 8 more are their negatives
BIAS = 127


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round blocks of the last dimension.

    Parameters
    ----------
    weight
        (..., n), where n is a multiple of 32.

    Returns
    -------
    tuple of Tensor
        e2m1 numbers as fp32 of shape (..., n / 32, 32), and biased exponents as int32 of shape (..., n / 32).
    """
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    bits = blocks.abs().amax(-1).view(torch.int32)
    # 6 is 1.5 * 2 ** 2: a mantissa above 1.5 needs the next power.
    exponent = ((bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).int()).clamp(min=1)
    scaled = blocks / (exponent << 23).view(torch.float32)[..., None]
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(scaled / step) * step, exponent


def dequantise(numbers: Tensor, exponent: Tensor) -> Tensor:
    """Return fp32 of shape (..., n) from what `quantise` returns."""
    return (numbers * (exponent << 23).view(torch.float32)[..., None]).flatten(-2)


def straight_through(weight: Tensor) -> Tensor:
    """Return `weight` (..., n) as MXFP4 would hold it, with the gradient of the unrounded one."""
    rounded = dequantise(*quantise(weight.detach())).to(weight.dtype)
    # Exactly the rounded value: the bracket is zero, but not to autograd.
    return rounded + (weight - weight.detach())


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return bytes (..., n / 32, 16), the even element in the low nibble, and exponent bytes (..., n / 32)."""
    numbers, exponent = quantise(weight)
    codes = torch.bucketize(numbers.abs().contiguous(), torch.tensor(VALUES, device=weight.device)).to(torch.uint8)
    codes |= (numbers < 0).to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, exponent.to(torch.uint8)
