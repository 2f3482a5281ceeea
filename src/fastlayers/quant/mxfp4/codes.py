"""MXFP4 weights: e2m1 codes, two a byte, and one ue8m0 scale for every 32 along the input dimension.

    K = input features, a multiple of 32
    blocks[..., K/32, 16]   uint8; byte b of a block: feature 2b in the low nibble, 2b + 1 in the high one
    scales[..., K/32]       uint8; a scale is 2^(byte - 127)

    code      0    1    2    3    4    5    6    7      8 … 15: the same, negative
    value     0  0.5    1  1.5    2    3    4    6

    w[..., 32·g + i] = value(code) · 2^(scales[..., g] - 127)

Values are exact in bf16 and fp32 unless they overflow. (In the OCP format scale 255 is no number; checkpoints with it
are refused, and arithmetic takes it for 2^128, as Hugging Face's does.) Source: OCP Microscaling Formats v1.0;
GPT-OSS's checkpoints.
"""

from __future__ import annotations

import torch

from fastlayers.errors import ArgumentError, check_choice, check_tensor

GROUP = 32
BYTES = GROUP // 2
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NAME = "mxfp4"


def groups_of(features: int, argument: str, layer: str = _NAME) -> int:
    """Return the number of scales for ``features`` input features.

    Raises
    ------
    ArgumentError
        They are not a multiple of 32; ``argument`` is named.
    """
    if features < 1 or features % GROUP:
        raise ArgumentError(layer, argument, features, f"a multiple of {GROUP} for MXFP4")
    return features // GROUP


def check_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Raise :class:`ArgumentError` unless codes and scales fit each other."""
    check_tensor(_NAME, "blocks", blocks, dtype=torch.uint8)
    if blocks.dim() < 2 or blocks.shape[-1] != BYTES:
        raise ArgumentError(_NAME, "blocks", f"of shape {list(blocks.shape)}", f"[..., K/{GROUP}, {BYTES}]")
    check_tensor(_NAME, "scales", scales, shape=tuple(blocks.shape[:-1]), dtype=torch.uint8, device=blocks.device)


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return the weights that codes and scales stand for.

    Parameters
    ----------
    blocks : uint8 Tensor ``[..., K/32, 16]``
    scales : uint8 Tensor ``[..., K/32]``
    dtype : torch.dtype
        bf16 and fp32 are exact; fp16 rounds once.

    Returns
    -------
    Tensor ``[..., K]``
        New, of ``dtype``.

    Raises
    ------
    ArgumentError
        Shapes or dtypes that do not fit.

    Notes
    -----
    Any device, no synchronisation. Holds one intermediate of the result's size.

    Examples
    --------
    >>> import torch
    >>> from fastlayers.quant.mxfp4.codes import dequantize_mxfp4
    >>> blocks = torch.full((1, 16), 0x72, dtype=torch.uint8)
    >>> dequantize_mxfp4(blocks, torch.tensor([128], dtype=torch.uint8))[:4].tolist()
    [2.0, 12.0, 2.0, 12.0]
    """
    check_mxfp4(blocks, scales)
    check_choice(_NAME, "dtype", dtype, DTYPES)
    # fp16 has neither the small nor the large powers of two: their product is rounded to it once.
    work = torch.float32 if dtype == torch.float16 else dtype
    # Values are doubled and powers halved, so that no power overflows. Tables are computed where they are needed: a
    # copy from the host would not survive capture in a CUDA graph.
    byte = torch.arange(256, device=blocks.device)
    values = _doubled(byte[:16]).to(work)
    powers = torch.ldexp(torch.ones(256, device=blocks.device), byte - 128).to(work)
    # One look-up a byte gives its two values as one word: by far the fastest way on a CPU.
    word = torch.int32 if work == torch.bfloat16 else torch.int64
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], -1).view(word).flatten()
    wide = pairs.index_select(0, blocks.flatten().int()).view(work).view(*scales.shape, GROUP)
    return wide.mul_(powers[scales.int()].unsqueeze(-1)).flatten(-2).to(dtype)


def _doubled(code: torch.Tensor) -> torch.Tensor:
    """Return twice the values of codes 0 … 15 as fp32: sign, two bits of exponent, one of mantissa."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = torch.where(exponent == 0, mantissa, (mantissa + 2) << (exponent - 1).clamp_min(0))
    return magnitude.float() * (1 - 2 * (code >> 3))


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(blocks, scales)`` of ``weight``.

    Parameters
    ----------
    weight : Tensor ``[..., K]``
        bf16, fp16 or fp32; finite; K a multiple of 32.

    Returns
    -------
    (Tensor, Tensor)
        uint8 ``[..., K/32, 16]`` and ``[..., K/32]``.

    Raises
    ------
    ArgumentError
        Another dtype, K not a multiple of 32, or a value that is not finite.

    Notes
    -----
    The scale is ``2^(floor(log2(absmax)) - 2)``, the OCP rule (6 is the largest code, 2^2 its power of two): the
    largest value of a group lies in [4, 8) and saturates at 6. Codes are rounded to nearest, ties to even codes. A
    group of zeros has the smallest scale. Reads ``weight`` on the host (a check), so not capture-safe.
    """
    check_tensor(_NAME, "weight", weight, dtype=DTYPES)
    groups = groups_of(weight.shape[-1] if weight.dim() else 0, "weight's last dimension")
    wide = weight.float().unflatten(-1, (groups, GROUP))
    if not bool(wide.isfinite().all()):
        raise ArgumentError(_NAME, "weight", "not finite everywhere", "finite values")
    # frexp's mantissa is in [0.5, 1), so floor(log2) is one less than its exponent; it is exact, unlike log2.
    absmax = wide.abs().amax(-1)
    exponent = torch.frexp(absmax).exponent - 3
    scales = torch.where(absmax == 0, 0, (exponent + 127).clamp(0, 254)).to(torch.uint8)
    magnitude = wide.abs().mul_(torch.ldexp(torch.ones_like(absmax), 127 - scales.int()).unsqueeze(-1))
    # The grid's step is 0.5 below 2, 1 below 4, then 2; round() takes ties to even, which are the even codes.
    code = torch.where(magnitude < 2, (magnitude * 2).round_(), magnitude.round() + 2)
    code = torch.where(magnitude < 4, code, (magnitude * 0.5).round_() + 4).clamp_(max=7).to(torch.uint8)
    code |= wide.signbit().to(torch.uint8) << 3
    low, high = code.unflatten(-1, (BYTES, 2)).unbind(-1)
    return low | (high << 4), scales
