"""Tuned tables: which backend was measured fastest up to which token count, per layer shape and device.

A table is one JSON file, ``<dir>/<layer>/<shape key>,device_name=<device>.json``::

    {"schema": 1, "layer": "fp8_linear", "device": "H200", "key": "N=…,K=…", "cfg": "FP8LinearConfig(…)",
     "ladder": [{"max_tokens": 64, "backend": "triton", "microseconds": 7.1, "config": {"BLOCK_N": 64}},
                {"max_tokens": null, ...}],
     "metadata": {"versions": {"triton": {"triton": "3.6.0"}}, "kernels": {"triton": "0f3a…"}, "commit": "…",
                  "date": "…", "command": "…"},
     "alternatives": [[{"max_tokens": null, "backend": "torch"}], ...],
     "tokens": [1, 4, ...], "times": {"triton": [6.9, 7.0, ...], ...},
     "measured": [{"tokens": 1, "backend": "triton", "us": 6.9, "spread_us": 0.1, "config": {...}}, ...],
     "candidates": {"1": 40}}

``alternatives`` are the ladders for machines that lack packages of ``ladder``, the best first; ``times`` is the best
time of each backend at each of ``tokens``. ``steps`` says at how many rows whole decode steps of a model decided
instead, and which sources were timed. ``measured``, and what else only the tuner reads, lies in
``benchmarks/results/tuned`` where the table ships. ``candidates`` is how many configurations of a backend were tried at
a token count, at most. A rung's ``config`` is given to its backend as it is; without one the backend's own rule holds.
``cfg.tuning_key()`` gives the shape key; a configuration without that method is never tuned. A shape without a table
takes the ladder of the nearest shape of which something can run: the same names and words in the key, the smallest
distance of the logarithms of its numbers. Where the device has none such, tables of a kin device serve
(:func:`lenders`). ``fastlayers tune`` writes tables; of one made with the same versions it measures what is missing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastlayers import env
from fastlayers.device import DESCRIBED, Device
from fastlayers.errors import FastlayersError
from fastlayers.runtime import kernel_cache

SHIPPED = Path(__file__).parent.parent / "tuned"
# What the shipped tables were made from, in the repository and not in the wheel: a file for each table.
MEASUREMENTS = Path(__file__).parents[3] / "benchmarks" / "results" / "tuned"
# What of a table only those need who make tables: it lies with the measurements where a table ships.
DETAILS = ("errors", "failed", "floors", "measured", "candidates")
SCHEMA = 1
# A table keeps the times of configurations that are within this factor of the best.
KEPT_WITHIN = 1.3


class TunedTableError(FastlayersError, ValueError):
    """A tuned table is corrupt, of another schema, or for another layer or device."""


def key_of(cfg: Any) -> str | None:
    """Return the shape key of a configuration, or ``None`` if its layer is not tuned."""
    return cfg.tuning_key() if hasattr(cfg, "tuning_key") else None


def path_of(folder: Path, layer: str, key: str, device: Device) -> Path:
    """Return where the table of a shape stands in a directory of tables."""
    return folder / layer / f"{key},device_name={device.name}.json"


def directories() -> list[Path]:
    """Return the directories with tables: the user's first, then the shipped one."""
    user = env.tuned_dir()
    return ([Path(user)] if user else []) + [SHIPPED]


def probed_dir() -> Path:
    """Return where a warm-up keeps the tables of shapes that nobody tuned: for these versions, beside the kernels."""
    asked = env.cache_dir()
    root = Path(asked).expanduser() if asked is not None else Path(os.path.expanduser("~")) / ".cache" / "fastlayers"
    return root / kernel_cache.versions_key() / "probed"


def find(layer: str, key: str, device: Device) -> Path | None:
    """Return the path of a shape's own table: the user's directory first, then the shipped one."""
    for directory in directories():
        if (path := path_of(directory, layer, key, device)).is_file():
            return path
    return None


def neighbours(layer: str, key: str, device: Device) -> list[Path]:
    """Return the tables of other shapes whose keys differ from ``key`` in numbers only, the nearest first."""
    found = [(distance(key, other), other, path) for other, path in tables_by_key(layer, device) if other != key]
    return [path for _, _, path in sorted((far, other, path) for far, other, path in found if far is not None)]


def kin(device: Device) -> list[Device]:
    """Return the described devices of the same compute capability, those nearest in multiprocessors first.

    Kernels compile to the same code there and fit as well: an H100's are an H200's, whose memory is faster.
    """
    if device.capability is None:
        return []
    same = [other for other in DESCRIBED.values() if other.capability == device.capability]
    others = [other for other in same if other.name != device.name]
    return sorted(others, key=lambda other: (abs(other.sm_count - device.sm_count), other.name))


def lenders(layer: str, key: str, device: Device) -> Iterator[tuple[Path, Device]]:
    """Yield the tables that may serve a shape without an own one, and the device of each: what is to be asked first.

    Kin devices' of this shape, which tiles fill alike: those with as many multiprocessors. Then other shapes' on the
    device, kin devices' of this shape, and theirs of other shapes.
    """
    others = kin(device)
    twins = [other for other in others if other.sm_count == device.sm_count]
    rest = [other for other in others if other not in twins]
    yield from ((path, other) for other in twins if (path := find(layer, key, other)) is not None)
    yield from ((path, device) for path in neighbours(layer, key, device))
    yield from ((path, other) for other in rest if (path := find(layer, key, other)) is not None)
    for other in others:
        yield from ((path, other) for path in neighbours(layer, key, other))


def tables(layer: str, device: Device) -> list[Path]:
    """Return the paths of a layer's tables for a device."""
    return [path for _, path in tables_by_key(layer, device)]


def tables_by_key(layer: str, device: Device) -> Iterator[tuple[str, Path]]:
    """Yield the shape keys and paths of a layer's tables for a device; of one key, the user's table."""
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


def read(path: Path, layer: str, device: Device, known: Collection[str] | None = None) -> dict[str, Any]:
    """Read and check one table; ``known``: the layer's backends, if their names are to be checked, too.

    Raises
    ------
    TunedTableError
        Not JSON, another schema, layer, device or key, an unknown backend, or rows out of order; the file is named.
    """
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise TunedTableError(f"tuned table {path} cannot be read: {error.strerror}") from error
    table = _read(path, layer, device.name, changed)
    rows = [row for rungs in (table["ladder"], *table.get("alternatives", [])) for row in rungs]
    if known is not None and (unknown := [row["backend"] for row in rows if row["backend"] not in known]):
        given = f"tuned table {path}: backend {unknown[0]!r} is unknown; known: {', '.join(known)}"
        raise TunedTableError(f"{given}. If the backend was removed, or its plug-in, remove the file and tune again")
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
    for rows in (table["ladder"], *table.get("alternatives", [])):
        if (problem := ladder_problem(rows)) is not None:
            return problem
    times = table.get("measured", [])
    configs = [row.get("config", {}) for row in times]
    about, said = table.get("metadata", {}), (table.get("candidates", {}), table.get("failed", {}))
    named = path.name.rpartition(",device_name=")[0]
    if table.get("key", named) != named:
        return f"its key is {table['key']!r}"
    if (problem := _config_problem(configs)) is not None:
        return problem
    counts, best = table.get("tokens", []), table.get("times", {})
    if not all(
        len(row) == len(counts) and all(us is None or _is_time(us) for us in row) for row in best.values()
    ) or counts != sorted(set(counts)):
        return "times are not a positive number, or null, for each of the increasing token counts"
    if not all(
        type(row["tokens"]) is int and isinstance(row["backend"], str) and _is_time(row["us"])
        and type(row.get("spread_us", 0.0)) in (int, float)
        for row in times
    ):  # fmt: skip
        return "measured token counts and times are not all positive numbers"
    versions, kernels, rules = about.get("versions", {}), about.get("kernels", {}), about.get("rules", {})
    if not (all(isinstance(each, dict) for each in (versions, kernels, rules, *said, *versions.values()))):
        return "metadata.versions, metadata.kernels, metadata.rules, candidates or failed are not mappings"
    return None


def ladder_problem(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what is wrong with the rungs of a ladder, ``None`` if nothing is."""
    limits, names = [row["max_tokens"] for row in rows], [row["backend"] for row in rows]
    whole = [type(m) is int and m > 0 for m in limits[:-1]]
    if not rows or limits[-1] is not None or not all(whole) or limits[:-1] != sorted(set(limits[:-1])):
        return f"thresholds {limits} are not positive, increasing and null at the end"
    if not all(isinstance(name, str) for name in names):
        return f"backends {names} are not all names"
    if (problem := _config_problem([row.get("config", {}) for row in rows])) is not None:
        return problem
    if not all(row.get("microseconds") is None or _is_time(row["microseconds"]) for row in rows):
        return f"microseconds {[row.get('microseconds') for row in rows]} are not all positive numbers"
    return None


def _config_problem(configs: Sequence[Any]) -> str | None:
    if all(isinstance(config, dict) and all(type(v) is int for v in config.values()) for config in configs):
        return None
    return f"configs {[config for config in configs if config]} are not all mappings to integers"


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def write(path: Path, table: Mapping[str, Any]) -> None:
    """Write a table in one step: a reader sees the old one or the new one. What ships leaves its details elsewhere."""
    if SHIPPED in path.parents and MEASUREMENTS.parent.is_dir():
        details = {name: table[name] for name in DETAILS if name in table}
        if details:
            _write(measurements(path), details)
        table = {name: value for name, value in table.items() if name not in DETAILS}
    _write(path, table)


def measurements(path: Path) -> Path:
    """Return where a shipped table's details are."""
    return MEASUREMENTS / path.relative_to(SHIPPED)


def read_whole(path: Path, layer: str, device: Device) -> dict[str, Any]:
    """Read a table with what it was made from, where that is to be had."""
    table = read(path, layer, device)
    if SHIPPED not in path.parents or not measurements(path).is_file():
        return table
    return table | json.loads(measurements(path).read_text())


def _write(path: Path, table: Mapping[str, Any]) -> None:
    """Write a table as JSON: lists and mappings open with a line for each entry, what is in those on one line."""
    lines = []
    for name, value in table.items():
        if isinstance(value, dict) and value and any(isinstance(each, dict | list) for each in value.values()):
            inner = ",\n".join(f"  {json.dumps(key)}: {json.dumps(each)}" for key, each in value.items())
            lines.append(f" {json.dumps(name)}: {{\n{inner}\n }}")
        elif isinstance(value, list) and value and any(isinstance(each, dict | list) for each in value):
            inner = ",\n".join(f"  {json.dumps(each)}" for each in value)
            lines.append(f" {json.dumps(name)}: [\n{inner}\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    kernel_cache.write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")


def shape_text(cfg: Any) -> str:
    """Return a configuration as ``--shape`` takes it: ``NAME=VALUE,…``, what has its default left out."""
    shown = [field for field in fields(cfg) if field.default is MISSING or getattr(cfg, field.name) != field.default]
    return ",".join(f"{f.name}={str(getattr(cfg, f.name)).removeprefix('torch.').replace(' ', '')}" for f in shown)
