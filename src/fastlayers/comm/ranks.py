"""How a model is split over processes, in one line: :class:`Ranks`.

    processes = tp × dp        tp ranks share each attention layer; dp groups of them hold requests of their own
    ep                         groups that split the experts (whole experts); the ranks of one group split each expert

Started by ``torchrun --nproc-per-node N``, which tells every process its rank; one process needs nothing.
"""

from __future__ import annotations

import atexit
import re
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from fastlayers import env
from fastlayers.comm.parallel import MOST_RANKS, TOKEN_WAYS, ParallelSpec
from fastlayers.errors import (
    ArgumentError,
    RankLostError,
    check_choice,
    check_device,
    check_fields,
    check_kind,
    check_positive,
)
from fastlayers.moe.placement.planner import EplbConfig

if TYPE_CHECKING:
    import torch

# A rank that is gone is noticed after so long at the latest.
TIMEOUT = timedelta(minutes=10)
# Who ends waits so long for threads of torch.distributed that have something to do.
_LONGEST_S = 5.0


@dataclass(frozen=True)
class Ranks:
    """Sizes of the rank grid.

    Parameters
    ----------
    tp : int
        Ranks that split each attention layer (and together with all others the MLPs).
    dp : int
        Attention groups, each with requests and a cache of its own.
    ep : int
        Groups over which whole experts are dealt out; a divisor of ``tp * dp``.
    eplb : EplbConfig, optional
        Redundant experts, and how experts move between ranks as their loads change; default: each has its place.
    expert_exchange : str
        How tokens get to the ranks that have their experts: ``"gather"`` (all rows to all ranks, sums scattered),
        ``"exchange"`` (a token to the ranks of its experts; each of them whole on one rank, ``ep = tp * dp``), or
        ``"auto"``: the exchange where it was measured to be quicker between such ranks, else the gather.

    Examples
    --------
    >>> from fastlayers.comm.ranks import Ranks
    >>> Ranks(tp=2, dp=2, ep=4).processes
    4
    >>> Ranks().join("cpu")[0].world_size
    1
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    eplb: EplbConfig | None = None
    expert_exchange: str = "auto"

    def __post_init__(self) -> None:
        check_fields("Ranks", self)
        check_positive("Ranks", tp=self.tp, dp=self.dp, ep=self.ep)
        check_kind("Ranks", EplbConfig | None, eplb=self.eplb)
        check_choice("Ranks", "expert_exchange", self.expert_exchange, TOKEN_WAYS)
        if self.processes > MOST_RANKS:
            raise ArgumentError("Ranks", "tp * dp", self.processes, f"at most {MOST_RANKS}")
        if self.processes % self.ep:
            raise ArgumentError("Ranks", "ep", self.ep, f"a divisor of tp * dp = {self.processes}")

    @property
    def processes(self) -> int:
        """How many there must be."""
        return self.tp * self.dp

    def join(self, device: torch.device | str | None = None) -> tuple[ParallelSpec, torch.device]:
        """Meet the other processes, and return this one's spec and device.

        A collective call: every process makes it, with equal sizes. Where torch.distributed was initialised already
        (by the caller, for its own purposes), that group is used.

        Parameters
        ----------
        device : torch device, optional
            ``"cuda"`` is this process's own GPU. Default: that, or the CPU where there is none.

        Raises
        ------
        ArgumentError
            Not started with as many processes, or fewer GPUs than processes here.
        RankLostError
            Not all of them came within ten minutes.
        """
        import torch
        import torch.distributed as dist

        started = env.torchrun_rank()
        usual = "cuda" if torch.cuda.is_available() else "cpu"
        place = check_device("Ranks", usual if device is None else device)
        if dist.is_initialized():
            rank, world, local = dist.get_rank(), dist.get_world_size(), started[2] if started else dist.get_rank()
        else:
            rank, world, local = started or (0, 1, 0)
        if world != self.processes:
            accepted = f"{self.processes}: torchrun --nproc-per-node {self.processes} …"
            raise ArgumentError("Ranks", "processes", world, accepted)
        if world == 1:
            return ParallelSpec(eplb=self.eplb, expert_exchange=self.expert_exchange), place
        if place.type == "cuda":
            if local >= torch.cuda.device_count():
                given = f"{torch.cuda.device_count()} GPUs on this host"
                raise ArgumentError("Ranks", "device", given, f"one for each process, of which this is number {local}")
            place = torch.device("cuda", local)
            torch.cuda.set_device(place)
        if not dist.is_initialized():
            env.disable_multicast()
            try:
                if place.type == "cuda":
                    dist.init_process_group("nccl", device_id=place, timeout=TIMEOUT)
                else:
                    dist.init_process_group("gloo", timeout=TIMEOUT)
            except dist.DistStoreError as error:
                raise _missing(error, rank, world) from error
        if place.type == "cpu":
            atexit.unregister(_let_go)  # once, however often ranks meet
            atexit.register(_let_go)
        mesh = dist.device_mesh.init_device_mesh(place.type, (world,))
        spec = ParallelSpec.from_mesh(mesh, attn_dp=self.dp, ep=self.ep)
        return replace(spec, eplb=self.eplb, expert_exchange=self.expert_exchange), place

    @staticmethod
    def leave() -> None:
        """End the process group, if there is one; after ``Generator.close``: NCCL waits for graphs that use it."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _let_go() -> None:
    """Wait until Gloo's threads have let go of what the last call sent.

    A thread may still hold it for a moment when the call has returned. Where that is the last reference, it asks for
    Python's lock to free the tensor, and where Python ends meanwhile that aborts the process. Threads that wait for
    another rank are left alone. Destroying the group would not do: whoever has its axes keeps it alive.
    """
    until, calm = time.monotonic() + _LONGEST_S, 0
    while calm < 2 and time.monotonic() < until:
        time.sleep(0.001)  # the lock is free meanwhile
        calm = 0 if any(map(_runs, Path("/proc/self/task").glob("*"))) else calm + 1


def _runs(thread: Path) -> bool:
    """Return whether this is a thread of Gloo's that has something to do."""
    try:
        name, _, rest = (thread / "stat").read_text().rpartition(")")
    except OSError:  # it has ended
        return False
    return "gloo" in name and rest.split()[0] != "S"


def _missing(error: Exception, rank: int, world: int) -> RankLostError:
    """Return what it means that the store of torch.distributed was asked in vain for what another rank writes."""
    key = re.search(r"keys: \S*//cpu//\d+/(\d+)", str(error))  # Gloo's ends with the rank that would write it
    late = int(key[1]) if key and int(key[1]) != rank else None
    who = f"rank {late} did not come" if late is not None else "not all ranks came"
    first = str(error).splitlines()[0][:200]
    return RankLostError(
        f"Ranks: rank {rank} waited for {world} processes, and {who} within {TIMEOUT.total_seconds():g} s ({first}); "
        f"accepted: all {world} processes make the model",
        rank=late,
        operation="Ranks",
    )
