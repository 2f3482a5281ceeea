"""Sum over ranks, every rank gets all of it.

n = ranks of the axis, T = rows (equal on all ranks), H = hidden_size
s[T,H]  = Σ over ranks of x[T,H]            (fp32, in rank order, rounded once to the dtype)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

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
class AllReduceConfig:
    """What a backend must know; fields as of :class:`~fastlayers.comm.sum_norm.layer.SumNormConfig`."""

    axis: Axis
    hidden_size: int
    dtype: torch.dtype = torch.bfloat16
    slots: int = 0
    refusal: str | None = None
    workspace: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_kind("AllReduce", Axis, axis=self.axis)
        check_positive("AllReduce", hidden_size=self.hidden_size)


_HERE = "fastlayers.comm.all_reduce"
ALL_REDUCE = Registry(
    "all_reduce",
    [
        Backend("triton_symm_mem", f"{_HERE}.triton_symm_mem:TritonAllReduce", SYMMETRIC_NEEDS, refuse_symmetric),
        Backend("nccl", f"{_HERE}.collective:CollectiveAllReduce", (), refuse_nccl),
        Backend("gloo", f"{_HERE}.collective:CollectiveAllReduce", (), refuse_gloo, ("cpu",)),
        Backend(
            "nccl_window", f"{_HERE}.collective:CollectiveAllReduce", (),
            never("NCCL < 2.29: symmetric windows replayed in graphs corrupt data"), (),
        ),
        Backend(
            "multimem", f"{_HERE}.collective:CollectiveAllReduce", (), never("multicast is off on this fabric"), (),
        ),
        reference_backend(f"{_HERE}.reference:ReferenceAllReduce"),
    ],
    cases=f"{_HERE}.cases",
)  # fmt: skip


class AllReduce(Layer):
    """Sum over the ranks of an axis.

    Parameters
    ----------
    axis : Axis
        With a process group.
    hidden_size : int
    workspace : Workspace, optional
        Of the same axis, hidden size and dtype. Without: NCCL or Gloo.
    device, dtype
        Of the rows.
    backend : str
        ``"auto"``, a name, or a ladder over rows.

    Notes
    -----
    Every rank of the axis makes the same calls with the same number of rows. Capture-safe; ``x`` may be overwritten.
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
        cfg = AllReduceConfig(
            axis, hidden_size, dtype or torch.get_default_dtype(), workspace.slots if workspace is not None else 0,
            workspace.fabric.refusal if workspace is not None else None, workspace,
        )  # fmt: skip
        self.choose(ALL_REDUCE, cfg, device, backend)
        limited = with_limit(self.choice, ALL_REDUCE)
        if limited is not self.choice:
            self.choice, self.ladder = limited, limited.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x [T, H]`` over the ranks, which may be ``x`` itself, overwritten."""
        if not self.trusted:
            size, dtype = self.cfg.hidden_size, self.cfg.dtype
            check_tensor("AllReduce", "x", x, shape=(None, size), dtype=dtype, last_dim_contiguous=True)
        total: torch.Tensor = self.ladder.pick(x.shape[0])(x)
        return total
