"""Integer arithmetic of launches, on the host; Triton's own functions take several calls each, made for tracing."""

from __future__ import annotations

from functools import lru_cache


def cdiv(a: int, b: int) -> int:
    """Return ``a / b``, rounded up."""
    return -(-a // b)


@lru_cache(maxsize=4096)
def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n`` (1 for 0 and 1)."""
    return 1 << (n - 1).bit_length() if n > 1 else 1
