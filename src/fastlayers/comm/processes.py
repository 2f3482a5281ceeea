"""Which process each rank is, and whether it is still there: how a rank that is lost is named."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastlayers.comm.parallel import Axis
from fastlayers.comm.trail import TRAIL
from fastlayers.errors import RankLostError

AGAIN = "the model must be made again, on all ranks"
# What Gloo and NCCL say when another process is gone, or does not answer; other errors of theirs are a call's own.
_SIGNS = (
    "gloo/transport", "pair closure", "Connection closed by peer", "Connection reset", "Broken pipe",
    "ncclRemoteError", "communicator was aborted", "Watchdog caught collective operation timeout",
)  # fmt: skip
_SHOWN = 3  # calls in a message
_ENDING_SECONDS = 1.0  # a process closes its connections before it has ended


def birth(pid: int) -> str | None:
    """Return when a process of this host began; ``None``: there is none, or it has ended."""
    try:
        state, *more = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else more[18]


@lru_cache
def host() -> str:
    """Return the name of this host since it was started; containers of one host have several."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.is_file() else ''}"


def own() -> list[Any]:
    """Return what tells this process from all others."""
    return [host(), os.getpid(), birth(os.getpid())]


def introduce(ranks: Sequence[int]) -> tuple[Any, ...]:
    """Say which process this rank is, and return that of each of these ranks, which all call this.

    The store of torch.distributed tells them, which may lie in a rank's process and be gone with it.
    """
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    store.set(f"fastlayers/process/{dist.get_rank()}", json.dumps(own()))
    return tuple(json.loads(store.get(f"fastlayers/process/{rank}")) for rank in ranks)


def ended(process: Sequence[Any]) -> bool:
    """Return whether a process, as :func:`own` described itself, is known to have ended; of another host it is not."""
    return process[0] == host() and process[2] is not None and birth(process[1]) != process[2]


def rank_lost(message: str, operation: str, rank: int | None = None) -> RankLostError:
    """Return the error of a rank that is lost, with the step and the calls that this process made last.

    ``rank``: in the world, where it is known.
    """
    step, records = TRAIL.steps or None, TRAIL.recent()
    made = "; ".join(records[-_SHOWN:]) or "none"
    began = "no step had begun here" if step is None else f"step {step} was the last to begin here"
    words = f"{message} ({began}; last calls between ranks: {made})"
    return RankLostError(words, rank=rank, operation=operation, step=step, records=records)


def lost(error: RuntimeError, axis: Axis, operation: str) -> RankLostError | None:
    """Return what an error of torch.distributed means where it means that a rank is gone, else ``None``."""
    text = str(error)
    if not any(sign in text for sign in _SIGNS):
        return None
    begin, who = f"{operation} over {axis.size} ranks", _ended_of(axis)
    if who is not None:
        return rank_lost(f"{begin}: rank {who[0]} is gone, its process {who[1]} has ended; {AGAIN}", operation, who[0])
    return rank_lost(f"{begin}: a rank did not answer ({text.splitlines()[0][:200]}); {AGAIN}", operation)


@contextmanager
def naming_lost(axis: Axis, operation: str) -> Iterator[None]:
    """Turn errors of torch.distributed that mean that a rank of the axis is gone into :class:`RankLostError`.

    For what is called between ranks apart from :mod:`fastlayers.comm.collectives`; ``operation``: as the error begins.
    """
    try:
        yield
    except RuntimeError as error:
        if (gone := lost(error, axis, operation)) is None:
            raise
        raise gone from error


def gather_objects(mine: Any, axis: Axis, operation: str) -> list[Any]:
    """Return what each rank of an axis brings, in their order; collective, by pickle.

    Parameters
    ----------
    mine
        This rank's, which can be pickled.
    axis : Axis
        With a process group.
    operation : str
        What it is for, as the error begins.

    Raises
    ------
    RankLostError
        A rank is gone.
    """
    import torch.distributed as dist

    found: list[Any] = [None] * axis.size
    with naming_lost(axis, operation):
        dist.all_gather_object(found, mine, group=axis.group)
    return found


def _ended_of(axis: Axis) -> tuple[int, int] | None:
    until = time.monotonic() + _ENDING_SECONDS
    while axis.processes and time.monotonic() < until:
        for rank, process in zip(axis.ranks, axis.processes, strict=True):
            if ended(process):
                return rank, process[1]
        time.sleep(0.02)
    return None
