"""Philox4x32-10, the counter-based random generator of Salmon et al. 2011, in torch's integer arithmetic.

(c0, c1, c2, c3) → (hi(M1·c2) ^ c1 ^ k0, lo(M1·c2), hi(M0·c0) ^ c3 ^ k1, lo(M0·c0))      ten times
(k0, k1)         → (k0 + W0, k1 + W1)                                                    between them
"""

from __future__ import annotations

import torch

MASK = 0xFFFFFFFF
M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def philox(seed: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return four random 32-bit words (as int64) for int64 ``seed`` (key) and ``offset`` (counter)."""
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    c0, c1 = offset & MASK, (offset >> 32) & MASK
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(ROUNDS):
        p0, p1 = c0 * M0, c2 * M1  # wrap modulo 2^64; the bits are those of the unsigned product
        c0, c1, c2, c3 = ((p1 >> 32) & MASK) ^ c1 ^ k0, p1 & MASK, ((p0 >> 32) & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + W0) & MASK, (k1 + W1) & MASK
    return c0, c1, c2, c3


def uniform(seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return fp64 numbers in [0, 1): 53 random bits."""
    high, low, _, _ = philox(seed, offset)
    return ((high >> 5) * 67108864 + (low >> 6)).double() * 2.0**-53
