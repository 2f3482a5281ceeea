"""What would run, what runs, and why not the other one: :func:`backends` and :func:`explain`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastlayers import device as device_module
from fastlayers import tuning
from fastlayers.device import Device
from fastlayers.errors import ArgumentError, describe
from fastlayers.registry import LAYERS, PARTS, Backend, Choice, Rung, registry, why_not_loaded
from fastlayers.runtime import builds
from fastlayers.tuning.probe import choices_of


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
        A name of :data:`fastlayers.registry.LAYERS`, of ``COLLECTIVES``, or of ``PARTS`` (the allocator, the
        communicator, the placement of experts), which have no configuration.
    device : str, torch.device or Device, optional
        A described device (``"H200"``, ``"B200"``, ``"A100"``, ``"cpu"``) or one of this machine.
    cfg : object, optional
        The layer's configuration. Without one a backend's hardware is "yes" if it accepts any of the layer's cases,
        in any phase; the reason of one that accepts none is about a real shape.
    """
    table, target = registry(layer), device_module.as_device(device)
    if cfg is not None and layer not in PARTS and not isinstance(cfg, kinds := _config_types(layer)):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ArgumentError("backends", "cfg", f"{type(cfg).__name__} {cfg!r}", f"a {names}, or None")
    configs = [cfg] if cfg is not None or layer in PARTS else _typical(layer)
    rows = []
    for rank, backend in enumerate(table.ranked):
        hardware = _refusal(backend, configs, target)
        installed = device_module.missing(backend.needs, load=not target.described)
        installed = installed or (None if target.described else why_not_loaded(backend))
        about = backend.about(configs[0], target) if backend.about is not None and hardware is None else ""
        reason = "; ".join(filter(None, (hardware, installed, backend.note, about)))
        automatic = target.type in backend.auto_on + backend.last_resort_on
        rows.append(Row(layer, backend.name, rank, hardware is None, installed is None, automatic, reason))
    return Table(rows)


def _config_types(layer: str) -> tuple[type, ...]:
    """Return the classes of a layer's configurations."""
    from fastlayers.registry.spec import spec_of

    return tuple(dict.fromkeys(type(case.cfg) for case in spec_of(layer).cases))


def _typical(layer: str) -> list[Any]:
    """Return the configurations of a layer's cases in each of their phases, those of real models first."""
    from fastlayers.registry.spec import spec_of

    found: dict[Any, None] = {}
    phases = dict.fromkeys(phase for backend in registry(layer).ranked for phase in backend.phases)
    for case in sorted(spec_of(layer).cases, key=lambda case: case.small):
        open_phase = getattr(case.cfg, "phase", None) == ""
        for cfg in [replace(case.cfg, phase=phase) for phase in phases] if open_phase else [case.cfg]:
            found[cfg] = None
    return list(found)


def _refusal(backend: Backend, configs: Sequence[Any], device: Device) -> str | None:
    """Return why a backend runs none of these configurations (of the phases that it serves), or ``None``.

    A reason about the device goes first: no other configuration would help. Such a reason says what "this is".
    """
    serving = [cfg for cfg in configs if backend.serves(getattr(cfg, "phase", ""))] or configs
    reasons = []
    for cfg in serving:
        why = backend.refusal(cfg, device)
        if why is None:
            return None
        reasons.append(why)
    names = tuple(f"this is {name}" for name in (device.sm, str(device)))
    return next((why for why in reasons if why.endswith(names)), reasons[0])


@dataclass(frozen=True)
class Explanation:
    """What one module runs: ``chosen`` (a backend or a ladder), on which ``evidence``, what lost and why.

    ``refused``: what cannot run it here; ``slower``: what could.
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
    slower: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The layer's name, with the phase of a choice that serves one."""
        return f"{self.layer}[{self.phase}]" if self.phase else self.layer

    @property
    def head(self) -> str:
        """What runs, on one line."""
        return f"{self.module or self.layer}: {self.place}={self.chosen} ({self.evidence}), {self.bytes:,} weight bytes"

    @property
    def losers(self) -> list[str]:
        """What lost and why, a line for each reason."""
        names: dict[str, list[str]] = {}
        for name, why in (self.refused | self.slower).items():
            names.setdefault(why, []).append(name)
        return [f"{', '.join(same)}: {why}" for why, same in names.items()]

    def __str__(self) -> str:
        return "\n".join([self.head, *(f"    not {line}" for line in self.losers)])


class Explanations(tuple[Explanation, ...]):
    """Explanations that print one module a line, the losers below, and those only where they first occur.

    Attributes
    ----------
    steps : tuple[str, ...]
        What was captured, what each graph cost, and why steps ran uncaptured; printed last.
    ranks : tuple[str, ...]
        Of a model that is split over ranks: what is summed and gathered between its layers, a line a transition.
    patched : tuple[str, ...]
        Of a patched model: the modules in which no backend had to be chosen, and what runs in them.
    """

    steps: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    patched: tuple[str, ...] = ()

    def losers(self) -> list[list[str]]:
        """Return of each module what lost and why; ``["as for …"]`` where an earlier module of the layer says it."""
        first: dict[tuple[str, ...], str] = {}
        lines = []
        for each in self:
            losers = each.losers
            earlier = first.setdefault((each.place, *losers), each.module)
            lines.append(losers if earlier == each.module or len(losers) < 2 else [f"as for {earlier or each.layer}"])
        return lines

    def __str__(self) -> str:
        rows = zip(self, self.losers(), strict=True)
        modules = ["\n".join([each.head, *(f"    not {line}" for line in lines)]) for each, lines in rows]
        lines = [*modules, *self.patched, *self.ranks, *self.steps]
        return (
            "\n".join(lines) or "no layer of fastlayers in this module (fl.patch puts some under a Hugging Face model)"
        )

    __repr__ = __str__


def explain(target: Any) -> Explanations:
    """Return what was chosen for a layer name, a layer, a model, or a patched Hugging Face model, and why.

    A name is explained for torch's default device and the layer's first case (parts have no cases). Of a generator of
    ``fastlayers_models`` its model is explained; of it, and of a model patched with ``cuda_graph=True``, also what its
    steps were: which buckets were captured, at what cost, and why steps ran uncaptured.
    """
    if isinstance(target, str):
        from fastlayers.registry.spec import spec_of

        table = registry(target)
        choice = table.choose(None if target in PARTS else spec_of(target).cases[0].cfg)
        return Explanations((_explain(target, choice, 0, _lost(choice)),))
    from torch import nn

    steps: list[str] = []
    if hasattr(target, "report") and not isinstance(target, nn.Module):
        steps, target = target.report(), target.model
    if not isinstance(target, nn.Module):
        raise ArgumentError("explain", "target", describe(target), "a layer's name, a layer, or a model")
    found, patched, lost = [], [], dict[Any, tuple[dict[str, str], dict[str, str]]]()
    for name, module in target.named_modules():
        if (driver := module.__dict__.get("_fl_decode")) is not None:
            steps += driver.report()
        num_bytes = sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
        choices = list(choices_of(module))
        if not choices and (told := getattr(module, "_fl_implementation", None)) is not None:
            patched.append(f"{name}: {told()}")
        for choice in choices:
            same = (choice.layer, choice.cfg, choice.device, choice.requested, choice.evidence, choice.name)
            if same not in lost:
                lost[same] = _lost(choice)
            found.append(_explain(name, choice, num_bytes, lost[same]))
    explained = Explanations(found)
    explained.steps, explained.ranks, explained.patched = tuple(steps), tuple(_between_ranks(target)), tuple(patched)
    return explained


def _between_ranks(target: Any) -> list[str]:
    """Return the tables of a model's communicators, each once, with the layers that have it."""
    tables: dict[tuple[str, ...], list[str]] = {}
    for name, module in target.named_modules():
        communicator = getattr(module, "communicator", None)
        if communicator is not None and (lines := communicator.report()):
            tables.setdefault(tuple(lines), []).append(name)
    found = []
    for lines, names in tables.items():
        several = f"{names[0]} to {names[-1]}, {len(names)} layers" if len(names) > 1 else names[0]
        found += [f"{several}: between ranks", *(f"    {line}" for line in lines)]
    for across in (getattr(target, name, None) for name in ("seam", "moves", "token_moves")):
        found += getattr(across, "evidence", [])
    way = getattr(target, "token_way", None)
    found += [way.words] if way is not None else []
    rows = getattr(target, "spread_rows", None)
    return found + ([f"steps of {rows.start:,} to {rows.stop - 1:,} rows are spread over ranks"] if rows else [])


def _explain(name: str, choice: Choice, size: int, lost: tuple[dict[str, str], dict[str, str]]) -> Explanation:
    chosen = choice.name
    if any(rung.microseconds for rung in choice.rungs):
        chosen += " (" + ", ".join(map(_rung, choice.rungs)) + ")"
    phase, (refused, slower) = getattr(choice.cfg, "phase", ""), lost
    if getattr(choice.cfg, "captured", False):
        phase += ", captured"
    return Explanation(
        name, choice.layer, repr(choice.cfg), chosen, choice.evidence, dict(refused), size, phase, dict(slower)
    )


def _lost(choice: Choice) -> tuple[dict[str, str], dict[str, str]]:
    """Return why each backend that was not chosen was not, by rank: those that cannot run it here, the others."""
    refused, slower = {}, {}
    chosen = {rung.backend.name for rung in choice.rungs}
    for backend in registry(choice.layer).ranked:
        if backend.name in chosen:
            continue
        why = choice.refused.get(backend.name) or backend.why_not(choice.cfg, choice.device)
        if why is not None and why.startswith(builds.UNBUILT):
            why = f"{why}; {_gain(backend, choice)}"
        if why is not None:
            refused[backend.name] = why
        else:
            slower[backend.name] = _slower_because(backend, choice)
    return refused, slower


def _measured(backend: Backend, choice: Choice) -> tuple[list[tuple[float, float, int]], str]:
    """Return this backend's time, the best of the chosen ones', and the tokens, where a tuned table has both.

    And what a sentence calls that table: nothing, if there is none.
    """
    used = {rung.backend.name: rung.backend for rung in choice.rungs}
    found = tuning.lookup(choice.layer, choice.cfg, choice.device, used)
    if found is None:
        return [], ""
    rows = []
    # A table keeps the best time of every backend at every token count.
    counts, times = tuning.times_of(found.table)
    for index, count in enumerate(counts):
        time = times.get(backend.name, [None] * len(counts))[index]
        theirs = [us for name in used if name in times and (us := times[name][index]) is not None]
        if time is not None and theirs:
            rows.append((time, min(theirs), count))
    return rows, found.whose


def _gain(backend: Backend, choice: Choice) -> str:
    """Return what a build of this backend would gain by the tuned table over what is chosen."""
    rows, whose = _measured(backend, choice)
    ratios = [(theirs / min(time, theirs), count) for time, theirs, count in rows]
    if not ratios:
        return "no table tells what that would gain"
    gain, count = max(ratios)
    if gain < 1.005:
        return f"by {whose} that would gain nothing"
    usual = statistics.median(ratio for ratio, _ in ratios)
    return f"by {whose} that would gain up to {gain:.2f} ×, at {count} tokens; {usual:.2f} × as a rule"


def _slower_because(backend: Backend, choice: Choice) -> str:
    """Return why a backend that could run was not chosen."""
    named = {piece.partition(":")[0].strip() for piece in choice.requested.split("|")}
    if any(rung.backend.name in named for rung in choice.rungs):
        return "not asked for"
    kind = choice.device.type
    if kind not in backend.auto_on:
        last = kind in backend.last_resort_on
        return f"a last resort on {kind}" if last else f"not automatic on {kind}, taken by name"
    rows, whose = _measured(backend, choice)
    if not whose:
        return f"ranked below {choice.rungs[0].backend.name}"
    if not rows:
        return f"not measured in {whose}"
    ratio, count = min((time / theirs, count) for time, theirs, count in rows)
    return f"in {whose} at best {ratio:.2f} × the chosen one's time, at {count} tokens"


def _rung(rung: Rung) -> str:
    parameters = "".join(f" {name}={value}" for name, value in rung.config)
    time = f" {rung.microseconds} µs" if rung.microseconds is not None else ""
    return f"{rung.backend.name}{parameters}{time}"


def layers() -> tuple[str, ...]:
    """Return the names of all layers."""
    return tuple(LAYERS)
