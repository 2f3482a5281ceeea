"""Codes of 4 and 8 bits: as checkpoints pack them into 32-bit words, and as kernels here read them.

A word holds ``32 // bits`` codes, the first in its lowest bits. AutoAWQ shuffles each eight of them first: field i of
a word is code ``AWQ_ORDER[i]``. Kernels here read nibbles of one unit of 32 input features as 16 bytes: byte j holds
feature j in its low half and feature 16 + j in its high half, so that both halves meet runs of x.
"""

from __future__ import annotations

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
UNIT = 32


def unpack_codes(words: torch.Tensor, bits: int, dim: int, *, awq: bool = False) -> torch.Tensor:
    """Return the unsigned codes (uint8) of int32 ``words`` ``[A, B]``; dimension ``dim`` grows ``32 // bits``-fold.

    Byte by byte: a checkpoint's experts are tens of thousands of matrices.
    """
    # A copy: what is contiguous may have any stride along dimensions of size 1.
    lines = words.movedim(dim, 0 if awq else -1).clone(memory_format=torch.contiguous_format)
    data = lines.view(torch.uint8).unflatten(-1, (-1, 4))
    if awq:
        # Fields 0, 2, 4, 6, 1, 3, 5, 7 of eight codes: byte 2h + l holds codes 4l + h and 4l + h + 2.
        data = data.mT.contiguous()
        codes = torch.stack((data & 15, data >> 4), 2).unflatten(1, (2, 2)).movedim(1, 3)
        return codes.flatten(0, 3).movedim(0, dim)
    if bits == 4:
        data = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    return data.flatten(-2).movedim(-1, dim)


def unpack_words(words: torch.Tensor, bits: int, dim: int, *, awq: bool = False) -> torch.Tensor:
    """Return the same as int32, which may be added to."""
    return unpack_codes(words, bits, dim, awq=awq).to(torch.int32)


def pack_words(codes: torch.Tensor, bits: int, dim: int, *, awq: bool = False) -> torch.Tensor:
    """Return the int32 words of unsigned ``codes`` ``[A, B]``: what :func:`unpack_words` reads."""
    fields = codes.transpose(dim, -1).long().unflatten(-1, (-1, 32 // bits))
    if awq:
        fields = fields[..., list(AWQ_ORDER)]
    words = (fields << torch.arange(0, 32, bits, device=codes.device)).sum(-1)
    # As a signed word: the upper half of the range is negative.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).transpose(dim, -1).contiguous()


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return uint8 ``[N, K/2]`` of codes 0 to 15 ``[N, K]``, K a multiple of 32; see the head of this file."""
    low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2, UNIT // 2)).unbind(-2)
    return (low | (high << 4)).flatten(-2)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return codes (uint8) ``[N, K]`` of what :func:`pack_nibbles` made."""
    halves = packed.unflatten(-1, (-1, 1, UNIT // 2))
    return torch.cat((halves & 15, halves >> 4), -2).flatten(-3)


def run_of(group: int, dtype: torch.dtype) -> int:
    """Return how many input features a kernel's tile takes: a power of two that lies in one group."""
    most = 32 if dtype == torch.float32 else 128
    return min(most, group & -group) if group else most
