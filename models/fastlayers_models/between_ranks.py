"""Steps of a model over several ranks, which compare what they called between each other.

    several groups   beside the exchange that each step begins with: :mod:`fastlayers_models.groups`
    one group        a number is written behind each launch, and read before the host waits for that step's tokens: the
                     device needs what the other ranks have launched, and these write theirs right behind that

On one host both go through memory that the processes share. Over several, one group compares when ``generate`` ends.
"""

from __future__ import annotations

import logging
import struct
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fastlayers.comm.board import Board
from fastlayers.comm.collectives import collectives
from fastlayers.comm.parallel import Axis
from fastlayers.comm.processes import gather_objects
from fastlayers.comm.ranks import TIMEOUT
from fastlayers.comm.trail import TRAIL, name_difference
from fastlayers_models.rows import Pending
from fastlayers_models.step import ModelStep

log = logging.getLogger(__name__)
_NUMBER = struct.Struct("<q")


class RankStep(ModelStep):
    """What steps over several ranks have in common; parameters as of :class:`ModelStep`."""

    def _meet(self, axis: Axis) -> Board | None:
        """Begin to compare, with the ranks of an axis; returns their board, where they are on one host."""
        self._axis = axis
        TRAIL.take(axis)  # what ranks called before is nobody's order
        return Board.make(axis, TIMEOUT.total_seconds())

    def of_all_groups(self, outputs: list[list[int]]) -> list[list[int]]:
        """Return the outputs of all requests, of those of this rank's group; at the end of a call, on all ranks."""
        return outputs

    def _name_difference(self, board: Board | None, told: str) -> None:
        """Raise what the ranks called differently; on all of them."""
        if board is not None:
            every = [each.decode() for each in board.exchange(told.encode())]
        else:
            every = gather_objects(told, self._axis, "telling what ranks called")
        name_difference(self._axis, every)


class SplitStep(RankStep):
    """The steps of one group of several ranks, which all have its requests; parameters as of :class:`ModelStep`.

    Raises
    ------
    CollectiveOrderError
        In ``tokens()`` of what :meth:`collect` returned: ranks called differently since they compared; on all ranks.
    RankLostError
        There: a rank of this host is gone.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        axis = self.model.parallel.tp
        try:
            self._board = self._meet(axis)
        except OSError as error:  # on all ranks: no memory of the host is needed for a step
            log.warning("ranks compare what they called once a call, not once a step: %s", error)
            self._board = None
        self._over = collectives(axis)
        # What was written and not compared yet; and how many were written, and compared.
        self._written: deque[tuple[int, Callable[[], str]]] = deque()
        self._count, self._compared = 0, 0

    def collect(self) -> Pending:
        """Start the copy of the loaded rows' last tokens to the host, and say what was called since the last one."""
        pending = super().collect()
        if self._board is not None:
            self._write(self._board)
            # Tokens that nobody reads keep no step, and so no cache, alive.
            pending.before = partial(_compare, weakref.ref(self), self._board, self._count)
        return pending

    def of_all_groups(self, outputs: list[list[int]]) -> list[list[int]]:
        """Compare what is left, and return the outputs."""
        if self._board is not None:
            self._write(self._board)
            self._compare(self._board, self._count)
            return outputs
        value, told = TRAIL.take(self._axis)
        mine = torch.tensor([value], dtype=torch.int64, device=self.model.device)
        found = self._over.all_gather(mine).tolist()
        TRAIL.take(self._axis)  # this is no call of a step
        if any(each != value for each in found):
            self._name_difference(None, told())
        return outputs

    def _write(self, board: Board) -> None:
        value, told = TRAIL.take(self._axis)
        board.post(_NUMBER.pack(value))
        self._written.append((value, told))
        self._count += 1

    def _read(self, board: Board) -> set[int]:
        return {_NUMBER.unpack(board.read(rank))[0] for rank in range(board.size) if rank != board.rank}

    def _compare(self, board: Board, count: int) -> None:
        """Compare what all ranks wrote until they had written so many."""
        while self._compared < count:
            value, told = self._written.popleft()
            self._compared += 1
            if self._read(board) != {value}:
                while self._written:  # all ranks have written as many
                    self._written.popleft()
                    self._compared += 1
                    self._read(board)
                self._name_difference(board, told())


def _compare(step: weakref.ref[SplitStep], board: Board, count: int) -> None:
    found = step()
    if found is not None:
        found._compare(board, count)
