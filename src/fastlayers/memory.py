"""Tensors of a size that a caller named: where there is no memory for one, the error names it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fastlayers.errors import ArgumentError, dtype_name

ACCEPTED = "a size for which there is memory"
# How torch and NumPy say that a size is none, beside MemoryError and OverflowError.
_NO_SIZE = re.compile(r"can't allocate memory|not enough memory|overflow|too (big|large)", re.IGNORECASE)


@contextmanager
def memory_for(layer: str, **sizes: int) -> Iterator[None]:
    """Raise :class:`ArgumentError` for the largest of ``sizes`` if what is made inside has no memory.

    What a GPU's allocator says stays as it is: it names what is free, and callers wait for that. Whoever makes it under
    ``torch.inference_mode`` may write to it outside: no tensor made inside belongs to that mode.
    """
    try:
        with torch.inference_mode(False):
            yield
    except torch.OutOfMemoryError:
        raise
    except (MemoryError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        if not (isinstance(error, MemoryError | OverflowError) or _NO_SIZE.search(str(error))):
            raise
        name = max(sizes, key=lambda each: sizes[each])
        raise ArgumentError(layer, name, sizes[name], ACCEPTED) from error


def allocate(
    layer: str, name: str, shape: Sequence[int], dtype: torch.dtype | None, device: Any, fill: float = 0
) -> torch.Tensor:
    """Return a tensor full of ``fill``, or raise :class:`ArgumentError`: ``layer: name is bfloat16[…]``."""
    dtype = dtype or torch.get_default_dtype()
    try:
        with memory_for(layer, size=0):
            if fill == 0:
                return torch.zeros(*shape, dtype=dtype, device=device)
            return torch.full(tuple(shape), fill, dtype=dtype, device=device)
    except ArgumentError as error:
        raise ArgumentError(layer, name, f"{dtype_name(dtype)}{list(shape)}", ACCEPTED) from error.__cause__
