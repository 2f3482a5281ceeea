"""What the experts' operators share: many tokens run in several chunks."""

from __future__ import annotations

import torch


def token_chunks(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, y: torch.Tensor, tokens: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the parts ``(x, topk_weights, topk_ids, y)`` of at most ``tokens`` tokens; none where there is no token.

    Rows of ``x`` may lie apart, the routing is contiguous: kernels expect that.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    weights, ids = topk_weights.contiguous(), topk_ids.contiguous()
    if 0 < x.shape[0] <= tokens:
        return [(x, weights, ids, y)]
    parts = [slice(start, start + tokens) for start in range(0, x.shape[0], tokens)]
    return [(x[part], weights[part], ids[part], y[part]) for part in parts]
