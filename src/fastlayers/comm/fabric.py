"""What connects the ranks of an axis, asked once, together: whether kernels may store to each other's memory.

A :class:`Workspace` is made collectively before anything is captured: the facts, and where they allow it an arena with
the operators that live in it. Every rank gets the same answer, so no rank falls back alone.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from fastlayers import env
from fastlayers.comm.parallel import Axis
from fastlayers.comm.processes import gather_objects
from fastlayers.comm.symmetric import Arena, NoSymmetricMemory, Phases, SymmArena
from fastlayers.device import as_device, missing, package
from fastlayers.errors import CollectiveMismatch
from fastlayers.registry.layers import COLLECTIVES

if TYPE_CHECKING:
    from fastlayers.comm.triton_exchange import Exchange
    from fastlayers.comm.triton_push import PushSum
    from fastlayers.comm.triton_tokens import TokenExchange
    from fastlayers.registry import Backend

log = logging.getLogger(__name__)
NEEDS = ("torch.distributed._symmetric_memory:rendezvous", "triton:jit")
# Rows of one launch by number of ranks: beyond, the bytes that each rank sends to all others cost more than a second
# exchange would. Two ranks send the same either way.
PUSH_ROWS = {2: 1024, 3: 128, 4: 64}
FEWEST_PUSH_ROWS = 16
# Of whose rows between ranks all ranks need the same.
PACKAGES = ("flashinfer", "sgl_kernel")


@dataclass(frozen=True)
class Fabric:
    """What holds on all ranks of an axis.

    ``refusal``: why kernels cannot address other ranks, or ``None``. ``lacking``: why a package's cannot, by its name.
    """

    size: int
    refusal: str | None = None
    lacking: Mapping[str, str] = field(default_factory=dict, compare=False)


def survey(axis: Axis, device: torch.device) -> Fabric:
    """Return what holds on all ranks of the axis; collective.

    Raises
    ------
    CollectiveMismatch
        Ranks have different versions of torch, Triton or fastlayers, or the environment names other backends there.
    """
    import fastlayers

    if axis.size == 1:
        return Fabric(1, "one rank has nobody to exchange with")
    own = as_device(device)
    place = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else None
    mine: dict[str, Any] = {
        "host": socket.gethostname(), "device": str(place), "type": device.type, "capability": own.capability,
        "lacks": missing(NEEDS, load=device.type == "cuda"),
        "versions": (torch.__version__, torch.version.cuda, fastlayers.__version__),
        "packages": {name: package(name, load=False) for name in PACKAGES},
        "asked": {layer: name for layer, name in sorted(env.backend_overrides().items()) if layer in COLLECTIVES},
    }  # fmt: skip
    facts = gather_objects(mine, axis, "asking what connects ranks")
    versions = [each["versions"] for each in facts]
    if len(set(versions)) != 1:
        raise CollectiveMismatch(f"ranks run different versions: {dict(enumerate(versions))}; accepted: one everywhere")
    asked = [each["asked"] for each in facts]
    if any(each != asked[0] for each in asked):  # what some of them then made together the others would not
        raise CollectiveMismatch(
            f"ranks differ in {env.BACKEND} of layers between ranks: {dict(enumerate(asked))}; accepted: one everywhere"
        )
    return Fabric(axis.size, _refusal(facts), _lacking(facts))


def _refusal(facts: list[dict[str, Any]]) -> str | None:
    """Return why the ranks that gave these facts cannot address each other's memory."""
    if any(each["type"] != "cuda" for each in facts):
        return "gloo carries CPU tensors; symmetric memory is for CUDA"
    if len({each["host"] for each in facts}) > 1:
        return "ranks are on several hosts"
    if len({each["device"] for each in facts}) < len(facts):
        return "several ranks share a device"
    old = next((each["capability"] for each in facts if each["capability"] < (9, 0)), None)
    if old is not None:
        return f"needs sm_90 or newer, a rank has sm_{old[0]}{old[1]}"
    return next((each["lacks"] for each in facts if each["lacks"]), None)


def _lacking(facts: list[dict[str, Any]]) -> dict[str, str]:
    """Return which packages not all ranks have alike, and why."""
    found = {}
    for name in PACKAGES:
        states = [each["packages"][name] for each in facts]
        versions = {rank: state.version for rank, state in enumerate(states)}
        absent = next((f"rank {rank}: {state.reason}" for rank, state in enumerate(states) if state.reason), None)
        if absent or len(set(versions.values())) > 1:
            found[name] = absent or f"ranks have different versions of {name}: {versions}"
    return found


def agree(axis: Axis, facts: Mapping[str, Any]) -> None:
    """Raise unless these facts are equal on all ranks of the axis; collective, before anything is launched.

    Where ``axis.group`` is no process group (sizes only, or threads of a test) nothing is compared.

    Raises
    ------
    CollectiveMismatch
        On every rank alike: the first fact that differs, and what each rank has.
    RankLostError
        A rank has ended.
    """
    import torch.distributed as dist

    if axis.size == 1 or not isinstance(axis.group, dist.ProcessGroup):
        return
    found = gather_objects({name: str(value) for name, value in facts.items()}, axis, "comparing what ranks have")
    for name in dict.fromkeys(name for each in found for name in each):
        values = [each.get(name, "nothing") for each in found]
        if len(set(values)) > 1:
            shown = "; ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
            raise CollectiveMismatch(f"ranks differ in {name}: {shown}; accepted: the same on all ranks")


def push_rows(size: int) -> int:
    """Return the most rows for which every rank sends its rows to all others."""
    return PUSH_ROWS.get(size, FEWEST_PUSH_ROWS)


@dataclass
class Workspace:
    """The arena of an axis and the operators in it; one stream at a time uses it.

    Attributes
    ----------
    fabric : Fabric
    arena : Arena or None
        ``None`` where ``fabric.refusal`` says why.
    push : PushSum or None
        For few rows.
    exchange : Exchange or None
        For many rows, where it was asked for.
    tokens : TokenExchange or None
        For tokens to their experts, where it was asked for.
    phases : dict of str to float
        What making it took, in seconds.
    """

    fabric: Fabric
    arena: Arena | None = None
    push: PushSum | None = None
    exchange: Exchange | None = None
    tokens: TokenExchange | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    _packages: dict[str, Any] = field(default_factory=dict, repr=False)
    _tried: set[str] = field(default_factory=set, repr=False)

    def agree_on(self, row: Backend, axis: Axis) -> None:
        """Import what a package's row needs, on all ranks together: where that fails on one, all ranks lack it.

        Collective, once for each row that is asked for: :func:`survey` imports none, which takes seconds.
        """
        import torch.distributed as dist

        known = row.name in self._tried or row.name in self.fabric.lacking
        if known or not isinstance(axis.group, dist.ProcessGroup):
            return
        self._tried.add(row.name)
        told = gather_objects(missing(row.needs, load=True), axis, f"importing what {row.name} needs")
        why = next((f"rank {rank}: {each}" for rank, each in enumerate(told) if each is not None), None)
        if why is not None:
            self.fabric = replace(self.fabric, lacking={**self.fabric.lacking, row.name: why})

    def of_package(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what a package's rows have beside the arena; the first of them makes it, on all ranks together."""
        if name not in self._packages:
            self._packages[name] = make()
        return self._packages[name]

    @property
    def share(self) -> int:
        """Most rows of one rank that an exchange takes."""
        return self.exchange.slots if self.exchange is not None else 0

    @property
    def seconds(self) -> float:
        """What making it took."""
        return sum(self.phases.values())

    @property
    def slots(self) -> int:
        """Most rows that one push takes."""
        return self.push.slots if self.push is not None else 0

    @staticmethod
    def make(
        axis: Axis,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        rows: int | None = None,
        share: int = 0,
        normed: bool = False,
        tokens: tuple[int, int, int] | None = None,
        deadline_s: float = 30.0,
    ) -> Workspace:
        """Return the workspace of an axis; collective, equal arguments on all ranks.

        Parameters
        ----------
        axis : Axis
        hidden_size : int
        dtype : torch.dtype
        device : torch.device
        rows : int, optional
            Most rows of a push; default: :func:`push_rows`.
        share : int
            Most rows of one rank in a reduce-scatter or all-gather; 0: none are made.
        normed : bool
            Whether rows are normed between the two; see :func:`~fastlayers.comm.triton_exchange.way_of`.
        tokens : tuple of int, optional
            Experts of all ranks, experts of a token, and most tokens of one rank that go to their experts.
        deadline_s : float
        """
        phases = Phases()
        fabric = survey(axis, device)
        phases.end("ranks surveyed")
        refusal = fabric.refusal or (None if hidden_size % 8 == 0 else f"rows of {hidden_size} values; a multiple of 8")
        if refusal is not None:
            return Workspace(Fabric(axis.size, refusal), phases=phases)
        from fastlayers.comm.triton_exchange import Exchange, way_of
        from fastlayers.comm.triton_push import PushSum

        slots = push_rows(axis.size) if rows is None else rows
        programs, chunk = way_of(share, normed)
        wanted = PushSum.nbytes_for(axis.size, hidden_size, dtype, slots)
        wanted += Exchange.nbytes_for(axis.size, hidden_size, dtype, share, programs) if share else 0
        if tokens is not None:
            from fastlayers.comm.triton_tokens import TokenExchange

            experts, top_k, most = tokens
            wanted += TokenExchange.nbytes_for(axis.size, hidden_size, top_k, dtype, most)
        phases.end("imported")
        try:
            arena = SymmArena(axis, wanted, device, deadline_s, phases)
        except NoSymmetricMemory as error:  # on all ranks, which take what else there is
            log.warning("rows cross ranks by NCCL: %s", error)
            return Workspace(Fabric(axis.size, str(error)), phases=phases)
        push = PushSum(arena, hidden_size, dtype, slots)
        exchange = Exchange(arena, hidden_size, dtype, share, programs, chunk) if share else None
        routed = TokenExchange(arena, hidden_size, experts, top_k, dtype, most) if tokens is not None else None
        arena.ready()
        return Workspace(fabric, arena, push, exchange, routed, phases)
