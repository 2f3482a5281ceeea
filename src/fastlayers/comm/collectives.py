"""Collectives along one :class:`Axis`: torch.distributed, or nothing at all at size 1.

``collectives(axis)`` returns the object once, at construction of a layer; its methods only call. Which form a
backend needs is decided there and then:

    operation                 NCCL                                  Gloo (and others: it asks for the least)
    all_reduce_               all_reduce                            all_reduce
    all_gather                one call, equal sizes                 the same
    reduce_scatter            one call, equal sizes                 all_reduce, then the own slice
    all_gather_variable       all_gather of unequal views           padded to the largest, gathered, cut
    reduce_scatter_variable   reduce_scatter of unequal views       all_reduce, then the own slice

Gloo's reduce-scatter is an all-reduce inside, and its lists must hold equal sizes; so nothing is lost. Sums are in
the order of the backend, and in the tensor's dtype. Every rank of the axis must make the same calls, those without
rows too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from fastlayers import env
from fastlayers.comm.parallel import Axis
from fastlayers.comm.processes import lost
from fastlayers.comm.trail import TRAIL
from fastlayers.errors import ArgumentError, check_kind
from fastlayers.gradients import refuse

# Newer torch renamed the two single-tensor calls and warns about the older names.
_gather_into: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


@runtime_checkable
class CollectiveGroup(Protocol):
    """A group that brings its own collectives (for simulation): may stand in ``Axis.group``."""

    def collectives(self, axis: Axis) -> Collectives:
        """Return the collectives of the group for one of its members."""
        ...


class Collectives:
    """Collectives along an axis of size 1: every one is the identity. The base of those that communicate.

    All methods are capture-safe where the backend is (NCCL), and take contiguous or strided tensors ``[T, ...]``.
    """

    def __init__(self, axis: Axis) -> None:
        self.size, self.rank = axis.size, axis.rank

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over the ranks; ``x`` itself may be overwritten with it."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x [T, ...]`` of all ranks, in rank order: ``[size * T, ...]``; ``T`` is equal on all ranks."""
        return x

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice ``[T / size, ...]`` of the sum of ``x [T, ...]``; ``size`` divides ``T``."""
        return x

    def all_gather_variable(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return the rows of all ranks, in rank order, where rank ``i`` brings ``sizes[i]`` rows (zero is fine)."""
        self._check_rows("all_gather_variable", x, sizes, sizes[self.rank])
        return x

    def reduce_scatter_variable(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return this rank's ``sizes[rank]`` rows of the sum of ``x [sum(sizes), ...]``."""
        self._check_rows("reduce_scatter_variable", x, sizes, sum(sizes))
        return x

    def gather_by_sum(self, x: torch.Tensor | None, like: torch.Tensor, rows: int, start: int) -> torch.Tensor:
        """Return the sum over the ranks of zeros ``[rows, ...]`` into which each rank put its ``x`` at ``start``.

        Ranks that bring nothing pass ``None``; ``like`` gives dtype, device and row shape. Where several ranks put
        rows at the same place, their values are added.
        """
        buffer = like.new_zeros((rows, *like.shape[1:]))
        if x is not None:
            buffer[start : start + x.shape[0]] = x
        return self.all_reduce_(buffer)

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x [T, V]`` of all ranks side by side: ``[T, size * V]`` (vocabulary-sharded logits made whole)."""
        if self.size == 1:
            return x
        rows, width = x.shape
        stacked = self.all_gather(x).view(self.size, rows, width)
        return stacked.transpose(0, 1).reshape(rows, self.size * width)

    def own_slice(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's view of ``x [T, ...]`` split into ``size`` equal runs of rows; no communication."""
        step = self._equal_part("own_slice", x)
        return x[self.rank * step : (self.rank + 1) * step]

    def _equal_part(self, operation: str, x: torch.Tensor) -> int:
        if x.shape[0] % self.size:
            raise ArgumentError(operation, "rows", x.shape[0], f"a multiple of {self.size} ranks")
        return x.shape[0] // self.size

    def _check_rows(self, operation: str, x: torch.Tensor, sizes: Sequence[int], rows: int) -> None:
        if len(sizes) != self.size or min(sizes) < 0 or x.shape[0] != rows:
            given, accepted = f"{x.shape[0]} rows with sizes {tuple(sizes)}", f"{self.size} sizes >= 0, {rows} rows"
            raise ArgumentError(operation, "x", given, accepted)


class TorchCollectives(Collectives):
    """Collectives over a torch process group whose backend takes unequal lists (NCCL).

    A rank that is gone ends them in :class:`~fastlayers.errors.RankLostError`.
    """

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis)
        self.axis, self.group = axis, axis.group

    def _call(self, operation: Callable[..., Any], *given: Any) -> None:
        try:
            operation(*given, group=self.group)
        except RuntimeError as error:
            found = lost(error, self.axis, operation.__name__)
            if found is None:
                raise
            raise found from error

    def _refuse_grad(self, operation: str, x: torch.Tensor) -> None:
        accepted = "tensors that need no gradient (torch.distributed's have none), or torch.no_grad()"
        refuse(f"{operation} over {self.size} ranks", [("x", x)], accepted)

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self._refuse_grad("all_reduce_", x)
        x = x.contiguous()
        TRAIL.note("all_reduce", self.axis, x.shape, x.dtype)
        self._call(dist.all_reduce, x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self._refuse_grad("all_gather", x)
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        TRAIL.note("all_gather", self.axis, x.shape, x.dtype)
        self._call(_gather_into, out, x.contiguous())
        return out

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self._refuse_grad("reduce_scatter", x)
        out = x.new_empty((self._equal_part("reduce_scatter", x), *x.shape[1:]))
        TRAIL.note("reduce_scatter", self.axis, x.shape, x.dtype)
        self._call(_scatter_into, out, x.contiguous())
        return out

    def all_gather_variable(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        self._check_rows("all_gather_variable", x, sizes, sizes[self.rank])
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self._refuse_grad("all_gather_variable", x)
        if len(set(sizes)) == 1:
            return self.all_gather(x)
        out = x.new_empty((sum(sizes), *x.shape[1:]))
        # Each rank brings its own number of rows.
        TRAIL.note("all_gather_variable", self.axis, x.shape[1:], x.dtype, sizes)
        self._call(dist.all_gather, list(out.split(list(sizes))), x.contiguous())
        return out

    def reduce_scatter_variable(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        self._check_rows("reduce_scatter_variable", x, sizes, sum(sizes))
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self._refuse_grad("reduce_scatter_variable", x)
        if len(set(sizes)) == 1:
            return self.reduce_scatter(x)
        out = x.new_empty((sizes[self.rank], *x.shape[1:]))
        TRAIL.note("reduce_scatter_variable", self.axis, x.shape, x.dtype, sizes)
        self._call(dist.reduce_scatter, out, list(x.contiguous().split(list(sizes))))
        return out


class GlooCollectives(TorchCollectives):
    """The same over Gloo: reduce-scatters are an all-reduce and a slice, unequal gathers are padded."""

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        self._equal_part("reduce_scatter", x)
        # The clone keeps the caller's tensor: only all_reduce_ may overwrite its argument.
        return self.own_slice(self.all_reduce_(x.clone(memory_format=torch.contiguous_format)))

    def all_gather_variable(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        self._check_rows("all_gather_variable", x, sizes, sizes[self.rank])
        largest = max(sizes)
        padded = x.new_zeros((largest, *x.shape[1:]))
        padded[: x.shape[0]] = x
        parts = self.all_gather(padded).split(largest) if largest else [padded] * self.size
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatter_variable(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        self._check_rows("reduce_scatter_variable", x, sizes, sum(sizes))
        start = sum(sizes[: self.rank])
        return self.all_reduce_(x.clone(memory_format=torch.contiguous_format))[start : start + sizes[self.rank]]


def _refuse(self: Collectives, *_: Any) -> Any:
    accepted = "a process group: build the spec with ParallelSpec.from_mesh (ParallelSpec.grid has sizes only)"
    raise ArgumentError("collectives", "axis.group", f"None for an axis of {self.size} ranks", accepted)


_REFUSE: Any = _refuse


class Unconnected(Collectives):
    """Collectives of an axis with several ranks but no group: sizes are known, any call raises."""

    all_reduce_ = all_gather = reduce_scatter = all_gather_variable = reduce_scatter_variable = _REFUSE


def by_nccl(group: Any) -> bool:
    """Return whether a group is one of processes that communicate by NCCL."""
    return isinstance(group, dist.ProcessGroup) and "nccl" in str(dist.get_backend_config(group))


def collectives(axis: Axis) -> Collectives:
    """Return the collectives of ``axis``; choose once, at construction.

    Size 1 needs no process group. An axis of several ranks without a group gives an object whose every call
    raises :class:`ArgumentError`, so that a rank's shapes can be studied without the other ranks.
    """
    if axis.size == 1:
        return Collectives(axis)
    if axis.group is None:
        return Unconnected(axis)
    if isinstance(axis.group, CollectiveGroup):
        return axis.group.collectives(axis)
    check_kind("collectives", dist.ProcessGroup, **{"axis.group": axis.group})
    found = TorchCollectives(axis) if by_nccl(axis.group) else GlooCollectives(axis)
    if env.debug():
        from fastlayers.comm.order import checked

        return checked(axis, found)
    return found


def gather_logits(logits: torch.Tensor, over: Collectives) -> torch.Tensor:
    """Return full logits ``[T, V]`` from the vocabulary shards ``[T, V / size]`` of each rank, in rank order.

    ``over`` is ``collectives(axis)``; capture-safe; a new tensor unless the axis has one rank.
    """
    return over.all_gather_last(logits)


def reduce_embedding(embedded: torch.Tensor, over: Collectives) -> torch.Tensor:
    """Return the sum of the partial embeddings ``[T, D]`` of a vocabulary-sharded table.

    Rows whose id another rank holds must be zero. ``embedded`` may be overwritten.
    """
    return over.all_reduce_(embedded)
