"""Sum over ranks, of which each rank gets its own rows.

    n = ranks of the axis, p = rows of each rank (equal), H = hidden_size
    y[p,H] = rows rank·p … of Σ over ranks of x[n·p,H]    (fp32, in rank order, rounded once)

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
class ScatterRowsConfig:
    """What a backend must know; ``slots``: most rows of one rank that the workspace was made for."""

    axis: Axis
    hidden_size: int
    dtype: torch.dtype = torch.bfloat16
    slots: int = 0
    refusal: str | None = None
    workspace: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_kind("ScatterRows", Axis, axis=self.axis)
        check_positive("ScatterRows", hidden_size=self.hidden_size)


_HERE = "fastlayers.comm.scatter_rows"
SCATTER_ROWS = Registry(
    "scatter_rows",
    [
        Backend("triton_symm_mem", f"{_HERE}.triton_symm_mem:TritonScatterRows", SYMMETRIC_NEEDS, refuse_symmetric),
        Backend("nccl", f"{_HERE}.collective:CollectiveScatterRows", (), refuse_nccl),
        Backend("gloo", f"{_HERE}.collective:CollectiveScatterRows", (), refuse_gloo, ("cpu",)),
        Backend(
            "multimem", f"{_HERE}.collective:CollectiveScatterRows", (), never("multicast is off on this fabric"), (),
        ),
        reference_backend(f"{_HERE}.reference:ReferenceScatterRows"),
    ],
    cases=f"{_HERE}.cases",
)  # fmt: skip


class ScatterRows(Layer):
    """Sum rows over the ranks of an axis and give each rank its part.

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
        cfg = ScatterRowsConfig(
            axis, hidden_size, dtype or torch.get_default_dtype(), exchange.slots if exchange is not None else 0,
            workspace.fabric.refusal if workspace is not None else None, workspace,
        )  # fmt: skip
        self.choose(SCATTER_ROWS, cfg, device, backend)
        limited = with_limit(self.choice, SCATTER_ROWS)
        if limited is not self.choice:
            self.choice, self.ladder = limited, limited.build()
        self.over = collectives(axis)

    def forward(self, x: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Return this rank's rows of the sum.

        Parameters
        ----------
        x : Tensor ``[n * p, H]``
        sizes : sequence of int, optional
            Rows of each rank, where they are not equal.
        """
        if not self.trusted:
            check_tensor(
                "ScatterRows",
                "x",
                x,
                shape=(None, self.cfg.hidden_size),
                dtype=self.cfg.dtype,
                last_dim_contiguous=True,
            )
        if sizes is not None and len(set(sizes)) > 1:
            return self.over.reduce_scatter_variable(x, sizes)
        found: torch.Tensor = self.ladder.pick(x.shape[0] // self.over.size)(x)
        return found
