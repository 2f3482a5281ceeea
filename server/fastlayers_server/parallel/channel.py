"""What the first rank says to the others, in the order in which it says it, and what all of them bring."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from fastlayers.comm.board import Board
from fastlayers.comm.parallel import Axis
from fastlayers.comm.trail import TRAIL, name_difference
from fastlayers_server.stalls import freeze

END = b""  # nothing follows
FREEZE = b"freeze"


class Channel:
    """Made on all ranks of the default process group, together; they are on one host.

    Nobody hears for long where nothing is asked for, so nothing has a deadline; who waits for a rank whose process is
    gone names it.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.axis = Axis(self.size, self.rank, tuple(range(self.size)), dist.group.WORLD)
        self._board = Board(self.axis)

    def tell(self, message: bytes | None) -> None:
        """Say something, or (``None``) that nothing follows; on the first rank."""
        self._board.post(END if message is None else message)

    def hear(self) -> bytes | None:
        """Wait for what is said next; on the other ranks. Who is told to freeze what lives does so meanwhile."""
        while (message := self._board.read(0)) == FREEZE:
            self.collect(str(freeze()["frozen"]).encode())
        return message or None

    def collect(self, data: bytes) -> list[bytes]:
        """Return what every rank brings, in their order; on all ranks."""
        return self._board.exchange(data)

    def freeze(self, objects: int) -> list[int]:
        """Have the other ranks do what this one did; returns how many objects each rank's collector leaves alone."""
        self.tell(FREEZE)
        return [int(each) for each in self.collect(str(objects).encode())]


class Digest:
    """A running checksum of the tokens of all plans, in their order; equal on all ranks, or one of them is wrong."""

    def __init__(self) -> None:
        self.count, self.value = 0, 0

    def add(self, tokens: Sequence[Sequence[int]]) -> None:
        """Take the tokens of the next plan."""
        self.count, self.value = self.count + 1, zlib.crc32(repr([list(each) for each in tokens]).encode(), self.value)


class Calls:
    """What this rank called between all ranks, from the launch of a plan to that of the next one.

    The first rank says it with the next plan, so that nobody waits for it; every other rank compares its own before it
    launches that.

    Parameters
    ----------
    axis : Axis
        Of all ranks.
    steps : bool
        Whether ranks replay the same captured steps. Groups need not: what a request draws by is part of a step.
    """

    def __init__(self, axis: Axis, steps: bool = True) -> None:
        self._axis, self._steps = axis, steps
        self.take()  # what ranks called before is nobody's order

    def take(self) -> tuple[int, str]:
        """Return a number of the calls since they were last taken, and the last of them in words."""
        number, told = TRAIL.take(self._axis, steps=self._steps)
        return number, told()

    def compare(self, number: int, made: str, tick: int) -> None:
        """Compare what was called here with what :meth:`take` returned on the first rank.

        Parameters
        ----------
        number : int
        made : str
        tick : int
            Of the plan that is launched next.

        Raises
        ------
        CollectiveOrderError
            It differs; the first call that does is named.
        """
        mine, told = TRAIL.take(self._axis, steps=self._steps)
        if mine != number:
            two = Axis(2, 1, (0, self._axis.rank))
            name_difference(two, [made, told()], f"in the plan before tick {tick} on rank {self._axis.rank}: ")
