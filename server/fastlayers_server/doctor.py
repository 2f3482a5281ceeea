"""What is installed, what works, what is disabled and why: the facts behind ``fastlayers doctor``."""

from __future__ import annotations

import importlib
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

import fastlayers
from fastlayers import device as device_module
from fastlayers import env


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
    target = device_module.as_device("cuda" if torch.cuda.is_available() else "cpu")
    layers = {layer: _layer(layer, target) for layer in fastlayers.layers()}
    return {
        "fastlayers": fastlayers.__version__,
        "facts": [asdict(fact) for fact in facts],
        "device": str(target),
        "layers": layers,
        "environment": _environment(),
        "ok": all(fact.ok for fact in facts),
    }


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


def _layer(layer: str, target: device_module.Device) -> dict[str, Any]:
    rows = fastlayers.backends(layer, device=target)
    return {
        "works": [row.name for row in rows if row.hardware and row.installed],
        "disabled": {row.name: row.reason for row in rows if not (row.hardware and row.installed)},
    }


def _environment() -> dict[str, str]:
    return {
        env.BACKEND: ",".join(f"{layer}={backend}" for layer, backend in env.backend_overrides().items()),
        env.DISABLE: ",".join(sorted(env.disabled_packages())),
        env.DEBUG: str(env.debug()),
        env.TUNED_DIR: env.tuned_dir() or "",
    }
