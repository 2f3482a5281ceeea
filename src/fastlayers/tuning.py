"""Tuned tables: which backend was measured fastest up to which token count, per layer shape and device.

A table is one JSON file, ``<dir>/<layer>/<shape key>,device_name=<device>.json``::

    {"schema": 1, "layer": "fp8_linear", "device": "H200", "key": "N=…,K=…", "cfg": "FP8LinearConfig(…)",
     "ladder": [{"max_tokens": 64, "backend": "triton", "microseconds": 7.1, "config": {"BLOCK_N": 64}},
                {"max_tokens": null, ...}],
     "metadata": {"versions": {"triton": {"triton": "3.6.0"}}, "kernels": {"triton": "0f3a…"}, "commit": "…",
                  "date": "…", "command": "…"},
     "measured": [{"tokens": 1, "backend": "triton", "us": 6.9, "spread_us": 0.1, "config": {...}}, ...]}

A rung's ``config`` is given to its backend as it is; without one the backend's own rule holds. ``cfg.tuning_key()``
gives the shape key; a configuration without that method is never tuned. A shape without a table takes the ladder of
the nearest shape: the same names and words in the key, the smallest distance of the logarithms of its numbers.
``fastlayers tune`` writes tables.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlayers import env
from fastlayers.device import Device
from fastlayers.errors import FastlayersError
from fastlayers.fingerprint import kernel_hash, packages_of, version_of

if TYPE_CHECKING:
    from fastlayers.registry import Backend, Rung

log = logging.getLogger(__name__)
SHIPPED = Path(__file__).parent / "tuned"
SCHEMA = 1
# A table keeps the times of configurations that are within this factor of the best.
KEPT_WITHIN = 1.3


class TunedTableError(FastlayersError, ValueError):
    """A tuned table is corrupt, of another schema, or for another layer or device."""


@dataclass(frozen=True)
class Found:
    """A table for a shape: its own (``exact``) or the nearest one; ``changed``: what is other than when it was made."""

    path: Path
    table: Mapping[str, Any]
    exact: bool
    changed: tuple[str, ...]

    @property
    def evidence(self) -> str:
        """What ``explain`` shows."""
        text = f"{'tuned table' if self.exact else 'nearest tuned table'} {self.path.name}"
        return f"{text}, made with other versions ({'; '.join(self.changed)})" if self.changed else text


@dataclass(frozen=True)
class Tuned:
    """A ladder read from a table, and the file it came from."""

    rungs: tuple[Rung, ...]
    evidence: str


def key_of(cfg: Any) -> str | None:
    """Return the shape key of a configuration, or ``None`` if its layer is not tuned."""
    return cfg.tuning_key() if hasattr(cfg, "tuning_key") else None


def path_of(folder: Path, layer: str, key: str, device: Device) -> Path:
    """Return where the table of a shape stands in a directory of tables."""
    return folder / layer / f"{key},device_name={device.name}.json"


def ladder(layer: str, cfg: Any, device: Device, able: Mapping[str, Backend]) -> Tuned | None:
    """Return the tuned ladder for this shape and device, cut to the backends that are able to run.

    Rungs share the weight layout of the last one that can run (it serves the largest batches). ``None`` if no table
    exists, not even of another shape, or nothing of it can run.
    """
    from fastlayers.registry import Rung

    found = lookup(layer, cfg, device, able)
    if found is None:
        return None
    rows = [row for row in found.table["ladder"] if row["backend"] in able]
    layout = able[rows[-1]["backend"]].weight_layout
    rows = [row for row in rows if able[row["backend"]].weight_layout == layout]
    limits = [row["max_tokens"] for row in rows[:-1]] + [None]
    rungs = tuple(
        Rung(m, able[r["backend"]], r.get("microseconds"), tuple(sorted(r.get("config", {}).items())))
        for m, r in zip(limits, rows, strict=True)
    )
    if not found.exact:
        _announce(layer, cfg, device, found)
    return Tuned(rungs, found.evidence)


def lookup(layer: str, cfg: Any, device: Device, able: Mapping[str, Backend]) -> Found | None:
    """Return the table that serves a shape, if any of its rungs is ``able`` to run.

    Raises
    ------
    TunedTableError
        The table is not one; the file is named.
    """
    key = key_of(cfg)
    if key is None:
        return None
    path = find(layer, key, device)
    exact = path is not None
    if path is None:
        path = nearest(layer, key, device)
    if path is None:
        return None
    table = read(path, layer, device)
    used = {row["backend"] for row in table["ladder"]} & set(able)
    return Found(path, table, exact, changes(table, [able[name] for name in sorted(used)])) if used else None


def directories() -> list[Path]:
    """Return the directories with tables: the user's first, then the shipped one."""
    user = env.tuned_dir()
    return ([Path(user)] if user else []) + [SHIPPED]


def find(layer: str, key: str, device: Device) -> Path | None:
    """Return the path of a shape's own table: the user's directory first, then the shipped one."""
    for directory in directories():
        if (path := path_of(directory, layer, key, device)).is_file():
            return path
    return None


def nearest(layer: str, key: str, device: Device, without: str = "") -> Path | None:
    """Return the path of the nearest other shape's table, or ``None`` if no key differs in numbers only.

    ``without`` is a key that does not count.
    """
    best: tuple[float, str, Path] | None = None
    for other, path in _tables(layer, device):
        far = distance(key, other)
        if other != without and far is not None and (best is None or (far, other) < best[:2]):
            best = (far, other, path)
    return best[2] if best is not None else None


def tables(layer: str, device: Device) -> list[Path]:
    """Return the paths of a layer's tables for a device."""
    return [path for _, path in _tables(layer, device)]


def _tables(layer: str, device: Device) -> Iterator[tuple[str, Path]]:
    ending, seen = f",device_name={device.name}.json", set()
    for directory in directories():
        for path in sorted((directory / layer).glob(f"*{ending}")):
            key = path.name.removesuffix(ending)
            if key not in seen:
                seen.add(key)
                yield key, path


def distance(key: str, other: str) -> float | None:
    """Return how far two shape keys are from each other; ``None`` if they differ in more than positive numbers.

    The sum over the numbers of \\|log2(a / b)\\|: twice as wide is 1, twice as wide and half as deep is 2.
    """
    total = 0.0
    ours, theirs = _fields(key), _fields(other)
    if len(ours) != len(theirs):
        return None
    for (name, a), (other_name, b) in zip(ours, theirs, strict=True):
        if name != other_name:
            return None
        if a != b:
            if not (a.isdigit() and b.isdigit() and int(a) and int(b)):
                return None
            total += abs(math.log2(int(a) / int(b)))
    return total


def _fields(key: str) -> list[tuple[str, str]]:
    pieces = [piece.partition("=") for piece in key.split(",")]
    return [(name, value) if separator else ("", name) for name, separator, value in pieces]


def read(path: Path, layer: str, device: Device) -> dict[str, Any]:
    """Read and check one table.

    Raises
    ------
    TunedTableError
        Not JSON, another schema, layer or device, or rows out of order; the file is named.
    """
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise TunedTableError(f"tuned table {path} cannot be read: {error.strerror}") from error
    return _read(path, layer, device.name, changed)


@lru_cache(maxsize=512)
def _read(path: Path, layer: str, device_name: str, changed: int) -> dict[str, Any]:
    """Read a table once as long as the file stays as it is: a model has hundreds of layers and few shapes."""
    try:
        table: dict[str, Any] = json.loads(path.read_text())
        rows = table["ladder"]
        limits, names = [row["max_tokens"] for row in rows], [row["backend"] for row in rows]
        configs = [row.get("config", {}) for row in rows]
        facts = (table["schema"], table["layer"], table["device"])
        times = [(row["tokens"], row["backend"], row["us"]) for row in table.get("measured", [])]
        metadata = table.get("metadata", {})
        dict(metadata.get("versions", {}), **metadata.get("kernels", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TunedTableError(f"tuned table {path} is corrupt: {type(error).__name__}: {error}") from error
    if facts != (SCHEMA, layer, device_name):
        raise TunedTableError(f"tuned table {path} is for {facts}; expected {(SCHEMA, layer, device_name)}")
    if (
        not rows
        or limits[-1] is not None
        or any(not isinstance(m, int) for m in limits[:-1])
        or limits[:-1] != sorted(set(limits[:-1]))
    ):
        raise TunedTableError(f"tuned table {path}: thresholds {limits} do not increase and end in null")
    if not all(isinstance(name, str) for name in names):
        raise TunedTableError(f"tuned table {path}: backends {names} are not all names")
    if not all(isinstance(config, dict) and all(type(v) is int for v in config.values()) for config in configs):
        raise TunedTableError(f"tuned table {path}: configs {configs} are not all mappings to integers")
    if not all(isinstance(us, int | float) and us > 0 for _, _, us in times):
        raise TunedTableError(f"tuned table {path}: measured times are not all positive numbers")
    return table


def write(path: Path, table: Mapping[str, Any]) -> None:
    """Write a table in one step: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = ",\n".join("  " + json.dumps(row) for row in table.get("measured", []))
    text = json.dumps({**table, "measured": []}, indent=1)
    if measured:
        text = text.replace('"measured": []', f'"measured": [\n{measured}\n ]')
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(text + "\n")
    partial.replace(path)


# ---- is it still true? -----------------------------------------------------------------------------------------


def metadata(layer: str, backends: Sequence[Backend]) -> dict[str, Any]:
    """Return what a table's figures depend on: packages, kernels, commit, date."""
    import datetime
    import subprocess

    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return {
        "versions": {b.name: {name: version_of(name) for name in packages_of(b)} for b in backends},
        "kernels": {b.name: kernel_hash(b.target) for b in backends},
        "commit": commit, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
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
    return tuple(found)


# ---- the nearest shape's ladder --------------------------------------------------------------------------------

_announced: set[str] = set()


def _announce(layer: str, cfg: Any, device: Device, found: Found) -> None:
    """Say once per layer that a ladder is borrowed, what that may cost, and how to have an own one."""
    if layer in _announced:
        return
    _announced.add(layer)
    loss = borrowed_loss(layer, device)
    cost = f"up to {100 * loss:.0f} % where it was measured" if loss is not None else "an unknown amount"
    command = f"fastlayers tune --layer {layer} --shape {shlex.quote(shape_text(cfg))}"
    log.warning(
        "%s: no tuned table for %s on %s; the ladder of %s serves it, which may cost %s; to tune it: %s",
        layer, key_of(cfg), device.name, found.path.name, cost, command,
    )  # fmt: skip


def shape_text(cfg: Any) -> str:
    """Return a configuration as ``--shape`` takes it: ``NAME=VALUE,…``, what has its default left out."""
    shown = [field for field in fields(cfg) if field.default is MISSING or getattr(cfg, field.name) != field.default]
    return ",".join(f"{f.name}={str(getattr(cfg, f.name)).removeprefix('torch.').replace(' ', '')}" for f in shown)


def borrowed_loss(layer: str, device: Device) -> float | None:
    """Return what the installed tables' shapes would lose with their nearest neighbours' ladders.

    The largest median over the token counts of a shape, from the times in the tables; 0.1 is 10 %. ``None`` if there
    are not two comparable tables with times.
    """
    losses = [statistics.median(ratios) - 1 for ratios in borrowed_ratios(layer, device).values()]
    return max(losses) if losses else None


def borrowed_ratios(layer: str, device: Device) -> dict[str, list[float]]:
    """Return for each shape with a table what its nearest neighbour's ladder takes at each token count, over the best.

    Times are those in the shape's own table. A configuration without one was slower than ``KEPT_WITHIN`` times the
    best, or never timed: it counts as that, or as its backend's own rule if that is slower.
    """
    found = {}
    for key, path in _tables(layer, device):
        lent = nearest(layer, key, device, without=key)
        if lent is not None and (ratios := _ratios(read(path, layer, device), read(lent, layer, device))):
            found[key] = ratios
    return found


def _ratios(own: Mapping[str, Any], lent: Mapping[str, Any]) -> list[float]:
    times: dict[int, dict[tuple[str, str], float]] = {}
    for row in own.get("measured", []):
        option = (row["backend"], json.dumps(row.get("config", {}), sort_keys=True))
        times.setdefault(row["tokens"], {})[option] = row["us"]
    ratios = []
    for tokens, here in times.items():
        rung = next(r for r in lent["ladder"] if r["max_tokens"] is None or tokens <= r["max_tokens"])
        configured = (rung["backend"], json.dumps(rung.get("config", {}), sort_keys=True))
        plain, best = here.get((rung["backend"], "{}")), min(here.values())
        if configured in here:
            ratios.append(here[configured] / best)
        elif plain is not None:
            ratios.append(max(KEPT_WITHIN, plain / best))
    return ratios
