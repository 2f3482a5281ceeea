"""The seam of a model: what its blocks' norms sum over ranks with, made once and given to every layer.

Seam.make(parallel, …)   ─►  seam.sum_norm(norm)   for each RMSNorm that follows a sum over ranks
                             seam.all_reduce       for a sum that no norm follows (embeddings)
                             seam.spread_rows      steps of how many rows each rank adds and norms a part of
Moves.make(parallel, …)  ─►  moves.gather          of own rows, behind residual and norm or not, from all ranks
                             moves.scatter         sums of all ranks' rows, of which each rank gets its own

    attention      what sums are due over    rows between groups cross    workspaces
    tp = n         tp: Seam                  –                            tp
    dp = d         –                         tp: Moves                    tp
    tp = n, dp = d attn_tp: Seam             tp: Moves                    attn_tp, and tp
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fastlayers.comm.all_reduce.layer import AllReduce
from fastlayers.comm.fabric import Fabric, Workspace
from fastlayers.comm.gather_rows.layer import GatherRows
from fastlayers.comm.parallel import Axis, ParallelSpec
from fastlayers.comm.processes import gather_objects
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
# What a rank did that a kernel has waited for in vain, as errors say it behind "rank 1".
SILENT = "did not answer within the deadline of a sum over ranks"


def connected(parallel: ParallelSpec, device: torch.device) -> bool:
    """Return whether rows cross ranks in kernels at all: over Gloo they are called one by one in any case."""
    import torch.distributed as dist

    return parallel.tp.size > 1 and device.type == "cuda" and isinstance(parallel.tp.group, dist.ProcessGroup)


def status_of(workspace: Workspace | None) -> torch.Tensor | None:
    """Return what a kernel of a workspace sets that has waited for a rank in vain."""
    return workspace.arena.status if workspace is not None and workspace.arena is not None else None


class Late(NamedTuple):
    """What a workspace's kernels set that waited for a rank in vain, and the global ranks of its axis."""

    status: torch.Tensor
    ranks: tuple[int, ...]

    def named(self, code: int) -> int:
        """Return the global rank that a status other than 0 means."""
        return self.ranks[code - 1] if code <= len(self.ranks) > 1 else code - 1


def late_of(model: Any) -> tuple[Late, ...]:
    """Return what tells that a rank was lost, one for each workspace of a model."""
    found: dict[int, Late] = {}
    for across in (getattr(model, name, None) for name in ("seam", "moves", "token_moves")):
        if across is not None and across.status is not None:
            found.setdefault(id(across.status), Late(across.status, across.axis.ranks))
    return tuple(found.values())


def evidence_of(axis: Axis, workspace: Workspace | None, *layers: RankLayer) -> list[str]:
    """Return on what layers were chosen, each line once, and why rows do not cross these ranks in symmetric memory."""
    refusal = workspace.fabric.refusal if workspace is not None else None
    why = [] if refusal is None else [f"no symmetric memory among ranks {', '.join(map(str, axis.ranks))}: {refusal}"]
    return [*dict.fromkeys(f"{layer.choice}: {layer.choice.evidence}" for layer in layers), *why]


def alike_in_groups(parallel: ParallelSpec, workspace: Workspace) -> Workspace:
    """Return the workspace of an attention group, or one that refuses where another group got none; collective.

    Groups choose alike, so that all ranks have the same rows.
    """
    told: list[str | None] = gather_objects(workspace.fabric.refusal, parallel.tp, "LayerCommunicator: workspaces")
    first = next((rank for rank, why in enumerate(told) if why is not None), None)
    if first is None or workspace.fabric.refusal is not None:
        return workspace
    why = f"the attention group of rank {first} has none: {told[first]}"
    return Workspace(Fabric(workspace.fabric.size, why), phases=workspace.phases)


def same_rows(norm: Any, hidden_size: int, dtype: torch.dtype) -> bool:
    """Return whether a norm is an RMSNorm of such rows."""
    return isinstance(norm, RMSNorm) and norm.weight.dtype == dtype and norm.cfg.hidden_size == hidden_size


class Moves:
    """Gather and scatter of rows between attention groups, of one rank or several.

    Each rank sends, and gets the sums of, the rows that are its own: a group's rows are dealt out to its ranks, in
    order. Parameters as of :class:`Seam`.
    """

    def __init__(
        self, parallel: ParallelSpec, workspace: Workspace | None, hidden_size: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.workspace, self.axis, self.hidden_size, self.dtype = workspace, parallel.tp, hidden_size, dtype
        self.gather = GatherRows(parallel.tp, hidden_size, workspace=workspace, device=device, dtype=dtype)
        self.scatter = ScatterRows(parallel.tp, hidden_size, workspace=workspace, device=device, dtype=dtype)
        trust(self.gather, self.scatter)
        # Whether rows are quantised before they are sent where only FP8 products read them.
        self.codes = hidden_size % 128 == 0

    @staticmethod
    def make(
        parallel: ParallelSpec, hidden_size: int, dtype: torch.dtype, device: torch.device,
        tokens: tuple[int, int, int] | None = None,
    ) -> Moves | None:  # fmt: skip
        """Return the moves of a model, or ``None`` where its rows take other ways; collective where it is not.

        ``tokens``: as for :meth:`Workspace.make`.
        """
        if parallel.attn_dp.size == 1 or not connected(parallel, device):
            return None
        workspace = Workspace.make(parallel.tp, hidden_size, dtype, device, rows=1, share=SHARE, tokens=tokens)
        return Moves(parallel, workspace, hidden_size, dtype, device)

    def norms(self, norm: Any) -> bool:
        """Return whether :attr:`gather` may compute ``norm``."""
        return same_rows(norm, self.hidden_size, self.dtype)

    @property
    def status(self) -> torch.Tensor | None:
        """As of :class:`Seam`."""
        return status_of(self.workspace)

    @property
    def chosen(self) -> dict[str, str]:
        """As of :class:`Seam`."""
        found = {"gather_rows": self.gather.choice.name, "scatter_rows": self.scatter.choice.name}
        return found | {"rows between groups as codes": str(self.codes)}

    @property
    def evidence(self) -> list[str]:
        """As of :class:`Seam`."""
        return evidence_of(self.axis, self.workspace, self.gather, self.scatter)


class Seam:
    """Fused sums over the ranks of an attention group: of ``parallel.tp``, with several groups ``parallel.attn_tp``.

    Parameters
    ----------
    parallel : ParallelSpec
        Attention groups of several ranks, with process groups.
    workspace : Workspace or None
        Of those ranks.
    hidden_size, dtype, device
        Of hidden states.
    """

    def __init__(
        self, parallel: ParallelSpec, workspace: Workspace | None, hidden_size: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        groups = parallel.attn_dp.size > 1
        self.workspace, self.axis = workspace, parallel.attn_tp if groups else parallel.tp
        self.hidden_size, self.dtype, self.device = hidden_size, dtype, device
        self.all_reduce = AllReduce(self.axis, hidden_size, workspace=workspace, device=device, dtype=dtype)
        trust(self.all_reduce)
        # With several groups: a group's rows from its ranks, and the sums of its ranks' rows to them.
        self.gather: GatherRows | None = None
        self.scatter: ScatterRows | None = None
        if groups:
            self.gather = GatherRows(self.axis, hidden_size, workspace=workspace, device=device, dtype=dtype)
            self.scatter = ScatterRows(self.axis, hidden_size, workspace=workspace, device=device, dtype=dtype)
            trust(self.gather, self.scatter)
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
        for name, layer in (("gather_rows", self.gather), ("scatter_rows", self.scatter)):
            if layer is not None:
                found[f"{name} in a group"] = layer.choice.name
        for (norm, spread), made in self._norms.items():
            found[f"sum_norm {norm.eps} {norm.rounding}{' spread' * spread}"] = made.choice.name
        return found | {"spread rows": str(self.spread_rows), "rows as codes": str(self.codes)}

    @property
    def evidence(self) -> list[str]:
        """On what each operator was chosen; ``fl.explain`` of a model shows it."""
        moves = [layer for layer in (self.gather, self.scatter) if layer is not None]
        return evidence_of(self.axis, self.workspace, self.all_reduce, *moves, *self._norms.values())

    @property
    def spread_rows(self) -> range:
        """Of how many rows steps are spread: more than one push takes, where an exchange takes them.

        With several groups none are: whether that pays was not measured.
        """
        if self.workspace is None or self.gather is not None:
            return range(0)
        least = self.workspace.slots // self.axis.size + 1  # of one rank
        ladders = [made.choice.rungs for (_, spread), made in self._norms.items() if spread]
        first = [next(r for r in rungs if r.max_tokens is None or r.max_tokens >= least) for rungs in ladders]
        if not first or any(rung.backend.name != "triton_symm_mem" for rung in first):
            return range(0)
        share = min(self.workspace.share, *(rung.max_tokens or self.workspace.share for rung in first))
        return range(self.workspace.slots + 1, self.axis.size * share + 1)

    @staticmethod
    def make(
        parallel: ParallelSpec, hidden_size: int, dtype: torch.dtype, device: torch.device, rows: int | None = None,
        tokens: tuple[int, int, int] | None = None,
    ) -> Seam | None:  # fmt: skip
        """Return the seam of a model, or ``None`` where none of its norms follows a sum over ranks.

        Collective where it is not ``None``. ``rows``, ``tokens``: as for :meth:`Workspace.make`; with several groups
        tokens go to their experts in the workspace of :class:`Moves`.
        """
        if parallel.attn_tp.size == 1 or not connected(parallel, device):
            return None
        if parallel.attn_dp.size > 1:
            made = Workspace.make(parallel.attn_tp, hidden_size, dtype, device, rows=rows, share=SHARE)
            return Seam(parallel, alike_in_groups(parallel, made), hidden_size, dtype, device)
        share = SPREAD_ROWS.get(parallel.tp.size, 0) // parallel.tp.size
        workspace = Workspace.make(
            parallel.tp, hidden_size, dtype, device, rows=rows, share=share, normed=True, tokens=tokens
        )
        return Seam(parallel, workspace, hidden_size, dtype, device)

    def norms(self, norm: Any) -> bool:
        """Return whether :attr:`gather` may compute ``norm``."""
        return same_rows(norm, self.hidden_size, self.dtype)

    def sum_norm(self, norm: Any, *, spread: bool = False) -> SumNorm | None:
        """Return what sums over :attr:`axis`, adds the residual and norms as ``norm`` does; ``None`` for another norm.

        ``spread``: of steps whose residual is scattered.
        """
        if not self.norms(norm):
            return None
        key = norm.cfg, spread
        if key not in self._norms:
            self._norms[key] = made = SumNorm(
                self.axis, self.hidden_size, norm.cfg.eps, rounding=norm.cfg.rounding, spread=spread,
                workspace=self.workspace, device=self.device, dtype=self.dtype,
            )  # fmt: skip
            trust(made)
        return self._norms[key]
