"""What the experts' operators share: their result is like ``x``, and many tokens run in several rounds."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def like_x(x: torch.Tensor, *rest: object) -> torch.Tensor:
    """The fake of an operator whose result has the shape and dtype of ``x``."""
    return x.new_empty(x.shape)


def rounds(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, y: torch.Tensor, tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield the parts of each tensor that belong to at most ``tokens`` tokens, dense where a kernel expects that.

    Yields
    ------
    (x, topk_weights, topk_ids, y)
        Of one round: rows of ``x`` may lie apart, the routing is contiguous.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    routing = topk_weights.contiguous(), topk_ids.contiguous()
    for start in range(0, x.shape[0], tokens):
        part = slice(start, start + tokens)
        yield x[part], routing[0][part], routing[1][part], y[part]
