"""The seam of a model: what its blocks' norms sum over ranks with, made once and given to every layer.

Seam.make(parallel, …)  ─►  seam.sum_norm(norm)   for each RMSNorm that follows a sum over ranks
                            seam.all_reduce       for a sum that no norm follows (embeddings)
"""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.comm.all_reduce.layer import AllReduce
from fastlayers.comm.fabric import Workspace
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.sum_norm.layer import SumNorm
from fastlayers.layer import trust
from fastlayers.norm.rms_norm.layer import RMSNorm, RMSNormConfig


class Seam:
    """Fused sums over the ranks of ``parallel.tp``.

    Parameters
    ----------
    parallel : ParallelSpec
        One attention group of several ranks, with process groups.
    workspace : Workspace or None
    hidden_size, dtype, device
        Of hidden states.
    """

    def __init__(
        self, parallel: ParallelSpec, workspace: Workspace | None, hidden_size: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.parallel, self.workspace = parallel, workspace
        self.hidden_size, self.dtype, self.device = hidden_size, dtype, device
        self.all_reduce = AllReduce(parallel.tp, hidden_size, workspace=workspace, device=device, dtype=dtype)
        trust(self.all_reduce)
        self._norms: dict[RMSNormConfig, SumNorm] = {}

    @property
    def status(self) -> torch.Tensor | None:
        """What a kernel sets that has waited for a rank in vain, see :class:`Arena`; ``None`` without an arena."""
        arena = self.workspace.arena if self.workspace is not None else None
        return arena.status if arena is not None else None

    @property
    def chosen(self) -> dict[str, str]:
        """What was chosen for each operator."""
        found = {"all_reduce": self.all_reduce.choice.name}
        return found | {f"sum_norm {norm.eps} {norm.rounding}": made.choice.name for norm, made in self._norms.items()}

    @staticmethod
    def make(
        parallel: ParallelSpec, hidden_size: int, dtype: torch.dtype, device: torch.device, rows: int | None = None
    ) -> Seam | None:
        """Return the seam of a model, or ``None`` where none of its norms follows a sum over ranks.

        Collective where it is not ``None``. ``rows``: as for :meth:`Workspace.make`.
        """
        import torch.distributed as dist

        tp = parallel.tp
        if tp.size == 1 or parallel.attn_dp.size > 1 or not isinstance(tp.group, dist.ProcessGroup):
            return None
        if device.type != "cuda":
            return None  # over Gloo the sum and the norm are two calls in any case
        workspace = Workspace.make(tp, hidden_size, dtype, device, rows=rows)
        return Seam(parallel, workspace, hidden_size, dtype, device)

    def sum_norm(self, norm: Any) -> SumNorm | None:
        """Return what sums over ``tp``, adds the residual and norms as ``norm`` does; ``None`` for another norm."""
        if not isinstance(norm, RMSNorm) or norm.weight.dtype != self.dtype or norm.cfg.hidden_size != self.hidden_size:
            return None
        if norm.cfg not in self._norms:
            made = SumNorm(
                self.parallel.tp, self.hidden_size, norm.cfg.eps, rounding=norm.cfg.rounding, workspace=self.workspace,
                device=self.device, dtype=self.dtype,
            )  # fmt: skip
            trust(made)
            self._norms[norm.cfg] = made
        return self._norms[norm.cfg]
