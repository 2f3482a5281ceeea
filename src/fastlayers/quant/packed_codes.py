"""Codes of 4 and 8 bits: as checkpoints pack them into 32-bit words, and as kernels here read them.

A word holds ``32 // bits`` codes, the first in its lowest bits. AutoAWQ shuffles each eight of them first: field i of
a word is code ``AWQ_ORDER[i]``. Kernels here read nibbles of one unit of 32 input features as 16 bytes: byte j holds
feature j in its low half and feature 16 + j in its high half, so that both halves meet runs of x.
"""

from __future__ import annotations

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
UNIT = 32


def unpack_words(words: torch.Tensor, bits: int, dim: int, *, awq: bool = False) -> torch.Tensor:
    """Return the unsigned codes (int32) of int32 ``words`` ``[A, B]``; dimension ``dim`` grows ``32 // bits``-fold."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    if awq:
        # The field that each of eight codes is in.
        shifts = shifts[torch.tensor(AWQ_ORDER, device=words.device).argsort()]
    codes = (words.transpose(dim, -1)[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2).transpose(dim, -1)


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
