"""What a backend's measured times depend on: versions of its packages, and the code of its kernels."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlayers import device as device_module
from fastlayers.runtime.kernel_cache import write_whole
from fastlayers.tuning.provenance import provenance
from fastlayers.tuning.sources import LIBRARY, installed

if TYPE_CHECKING:
    from fastlayers.registry import Backend

HASHES = "kernel_hashes.json"


def packages_of(backend: Backend) -> tuple[str, ...]:
    """Return the import names of the packages behind a backend; ``("torch",)`` if it names none."""
    tops = dict.fromkeys(need.partition(":")[0].split(".")[0] for need in backend.needs)
    return tuple(name for name in tops if name != "torch") or ("torch",)


def removable_packages(backend: Backend) -> tuple[str, ...]:
    """Return the packages behind a backend that a machine with a GPU may lack, or may not have built."""
    return tuple(name for name in packages_of(backend) if name not in ("torch", "triton"))


def version_of(package: str) -> str | None:
    """Return an installed package's version, without importing it; ``None`` if it is absent."""
    if package == "torch":
        import torch

        return str(torch.__version__)
    return device_module.package(package, load=False).version


def kernel_hash(target: str | Callable[..., Any]) -> str:
    """Return a hash of the code behind a backend's target that its times depend on: see :mod:`.sources`."""
    return _hash(target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}")


@lru_cache
def _hash(target: str) -> str:
    if not target.startswith(f"{LIBRARY}."):
        return installed().kernel_hash(target)
    # Its code is this library's alone. To parse that takes seconds of a process's start.
    known = _known_hashes(_files_state())
    if target not in known:
        known[target] = installed().kernel_hash(target)
        _keep(known)
    return known[target]


@lru_cache
def _files_state() -> str:
    """Return a digest of when this library's files were written, and how large they are."""
    root = Path(__file__).parents[1]
    files = sorted((path, path.stat()) for path in root.rglob("*.py"))
    facts = [(str(path), about.st_mtime_ns, about.st_size) for path, about in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def _hashes_path() -> Path:
    from fastlayers.tuning.table import probed_dir

    return probed_dir() / HASHES


@lru_cache
def _known_hashes(state: str) -> dict[str, str]:
    """Return the hashes of earlier processes; of other files, or where they cannot be read, there are none."""
    try:
        found = json.loads(_hashes_path().read_text())
        kept: dict[str, str] = found["hashes"]
        good = found["state"] == state and all(isinstance(each, str) for pair in kept.items() for each in pair)
        return kept if good else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _keep(hashes: Mapping[str, str]) -> None:
    with suppress(OSError):  # then the next process parses again
        text = json.dumps({"state": _files_state(), "hashes": dict(hashes)}, indent=1)
        write_whole(_hashes_path(), text + "\n")


def rule_hash(backend: Backend, cfg: Any, counts: Sequence[int]) -> str | None:
    """Return a hash of the parameters that a backend's own rule gives its kernels; ``None`` if it has no such rule."""
    candidates = getattr(backend.load(), "candidates", None)
    if candidates is None:
        return None
    chosen = [candidates(cfg, count)[:1] for count in counts]
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:12]


def rules(table: Mapping[str, Any], cfg: Any, backends: Sequence[Backend]) -> dict[str, str]:
    """Return the hashes of the rules that a table's ladders rely on: those of rungs without a configuration."""
    ladders = [table["ladder"], *table.get("alternatives", [])]
    plain = {row["backend"] for rungs in ladders for row in rungs if not row.get("config")}
    found = {b.name: rule_hash(b, cfg, table["tokens"]) for b in backends if b.name in plain}
    return {name: each for name, each in found.items() if each is not None}


@lru_cache
def _rule_now(layer: str, name: str, cfg: str, counts: tuple[int, ...]) -> str | None:
    from fastlayers.registry import registry
    from fastlayers.tuning.sweep import parse_shape

    try:
        return rule_hash(registry(layer).named(name), parse_shape(layer, cfg), counts)
    except Exception:  # a package that is gone, a configuration that is no more: not the rule that was
        return None


def metadata(layer: str, backends: Sequence[Backend]) -> dict[str, Any]:
    """Return what a table's figures depend on: packages, kernels, sources, date."""
    return {
        "versions": {b.name: {name: version_of(name) for name in packages_of(b)} for b in backends},
        "kernels": {b.name: kernel_hash(b.target) for b in backends},
        **provenance(), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def changes(table: Mapping[str, Any], backends: Sequence[Backend]) -> tuple[str, ...]:
    """Return in words which packages and kernels of these backends are other than when the table was made."""
    about = table.get("metadata", {})
    versions, kernels = about.get("versions", {}), about.get("kernels", {})
    found: dict[str, None] = {}
    for backend in backends:
        for name, then in versions.get(backend.name, {}).items():
            if (now := version_of(name)) != then:
                found[f"{name} {then}, now {now or 'absent'}"] = None
        if backend.name in kernels and kernels[backend.name] != kernel_hash(backend.target):
            found[f"kernels of {backend.name} have changed"] = None
        rule = about.get("rules", {}).get(backend.name)
        if rule is not None and rule != _rule_now(table["layer"], backend.name, table["cfg"], tuple(table["tokens"])):
            found[f"the rule of {backend.name} has changed"] = None
    return tuple(found)
