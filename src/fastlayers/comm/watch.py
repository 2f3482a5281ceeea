"""A wait for work that another rank can keep from ending: it ends, in words, when that rank is lost.

    replay that holds collectives of NCCL ─► event ◄─ the host, in Watch.wait
    a thread meanwhile: has a rank's process ended? has a sum given up? is the deadline over?
                        ─► says who is lost, then aborts the communicators: their kernels end, the event comes, and
                           the host raises

torch.distributed watches what it launches itself, for ten minutes; what is in a captured step it does not see, and a
kernel of NCCL waits for ever. An abort returns when the graphs that hold its communicator are freed; so it has a thread
of its own, and nobody waits for that.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastlayers.comm.parallel import AXES, Axis, ParallelSpec
from fastlayers.comm.processes import AGAIN, ended, rank_lost
from fastlayers.comm.ranks import TIMEOUT
from fastlayers.comm.seam import SILENT, Late
from fastlayers.runtime.streams import side_lock, side_stream

# What ended the communicators of a group: whoever else waits for their work must not take it for right.
_LOST: weakref.WeakKeyDictionary[Any, tuple[str, int | None]] = weakref.WeakKeyDictionary()
GRACE = 5.0  # seconds that work may take whose rank has ended: it may have brought all that it had to
_LOOK = 0.25  # seconds between two looks


class Watch:
    """Waits of one process for events that need the ranks of an axis.

    Parameters
    ----------
    axis : Axis
        The ranks that are waited for, with their processes.
    groups : sequence of torch.distributed.ProcessGroup
        Each one's ``abort`` ends its communicator's kernels, and may itself never return. What one watch gave up, all
        watches of the group give up.
    status : callable, optional
        Returns, while the device is busy, one more than the global rank that a workspace's kernels waited for in vain;
        0: none; ``None``: not known now.
    deadline_s : float
        How long a rank that lives is waited for.
    grace_s : float
        How long work may take of which a rank is known to be lost.
    """

    def __init__(
        self, axis: Axis, groups: Sequence[Any], status: Callable[[], int | None] | None = None,
        *, deadline_s: float = TIMEOUT.total_seconds(), grace_s: float = GRACE,
    ) -> None:  # fmt: skip
        self.axis, self.groups, self._status = axis, tuple(groups), status
        self.deadline_s, self.grace_s = deadline_s, grace_s
        self.lost: str | None = None
        self.rank: int | None = None  # that is lost, where it is known
        self._waits: dict[object, float] = {}  # of each thread that waits, since when
        self._suspect: tuple[float, float] | None = None  # that wait, and when a rank was first seen to be lost
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @staticmethod
    def of(parallel: ParallelSpec, device: torch.device, late: Sequence[Late] = ()) -> Watch | None:
        """Return the watch of a split model's steps, or ``None`` where no collective of theirs is captured.

        ``late``: of their workspaces, on the device.
        """
        from fastlayers.comm.collectives import by_nccl

        groups = {id(group): group for name in AXES if by_nccl(group := getattr(parallel, name).group)}
        if device.type != "cuda" or not groups:
            return None
        return Watch(parallel.tp, list(groups.values()), LateReader(late) if late else None)

    def wait(self, event: Any) -> None:
        """Wait for an event, as ``event.synchronize()`` does.

        Raises
        ------
        RankLostError
            Another rank is lost; on every further call, too.
        """
        self._ask_others()
        if self.lost is None:
            with self._lock:
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True)
                    self._thread.start()
            mine = object()
            self._waits[mine] = time.monotonic()
            try:
                event.synchronize()
            except RuntimeError:
                if self.lost is None:
                    raise
            finally:
                del self._waits[mine]
            self._ask_others()
        if self.lost is not None:
            raise rank_lost(f"Watch: {self.lost}; {AGAIN}", "a captured collective", self.rank)

    def _ask_others(self) -> None:
        """Take over what another watch of these groups gave up: their communicators are gone."""
        if _LOST and self.lost is None:
            self.lost, self.rank = next((_LOST[group] for group in self.groups if group in _LOST), (None, None))

    def give_up(self, why: str, rank: int | None = None) -> None:
        """End what the device does with other ranks; ``why``: what every further wait raises. The first one counts."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost, self.rank = why, rank
        for group in self.groups:
            _LOST[group] = why, rank
        for group in self.groups:
            threading.Thread(target=group.abort, daemon=True).start()

    def look(self) -> None:
        """Give up where the host waits for a rank that is lost; what the thread does again and again."""
        since, now = min(list(self._waits.values()), default=None), time.monotonic()
        if since is None or self.lost is not None:
            return
        if now - since > self.deadline_s:
            self.give_up(f"a rank of {self.axis.ranks} did not answer for {self.deadline_s:g} s")
        elif (found := self._who()) is not None:
            if self._suspect is None or self._suspect[0] != since:
                self._suspect = since, now
            elif now - self._suspect[1] > self.grace_s:
                self.give_up(*found)

    def _who(self) -> tuple[str, int] | None:
        """Return which rank is lost, in words and by its number in the world."""
        for rank, process in zip(self.axis.ranks, self.axis.processes, strict=False):
            if ended(process):
                return f"rank {rank} is gone, its process {process[1]} has ended", rank
        if self._status is not None and (code := self._status()):
            return f"rank {code - 1} {SILENT}", code - 1
        return None


def _watch(watch: weakref.ref[Watch]) -> None:
    while (found := watch()) is not None and found.lost is None:
        found.look()
        del found
        time.sleep(_LOOK)


class LateReader:
    """Reads words of the device while that is busy: on the side stream, into memory that is there already."""

    def __init__(self, late: Sequence[Late]) -> None:
        self.late, self.stream = late, side_stream(late[0].status.device)
        self.words = torch.zeros(len(late), dtype=torch.int32, device="cpu", pin_memory=True)
        self.done: Any = None

    def __call__(self) -> int | None:
        """Return what the last copies brought, and begin the next; ``None``, too, while something is captured there."""
        if not side_lock.acquire(blocking=False):
            return None
        try:
            if self.done is not None and not self.done.query():
                return None
            codes = zip(self.late, self.words.tolist(), strict=True)
            found = next((late.named(code) + 1 for late, code in codes if code), 0)
            with torch.cuda.stream(self.stream), torch.inference_mode():
                for place, late in enumerate(self.late):
                    self.words[place : place + 1].copy_(late.status[:1], non_blocking=True)
                self.done = self.stream.record_event()
        finally:
            side_lock.release()
        return found
