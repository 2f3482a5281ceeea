"""Rows of all ranks, on every rank.

    n = ranks of the axis, p = rows of each rank (equal), H = hidden_size
    y[n·p,H] = x of rank 0, of rank 1, …

Rows of unequal numbers take the group's own way (NCCL, Gloo), by sizes that the host knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fastlayers.comm.collectives import collectives
from fastlayers.comm.parallel import Axis
from fastlayers.comm.sum_norm.layer import (
    SYMMETRIC_NEEDS,
    never,
    refuse_gloo,
    refuse_nccl,
    refuse_symmetric,
    with_limit,
)
from fastlayers.errors import check_kind, check_positive, check_tensor
from fastlayers.layer import Layer
from fastlayers.registry import Backend, Registry, reference_backend


@dataclass(frozen=True)
class GatherRowsConfig:
    """What a backend must know; ``slots``: most rows of one rank that the workspace was made for."""

    axis: Axis
    hidden_size: int
    dtype: torch.dtype = torch.bfloat16
    slots: int = 0
    refusal: str | None = None
    workspace: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_kind("GatherRows", Axis, axis=self.axis)
        check_positive("GatherRows", hidden_size=self.hidden_size)


_HERE = "fastlayers.comm.gather_rows"
GATHER_ROWS = Registry(
    "gather_rows",
    [
        Backend("triton_symm_mem", f"{_HERE}.triton_symm_mem:TritonGatherRows", SYMMETRIC_NEEDS, refuse_symmetric),
        Backend("nccl", f"{_HERE}.collective:CollectiveGatherRows", (), refuse_nccl),
        Backend("gloo", f"{_HERE}.collective:CollectiveGatherRows", (), refuse_gloo, ("cpu",)),
        Backend(
            "copy_engine", f"{_HERE}.collective:CollectiveGatherRows", (),
            never("written for overlap schedules, of which there is none yet"), (),
        ),
        reference_backend(f"{_HERE}.reference:ReferenceGatherRows"),
    ],
    cases=f"{_HERE}.cases",
)  # fmt: skip


class GatherRows(Layer):
    """Gather rows from the ranks of an axis.

    Parameters
    ----------
    axis : Axis
        With a process group.
    hidden_size : int
    workspace : Workspace, optional
        Of the same axis, hidden size and dtype, made with a ``share``. Without: NCCL or Gloo.
    device, dtype
        Of the rows.
    backend : str
        ``"auto"``, a name, or a ladder over rows of one rank.

    Notes
    -----
    Every rank of the axis makes the same calls with the same numbers of rows, ranks without rows too. Capture-safe.
    Over symmetric memory the result is a view of the workspace: it holds until the workspace's next exchange.
    """

    def __init__(
        self,
        axis: Axis,
        hidden_size: int,
        *,
        workspace: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        exchange = workspace.exchange if workspace is not None else None
        cfg = GatherRowsConfig(
            axis, hidden_size, dtype or torch.get_default_dtype(), exchange.slots if exchange is not None else 0,
            workspace.fabric.refusal if workspace is not None else None, workspace,
        )  # fmt: skip
        self.choose(GATHER_ROWS, cfg, device, backend)
        limited = with_limit(self.choice, GATHER_ROWS)
        if limited is not self.choice:
            self.choice, self.ladder = limited, limited.build()
        self.over = collectives(axis)

    def forward(self, x: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Return the rows of all ranks, in rank order.

        Parameters
        ----------
        x : Tensor ``[p, H]``
        sizes : sequence of int, optional
            Rows of each rank, where they are not equal.
        """
        if not self.trusted:
            size, dtype = self.cfg.hidden_size, self.cfg.dtype
            check_tensor("GatherRows", "x", x, shape=(None, size), dtype=dtype, last_dim_contiguous=True)
        if sizes is not None and len(set(sizes)) > 1:
            return self.over.all_gather_variable(x, sizes)
        found: torch.Tensor = self.ladder.pick(x.shape[0])(x)
        return found
