"""What backends share that turn x into codes with a scale a token, and give those to somebody's product.

q[T, K], s[T] = codes of x and their scales, by a kernel of ours: the same codes whoever multiplies
y[T, N]       = round( (q · weight[N, K]ᵀ) · s[T] · weight_scale[N] + bias[N] )
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def empty_product(q: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what a product writes into, ``[rows of q, N]``; also the fake of its operator."""
    return q.new_empty(q.shape[0], weight.shape[0], dtype=dtype)


class ScaledProduct:
    """One kernel quantises the rows, the next multiplies; a format says how to quantise, a backend who multiplies."""

    # Takes q, s, weight, weight_scale, bias and the dtype of y.
    multiply: Callable[..., torch.Tensor]

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    def codes(self, rows: torch.Tensor, *scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes ``[T, K]`` and fp32 scales ``[T]``; ``scales``: what the layer stores for its input."""
        raise TypeError(f"{type(self).__name__} does not say how to quantise")

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, *rest: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``y`` ``[..., N]``, a new contiguous tensor of ``x``'s dtype; ``rest``: input scales, and the bias."""
        *scales, bias = rest
        q, s = self.codes(x.reshape(-1, self.cfg.in_features), *scales)
        return self.multiply(q, s, weight, weight_scale, bias, x.dtype).view(*x.shape[:-1], self.cfg.out_features)
