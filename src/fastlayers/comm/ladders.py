"""Measured ladders of the layers between ranks: what was quickest up to how many rows of one rank.

    layer and way, ranks, device, dtype, class of the hidden size (the nearest power of two) ─► rungs

They are in ``between_ranks.json`` of the first directory of tuned tables that has one; ``tools/rank_ladders.py`` writes
the one that ships, from committed results. A ladder is never lent to another number of ranks or another device.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fastlayers.device import Device
from fastlayers.registry import Registry, Rung
from fastlayers.tuning.table import SCHEMA, TunedTableError, directories, ladder_problem

NAME = "between_ranks.json"
Key = tuple[str, str, int, str, str, int]


def size_class(hidden_size: int) -> int:
    """Return the exponent of the power of two that is nearest to a hidden size, by their ratio."""
    return round(math.log2(hidden_size))


def path() -> Path:
    """Return the file that serves: the user's, or the one that ships."""
    found = [folder / NAME for folder in directories()]
    return next((each for each in found if each.is_file()), found[-1])


def digest() -> str:
    """Return what ranks compare: of all that the file says."""
    return hashlib.sha256(path().read_bytes()).hexdigest()[:16]


def named(layer: str, cfg: Any, device: Device) -> tuple[str, ...]:
    """Return the backends that the measured ladder of a configuration names, whether they can be had or not."""
    _, entry = _entry(layer, cfg, device)
    return () if entry is None else tuple(row["backend"] for row in entry["ladder"])


def _entry(layer: str, cfg: Any, device: Device) -> tuple[Path, Mapping[str, Any] | None]:
    """Return the file that serves, and what it says of a configuration."""
    file, dtype = path(), str(cfg.dtype).removeprefix("torch.")
    key = layer, cfg.way, cfg.axis.size, device.name, dtype, size_class(cfg.hidden_size)
    return file, _read(file, file.stat().st_mtime_ns).get(key)


def times(layer: str, cfg: Any, device: Device) -> dict[int, float]:
    """Return what the quickest backend took, in microseconds, by rows of one rank; nothing if that was not measured."""
    _, entry = _entry(layer, cfg, device)
    if entry is None:
        return {}
    return dict(zip(entry["tokens"], map(min, zip(*entry["times"].values(), strict=True)), strict=True))


def measured(registry: Registry, cfg: Any, device: Device) -> tuple[tuple[Rung, ...], str]:
    """Return the rungs that were measured for a configuration and their evidence, or no rungs and why there are none.

    Raises
    ------
    TunedTableError
        The file is not one of ladders, or names a backend that this layer has not; it is named.
    """
    (file, entry), size = _entry(registry.layer, cfg, device), cfg.axis.size
    if entry is None:
        what, dtype = f"{cfg.way} " if cfg.way else "", str(cfg.dtype).removeprefix("torch.")
        return (), f"no {what}ladder was measured for {size} ranks, {device.name}, rows of {cfg.hidden_size} {dtype}"
    known = {backend.name: backend for backend in registry.ranked}
    unknown = [row["backend"] for row in entry["ladder"] if row["backend"] not in known]
    if unknown:
        raise TunedTableError(f"tuned table {file}: backend {unknown[0]!r} is unknown; known: {', '.join(known)}")
    rungs = [Rung(row["max_tokens"], known[row["backend"]], row.get("microseconds")) for row in entry["ladder"]]
    for rung in rungs:
        if (why := rung.backend.why_not(cfg, device)) is not None:
            return (), f"the measured ladder is not taken: {rung.backend.name}: {why}"
    of, now = entry["made"], torch.__version__
    upto, hidden = entry["tokens"][-1], entry["hidden_size"]
    evidence = f"{file.name}: measured with {size} ranks to {upto} rows of {hidden} at commit {of['commit']}"
    return tuple(rungs), evidence + (f", with torch {of['torch']}, now {now}" if of["torch"] != now else "")


def bounded(rungs: tuple[Rung, ...], name: str, slots: int, beyond: Any) -> tuple[Rung, ...]:
    """Return a ladder whose backend ``name`` serves up to ``slots`` rows, and ``beyond`` what it served above."""
    found: list[Rung] = []
    for rung in rungs:
        parts = [rung]
        if rung.backend.name == name and (rung.max_tokens is None or rung.max_tokens > slots):
            reached = bool(found) and (found[-1].max_tokens or 0) >= slots
            parts = (
                [Rung(rung.max_tokens, beyond)]
                if reached
                else [Rung(slots, rung.backend), Rung(rung.max_tokens, beyond)]
            )
        for part in parts:
            if found and found[-1].backend is part.backend:
                found.pop()
            found.append(part)
    return tuple(found)


@lru_cache(maxsize=8)
def _read(file: Path, changed: int) -> Mapping[Key, Mapping[str, Any]]:
    try:
        table = json.loads(file.read_text())
        schema, found = table["schema"], {_key(entry): entry for entry in table["ladders"]}
        problems = [ladder_problem(entry["ladder"]) for entry in found.values()]
        good = all(isinstance(entry["made"][name], str) for entry in found.values() for name in ("commit", "torch"))
        good &= all(type(entry["tokens"][-1]) is int for entry in found.values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise TunedTableError(f"tuned table {file} is corrupt: {type(error).__name__}: {error}") from error
    problems += [] if schema == SCHEMA else [f"its schema is {schema!r}, not {SCHEMA}"]
    problems += [] if len(found) == len(table["ladders"]) else ["two of its ladders are for the same"]
    problems += [] if good else ["made.commit, made.torch or tokens are not what they should be"]
    for problem in problems:
        if problem is not None:
            raise TunedTableError(f"tuned table {file}: {problem}")
    return found


def _key(entry: Mapping[str, Any]) -> Key:
    size = size_class(entry["hidden_size"])
    return entry["layer"], entry["way"], entry["ranks"], entry["device"], entry["dtype"], size
