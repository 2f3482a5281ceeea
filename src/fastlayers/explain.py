"""What would run, what runs, and why not the other one: :func:`backends` and :func:`explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastlayers import device as device_module
from fastlayers.device import Device
from fastlayers.errors import ArgumentError
from fastlayers.probing import choices_of
from fastlayers.registry import LAYERS, Backend, Choice, Rung, registry


@dataclass(frozen=True)
class Row:
    """One backend of a layer as seen from one device.

    ``hardware``: would it run on this hardware (without a configuration: at least one of the layer's shapes, in one
    phase); ``installed``: are its packages here; ``reason``: the sentences why not, or a note.
    """

    layer: str
    name: str
    rank: int
    hardware: bool
    installed: bool
    automatic: bool
    reason: str


class Table(tuple[Row, ...]):
    """Rows that print as a table."""

    def __str__(self) -> str:
        head = ("layer", "backend", "hardware", "installed", "auto", "reason")
        body = [
            (r.layer, r.name, "yes" if r.hardware else "no", "yes" if r.installed else "no",
             "yes" if r.automatic else "by name", r.reason)
            for r in self
        ]  # fmt: skip
        widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
        return "\n".join(
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in [head, *body]
        )

    __repr__ = __str__


def backends(layer: str, device: Any = None, cfg: Any = None) -> Table:
    """Return every backend of ``layer``: would the hardware do, is the package here, refused because.

    Parameters
    ----------
    layer : str
        A name of :data:`fastlayers.registry.LAYERS`.
    device : str, torch.device or Device, optional
        A described device (``"H200"``, ``"B200"``, ``"A100"``, ``"cpu"``) or one of this machine.
    cfg : object, optional
        The layer's configuration. Without one a backend's hardware is "yes" if it accepts any of the layer's cases,
        in any phase; the reason of one that accepts none is about a real shape.
    """
    table, target = registry(layer), device_module.as_device(device)
    configs = [cfg] if cfg is not None else _typical(layer)
    rows = []
    for rank, backend in enumerate(table.ranked):
        hardware = _refusal(backend, configs, target)
        installed = device_module.missing(backend.needs, load=not target.described)
        reason = "; ".join(filter(None, (hardware, installed, backend.note)))
        automatic = target.type in backend.auto_on + backend.last_resort_on
        rows.append(Row(layer, backend.name, rank, hardware is None, installed is None, automatic, reason))
    return Table(rows)


def _typical(layer: str) -> list[Any]:
    """Return the configurations of a layer's cases in each of their phases, those of real models first."""
    from fastlayers.testing.spec import spec_of

    found: dict[Any, None] = {}
    phases = dict.fromkeys(phase for backend in registry(layer).ranked for phase in backend.phases)
    for case in sorted(spec_of(layer).cases, key=lambda case: case.small):
        open_phase = getattr(case.cfg, "phase", None) == ""
        for cfg in [replace(case.cfg, phase=phase) for phase in phases] if open_phase else [case.cfg]:
            found[cfg] = None
    return list(found)


def _refusal(backend: Backend, configs: Sequence[Any], device: Device) -> str | None:
    """Return why a backend runs none of these configurations (of the first in a phase that it serves), or ``None``."""
    serving = [cfg for cfg in configs if backend.serves(getattr(cfg, "phase", ""))] or configs
    reasons = []
    for cfg in serving:
        why = backend.refusal(cfg, device)
        if why is None:
            return None
        reasons.append(why)
    return reasons[0]


@dataclass(frozen=True)
class Explanation:
    """What one module runs: ``chosen`` (a backend or a ladder), on which ``evidence``, what lost and why.

    ``phase``: of an attention core, for which steps (``"decode"``, ``"extend"``, …); empty: for all.
    """

    module: str
    layer: str
    cfg: str
    chosen: str
    evidence: str
    refused: dict[str, str]
    bytes: int
    phase: str = ""

    @property
    def place(self) -> str:
        """The layer's name, with the phase of a choice that serves one."""
        return f"{self.layer}[{self.phase}]" if self.phase else self.layer

    def __str__(self) -> str:
        lines = [
            f"{self.module or self.layer}: {self.place}={self.chosen} ({self.evidence}), {self.bytes:,} weight bytes"
        ]
        lines += [f"    not {name}: {why}" for name, why in self.refused.items()]
        return "\n".join(lines)


class Explanations(tuple[Explanation, ...]):
    """Explanations that print one module a line, the losers below."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    __repr__ = __str__


def explain(target: Any) -> Explanations:
    """Return what was chosen for a layer name, a layer, a model, or a patched Hugging Face model, and why.

    A name is explained for torch's default device and the layer's first case.
    """
    if isinstance(target, str):
        from fastlayers.testing.spec import spec_of

        choice = registry(target).choose(spec_of(target).cases[0].cfg)
        return Explanations((_explain(target, choice, 0),))
    from torch import nn

    if not isinstance(target, nn.Module):
        raise ArgumentError("explain", "target", repr(target), "a layer's name, a layer, or a model")
    found = []
    for name, module in target.named_modules():
        own = sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
        found += [_explain(name, choice, own) for choice in choices_of(module)]
    return Explanations(found)


def _explain(name: str, choice: Choice, size: int) -> Explanation:
    chosen = choice.name
    if any(rung.microseconds for rung in choice.rungs):
        chosen += " (" + ", ".join(map(_rung, choice.rungs)) + ")"
    phase, lost = getattr(choice.cfg, "phase", ""), dict(choice.refused)
    return Explanation(name, choice.layer, repr(choice.cfg), chosen, choice.evidence, lost, size, phase)


def _rung(rung: Rung) -> str:
    parameters = "".join(f" {name}={value}" for name, value in rung.config)
    time = f" {rung.microseconds} µs" if rung.microseconds is not None else ""
    return f"{rung.backend.name}{parameters}{time}"


def layers() -> tuple[str, ...]:
    """Return the names of all layers."""
    return tuple(LAYERS)
