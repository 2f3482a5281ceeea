"""What this process called between ranks since ranks last compared that: a rolling hash, and the last calls themselves.

    collectives, layers between ranks ─► note ─► hash and calls, for each set of ranks that a call was along
    a captured step                   ─► one call when it is captured (of all that it holds), one for each replay
    once a step                       ─► the hashes of all ranks lie beside what they exchange anyway, or are written
                                         where all read them; where they differ the calls are exchanged, and every rank
                                         names the first that is not the same

A call costs its host a microsecond or so, a step a few bytes, the device nothing. What was called differently is named
behind the step that did so, and before the host waits for that; :mod:`fastlayers.comm.order` names it before it is
launched, and where it was made.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from fastlayers.comm.parallel import Axis
from fastlayers.errors import CollectiveOrderError

KEPT, MOST_CODES = 64, 4096  # calls that can be named, and whose numbers are remembered
_PRIME, _MASK = 1_000_003, (1 << 63) - 1
STEPS = ()  # in place of ranks: captured steps, which all ranks replay

Call = tuple[Any, ...]
_codes: dict[Call, int] = {}
_places = itertools.count()


def _code(call: Call) -> int:
    """Return the number of a call, the same in every process: Python's own hash of a word is not."""
    if len(_codes) >= MOST_CODES:
        _codes.clear()  # lengths of prompts come without end
    found = _codes[call] = int.from_bytes(hashlib.sha256(_words(call).encode()).digest()[:7], "big")
    return found


@lru_cache(MOST_CODES)  # a server's first rank says them in every step
def _words(call: Call) -> str:
    name, shape, dtype, sizes = call
    if shape is None:
        return str(name)
    ragged = f" of {list(sizes)} rows" if sizes else ""
    return f"{name} with {str(dtype).removeprefix('torch.')}{list(shape)}{ragged}"


class Line:
    """The calls along one set of ranks; ``last``: the place of the last one among those of all sets."""

    __slots__ = ("calls", "count", "last", "value")

    def __init__(self) -> None:
        self.count, self.value, self.last = 0, 0, -1
        self.calls: deque[Call] = deque(maxlen=KEPT)

    def add(self, call: Call) -> None:
        """Take the next call."""
        self.value = (self.value * _PRIME + (_codes.get(call) or _code(call))) & _MASK
        self.count += 1
        self.last = next(_places)
        self.calls.append(call)


class Trail:
    """The calls of this process, along all axes: each line has its own order.

    Attributes
    ----------
    lines : dict
        Ranks of an axis (:data:`STEPS`: replays) to their :class:`Line`.
    before : dict
        Those that were compared last, if anything was called then.
    steps : int
        That this process has begun.
    """

    def __init__(self) -> None:
        self.lines: dict[tuple[int, ...], Line] = {}
        self.before: dict[tuple[int, ...], Line] = {}
        self.steps = 0

    def note(
        self, name: str, axis: Axis, shape: Sequence[int] | None, dtype: torch.dtype | None,
        sizes: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Take a call that is about to be launched along an axis; what differs between ranks by design is left out.

        Without a shape the name says it all.
        """
        if torch.compiler.is_compiling():
            return  # a program is compiled once; what runs is its captured step
        line = self.lines.get(axis.ranks)
        if line is None:
            line = self.lines[axis.ranks] = Line()
        line.add((name, shape, dtype, sizes and tuple(sizes)))

    def step(self, what: str, key: Hashable) -> None:
        """Take the capture or the replay of a step; of a process that calls nobody nothing is kept."""
        if self.lines:
            self.lines.setdefault(STEPS, Line()).add((f"{what} of {key}", None, None, None))

    @contextmanager
    def aside(self) -> Iterator[Trail]:
        """Keep the calls of a capture apart: they are not launched, and one rank may have to capture again."""
        kept, self.lines = self.lines, {}
        found = Trail()
        try:
            yield found
        finally:
            found.lines, self.lines = self.lines, kept

    def digest(self) -> int:
        """Return one number of all lines, whichever ranks they are of: groups do the same, each within itself."""
        return sum(line.value for line in self.lines.values()) & _MASK

    def recent(self) -> tuple[str, ...]:
        """Return the last calls in words, of each line at most as many as are kept, and between whom.

        The line of the newest call comes last.

        Those since ranks last compared, and those that they compared then.
        """
        found, both = [], (self.before, self.lines)
        every = {ranks: [lines[ranks] for lines in both if ranks in lines] for ranks in {*self.before, *self.lines}}
        for ranks, lines in sorted(every.items(), key=lambda item: max(line.last for line in item[1])):
            calls = [_words(call) for line in lines for call in line.calls][-KEPT:]
            found += [call if ranks == STEPS else f"{call} between ranks {ranks}" for call in calls]
        return tuple(found)

    def take(self, axis: Axis, *, steps: bool = True) -> tuple[int, Callable[[], str]]:
        """Return the number of the calls that all ranks of an axis make, and what tells them; begin anew.

        Calls along axes that some of these ranks are not on are theirs alone, and so are replays without ``steps``.
        """
        common = {
            ranks: line
            for ranks, line in self.lines.items()
            if (steps if ranks == STEPS else set(axis.ranks) <= set(ranks))
        }
        value = 0
        for ranks in sorted(common):
            value = (value * _PRIME + common[ranks].value) & _MASK
        if any(line.count for line in self.lines.values()):
            self.before = self.lines
        self.lines = {ranks: Line() for ranks in self.lines}

        def told() -> str:
            return json.dumps([
                (list(ranks), line.count, list(map(_words, line.calls))) for ranks, line in sorted(common.items())
            ])  # fmt: skip

        return value, told


def name_difference(axis: Axis, told: Sequence[str], where: str = "") -> None:
    """Raise what ranks called differently; ``told``: by each rank of the axis, of the calls since they last compared.

    ``where``: that these were made, as the beginning of the sentence.

    Raises
    ------
    CollectiveOrderError
        On every rank alike.
    """
    every = [{tuple(ranks): (count, calls) for ranks, count, calls in json.loads(each)} for each in told]
    names = axis.ranks if len(axis.ranks) == axis.size else tuple(range(axis.size))
    for ranks in sorted(set().union(*every)):
        lines = [each.get(ranks, (0, [])) for each in every]
        first = max(1, *(count - len(calls) + 1 for count, calls in lines))
        for number in range(first, max(count for count, _ in lines) + 2):
            calls = [_nth(number, *line) for line in lines]
            if len(set(calls)) > 1:
                along = "captured steps" if ranks == STEPS else f"calls between ranks {ranks}"
                each = "; ".join(f"rank {name} made {call}" for name, call in zip(names, calls, strict=True))
                break
        else:
            continue
        raise CollectiveOrderError(
            f"{where}{along}, number {number} since ranks last agreed: {each}; accepted: the same on all ranks. "
            "FASTLAYERS_DEBUG=1 names where a call is made, before it is launched."
        )
    raise CollectiveOrderError(
        f"{where}ranks {names} made other calls, and more than {KEPT} ago; accepted: the same on all ranks. "
        "FASTLAYERS_DEBUG=1 names the first, and where it is made, before it is launched."
    )


def _nth(number: int, count: int, calls: Sequence[str]) -> str:
    return calls[number - 1 - (count - len(calls))] if number <= count else "none"


TRAIL = Trail()
