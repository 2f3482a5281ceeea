"""What is built of the backends whose packages compile modules of their own when first called: deep_gemm, flashinfer.

Such a build takes many seconds, so ``auto`` takes a backend only where a warm-up built it before. The record of that
lies inside the package's own cache, travels with it, and is read once a process and again by :func:`refresh`.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlayers.runtime import kernel_cache

if TYPE_CHECKING:
    from fastlayers.comm.parallel import Axis
    from fastlayers.device import Device
    from fastlayers.registry.backend import Backend

RECORD = "fastlayers-builds.json"
SCHEMA = 1
UNBUILT = "its modules for this shape are not built"


def compiling(backend: Backend) -> tuple[str, ...]:
    """Return the packages behind a backend that compile modules on the first call; empty: nothing to build."""
    tops = dict.fromkeys(need.partition(":")[0].split(".")[0] for need in backend.needs)
    return tuple(name for name in tops if name in kernel_cache.NEEDS_NVCC and not _comes_built(name))


@lru_cache
def _comes_built(package: str) -> bool:
    return package == "flashinfer" and importlib.util.find_spec("flashinfer_jit_cache") is not None


def record_path(package: str) -> Path:
    """Return where the record of a package's modules is."""
    root = kernel_cache.STORES[package].directory()
    return (root / ".cache" / "flashinfer" if package == "flashinfer" else root) / RECORD


def entry(layer: str, backend: str, cfg: Any, device: Device) -> str:
    """Return how one backend of one shape is called in a record; modules do not depend on the context's class."""
    if is_dataclass(cfg) and not isinstance(cfg, type):
        usual = {f.name: f.default for f in fields(cfg) if f.name == "context" and f.default is not MISSING}
        cfg = replace(cfg, **usual)
    return f"{layer}={backend} {device.sm} {cfg!r}"


def unbuilt(layer: str, backend: Backend, cfg: Any, device: Device) -> str | None:
    """Return why ``auto`` does not take a backend yet, or ``None``; of a described device nobody knows: ``None``."""
    packages = compiling(backend)
    if not packages or device.described:
        return None
    if (why := failed(layer, backend, cfg, device)) is not None:
        return why
    name = entry(layer, backend.name, cfg, device)
    lacking = [package for package in packages if name not in built(package)]
    return f"{UNBUILT} ({', '.join(lacking)}; fastlayers warmup MODEL builds them)" if lacking else None


# Entries whose modules could not be built, and what their package said.
_failed: dict[str, str] = {}


def failed(layer: str, backend: Backend, cfg: Any, device: Device) -> str | None:
    """Return why a warm-up does not take a backend either: its package could not build what it needs."""
    if not _failed or not compiling(backend) or device.described:
        return None
    said = _failed.get(entry(layer, backend.name, cfg, device))
    return None if said is None else f"{UNBUILT}: {said}"


def of_all_ranks(entries: Mapping[str, str], axis: Axis) -> dict[str, str]:
    """Return what could not be built on any rank of an axis, which all have to do without; collective."""
    import torch.distributed as dist

    from fastlayers.comm.processes import gather_objects

    if axis.size == 1 or not isinstance(axis.group, dist.ProcessGroup):
        return dict(entries)
    told = gather_objects(dict(entries), axis, "telling what could not be built")
    return {entry: words for each in reversed(told) for entry, words in each.items()}


def leave_out(entries: Mapping[str, str]) -> None:
    """Let nobody take these backends of shapes, whose modules could not be built, until the next warm-up tries again.

    ``entries``: what their package said of each.
    """
    _failed.update(entries)


def try_again() -> None:
    """Forget what could not be built."""
    _failed.clear()


def built(package: str) -> Mapping[str, int]:
    """Return what is built of a package: entries, and the most tokens that they were built for."""
    kernel_cache.ensure()
    path = record_path(package)
    met = _met.get(path)
    return _snapshot(path) if met is None else met


# Records as all ranks have them, once they have met.
_met: dict[Path, Mapping[str, int]] = {}


def meet(axis: Axis) -> None:
    """Let only what is built on all ranks of an axis count until the next :func:`refresh`; collective.

    Ranks on several hosts have caches of their own. One that had built what others have not would otherwise take
    another backend, and its sums other bits.
    """
    import torch.distributed as dist

    from fastlayers.comm.processes import gather_objects

    if axis.size == 1 or not isinstance(axis.group, dist.ProcessGroup):
        return
    mine = {package: dict(built(package)) for package in kernel_cache.NEEDS_NVCC}
    everyones = gather_objects(mine, axis, "telling what is built")
    for package, names in mine.items():
        common = set(names).intersection(*(each[package] for each in everyones))
        _met[record_path(package)] = {name: min(each[package][name] for each in everyones) for name in sorted(common)}


@lru_cache
def _snapshot(path: Path) -> Mapping[str, int]:
    return _read(path)


def _read(path: Path) -> dict[str, int]:
    """Return a record; one that is damaged, or of other versions, says nothing: what it tells is built again."""
    try:
        found = json.loads(path.read_text())
        if (found["schema"], found["versions"]) != (SCHEMA, kernel_cache.versions_key()):
            return {}
        return {name: tokens for name, tokens in found["built"].items() if type(tokens) is int}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def refresh() -> None:
    """Read the records anew when they are next asked: what was built since counts from now on."""
    _snapshot.cache_clear()
    _met.clear()


def record(done: Iterable[tuple[str, Backend, Any, Device]], tokens: int) -> list[str]:
    """Note what has run for up to so many tokens, and return the new entries."""
    new: list[str] = []
    kernel_cache.ensure()
    by_package: dict[str, list[str]] = {}
    for layer, backend, cfg, device in done:
        for package in compiling(backend):
            by_package.setdefault(package, []).append(entry(layer, backend.name, cfg, device))
    for package, names in by_package.items():
        path = record_path(package)
        if _noted(before := _read(path), names, tokens) == before:
            continue  # caches may lie where nobody writes
        with _alone(path):  # what another process notes between the two would be lost
            before = _read(path)
            after = _noted(before, names, tokens)
            new += [name for name in dict.fromkeys(names) if name not in before]
            text = {"schema": SCHEMA, "versions": kernel_cache.versions_key(), "built": after}
            kernel_cache.write_whole(path, json.dumps(text, indent=1) + "\n")
    return new


def _noted(before: Mapping[str, int], names: Iterable[str], tokens: int) -> dict[str, int]:
    return {**before, **{name: max(tokens, before.get(name, 0)) for name in names}}


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let no other process change a record meanwhile; the lock goes with the process, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def summary() -> dict[str, int]:
    """Return how many entries each package has, for results."""
    return {package: len(found) for package in kernel_cache.NEEDS_NVCC if (found := built(package))}
