"""Block-quantised weights: e4m3 values with one fp32 scale per block of rows and columns.

    w[..., n, k] ≈ q[..., n, k] · s[..., n // block_rows, k // block_columns]

Blocks start at row 0 and column 0; the last may be ragged. The number of blocks is a ceil-division of the
weight's own size by ``block_size``. It is never inferred the other way round: 576 rows with 5 scale rows are
blocks of 128 and a last one of 64, not blocks of 115.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fastlayers.errors import ArgumentError, check_choice, describe

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = (128, 128)


def grid_of(rows: int, columns: int, block_size: tuple[int, int] = BLOCK) -> tuple[int, int]:
    """Return the shape of the scale grid of a ``[rows, columns]`` weight."""
    return -(-rows // block_size[0]), -(-columns // block_size[1])


def check_scale_grid(
    layer: str, argument: str, scale: torch.Tensor, weight: torch.Tensor, block_size: tuple[int, int]
) -> None:
    """Raise :class:`ArgumentError` unless ``scale`` has one entry per block of ``weight``."""
    wanted = (*weight.shape[:-2], *grid_of(weight.shape[-2], weight.shape[-1], block_size))
    if tuple(scale.shape) != wanted:
        raise ArgumentError(
            layer, argument, f"of shape {list(scale.shape)}",
            f"{list(wanted)}: blocks of {block_size[0]}×{block_size[1]} of a weight {list(weight.shape)}",
        )  # fmt: skip


def quantize_block_weight(
    weight: torch.Tensor, block_size: tuple[int, int] = BLOCK, scale_fmt: str = "float"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight block by block.

    Parameters
    ----------
    weight : Tensor ``[..., N, K]``
        Any floating dtype; finite.
    block_size : tuple[int, int]
    scale_fmt : str
        ``"float"``: absmax / 448. ``"ue8m0"``: the next power of two that is not below.

    Returns
    -------
    (Tensor, Tensor)
        e4m3 ``[..., N, K]`` and fp32 ``[..., ceil(N / rows), ceil(K / columns)]``; 1 for an all-zero block.
    """
    check_choice("quantize_block_weight", "scale_fmt", scale_fmt, ("float", "ue8m0"))
    if weight.dim() < 2 or not weight.is_floating_point():
        raise ArgumentError("quantize_block_weight", "weight", describe(weight), "a floating tensor [..., N, K]")
    *leading, rows, columns = weight.shape
    grid = grid_of(rows, columns, block_size)
    padded = F.pad(weight.float(), (0, grid[1] * block_size[1] - columns, 0, grid[0] * block_size[0] - rows))
    blocks = padded.view(*leading, grid[0], block_size[0], grid[1], block_size[1])
    absmax = blocks.abs().amax((-3, -1))
    # A tensor as divisor: CUDA turns a division by a Python number into a product with 1/448. The floor keeps
    # the scales of tiny blocks normal numbers.
    scale = absmax.clamp_min(1e-30) / absmax.new_full((), E4M3_MAX)
    if scale_fmt == "ue8m0":
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scale = scale.masked_fill(absmax == 0, 1.0)
    codes = (blocks / scale[..., :, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return codes.view(padded.shape)[..., :rows, :columns].contiguous(), scale


# Codes shifted into fp16 are this many times too small.
SHIFTED = 256.0


def shift_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Return e4m3 ``codes`` as fp32 values divided by :data:`SHIFTED`, exactly, NaN included.

    torch's own conversion on a CPU goes value by value; this one moves bits with whole vectors and is several
    times faster. An e4m3 code, shifted by 7, is the fp16 number 2⁸ times smaller, subnormals included.
    """
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
    # Only the codes 0x7F and 0xFF (NaN) carry into bit 14; it and the bit below complete fp16's NaN exponent.
    carry = (bits + 0x80).bitwise_and_(0x4000)
    bits.bitwise_or_(carry).bitwise_or_(carry.bitwise_right_shift_(1))
    return bits.view(torch.float16).to(torch.float32)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Return e4m3 ``codes`` as fp32 values: what ``codes.float()`` gives, faster on a CPU."""
    return codes.float() if codes.is_cuda else shift_e4m3(codes).mul_(SHIFTED)


def decode_blocks(codes: torch.Tensor, scale: torch.Tensor, block_size: tuple[int, int]) -> torch.Tensor:
    """Return fp32 ``codes · scale``, block by block; ``codes`` are contiguous and start at a block's first column.

    Rows may be a part of one block of rows, or whole blocks.
    """
    if codes.is_cuda:
        return scale_blocks_(codes.float(), scale, block_size)
    # One pass less: the power of two goes with the scale (which would overflow above 1e36: no weight is so large).
    return scale_blocks_(shift_e4m3(codes), scale * SHIFTED, block_size)


def scale_blocks_(values: torch.Tensor, scale: torch.Tensor, block_size: tuple[int, int]) -> torch.Tensor:
    """Multiply contiguous ``values`` ``[..., N, K]`` by their blocks' scales, in place, and return them."""
    *leading, rows, columns = values.shape
    by_row = scale.to(values.dtype).repeat_interleave(block_size[0], -2)[..., :rows, :]
    whole = columns // block_size[1]
    edge = whole * block_size[1]
    values[..., :edge].view(*leading, rows, whole, block_size[1]).mul_(by_row[..., :whole, None])
    if edge < columns:
        values[..., edge:].mul_(by_row[..., whole:])
    return values


def dequantize_block_weight(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block_size: tuple[int, int] = BLOCK,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return ``weight · scale``, block by block: the product in fp32, rounded once to ``dtype``.

    Parameters
    ----------
    weight : Tensor e4m3 ``[..., N, K]``
    scale : Tensor ``[..., ceil(N / rows), ceil(K / columns)]``
    block_size : tuple[int, int]
        Of the checkpoint (``weight_block_size``).
    dtype : torch.dtype

    Raises
    ------
    ArgumentError
        ``weight`` is not e4m3, or the scale grid has another size.
    """
    if weight.dim() < 2 or weight.dtype != E4M3:
        raise ArgumentError("dequantize_block_weight", "weight", describe(weight), "float8_e4m3fn[..., N, K]")
    check_scale_grid("dequantize_block_weight", "scale", scale, weight, block_size)
    return decode_blocks(weight.contiguous(), scale.float(), block_size).to(dtype)
