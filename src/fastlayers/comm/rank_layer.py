"""What the layers between ranks share: configuration, rows of backends, and the choice by what a workspace holds.

axis, workspace ─► RankConfig ─► registry ─► ladder:  rows up to the workspace's slots  as measured, or triton_symm_mem
                                                      beyond                            nccl
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from fastlayers.comm import ladders
from fastlayers.comm.collectives import by_nccl, collectives
from fastlayers.comm.fabric import PACKAGES
from fastlayers.comm.parallel import Axis
from fastlayers.comm.trail import TRAIL
from fastlayers.device import Device, as_device
from fastlayers.env import triton_interpret
from fastlayers.errors import ArgumentError, check_kind, check_positive, check_tensor
from fastlayers.layer import Layer, check_asked
from fastlayers.registry import Backend, Choice, Registry, reference_backend

SYMMETRIC_NEEDS = ("triton:jit", "triton.language:atomic_xchg")
# Of guards that several layers have.
NVSHMEM = "needs one NVSHMEM for the whole process and its device code in each kernel: neither is here"
MNNVL = "needs NVLink between hosts and multicast over it: neither is here"


@dataclass(frozen=True)
class RankConfig:
    """What a backend must know; :meth:`over` makes it.

    ``slots``: most rows (of one rank) that the workspace's operator was made for. ``refusal``: why there is none.
    ``workspace`` is the :class:`~fastlayers.comm.fabric.Workspace` itself, of which the layer uses ``operator``.
    """

    axis: Axis
    hidden_size: int
    dtype: torch.dtype = torch.bfloat16
    slots: int = 0
    refusal: str | None = None
    workspace: Any = field(default=None, compare=False, repr=False)

    # The layer's name in errors, the operator of a workspace that it uses, and what of it must be as it is here.
    layer: ClassVar[str]
    operator: ClassVar[str]
    alike: ClassVar[tuple[str, ...]] = ("hidden_size", "dtype")
    words: ClassVar[str] = "rows of {} values of {}"
    # What of the layer's ways to do it is meant, where ladders are measured for each.
    way: ClassVar[str] = ""
    # Rows of backends that take as many rows as the workspace was made for.
    within: ClassVar[tuple[str, ...]] = ("triton_symm_mem",)

    def __post_init__(self) -> None:
        check_kind(self.layer, Axis, axis=self.axis)
        check_positive(self.layer, hidden_size=self.hidden_size)

    def made(self) -> Any:
        """Return the workspace's operator, which must be for the same rows; ``None``: there is no workspace yet."""
        if self.workspace is None:
            return None
        found = getattr(self.workspace, self.operator)
        given, wanted = (self.words.format(*(getattr(each, name) for name in self.alike)) for each in (found, self))
        if given != wanted:
            raise ArgumentError(self.layer, "workspace", f"for {given}", wanted)
        return found

    def limits(self) -> dict[str, int]:
        """Return the most rows of the backends that have a bound, by name."""
        return dict.fromkeys(self.within, self.slots)

    def check_slots(self, rows: int, slots: int, why: str = "for which the workspace was made") -> None:
        """Raise :class:`ArgumentError` unless so many rows fit."""
        if rows > slots:
            raise ArgumentError(self.layer, "rows", rows, f"at most {slots}, {why}")


def refuse_nccl(cfg: Any, device: Device) -> str | None:
    """Refuse an axis whose group is not NCCL's."""
    if device.type != "cuda":
        return f"NCCL needs a CUDA device, this is {device}"
    return None if by_nccl(cfg.axis.group) else "axis.group has no NCCL"


def refuse_gloo(cfg: Any, device: Device) -> str | None:
    """Refuse what is not on a CPU."""
    return None if device.type == "cpu" else "gloo carries CPU tensors"


def refuse_symmetric(cfg: Any, device: Device) -> str | None:
    """Refuse an axis whose ranks cannot address each other's memory, or for which no workspace was made."""
    if device.type != "cuda" and not (device.type == "cpu" and triton_interpret()):
        return f"needs a CUDA device (or TRITON_INTERPRET=1 for tests), this is {device}"
    if device.capability is not None and device.capability < (9, 0):
        return f"needs sm_90 or newer, this is {device.sm}"
    if cfg.refusal is not None:
        return str(cfg.refusal)
    if cfg.hidden_size % 8:
        return f"rows of {cfg.hidden_size} values; a multiple of 8"
    return None if cfg.slots else "no symmetric workspace was made for this axis"


def refuse_package(name: str, sizes: tuple[int, ...]) -> Callable[[Any, Device], str | None]:
    """Return what refuses ranks between which the kernels of a package cannot go, or that have it not alike."""

    def refuse(cfg: Any, device: Device) -> str | None:
        if cfg.axis.size not in sizes:
            return f"{cfg.axis.size} ranks; {name}'s kernels are for {', '.join(map(str, sizes))}"
        why = refuse_nccl(cfg, device) or refuse_symmetric(cfg, device)
        if why is None and cfg.workspace is not None:
            why = cfg.workspace.fabric.lacking.get(name)
        return why

    return refuse


def rank_registry(layer: str, name: str, guards: Mapping[str, str], *more: Backend) -> Registry:
    """Return the rows of a layer: over symmetric memory, over the group (NCCL, Gloo), guards, the reference.

    Parameters
    ----------
    layer : str
        In the registry; its folder holds ``triton_symm_mem``, ``collective``, ``reference`` and ``cases``.
    name : str
        Of the classes, behind ``Triton``, ``Collective`` and ``Reference``.
    guards : mapping of str to str
        Names of rows that always refuse, and why.
    *more : Backend
        Rows of this layer alone, behind those of the group.
    """
    here = f"fastlayers.comm.{layer}"
    collective = f"{here}.collective:Collective{name}"

    def never(reason: str) -> Any:
        return lambda cfg, device: reason

    rows = [Backend(row, collective, (), never(why), ()) for row, why in guards.items()]
    return Registry(
        layer,
        [
            Backend("triton_symm_mem", f"{here}.triton_symm_mem:Triton{name}", SYMMETRIC_NEEDS, refuse_symmetric),
            Backend("nccl", collective, (), refuse_nccl),
            Backend("gloo", collective, (), refuse_gloo, ("cpu",)),
            *more,
            *rows,
            reference_backend(f"{here}.reference:Reference{name}"),
        ],
        cases=f"{here}.cases",
    )


def packages_of(registry: Registry, cfg: Any, device: Device, backend: str) -> list[Backend]:
    """Return the rows of packages that are named, or of a measured ladder, and that nothing refuses on these ranks."""
    names = registry.asked_for(backend) or ladders.named(registry.layer, cfg, device)
    rows = [row for row in registry.ranked if row.name in PACKAGES and row.name in names]
    return [row for row in rows if row.refusal(cfg, device) is None]


def with_limit(choice: Choice, registry: Registry) -> Choice:
    """Return an automatic choice by the measured ladder, with the rows beyond what a backend takes given to NCCL."""
    if choice.requested != "auto" or choice.name != "triton_symm_mem":
        return choice
    nccl = registry.named("nccl")
    if nccl.why_not(choice.cfg, choice.device) is not None:
        return choice
    found, evidence = ladders.measured(registry, choice.cfg, choice.device)
    slots, rungs = choice.cfg.slots, found or choice.rungs
    for name, most in choice.cfg.limits().items():
        rungs = ladders.bounded(rungs, name, most, nccl)
    said = f"{evidence if found else 'rank'}; the workspace was made for {slots} rows"
    return replace(choice, rungs=rungs, evidence=said if found else f"{said}; {evidence}")


class RankLayer(Layer):
    """The base of layers between the ranks of an axis.

    Parameters
    ----------
    axis : Axis
        With a process group.
    hidden_size : int
    workspace : Workspace, optional
        Of the same axis, hidden size and dtype. Without, or without the operator that is used: NCCL or Gloo.
    device, dtype
        Of the rows.
    backend : str
        ``"auto"``, a name, or a ladder over rows (of one rank).

    Attributes
    ----------
    rows : Registry
    config : type[RankConfig]
    """

    rows: ClassVar[Registry]
    config: ClassVar[type[RankConfig]]

    def __init__(
        self,
        axis: Axis,
        hidden_size: int,
        *,
        workspace: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.connect(self.config(axis, hidden_size), workspace, device, dtype, backend)

    def connect(
        self, cfg: RankConfig, workspace: Any, device: torch.device | str | None, dtype: torch.dtype | None,
        backend: str,
    ) -> None:  # fmt: skip
        """Choose what computes, for a configuration and what a workspace adds to it."""
        made = getattr(workspace, cfg.operator) if workspace is not None else None
        cfg = replace(
            cfg, dtype=dtype or torch.get_default_dtype(), slots=made.slots if made is not None else 0,
            refusal=workspace.fabric.refusal if workspace is not None else None, workspace=workspace,
        )  # fmt: skip
        self.choose(self.rows, cfg, device, backend)
        self.over = collectives(cfg.axis)
        # Kernels that address other ranks go past the group's collectives.
        self._order = getattr(self.over, "order", None)

    def check_order(self, x: torch.Tensor, what: str | None = None) -> None:
        """Note this call, or under ``FASTLAYERS_DEBUG`` compare it with those of the other ranks.

        ``what``: its name, where the layer's own says too little.
        """
        if self._order is not None:
            self._order.check(what or self.cfg.layer, self.cfg.axis, x)
        else:
            TRAIL.note(what or self.cfg.layer, self.cfg.axis, x.shape, x.dtype)

    def check_rows(self, x: torch.Tensor) -> None:
        """Raise :class:`ArgumentError` unless ``x`` are rows of this layer."""
        cfg = self.cfg
        check_tensor(cfg.layer, "x", x, shape=(None, cfg.hidden_size), dtype=cfg.dtype, last_dim_contiguous=True)

    def choose(self, registry: Registry, cfg: Any, device: torch.device | str | None, backend: str) -> None:
        check_asked(self, cfg, device)
        self.cfg = cfg
        if cfg.workspace is not None:
            for row in packages_of(registry, cfg, as_device(device), backend):
                cfg.workspace.agree_on(row, cfg.axis)
        self.use([with_limit(registry.choose(cfg, device, backend), registry).build()])

    def choices_for(self, cfg: Any, device: Any, requested: str, built_only: bool = True) -> list[Choice]:
        return [with_limit(each, self.rows) for each in super().choices_for(cfg, device, requested, built_only)]
