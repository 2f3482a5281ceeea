"""One backend of a layer: what it needs, what it refuses, and the class behind it, imported only if chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastlayers import device as device_module
from fastlayers import env
from fastlayers.device import Device
from fastlayers.errors import ArgumentError, NoBackendError


def supports_all(cfg: Any, device: Device) -> str | None:
    """A predicate without objections."""
    return None


def not_multiple(cfg: Any, /, **multiples: int) -> str | None:
    """Return which size of ``cfg`` is not a multiple of what a package asks of it, in words; for predicates."""
    for name, of in multiples.items():
        if (size := getattr(cfg, name)) % of:
            return f"{name} {size} is not a multiple of {of}"
    return None


@dataclass(frozen=True)
class Backend:
    """One implementation of a layer.

    Parameters
    ----------
    name : str
        Where the code comes from (``"deep_gemm"``), never a number format or an architecture.
    target : str or callable
        ``"package.module:Class"``, imported only if chosen; or the class itself. Called with ``cfg``, and with a
        mapping of kernel parameters after it where a tuned table gives one.
    needs : tuple[str, ...]
        Functions that optional packages must have, see :func:`fastlayers.device.missing`.
    refuse : callable
        ``refuse(cfg, device)``: pure; ``None`` or a sentence that says why not. Asks about hardware and shapes
        only; packages are ``needs``.
    auto_on : tuple[str, ...]
        Device types on which ``"auto"`` may take it. Empty: only by name.
    last_resort_on : tuple[str, ...]
        Device types on which ``"auto"`` takes it only if nothing else accepts, and says so once.
    weight_layout : str
        Layouts with the same name share packed weights: the condition for sharing a ladder.
    note : str
        Shown by ``explain`` and ``backends``, for example "not run on this hardware".
    phases : tuple[str, ...]
        For attention: the phases (``cfg.phase``) that it serves; empty: all.
    repeats_on : tuple[str, ...]
        Device types on which equal calls give equal bits, whatever ran before and wherever tensors lie: no sum in the
        order of arrival, no schedule by time. A server that promises equal bytes takes no other.
    captures_extend : bool
        For attention: whether an extend can be captured with it (``cfg.captured``): several new tokens a request,
        whose lengths, starts and pages it reads on the device, with grids that follow from the bucket alone.
    masks_trees : bool
        For attention: whether it reads ``meta.tree``, of which new tokens each sees (``cfg.tree``).
    few_only : bool
        For attention: whether of several new tokens a request it takes few alone (``cfg.few``).
    auto_phases : tuple[str, ...]
        Phases in which ``"auto"`` may take it; empty: all that it serves.
    auto_from : callable, optional
        ``auto_from(cfg)``: in a phase that is not among ``auto_phases``, from how many tokens on ``"auto"`` takes it
        all the same, ahead of every other; ``None``: never.
    about : callable, optional
        ``about(cfg, device)``: what a package's binary does there by itself, in words; shown by ``backends``.
    """

    name: str
    target: str | Callable[..., Any]
    needs: tuple[str, ...] = ()
    refuse: Callable[[Any, Device], str | None] = supports_all
    auto_on: tuple[str, ...] = ("cuda",)
    last_resort_on: tuple[str, ...] = ()
    weight_layout: str = "checkpoint"
    note: str = ""
    phases: tuple[str, ...] = ()
    captures_extend: bool = False
    masks_trees: bool = False
    few_only: bool = False
    auto_phases: tuple[str, ...] = ()
    auto_from: Callable[[Any], int | None] | None = None
    repeats_on: tuple[str, ...] = ()
    about: Callable[[Any, Device], str] | None = None

    @property
    def guard(self) -> str:
        """Why it has no kernels: a row that says what it would need, and cannot be constructed; empty: it has some."""
        is_guard = isinstance(self.target, type) and issubclass(self.target, UnverifiedBackend)
        return str(getattr(self.target, "reason", "")) if is_guard else ""

    def serves(self, phase: str) -> bool:
        """Return whether it serves this phase of attention (``""``: a layer without phases, or all of them)."""
        return not self.phases or phase in self.phases

    def takes(self, cfg: Any) -> bool:
        """Return whether it serves such steps of attention at all: their phase, trees of drafts, many new tokens."""
        phase = getattr(cfg, "phase", "")
        many = self.few_only and phase != "decode" and not getattr(cfg, "few", False)
        return self.serves(phase) and not many and (self.masks_trees or not getattr(cfg, "tree", False))

    def load(self) -> Callable[..., Any]:
        """Import and return the class behind ``target``."""
        if not isinstance(self.target, str):
            return self.target
        module, _, attribute = self.target.partition(":")
        try:
            loaded: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            given = f"{self.target!r}, which cannot be loaded: {type(error).__name__}: {error}"
            raise ArgumentError(f"backend {self.name!r}", "target", given, "'package.module:Class'") from error
        return loaded

    def refusal(self, cfg: Any, device: Device) -> str | None:
        """Return what ``refuse`` says; a predicate that raises, or returns no sentence, refuses with that."""
        if not self.serves(phase := getattr(cfg, "phase", "")):
            return f"serves {' and '.join(self.phases)} only, not {phase or 'every phase'}"
        if getattr(cfg, "tree", False) and not self.masks_trees:
            return "masks no trees of drafts: of the new tokens each would see all before it"
        if not self.takes(cfg):
            return "of several new tokens a request it takes few alone"
        if getattr(cfg, "captured", False) and not self.captures_extend:
            return "captures no extend: its launches follow from lengths on the host"
        try:
            found: object = self.refuse(cfg, device)
        except Exception as error:  # a foreign row must not break the layer; the reason is kept
            return f"its refuse() raised {type(error).__name__}: {error}"
        return found if found is None or (isinstance(found, str) and found) else f"its refuse() returned {found!r}"

    def why_not(
        self, cfg: Any, device: Device, ahead: Callable[[Any, Device], str | None] = supports_all
    ) -> str | None:
        """Return why this backend cannot run ``cfg`` on ``device`` here, or ``None``.

        ``ahead`` may refuse as well, and is asked before packages are imported: large ones take seconds.
        """
        found = self.refusal(cfg, device) or device_module.missing(self.needs, load=False) or ahead(cfg, device)
        return found or device_module.missing(self.needs, load=not device.described)


# The two rows that every layer has.
def reference_backend(target: str) -> Backend:
    """Return the row of a layer's oracle: fp32, plain torch, taken only by name."""
    return Backend("reference", target, auto_on=(), note="fp32 oracle, for tests", repeats_on=("cpu",))


def torch_backend(target: str, refuse: Callable[[Any, Device], str | None] = supports_all) -> Backend:
    """Return the row of a layer's native torch path: what "auto" takes on a CPU, the last resort on CUDA."""
    return Backend("torch", target, refuse=refuse, auto_on=("cpu",), last_resort_on=("cuda",), repeats_on=("cpu",))


# What every kernel of ours uses of Triton.
TRITON_NEEDS = ("triton:jit", "triton.language:dot", "triton.language:float8e4nv")


REPEATS = ("cpu", "cuda")


def triton_backend(
    target: str, refuse: Callable[[Any, Device], str | None] = supports_all, weight_layout: str = "checkpoint"
) -> Backend:
    """Return the row of a layer's Triton path: CUDA, or by name anywhere under Triton's interpreter."""

    def needs_cuda(cfg: Any, device: Device) -> str | None:
        if device.type != "cuda" and not (device.type == "cpu" and env.triton_interpret()):
            return f"Triton needs a CUDA device (or TRITON_INTERPRET=1 for tests), this is {device}"
        if device.capability is not None and device.capability < (8, 0):
            return f"needs sm_80 or newer, this is {device.sm}"
        return refuse(cfg, device)

    # Sums have a fixed order, whichever program ends first: parity asks a second run for the same bits, on CUDA as
    # well, and benchmarks/deterministic.py whole requests.
    return Backend("triton", target, TRITON_NEEDS, needs_cuda, weight_layout=weight_layout, repeats_on=REPEATS)


class UnverifiedBackend:
    """The target of rows for hardware that was not at hand: guards and reasons only, no kernels."""

    hardware = "sm_100"
    reason = "this row is a guard; it has never been run on sm_100 hardware"

    def __init__(self, cfg: Any) -> None:
        raise NoBackendError(type(cfg).__name__, cfg, self.hardware, "auto", {"guard": self.reason})


class UnbuiltBackend(UnverifiedBackend):
    """The same for kernels of sm_90 that take too long to build to have been tried."""

    hardware = "sm_90"
    reason = "this row is a guard; its kernels take many minutes to build and have not been run"


def blackwell_guard(name: str, needs: tuple[str, ...], refuse: Callable[[Any], str | None] | None = None) -> Backend:
    """Return a row for sm_100 that is never chosen: it says what it would need and that it has not been run.

    ``refuse(cfg)``: what it cannot do on the right hardware either.
    """

    def needs_blackwell(cfg: Any, device: Device) -> str | None:
        return device.refuses_all_but(10) or (refuse(cfg) if refuse is not None else None)

    return Backend(name, UnverifiedBackend, needs, needs_blackwell, (), note="not run on this hardware")


def hopper_guard(name: str, needs: tuple[str, ...], refuse: Callable[[Any, Device], str | None]) -> Backend:
    """Return a row for sm_90 that is never chosen, as :func:`blackwell_guard`: what it needs is too long to build."""
    return Backend(name, UnbuiltBackend, needs, refuse, (), note="not run on this hardware")
