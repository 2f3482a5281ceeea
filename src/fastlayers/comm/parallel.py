"""Parallel topology as plain data: :class:`Axis`, :class:`Shard`, :class:`ParallelSpec`.

    world = TP ranks; rank layout is dp-major:   rank = dp_rank * attn_tp.size + attn_tp_rank

    axis      ranks in it                               who uses it
    tp        all                                       dense MLP, lm_head
    attn_tp   ranks of one attention group              attention, embedding
    attn_dp   one rank of each attention group          tokens differ along it
    ep        ranks that split the experts              experts
    moe_tp    ranks that split one expert               experts

State is an argument: the spec goes into constructors, and nothing is looked up in globals. World size 1 needs no
process group.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastlayers.errors import (
    ArgumentError,
    as_integers,
    check_choice,
    check_fields,
    check_kind,
    check_plain,
    check_positive,
    describe,
)
from fastlayers.moe.placement.planner import EplbConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Axis:
    """One dimension of the rank grid: its ``size``, this process's ``rank`` in it, and its process group.

    ``ranks`` are the global ranks of this process's line along the axis, in order; ``()`` or the default where nobody
    asks for them. ``processes``: which process each of them is (:mod:`fastlayers.comm.processes`), where that is known.
    """

    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: Any = field(default=None, compare=False, repr=False)
    processes: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_positive("Axis", size=self.size)
        check_fields("Axis", self)
        if not 0 <= self.rank < self.size:
            raise ArgumentError("Axis", "rank", f"{self.rank} of {self.size}", "0 <= rank < size")
        known = self.ranks not in ((), (0,))
        if known and (len(self.ranks) != self.size or len(set(self.ranks)) != self.size or min(self.ranks) < 0):
            raise ArgumentError("Axis", "ranks", self.ranks, f"{self.size} different ranks, none negative")
        processes = self.processes
        whole = isinstance(processes, tuple) and all(isinstance(p, list | tuple) and len(p) == 3 for p in processes)
        if not whole or len(processes) not in (0, self.size):
            accepted = f"(), or host, process id and birth of each of the {self.size} ranks' processes"
            raise ArgumentError("Axis", "processes", describe(processes), accepted)

    def part(self, extent: int, what: str) -> slice:
        """Return this rank's slice of ``extent`` equal parts, or raise naming ``what`` is not divisible."""
        if extent % self.size:
            raise ArgumentError(what, "size", f"{extent} over {self.size} ranks", f"a multiple of {self.size}")
        step = extent // self.size
        return slice(self.rank * step, (self.rank + 1) * step)


SINGLE = Axis()


@dataclass(frozen=True)
class Shard:
    """How a layer's weights are split: ``kind`` along ``axis``.

    ``"replicated"``; ``"column"`` (output features), ``"row"`` (input features; the output is a partial sum that
    the communicator reduces); ``"expert"`` (whole experts).
    """

    kind: str = "replicated"
    axis: Axis = SINGLE

    def __post_init__(self) -> None:
        check_choice("Shard", "kind", self.kind, ("replicated", "column", "row", "expert"))
        check_kind("Shard", Axis, axis=self.axis)


REPLICATED = Shard()
MOST_RANKS = 65_536  # beyond any machine: each rank lists all others
AXES = ("tp", "attn_tp", "attn_dp", "ep", "moe_tp")
# How tokens get to the ranks that have their experts, see :mod:`fastlayers.comm.token_moves`.
TOKEN_WAYS = ("auto", "gather", "exchange")


@dataclass(frozen=True)
class ParallelSpec:
    """The rank grid as one process sees it; see the table at the head of this file.

    ``eplb``: experts lie in slots of which there may be more than experts, and move as their loads change; ``None``:
    each rank of ``ep`` has an equal run of them. ``expert_exchange``: how tokens get to their experts, one of
    :data:`TOKEN_WAYS`; ``"auto"`` is ``"gather"`` where nothing else was measured to be quicker.
    """

    tp: Axis = SINGLE
    attn_tp: Axis = SINGLE
    attn_dp: Axis = SINGLE
    ep: Axis = SINGLE
    moe_tp: Axis = SINGLE
    eplb: EplbConfig | None = None
    expert_exchange: str = "auto"

    def __post_init__(self) -> None:
        axes = {name: getattr(self, name) for name in AXES}
        check_kind("ParallelSpec", Axis, **axes)
        check_kind("ParallelSpec", EplbConfig | None, eplb=self.eplb)
        check_choice("ParallelSpec", "expert_exchange", self.expert_exchange, TOKEN_WAYS)
        for outer, inner in (("attn_dp", "attn_tp"), ("ep", "moe_tp")):
            a, b = axes[outer], axes[inner]
            if (a.size * b.size, a.rank * b.size + b.rank) != (self.tp.size, self.tp.rank):
                given = f"rank {b.rank} of {b.size}, with {outer} rank {a.rank} of {a.size}"
                accepted = f"axes that make rank {self.tp.rank} of {self.tp.size} of tp; see ParallelSpec.grid"
                raise ArgumentError("ParallelSpec", inner, given, accepted)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tp.size

    def column(self, axis: str = "tp") -> Shard:
        """Return a column shard along the named axis."""
        return self._shard("column", axis)

    def row(self, axis: str = "tp") -> Shard:
        """Return a row shard along the named axis."""
        return self._shard("row", axis)

    def _shard(self, kind: str, axis: str) -> Shard:
        check_choice("ParallelSpec", "axis", axis, AXES)
        return Shard(kind, getattr(self, axis))

    @staticmethod
    def grid(world_size: int, rank: int, *, attn_dp: int = 1, ep: int = 1) -> ParallelSpec:
        """Return the spec of one rank without process groups: sizes, ranks and slices only.

        Raises
        ------
        ArgumentError
            ``attn_dp`` or ``ep`` does not divide ``world_size``.
        """
        check_positive("ParallelSpec", world_size=world_size, attn_dp=attn_dp, ep=ep)
        check_plain("ParallelSpec", "int >= 0", rank=rank)
        world_size, rank, attn_dp, ep = as_integers(world_size, rank, attn_dp, ep)
        if world_size > MOST_RANKS:
            raise ArgumentError("ParallelSpec", "world_size", world_size, f"at most {MOST_RANKS}")
        if rank >= world_size:
            raise ArgumentError("ParallelSpec", "rank", rank, f"less than world_size {world_size}")
        for name, value in (("attn_dp", attn_dp), ("ep", ep)):
            if world_size % value:
                raise ArgumentError("ParallelSpec", name, value, f"a divisor of world_size {world_size}")
        attn_tp, moe_tp = world_size // attn_dp, world_size // ep
        dp_rank, attn_rank = divmod(rank, attn_tp)
        ep_rank, moe_rank = divmod(rank, moe_tp)
        return ParallelSpec(
            tp=Axis(world_size, rank, tuple(range(world_size))),
            attn_tp=Axis(attn_tp, attn_rank, tuple(dp_rank * attn_tp + i for i in range(attn_tp))),
            attn_dp=Axis(attn_dp, dp_rank, tuple(i * attn_tp + attn_rank for i in range(attn_dp))),
            ep=Axis(ep, ep_rank, tuple(i * moe_tp + moe_rank for i in range(ep))),
            moe_tp=Axis(moe_tp, moe_rank, tuple(ep_rank * moe_tp + i for i in range(moe_tp))),
        )

    @staticmethod
    def from_mesh(mesh: DeviceMesh, *, attn_dp: int = 1, ep: int = 1) -> ParallelSpec:
        """Return the spec of this process for a one-dimensional ``DeviceMesh`` over all TP ranks.

        Creates the sub-groups (a collective call: every rank must make it, with equal arguments).
        """
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        from fastlayers.comm.processes import introduce

        check_kind("ParallelSpec", DeviceMesh, mesh=mesh)
        if mesh.ndim != 1:
            raise ArgumentError("ParallelSpec", "mesh", mesh, "a mesh of one dimension")
        world_size, rank = mesh.size(), mesh.get_rank()
        plain = ParallelSpec.grid(world_size, rank, attn_dp=attn_dp, ep=ep)
        by_attention = init_device_mesh(
            mesh.device_type, (attn_dp, world_size // attn_dp), mesh_dim_names=("attn_dp", "attn_tp")
        )
        by_expert = init_device_mesh(mesh.device_type, (ep, world_size // ep), mesh_dim_names=("ep", "moe_tp"))
        groups = {
            "tp": mesh.get_group(),
            "attn_tp": by_attention.get_group("attn_tp"),
            "attn_dp": by_attention.get_group("attn_dp"),
            "ep": by_expert.get_group("ep"),
            "moe_tp": by_expert.get_group("moe_tp"),
        }
        processes = introduce(mesh.mesh.flatten().tolist())
        axes = {name: getattr(plain, name) for name in groups}
        made: dict[str, Any] = {
            n: Axis(a.size, a.rank, a.ranks, groups[n] if a.size > 1 else None, tuple(processes[r] for r in a.ranks))
            for n, a in axes.items()
        }
        return replace(plain, **made)
