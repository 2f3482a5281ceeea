"""The ranked backends of one layer, and the one place where a backend is chosen.

``registry(layer).choose(cfg, device, want)`` is called once, in the layer's constructor, and returns a
:class:`~fastlayers.registry.Choice`: one or more *rungs* (token thresholds), each with its backend, plus the reason why
every better-ranked backend lost. ``choice.build()`` imports only what was chosen.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from fastlayers import device as device_module
from fastlayers import env
from fastlayers.device import Device
from fastlayers.errors import ArgumentError, EnvironmentVariableError, NoBackendError, UnknownNameError, check_plain
from fastlayers.registry.backend import Backend
from fastlayers.registry.choice import Choice, Rung
from fastlayers.registry.layers import COLLECTIVES, LAYERS, PARTS, builtin_registry, no_layer
from fastlayers.registry.plugins import load_plugins
from fastlayers.runtime import builds
from fastlayers.tuning import ladder as tuned_ladders

log = logging.getLogger(__name__)


@dataclass
class Registry:
    """The ranked backends of one layer, best first.

    Parameters
    ----------
    layer : str
        The name in :data:`LAYERS`.
    ranked : list of Backend
    cases : str
        Module with ``SPEC``, a :class:`fastlayers.registry.spec.LayerSpec`; imported by tests, benchmarks,
        the tuner, ``fl.backends`` and the warm-up, never to run the layer.
    """

    layer: str
    ranked: list[Backend]
    cases: str = ""

    def __post_init__(self) -> None:
        names = [backend.name for backend in self.ranked]
        if len(set(names)) != len(names):
            raise ArgumentError(self.layer, "backends", names, "distinct names")

    def add(self, new: Backend, *, before: str | None = None) -> None:
        """Add a backend, ranked before the named one (default: first).

        Raises
        ------
        ArgumentError
            The name is taken, or a field is not of its type.
        """
        if not isinstance(new, Backend):
            raise ArgumentError(self.layer, "backend", repr(new), "a Backend")
        if not isinstance(new.name, str) or new.name == "auto" or not re.fullmatch(r"[\w.+-]+", new.name):
            accepted = "letters, digits, '_', '.', '+', '-'; not 'auto'"
            raise ArgumentError(self.layer, "backend", repr(new.name), accepted)
        tuples = ("needs", "auto_on", "last_resort_on", "phases", "auto_phases", "repeats_on")
        kinds = dict.fromkeys(tuples, "tuple[str, ...]")
        kinds |= {"weight_layout": "str", "note": "str", "refuse": "Callable"}
        kinds |= dict.fromkeys(("captures_extend", "masks_trees", "few_only"), "bool")
        kinds |= {} if isinstance(new.target, str) else {"target": "Callable"}
        for name, kind in kinds.items():
            check_plain(self.layer, kind, **{f"{name} of {new.name!r}": getattr(new, name)})
        names = [backend.name for backend in self.ranked]
        if new.name in names:
            raise ArgumentError(self.layer, "backend", repr(new.name), f"a name other than {', '.join(names)}")
        self.ranked.insert(names.index(self.named(before).name) if before else 0, new)

    def named(self, name: str) -> Backend:
        """Return the backend of this name or raise :class:`UnknownNameError` with the known ones."""
        for backend in self.ranked:
            if backend.name == name:
                return backend
        known = ", ".join(backend.name for backend in self.ranked)
        raise UnknownNameError(f"{self.layer}: backend {name!r} is unknown; known: {known}")

    def choose(self, cfg: Any, device: Any = None, want: str = "auto", *, built_only: bool = True) -> Choice:
        """Choose once: ``want`` is ``"auto"``, a backend's name, or a ladder ``"triton:64|torch"``.

        ``FASTLAYERS_BACKEND`` replaces ``"auto"`` only; what the code names wins. With ``built_only``, ``"auto"``
        leaves out what would have to be built on its first call, see :mod:`fastlayers.runtime.builds`.

        Raises
        ------
        NoBackendError
            Nothing can run it; every reason is in the message. A named backend never falls back.
        UnknownNameError
            A name that is not registered, in the call or in the environment.
        """
        target = device_module.as_device(device)
        named, evidence, source = self._requested(want)
        if named == "auto":
            return self._choose_auto(cfg, target, built_only)
        return self._choose_named(self._parse(named), cfg, target, named, evidence, source)

    def choose_phases(
        self, cfg: Any, phases: tuple[str, ...], device: Any = None, want: str = "auto", *, built_only: bool = True
    ) -> list[Choice]:
        """Choose for each phase of attention; ``cfg`` is a dataclass with a field ``phase``.

        What is named serves the phases that it can; a phase that no named backend serves is chosen automatically,
        and its evidence says so. So it is with trees of drafts (``cfg.tree``), and with more than few new tokens.

        Raises
        ------
        NoBackendError, UnknownNameError
            As :meth:`choose`; also if what is named serves no phase.
        """
        target = device_module.as_device(device)
        named, evidence, source = self._requested(want)
        configs = [replace(cfg, phase=phase) for phase in phases]
        if named == "auto":
            return [self._choose_auto(each, target, built_only) for each in configs]
        rungs, chosen = self._parse(named), []
        for each in configs:
            what = "trees" if getattr(each, "tree", False) else each.phase
            serving = [rung for rung in rungs if rung.backend.takes(each)]
            if serving:
                limits = [rung.max_tokens for rung in serving[:-1]] + [None]
                cut = tuple(replace(rung, max_tokens=m) for rung, m in zip(serving, limits, strict=True))
                left = "".join(f"; {r.backend.name} does not serve {what}" for r in rungs if r not in serving)
                chosen.append(self._choose_named(cut, each, target, named, evidence + left, source))
            else:
                auto = self._choose_auto(each, target, built_only)
                chosen.append(
                    replace(auto, requested=named, evidence=f"{auto.evidence}; {named} does not serve {what}")
                )
        return chosen

    def asked_for(self, want: str) -> tuple[str, ...]:
        """Return the backends that ``want`` names, or else the environment; empty: they are chosen automatically."""
        named, *_ = self._requested(want)
        return () if named == "auto" else tuple(rung.backend.name for rung in self._parse(named))

    def _requested(self, want: str) -> tuple[str, str, str]:
        """Return what is asked for, the environment's override included, on which evidence, and by which variable."""
        if not isinstance(want, str):
            raise ArgumentError(self.layer, "backend", repr(want), "'auto', a name, or a ladder like 'triton:64|torch'")
        load_plugins()
        if want != "auto":
            return want, "asked for by name", ""
        named = environment_wishes().get(self.layer, "auto")
        return named, f"{env.BACKEND}={self.layer}={named}", env.BACKEND

    def _choose_named(
        self, rungs: tuple[Rung, ...], cfg: Any, device: Device, want: str, evidence: str, source: str
    ) -> Choice:
        refused = {r.backend.name: why for r in rungs if (why := r.backend.why_not(cfg, device)) is not None}
        guards = {r.backend.name: r.backend.guard for r in rungs if r.backend.guard}
        if refused := refused or guards:
            raise NoBackendError(self.layer, cfg, device, want, refused, source)
        return Choice(self.layer, cfg, device, want, rungs, {}, evidence)

    def _choose_auto(self, cfg: Any, device: Device, built_only: bool) -> Choice:
        refused: dict[str, str] = {}
        able: list[Backend] = []
        late: list[tuple[int, Backend]] = []
        for backend in self.ranked:
            if device.type not in backend.auto_on:
                continue
            phase = getattr(cfg, "phase", "")
            timed = not backend.auto_phases or phase in backend.auto_phases
            start = None if timed or backend.auto_from is None else backend.auto_from(cfg)
            unbuilt = partial(builds.unbuilt if built_only else builds.failed, self.layer, backend)
            named = f"taken by name only in {phase or 'every phase'}"
            why = backend.why_not(cfg, device, unbuilt) if timed or start is not None else named
            if why is not None:
                refused[backend.name] = why
            elif start is not None:
                late.append((start, backend))
            else:
                able.append(backend)
        if not able:
            return self._last_resort(cfg, device, refused)
        known = [backend.name for backend in self.ranked]
        tuned = tuned_ladders.ladder_for(self.layer, cfg, device, {b.name: b for b in able}, known, refused)
        rungs = (Rung(None, able[0]),) if tuned is None else tuned.rungs
        for start, backend in late:
            if backend.weight_layout == rungs[0].backend.weight_layout:
                rungs = _from(rungs, start, backend)
        if tuned is not None:
            return Choice(self.layer, cfg, device, "auto", rungs, refused, tuned.evidence)
        return Choice(self.layer, cfg, device, "auto", rungs, refused)

    def _last_resort(self, cfg: Any, device: Device, refused: dict[str, str]) -> Choice:
        for backend in self.ranked:
            if device.type in backend.last_resort_on:
                why = backend.why_not(cfg, device)
                if why is None:
                    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items()) or "none is ranked"
                    _warn_once(f"{self.layer}: only {backend.name} runs on {device} ({reasons}); expect it to be slow")
                    return Choice(self.layer, cfg, device, "auto", (Rung(None, backend),), refused, "last resort")
                refused[backend.name] = why
        raise NoBackendError(self.layer, cfg, device, "auto", refused)

    def _parse(self, want: str) -> tuple[Rung, ...]:
        pieces = [piece.strip() for piece in want.split("|")]
        rungs: list[Rung] = []
        for position, piece in enumerate(pieces):
            name, separator, limit = piece.partition(":")
            last = position == len(pieces) - 1
            if last and limit.isdigit():
                given = f"{want!r}, of which nothing serves more than {limit} tokens"
                accepted = "a name, or a ladder like 'triton:64|torch', whose last rung has no limit"
                raise ArgumentError(self.layer, "backend", given, accepted)
            if last == bool(separator) or (separator and not limit.isdigit()):
                raise ArgumentError(self.layer, "backend", repr(want), "a name, or a ladder like 'triton:64|torch'")
            rungs.append(Rung(int(limit) if separator else None, self.named(name)))
        check_ladder(self.layer, want, tuple(rungs))
        return tuple(rungs)


def check_ladder(layer: str, want: str, rungs: tuple[Rung, ...]) -> None:
    """Raise unless thresholds increase and all rungs share one weight layout."""
    limits = [rung.max_tokens for rung in rungs[:-1]]
    if any(a is None or b is None or a >= b for a, b in pairwise(limits)):
        raise ArgumentError(layer, "backend", repr(want), "a ladder with increasing thresholds")
    layouts = {rung.backend.weight_layout for rung in rungs}
    if len(layouts) > 1:
        raise ArgumentError(layer, "backend", f"{want!r} with weight layouts {sorted(layouts)}", "one weight layout")


def _from(rungs: tuple[Rung, ...], start: int, backend: Backend) -> tuple[Rung, ...]:
    """Return a ladder whose last rung is a backend, from so many tokens on, whatever stood there."""
    below = [rung for rung in rungs if rung.max_tokens is not None and rung.max_tokens < start - 1]
    return (*below, replace(rungs[len(below)], max_tokens=start - 1), Rung(None, backend))


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        log.warning(message)


def environment_wishes() -> dict[str, str]:
    """Return ``{layer: backend or ladder}`` as ``FASTLAYERS_BACKEND`` has it, for layers and backends that exist.

    Raises
    ------
    EnvironmentVariableError, UnknownNameError, ArgumentError
        An entry is not of the form, or names no layer, no backend, or no ladder.
    """
    load_plugins()
    overrides = env.backend_overrides()
    for layer, named in overrides.items():
        if layer not in LAYERS and layer not in COLLECTIVES:
            raise EnvironmentVariableError(f"{env.BACKEND}: {no_layer(layer)}")
        if named != "auto":
            try:
                builtin_registry(layer)._parse(named)
            except UnknownNameError as error:
                raise UnknownNameError(f"{error} (from {env.BACKEND})") from None
            except ArgumentError as error:
                given = f"{error.given} (from {env.BACKEND})"
                raise ArgumentError(error.layer, error.argument, given, error.accepted) from None
    return overrides


def registry(layer: str) -> Registry:
    """Return the registry of a layer by its name in :data:`LAYERS`, or of a collective or a part, plug-ins included."""
    known = (*LAYERS, *COLLECTIVES, *PARTS)
    if not isinstance(layer, str) or layer not in known:
        raise UnknownNameError(f"layer {layer!r} is unknown; known: {', '.join(known)}")
    load_plugins()
    return builtin_registry(layer)
