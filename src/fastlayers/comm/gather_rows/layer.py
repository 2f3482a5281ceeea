"""Rows of all ranks, on every rank.

    n = ranks of the axis, p = rows of each rank (equal), H = hidden_size
    y[n·p,H] = x of rank 0, of rank 1, …

Rows of unequal numbers take the group's own way (NCCL, Gloo), by sizes that the host knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from fastlayers.comm.rank_layer import RankConfig, RankLayer, rank_registry


@dataclass(frozen=True)
class GatherRowsConfig(RankConfig):
    """What a backend must know; ``slots``: most rows of one rank that the workspace was made for."""

    layer, operator = "GatherRows", "exchange"


GATHER_ROWS = rank_registry(
    "gather_rows", "GatherRows", {"copy_engine": "written for overlap schedules, of which there is none yet"}
)


class GatherRows(RankLayer):
    """Gather rows from the ranks of an axis; parameters as of :class:`~fastlayers.comm.rank_layer.RankLayer`.

    The workspace is one that was made with a ``share``.

    Notes
    -----
    Every rank of the axis makes the same calls with the same numbers of rows, ranks without rows too. Capture-safe.
    Over symmetric memory the result is a view of the workspace: it holds until the workspace's next exchange.
    """

    rows, config = GATHER_ROWS, GatherRowsConfig

    def forward(self, x: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Return the rows of all ranks, in rank order.

        Parameters
        ----------
        x : Tensor ``[p, H]``
        sizes : sequence of int, optional
            Rows of each rank, where they are not equal.
        """
        if not self.trusted:
            self.check_rows(x)
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self.refuse_grad(x=x)
        if sizes is not None and len(set(sizes)) > 1:
            return self.over.all_gather_variable(x, sizes)
        found: torch.Tensor = self.ladder.pick(x.shape[0])(x)
        return found
