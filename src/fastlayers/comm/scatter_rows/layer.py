"""Sum over ranks, of which each rank gets its own rows.

    n = ranks of the axis, p = rows of each rank (equal), H = hidden_size
    y[p,H] = rows rank·p … of Σ over ranks of x[n·p,H]    (fp32, in rank order, rounded once)

Rows of unequal numbers take the group's own way (NCCL, Gloo), by sizes that the host knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from fastlayers.comm.rank_layer import RankConfig, RankLayer, rank_registry


@dataclass(frozen=True)
class ScatterRowsConfig(RankConfig):
    """What a backend must know; ``slots``: most rows of one rank that the workspace was made for."""

    layer, operator = "ScatterRows", "exchange"


SCATTER_ROWS = rank_registry("scatter_rows", "ScatterRows", {"multimem": "multicast is off on this fabric"})


class ScatterRows(RankLayer):
    """Sum rows over the ranks of an axis and give each rank its part.

    Parameters as of :class:`~fastlayers.comm.rank_layer.RankLayer`; the workspace is one made with a ``share``.

    Notes
    -----
    Every rank of the axis makes the same calls with the same numbers of rows, ranks without rows too. Capture-safe.
    """

    rows, config = SCATTER_ROWS, ScatterRowsConfig

    def forward(self, x: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Return this rank's rows of the sum.

        Parameters
        ----------
        x : Tensor ``[n * p, H]``
        sizes : sequence of int, optional
            Rows of each rank, where they are not equal.
        """
        if not self.trusted:
            self.check_rows(x)
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self.refuse_grad(x=x)
        if sizes is not None and len(set(sizes)) > 1:
            return self.over.reduce_scatter_variable(x, sizes)
        self.check_order(x)
        found: torch.Tensor = self.ladder.pick(x.shape[0] // self.over.size)(x)
        return found
