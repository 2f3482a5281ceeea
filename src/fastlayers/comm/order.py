"""Under ``FASTLAYERS_DEBUG``: every rank says what it does next between ranks, and only what all say is launched.

    rank r, call k along an axis:  operation, shape, dtype, where it was called ─► store ─► those of its ranks, compared

Ranks whose calls differ would wait for each other, or add up what does not belong together. A rank that says nothing
within :data:`DEADLINE` is named with what it said last, and so is, at once, one that waits along another axis for who
waits for it; nothing was launched then, and no rank waits for ever. A rank whose process has ended is lost.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from fastlayers.comm.collectives import Collectives
from fastlayers.comm.parallel import Axis
from fastlayers.comm.processes import AGAIN, ended, rank_lost
from fastlayers.errors import CollectiveOrderError

# How long a rank may be behind: first calls compile.
DEADLINE = timedelta(seconds=120)
# Frames of these files and of torch are not where a call was made.
_OWN = str(Path(__file__).parent)
_KEPT = 64  # calls that stay in the store
_LOOK = timedelta(seconds=1)  # a rank that waits looks so often what the other one does instead


class Order:
    """The calls of this process between ranks, compared with those of all others.

    Parameters
    ----------
    store
        Of torch.distributed, of all ranks.
    rank, size : int
        In the world.
    deadline : timedelta
    name : str
        Of this order in the store.
    """

    def __init__(self, store: Any, rank: int, size: int, deadline: timedelta = DEADLINE, name: str = "order") -> None:
        self.store, self.rank, self.size, self.deadline, self.name = store, rank, size, deadline, name
        self.calls: Counter[tuple[int, ...]] = Counter()

    def check(self, operation: str, axis: Axis, x: torch.Tensor, sizes: Sequence[int] | None = None) -> None:
        """Compare the next call along an axis; before it is launched.

        Raises
        ------
        CollectiveOrderError
            On every rank: another one calls something else next, or says nothing within the deadline.
        RankLostError
            Its process has ended.
        """
        line = axis.ranks if len(axis.ranks) == axis.size else tuple(range(self.size))
        self.calls[line] += 1
        number = self.calls[line]
        rows = [list(x.shape), str(x.dtype).removeprefix("torch."), list(sizes or ())]
        mine = {"number": number, "line": list(line), "call": operation, "rows": rows, "site": _site()}
        self.store.set(self._key(line, number, self.rank), json.dumps(mine))
        self.store.set(f"{self.name}/last/{self.rank}", json.dumps(mine))
        if number > _KEPT:
            self.store.delete_key(self._key(line, number - _KEPT, self.rank))
        begin = f"call {number} between ranks {line}: rank {self.rank} calls {_words(mine)}"
        for rank in line:
            theirs = mine if rank == self.rank else self._of(axis, line, number, rank, begin)
            if (theirs["call"], theirs["rows"]) != (mine["call"], mine["rows"]):
                accepted = "the same on all ranks. Nothing was launched."
                raise CollectiveOrderError(f"{begin}; rank {rank} calls {_words(theirs)}; accepted: {accepted}")

    def _key(self, line: tuple[int, ...], number: int, rank: int) -> str:
        return f"{self.name}/{line}/{number}/{rank}"

    def _of(self, axis: Axis, line: tuple[int, ...], number: int, rank: int, begin: str) -> dict[str, Any]:
        """Wait for what another rank says of this call."""
        key, until = self._key(line, number, rank), time.monotonic() + self.deadline.total_seconds()
        while True:
            left = max(0.001, until - time.monotonic())
            try:
                self.store.wait([key], min(_LOOK, timedelta(seconds=left)))
                found: dict[str, Any] = json.loads(self.store.get(key))
                return found
            except RuntimeError as error:  # torch's of a store are
                told, here = self._last(rank, key)
                if here:
                    continue
                last = "nothing"
                if told is not None:
                    last = f"call {told['number']} between ranks {tuple(told['line'])}, {_words(told)}"
                process = dict(zip(axis.ranks, axis.processes, strict=False)).get(rank)
                if process is not None and ended(process):
                    gone = f"rank {rank} is gone, its process {process[1]} has ended, its last: {last}"
                    raise rank_lost(f"{begin}; {gone}. Nothing was launched; {AGAIN}", "order", rank) from error
                why = None
                if told is not None and self._awaits_me(told):
                    why = f"makes {last}, and waits there for this one"
                elif time.monotonic() >= until:
                    why = f"says nothing of it for {self.deadline.total_seconds():g} s, its last: {last}"
                if why is not None:
                    raise CollectiveOrderError(f"{begin}; rank {rank} {why}. Nothing was launched.") from error

    def _last(self, rank: int, key: str) -> tuple[dict[str, Any] | None, bool]:
        """Return what another rank said last, and whether ``key`` is there now: who says a call has said it."""
        last = f"{self.name}/last/{rank}"
        try:
            told = json.loads(self.store.get(last)) if self.store.check([last]) else None
            return told, self.store.check([key])
        except RuntimeError:  # gone with the process that kept it
            return None, False

    def _awaits_me(self, told: dict[str, Any]) -> bool:
        """Return whether who made this call last waits until this rank makes it, too."""
        line = tuple(told["line"])
        return self.rank in line and told["number"] > self.calls[line]


def _words(record: dict[str, Any]) -> str:
    shape, dtype, sizes = record["rows"]
    ragged = f" of {sizes} rows" if sizes else ""
    return f"{record['call']} with {dtype}{shape}{ragged} at {record['site']}"


def _site() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN) and "/torch/" not in file:
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


class CheckedCollectives(Collectives):
    """Collectives whose calls are compared with those of all ranks before they are launched."""

    def __init__(self, axis: Axis, inner: Collectives, order: Order) -> None:
        super().__init__(axis)
        self.axis, self.inner, self.order = axis, inner, order

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        self.order.check("all_reduce", self.axis, x)
        return self.inner.all_reduce_(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.order.check("all_gather", self.axis, x)
        return self.inner.all_gather(x)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        self.order.check("reduce_scatter", self.axis, x)
        return self.inner.reduce_scatter(x)

    def all_gather_variable(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        # Each rank brings its own number of rows.
        self.order.check("all_gather_variable", self.axis, x[:0], sizes)
        return self.inner.all_gather_variable(x, sizes)

    def reduce_scatter_variable(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        self.order.check("reduce_scatter_variable", self.axis, x, sizes)
        return self.inner.reduce_scatter_variable(x, sizes)


# The order of this process's world; another world has another.
_orders: dict[Any, Order] = {}


def order_of_world() -> Order:
    """Return the order of the default process group."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    if store not in _orders:
        _orders.clear()
        _orders[store] = Order(store, dist.get_rank(), dist.get_world_size())
    return _orders[store]


def checked(axis: Axis, inner: Collectives) -> Collectives:
    """Return these collectives with the check."""
    return CheckedCollectives(axis, inner, order_of_world())
