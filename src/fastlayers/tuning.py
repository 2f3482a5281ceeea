"""Tuned tables: which backend was measured fastest up to which token count, per layer shape and device.

A table is one JSON file, ``<dir>/<layer>/<shape key>,device_name=<device>.json``::

    {"schema": 1, "layer": "fp8_linear", "device": "H200", "key": "N=…,K=…", "cfg": "FP8LinearConfig(…)",
     "ladder": [{"max_tokens": 64, "backend": "triton", "microseconds": 7.1, "config": {"BLOCK_N": 64}},
                {"max_tokens": null, ...}],
     "metadata": {"versions": {"triton": {"triton": "3.6.0"}}, "kernels": {"triton": "0f3a…"}, "commit": "…",
                  "date": "…", "command": "…"},
     "measured": [{"tokens": 1, "backend": "triton", "us": 6.9, "spread_us": 0.1, "config": {...}}, ...],
     "candidates": {"1": 40}}

``candidates`` is how many configurations of a backend were tried at a token count, at most. A rung's ``config`` is
given to its backend as it is; without one the backend's own rule holds. ``cfg.tuning_key()`` gives the shape key; a
configuration without that method is never tuned. A shape without a table takes the ladder of the nearest shape of
which something can run: the same names and words in the key, the smallest distance of the logarithms of its numbers.
``fastlayers tune`` writes tables; of one made with the same versions it measures what is missing.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import shlex
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
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

    Rungs share the weight layout of the last one that can run (it serves the largest batches). The evidence names
    what was dropped. ``None`` if no table exists, not even of another shape, or nothing of any can run.

    Raises
    ------
    TunedTableError
        The table is not one, or has a configuration for a backend that takes none; the file is named.
    """
    from fastlayers.registry import Rung

    found = lookup(layer, cfg, device, able)
    if found is None:
        return None
    whole = found.table["ladder"]
    rows = [row for row in whole if row["backend"] in able]
    layout = able[rows[-1]["backend"]].weight_layout
    dropped = {row["backend"]: "it cannot run here" for row in whole if row["backend"] not in able}
    dropped |= {row["backend"]: "another weight layout" for row in rows if able[row["backend"]].weight_layout != layout}
    rows = [row for row in rows if row["backend"] not in dropped]
    if rows[-1]["max_tokens"] is not None:  # it serves more than it did: its time there is another
        rows[-1] = rows[-1] | {"max_tokens": None, "microseconds": _time_of(found.table, rows[-1])}
    for row in rows:
        if row.get("config") and not _takes_config(able[row["backend"]]):
            raise TunedTableError(f"tuned table {found.path}: backend {row['backend']!r} takes no config")
    rungs = tuple(
        Rung(r["max_tokens"], able[r["backend"]], r.get("microseconds"), tuple(sorted(r.get("config", {}).items())))
        for r in rows
    )
    if not found.exact:
        _announce(layer, cfg, device, found, able)
    cut = "".join(f"; without its rungs of {name}: {why}" for name, why in dropped.items())
    return Tuned(rungs, found.evidence + cut)


def _time_of(table: Mapping[str, Any], row: Mapping[str, Any]) -> float | None:
    """Return what a rung's backend and configuration took at the largest token count, if that was measured."""
    times = table.get("measured", [])
    last = max((each["tokens"] for each in times), default=0)
    same = [
        each["us"] for each in times
        if each["tokens"] == last and each["backend"] == row["backend"]
        and each.get("config", {}) == row.get("config", {})
    ]  # fmt: skip
    return same[0] if same else None


def _takes_config(backend: Backend) -> bool:
    try:
        inspect.signature(backend.load()).bind(None, {})
    except TypeError:
        return False
    return True


def lookup(layer: str, cfg: Any, device: Device, able: Mapping[str, Backend]) -> Found | None:
    """Return the table that serves a shape: the nearest of which a rung is ``able`` to run, its own first.

    Raises
    ------
    TunedTableError
        A table is not one; the file is named.
    """
    key = key_of(cfg)
    if key is None:
        return None
    own = find(layer, key, device)
    for path in ([own] if own is not None else []) + neighbours(layer, key, device):
        table = read(path, layer, device)
        used = {row["backend"] for row in table["ladder"]} & set(able)
        if used:
            return Found(path, table, path == own, changes(table, [able[name] for name in sorted(used)]))
    return None


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


def neighbours(layer: str, key: str, device: Device) -> list[Path]:
    """Return the tables of other shapes whose keys differ from ``key`` in numbers only, the nearest first."""
    found = [(distance(key, other), other, path) for other, path in _tables(layer, device) if other != key]
    return [path for _, _, path in sorted((far, other, path) for far, other, path in found if far is not None)]


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
        Not JSON, another schema, layer, device or key, an unknown backend, or rows out of order; the file is named.
    """
    from fastlayers.registry import LAYERS, registry

    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise TunedTableError(f"tuned table {path} cannot be read: {error.strerror}") from error
    table = _read(path, layer, device.name, changed)
    if layer in LAYERS:
        known = {backend.name for backend in registry(layer).ranked}
        if unknown := [row["backend"] for row in table["ladder"] if row["backend"] not in known]:
            raise TunedTableError(f"tuned table {path}: backend {unknown[0]!r} is unknown; known: {', '.join(known)}")
    return table


@lru_cache(maxsize=512)
def _read(path: Path, layer: str, device_name: str, changed: int) -> dict[str, Any]:
    """Read a table once as long as the file stays as it is: a model has hundreds of layers and few shapes."""
    try:
        table: dict[str, Any] = json.loads(path.read_text())
        facts = (table["schema"], table["layer"], table["device"])
        problem = _problem(table, path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TunedTableError(f"tuned table {path} is corrupt: {type(error).__name__}: {error}") from error
    if facts != (SCHEMA, layer, device_name):
        raise TunedTableError(f"tuned table {path} is for {facts}; expected {(SCHEMA, layer, device_name)}")
    if problem is not None:
        raise TunedTableError(f"tuned table {path}: {problem}")
    return table


def _problem(table: Mapping[str, Any], path: Path) -> str | None:
    """Return what is wrong with a table's values, ``None`` if nothing is."""
    rows, times = table["ladder"], table.get("measured", [])
    limits, names = [row["max_tokens"] for row in rows], [row["backend"] for row in rows]
    configs = [row.get("config", {}) for row in [*rows, *times]]
    about, said = table.get("metadata", {}), (table.get("candidates", {}), table.get("failed", {}))
    named = path.name.rpartition(",device_name=")[0]
    whole = [type(m) is int and m > 0 for m in limits[:-1]]
    if table.get("key", named) != named:
        return f"its key is {table['key']!r}"
    if not rows or limits[-1] is not None or not all(whole) or limits[:-1] != sorted(set(limits[:-1])):
        return f"thresholds {limits} are not positive, increasing and null at the end"
    if not all(isinstance(name, str) for name in names):
        return f"backends {names} are not all names"
    if not all(isinstance(config, dict) and all(type(v) is int for v in config.values()) for config in configs):
        return f"configs {[config for config in configs if config]} are not all mappings to integers"
    if not all(row.get("microseconds") is None or _is_time(row["microseconds"]) for row in rows):
        return f"microseconds {[row.get('microseconds') for row in rows]} are not all positive numbers"
    if not all(
        type(row["tokens"]) is int and isinstance(row["backend"], str) and _is_time(row["us"])
        and type(row.get("spread_us", 0.0)) in (int, float)
        for row in times
    ):  # fmt: skip
        return "measured token counts and times are not all positive numbers"
    versions, kernels = about.get("versions", {}), about.get("kernels", {})
    if not (all(isinstance(each, dict) for each in (versions, kernels, *said, *versions.values()))):
        return "metadata.versions, metadata.kernels, candidates or failed are not mappings"
    return None


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


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


def _announce(layer: str, cfg: Any, device: Device, found: Found, able: Collection[str]) -> None:
    """Say once per layer that a ladder is borrowed, what that may cost, and how to have an own one."""
    if layer in _announced:
        return
    _announced.add(layer)
    loss = borrowed_loss(layer, device, able)
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


def borrowed_loss(layer: str, device: Device, able: Collection[str] | None = None) -> float | None:
    """Return what the installed tables' shapes would lose with their nearest neighbours' ladders.

    The largest median over the token counts of a shape, from the times in the tables; 0.1 is 10 %. ``None`` if there
    are not two comparable tables with times. ``able``: only these backends count.
    """
    losses = [statistics.median(ratios) - 1 for ratios in borrowed_ratios(layer, device, able).values()]
    return max(losses) if losses else None


def borrowed_ratios(layer: str, device: Device, able: Collection[str] | None = None) -> dict[str, list[float]]:
    """Return for each shape with a table what its nearest neighbour's ladder takes at each token count, over the best.

    Times are those in the shape's own table. A configuration without one was slower than ``KEPT_WITHIN`` times the
    best, or never timed: it counts as that, or as its backend's own rule if that is slower. ``able``: as if these
    were the only backends.
    """
    found = {}
    for key, path in _tables(layer, device):
        rungs = lent_rungs(layer, key, device, able)
        own = [row for row in read(path, layer, device).get("measured", []) if able is None or row["backend"] in able]
        if rungs and (ratios := _ratios(own, rungs)):
            found[key] = ratios
    return found


def lent_rungs(layer: str, key: str, device: Device, able: Collection[str] | None = None) -> list[Mapping[str, Any]]:
    """Return the nearest neighbour's ladder without what is not ``able``; empty if nobody lends one."""
    for path in neighbours(layer, key, device):
        rungs = [row for row in read(path, layer, device)["ladder"] if able is None or row["backend"] in able]
        if rungs:
            return rungs
    return []


def rung_at(rungs: Sequence[Mapping[str, Any]], tokens: int) -> Mapping[str, Any]:
    """Return the rung that serves so many tokens."""
    return next((row for row in rungs if row["max_tokens"] is None or tokens <= row["max_tokens"]), rungs[-1])


def _ratios(own: Sequence[Mapping[str, Any]], rungs: Sequence[Mapping[str, Any]]) -> list[float]:
    times: dict[int, dict[tuple[str, str], float]] = {}
    for row in own:
        option = (row["backend"], json.dumps(row.get("config", {}), sort_keys=True))
        times.setdefault(row["tokens"], {})[option] = row["us"]
    ratios = []
    for tokens, here in times.items():
        rung = rung_at(rungs, tokens)
        configured = (rung["backend"], json.dumps(rung.get("config", {}), sort_keys=True))
        plain, best = here.get((rung["backend"], "{}")), min(here.values())
        if configured in here:
            ratios.append(here[configured] / best)
        elif plain is not None:
            ratios.append(max(KEPT_WITHIN, plain / best))
    return ratios
