"""What is installed, what works, what is disabled and why: the facts behind ``fastlayers doctor``."""

from __future__ import annotations

import importlib
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import fastlayers
from fastlayers import device as device_module
from fastlayers import env, tuning
from fastlayers.errors import FastlayersError


@dataclass(frozen=True)
class Fact:
    """One line of the report: ``ok`` is ``False`` only for something installed that cannot be used."""

    name: str
    version: str | None
    state: str
    reason: str | None
    ok: bool


def diagnose() -> dict[str, Any]:
    """Return the whole report as plain data; imports every optional package that is installed."""
    registry = importlib.import_module("fastlayers.registry")
    registry.load_plugins()
    facts = [_python(), _torch(), _gpu()]
    for name in device_module.OPTIONAL_PACKAGES:
        found = device_module.package(name, load=True)
        facts.append(Fact(name, found.version, found.state, found.reason, found.state != "broken"))
    for name, reason in registry.plugin_errors.items():
        facts.append(Fact(f"plug-in {name}", None, "broken", reason, False))
    for name, layer, backend in registry.plugins.plugin_backends:
        if (why := registry.why_not_loaded(backend)) is not None:
            facts.append(Fact(f"plug-in {name}", None, "broken", f"{layer}: {why}", False))
    target = device_module.as_device("cuda" if torch.cuda.is_available() else "cpu")
    facts += _without_effect() + _tuned_tables(target)
    layers = {layer: _layer(layer, target) for layer in fastlayers.layers()}
    return {
        "fastlayers": fastlayers.__version__,
        "facts": [asdict(fact) for fact in facts],
        "device": str(target),
        "layers": layers,
        "environment": _environment(),
        "ok": all(fact.ok for fact in facts),
    }


def _without_effect() -> list[Fact]:
    """Return a fact for each variable, and each name in one, that changes nothing, or stops everything."""
    found = importlib.import_module("fastlayers.registry.environment").without_effect()
    facts = [Fact(each.variable, None, each.state, each.reason, not each.broken) for each in found]
    wrong = _wrong_wish()
    return facts + ([Fact(env.BACKEND, None, "broken", wrong, False)] if wrong is not None else [])


def _wrong_wish() -> str | None:
    """Return what is wrong with the backends that the environment asks for: no layer could be constructed."""
    try:
        importlib.import_module("fastlayers.registry").environment_wishes()
    except FastlayersError as error:
        return str(error)
    return None


def _python() -> Fact:
    return Fact("python", platform.python_version(), "ok", None, True)


def _torch() -> Fact:
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Fact("torch", torch.__version__, "ok", cuda, True)


def _gpu() -> Fact:
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        reason = "torch has CUDA but finds no usable NVIDIA GPU" if built else "this torch is built without CUDA"
        return Fact("gpu", None, "absent", reason, True)
    found = device_module.as_device("cuda")
    return Fact(
        "gpu", found.sm, "ok", f"{found.name}, {found.sm_count} SMs, {found.memory_bytes / 2**30:.0f} GiB", True
    )


def _tuned_tables(target: device_module.Device) -> list[Fact]:
    """Return how many tuned tables serve this device, and one fact for each that is refused."""
    count, stale, facts = 0, 0, []
    registry = importlib.import_module("fastlayers.registry")
    for layer in fastlayers.layers():
        ranked = registry.registry(layer).ranked
        for path in tuning.tables(layer, target):
            try:
                table = tuning.read(path, layer, target, [backend.name for backend in ranked])
            except tuning.TunedTableError as error:
                facts.append(Fact("tuned table", None, "broken", str(error), False))
                continue
            used = {row["backend"] for row in table["ladder"]}
            backends = [backend for backend in ranked if backend.name in used]
            count, stale = count + 1, stale + bool(tuning.changes(table, backends))
    reason = f"{count or 'none'} for {target.name}" + (f", {stale} of them made with other versions" if stale else "")
    reason += _lent(target, count)
    return [Fact("tuned tables", None, "ok", reason, True), *facts]


def _lent(target: device_module.Device, own: int) -> str:
    """Return whose tables serve a device that has none, or what it has none for; nothing, if nobody has more."""
    counts = {
        other: sum(len(tuning.tables(layer, other)) for layer in fastlayers.layers()) for other in tuning.kin(target)
    }
    lent = " and ".join(f"{count} of {other.name}" for other, count in counts.items() if count > own)
    return f"; {lent}, also {target.sm}, serve {'what else' if own else 'instead'}" if lent else ""


def _layer(layer: str, target: device_module.Device) -> dict[str, Any]:
    rows = fastlayers.backends(layer, device=target)
    ranked = importlib.import_module("fastlayers.registry").registry(layer).ranked
    guards = {backend.name for backend in ranked if backend.guard}
    works = [row.name for row in rows if row.hardware and row.installed and row.name not in guards]
    return {"works": works, "disabled": {row.name: row.reason for row in rows if row.name not in works}}


@dataclass(frozen=True)
class Trial:
    """One backend run on a small case: ``ok``, or why not."""

    layer: str
    backend: str
    case: str
    ok: bool
    reason: str
    seconds: float


def trials(device: str, only: Sequence[str] = ()) -> Iterator[Trial]:
    """Run every backend that can run here on one small case of its layer, against the reference.

    Guards, which have no kernels, are left out.
    The first of the layer's cases that the backend accepts is taken: a small one if there is one.
    """
    registry = importlib.import_module("fastlayers.registry")
    from fastlayers.registry.spec import spec_of
    from fastlayers.tuning.parity import check_parity

    target = device_module.as_device(device)
    for layer in only or fastlayers.layers():
        for backend in registry.registry(layer).ranked:
            accepted = [case for case in spec_of(layer).cases if backend.why_not(case.cfg, target) is None]
            # An empty case proves nothing.
            full = [case for case in accepted if "empty" not in case.name]
            if backend.name == "reference" or backend.guard or not full:
                continue
            case, begin = min(full, key=lambda case: not case.small), time.perf_counter()
            try:
                check_parity(layer, backend, case, device)
                reason = ""
            except Exception as error:  # a foreign kernel may raise anything; the reason is shown
                reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            seconds = time.perf_counter() - begin
            yield Trial(layer, backend.name, case.name, not reason, reason, round(seconds, 2))


def _environment() -> dict[str, str]:
    return {
        env.BACKEND: env.backend_text(),
        env.DISABLE: ",".join(sorted(env.disabled_packages())),
        env.DEBUG: str(env.debug()),
        env.TUNED_DIR: env.tuned_dir() or "",
    }
