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

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastlayers.errors import ArgumentError, check_choice

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Axis:
    """One dimension of the rank grid: its ``size``, this process's ``rank`` in it, and its process group.

    ``ranks`` are the global ranks of this process's line along the axis, in order.
    """

    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ArgumentError("Axis", "rank", f"{self.rank} of {self.size}", "0 <= rank < size, size >= 1")

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


REPLICATED = Shard()


@dataclass(frozen=True)
class ParallelSpec:
    """The rank grid as one process sees it; see the table at the head of this file."""

    tp: Axis = SINGLE
    attn_tp: Axis = SINGLE
    attn_dp: Axis = SINGLE
    ep: Axis = SINGLE
    moe_tp: Axis = SINGLE

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tp.size

    def column(self, axis: str = "tp") -> Shard:
        """Return a column shard along the named axis."""
        return Shard("column", getattr(self, axis))

    def row(self, axis: str = "tp") -> Shard:
        """Return a row shard along the named axis."""
        return Shard("row", getattr(self, axis))

    @staticmethod
    def grid(world_size: int, rank: int, *, attn_dp: int = 1, ep: int = 1) -> ParallelSpec:
        """Return the spec of one rank without process groups: sizes, ranks and slices only.

        Raises
        ------
        ArgumentError
            ``attn_dp`` or ``ep`` does not divide ``world_size``.
        """
        for name, value in (("attn_dp", attn_dp), ("ep", ep)):
            if value < 1 or world_size % value:
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
        from torch.distributed.device_mesh import init_device_mesh

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
        axes = {name: getattr(plain, name) for name in groups}
        return ParallelSpec(
            **{n: Axis(a.size, a.rank, a.ranks, groups[n] if a.size > 1 else None) for n, a in axes.items()}
        )
