"""What RMSNorm's package backends share: their fused pair works in place, so both of its inputs are copied first."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Writes into its first argument: (y, rows) for the norm alone, (y, summed) for the pair, which overwrites both.
Kernel = Callable[[torch.Tensor, torch.Tensor], object]


def normalise(x: torch.Tensor, residual: torch.Tensor | None, plain: Kernel, fused: Kernel) -> list[torch.Tensor]:
    """Return ``[y]``, or ``[y, x + residual]``, as new contiguous tensors; the inputs stay as they are."""
    rows = x.reshape(-1, x.shape[-1])
    if residual is None:
        y = torch.empty_like(rows, memory_format=torch.contiguous_format)
        if rows.shape[0]:
            plain(y, rows)
        return [y.view(x.shape)]
    y = rows.clone(memory_format=torch.contiguous_format)
    summed = residual.reshape(rows.shape).clone(memory_format=torch.contiguous_format)
    if rows.shape[0]:
        fused(y, summed)
    return [y.view(x.shape), summed.view(x.shape)]
