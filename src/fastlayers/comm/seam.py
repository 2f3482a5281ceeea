"""The seam of a model: what its blocks' norms sum over ranks with, made once and given to every layer.

Seam.make(parallel, …)  ─►  seam.sum_norm(norm)   for each RMSNorm that follows a sum over ranks
                            seam.all_reduce       for a sum that no norm follows (embeddings)
                            seam.spread_rows      steps of how many rows each rank adds and norms a part of
"""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.comm.all_reduce.layer import AllReduce
from fastlayers.comm.fabric import Workspace
from fastlayers.comm.gather_rows.layer import GatherRows
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.rank_layer import RankLayer
from fastlayers.comm.scatter_rows.layer import ScatterRows
from fastlayers.comm.sum_norm.layer import SumNorm
from fastlayers.layer import trust
from fastlayers.norm.rms_norm.layer import RMSNorm, RMSNormConfig

# Most rows of one rank that go through other ranks' memory; beyond, NCCL moves them.
SHARE = 512
# Most rows of a step that is spread, by number of ranks, where that was measured to pay: beyond what one push takes.
# With two ranks and a hidden size of 7168 a sum and its norm of 2,048 rows take 91 us (NCCL's sum alone 120), of 16,384
# rows 662 (781). The workspace has 6 bytes for each value of these rows.
SPREAD_ROWS = {2: 8192}


def connected(parallel: ParallelSpec, device: torch.device) -> bool:
    """Return whether rows cross ranks in kernels at all: over Gloo they are called one by one in any case."""
    import torch.distributed as dist

    return parallel.tp.size > 1 and device.type == "cuda" and isinstance(parallel.tp.group, dist.ProcessGroup)


def status_of(workspace: Workspace | None) -> torch.Tensor | None:
    """Return what a kernel of a workspace sets that has waited for a rank in vain."""
    return workspace.arena.status if workspace is not None and workspace.arena is not None else None


def evidence_of(*layers: RankLayer) -> list[str]:
    """Return on what layers were chosen, each line once."""
    return list(dict.fromkeys(f"{layer.choice}: {layer.choice.evidence}" for layer in layers))


class Moves:
    """Gather and scatter of rows between attention groups of one rank each; parameters as of :class:`Seam`."""

    def __init__(
        self, parallel: ParallelSpec, workspace: Workspace | None, hidden_size: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.workspace = workspace
        self.gather = GatherRows(parallel.tp, hidden_size, workspace=workspace, device=device, dtype=dtype)
        self.scatter = ScatterRows(parallel.tp, hidden_size, workspace=workspace, device=device, dtype=dtype)
        trust(self.gather, self.scatter)

    @staticmethod
    def make(
        parallel: ParallelSpec, hidden_size: int, dtype: torch.dtype, device: torch.device,
        tokens: tuple[int, int, int] | None = None,
    ) -> Moves | None:  # fmt: skip
        """Return the moves of a model, or ``None`` where its rows take other ways; collective where it is not.

        ``tokens``: as for :meth:`Workspace.make`.
        """
        if parallel.attn_dp.size == 1 or parallel.attn_tp.size > 1 or not connected(parallel, device):
            return None
        workspace = Workspace.make(parallel.tp, hidden_size, dtype, device, rows=1, share=SHARE, tokens=tokens)
        return Moves(parallel, workspace, hidden_size, dtype, device)

    @property
    def status(self) -> torch.Tensor | None:
        """As of :class:`Seam`."""
        return status_of(self.workspace)

    @property
    def chosen(self) -> dict[str, str]:
        """As of :class:`Seam`."""
        return {"gather_rows": self.gather.choice.name, "scatter_rows": self.scatter.choice.name}

    @property
    def evidence(self) -> list[str]:
        """As of :class:`Seam`."""
        return evidence_of(self.gather, self.scatter)


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
        # Whether normed rows are quantised before they leave their kernel where only FP8 products read them.
        self.codes = hidden_size % 128 == 0
        self._norms: dict[tuple[RMSNormConfig, bool], SumNorm] = {}

    @property
    def status(self) -> torch.Tensor | None:
        """What a kernel sets that has waited for a rank in vain, see :class:`Arena`; ``None`` without an arena."""
        return status_of(self.workspace)

    @property
    def chosen(self) -> dict[str, str]:
        """What was chosen for each operator."""
        found = {"all_reduce": self.all_reduce.choice.name}
        for (norm, spread), made in self._norms.items():
            found[f"sum_norm {norm.eps} {norm.rounding}{' spread' * spread}"] = made.choice.name
        return found | {"spread rows": str(self.spread_rows), "rows as codes": str(self.codes)}

    @property
    def evidence(self) -> list[str]:
        """On what each operator was chosen; ``fl.explain`` of a model shows it."""
        return evidence_of(self.all_reduce, *self._norms.values())

    @property
    def spread_rows(self) -> range:
        """Of how many rows steps are spread: more than one push takes, where an exchange takes them."""
        if self.workspace is None:
            return range(0)
        least = self.workspace.slots // self.parallel.tp.size + 1  # of one rank
        ladders = [made.choice.rungs for (_, spread), made in self._norms.items() if spread]
        first = [next(r for r in rungs if r.max_tokens is None or r.max_tokens >= least) for rungs in ladders]
        if not first or any(rung.backend.name != "triton_symm_mem" for rung in first):
            return range(0)
        share = min(self.workspace.share, *(rung.max_tokens or self.workspace.share for rung in first))
        return range(self.workspace.slots + 1, self.parallel.tp.size * share + 1)

    @staticmethod
    def make(
        parallel: ParallelSpec, hidden_size: int, dtype: torch.dtype, device: torch.device, rows: int | None = None,
        tokens: tuple[int, int, int] | None = None,
    ) -> Seam | None:  # fmt: skip
        """Return the seam of a model, or ``None`` where none of its norms follows a sum over ranks.

        Collective where it is not ``None``. ``rows``, ``tokens``: as for :meth:`Workspace.make`.
        """
        if parallel.attn_dp.size > 1 or not connected(parallel, device):
            return None
        share = SPREAD_ROWS.get(parallel.tp.size, 0) // parallel.tp.size
        workspace = Workspace.make(
            parallel.tp, hidden_size, dtype, device, rows=rows, share=share, normed=True, tokens=tokens
        )
        return Seam(parallel, workspace, hidden_size, dtype, device)

    def sum_norm(self, norm: Any, *, spread: bool = False) -> SumNorm | None:
        """Return what sums over ``tp``, adds the residual and norms as ``norm`` does; ``None`` for another norm.

        ``spread``: of steps whose residual is scattered.
        """
        if not isinstance(norm, RMSNorm) or norm.weight.dtype != self.dtype or norm.cfg.hidden_size != self.hidden_size:
            return None
        key = norm.cfg, spread
        if key not in self._norms:
            self._norms[key] = made = SumNorm(
                self.parallel.tp, self.hidden_size, norm.cfg.eps, rounding=norm.cfg.rounding, spread=spread,
                workspace=self.workspace, device=self.device, dtype=self.dtype,
            )  # fmt: skip
            trust(made)
        return self._norms[key]
