"""Tuned tables: which backend was measured fastest up to which token count, per layer shape and device.

A table is one JSON file, ``<dir>/<layer>/<shape key>,device_name=<device>.json``::

    {"schema": 1, "layer": "fp8_linear", "device": "H200", "versions": {...}, "commit": "...", "date": "...",
     "ladder": [{"max_tokens": 64, "backend": "triton", "microseconds": 7.1, "config": {"BLOCK_N": 64}},
                {"max_tokens": null, ...}]}

A rung's ``config`` is given to its backend as it is; without one the backend's own rule holds.

``cfg.tuning_key()`` gives the shape key; a configuration without that method is never tuned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlayers import env
from fastlayers.device import Device
from fastlayers.errors import FastlayersError

if TYPE_CHECKING:
    from fastlayers.registry import Backend, Rung

SHIPPED = Path(__file__).parent / "tuned"
SCHEMA = 1


class TunedTableError(FastlayersError, ValueError):
    """A tuned table is corrupt, of another schema, or for another layer or device."""


@dataclass(frozen=True)
class Tuned:
    """A ladder read from a table, and the file it came from."""

    rungs: tuple[Rung, ...]
    evidence: str


def ladder(layer: str, cfg: Any, device: Device, able: Mapping[str, Backend]) -> Tuned | None:
    """Return the tuned ladder for this shape and device, cut to the backends that are able to run.

    Rungs share the weight layout of the last one that can run (it serves the largest batches). ``None`` if no table
    exists or nothing of it can run.
    """
    from fastlayers.registry import Rung

    key = cfg.tuning_key() if hasattr(cfg, "tuning_key") else None
    if key is None:
        return None
    path = find(layer, key, device)
    if path is None:
        return None
    rows = [row for row in read(path, layer, device)["ladder"] if row["backend"] in able]
    if not rows:
        return None
    layout = able[rows[-1]["backend"]].weight_layout
    rows = [row for row in rows if able[row["backend"]].weight_layout == layout]
    limits = [row["max_tokens"] for row in rows[:-1]] + [None]
    rungs = tuple(
        Rung(m, able[r["backend"]], r.get("microseconds"), tuple(sorted(r.get("config", {}).items())))
        for m, r in zip(limits, rows, strict=True)
    )
    return Tuned(rungs, f"tuned table {path.name}")


def find(layer: str, key: str, device: Device) -> Path | None:
    """Return the table's path: the user's directory first, then the shipped one."""
    name = f"{key},device_name={device.name}.json"
    user = env.tuned_dir()
    for directory in ([Path(user)] if user else []) + [SHIPPED]:
        if (path := directory / layer / name).is_file():
            return path
    return None


def read(path: Path, layer: str, device: Device) -> dict[str, Any]:
    """Read and check one table.

    Raises
    ------
    TunedTableError
        Not JSON, another schema, layer or device, or rows out of order; the file is named.
    """
    try:
        table: dict[str, Any] = json.loads(path.read_text())
        rows = table["ladder"]
        limits, names = [row["max_tokens"] for row in rows], [row["backend"] for row in rows]
        configs = [row.get("config", {}) for row in rows]
        facts = (table["schema"], table["layer"], table["device"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TunedTableError(f"tuned table {path} is corrupt: {type(error).__name__}: {error}") from error
    if facts != (SCHEMA, layer, device.name):
        raise TunedTableError(f"tuned table {path} is for {facts}; expected {(SCHEMA, layer, device.name)}")
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
    return table
