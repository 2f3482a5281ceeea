"""The ladder that serves a shape: read from its tuned table, or lent by the nearest shape, or by a kin device."""

from __future__ import annotations

import inspect
import json
import logging
import math
import shlex
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlayers.device import Device
from fastlayers.runtime import builds, kernel_cache
from fastlayers.tuning.staleness import changes
from fastlayers.tuning.table import (
    KEPT_WITHIN,
    TunedTableError,
    find,
    key_of,
    lenders,
    neighbours,
    path_of,
    probed_dir,
    read,
    read_whole,
    shape_text,
    tables_by_key,
)

if TYPE_CHECKING:
    from fastlayers.registry import Backend

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rung:
    """One step of a ladder: ``backend`` serves up to ``max_tokens`` tokens (``None``: no limit).

    ``config`` holds what the tuner found for the backend's kernels; empty: the backend's own rule.
    """

    max_tokens: int | None
    backend: Backend
    microseconds: float | None = None
    config: tuple[tuple[str, int], ...] = ()

    def build(self, cfg: Any) -> Any:
        """Import the backend and construct it with the configuration (and the tuner's, if there is one)."""
        if self.backend.needs:
            kernel_cache.ensure()  # before the first kernel, wherever the choice comes from
        target = self.backend.load()
        return target(cfg, dict(self.config)) if self.config else target(cfg)


@dataclass(frozen=True)
class Found:
    """A table for a shape: its own (``exact``) or the nearest one; ``changed``: what is other than when it was made.

    ``kin``: the device that it was made on, where that is another one; its times are no times of this device.
    """

    path: Path
    table: Mapping[str, Any]
    exact: bool
    changed: tuple[str, ...]
    kind: str = ""
    kin: str = ""

    @property
    def evidence(self) -> str:
        """What ``explain`` shows."""
        text = f"{self.kind or ('tuned table' if self.exact else 'nearest tuned table')} {self.path.name}"
        return f"{text}, made with other versions ({'; '.join(self.changed)})" if self.changed else text

    @property
    def whose(self) -> str:
        """What a sentence about its times calls it."""
        return f"{self.kin}'s tuned table" if self.kin else "the tuned table"


@dataclass(frozen=True)
class Tuned:
    """A ladder read from a table, and the file it came from."""

    rungs: tuple[Rung, ...]
    evidence: str


def ladder_for(
    layer: str,
    cfg: Any,
    device: Device,
    able: Mapping[str, Backend],
    known: Collection[str] | None = None,
    refused: Mapping[str, str] | None = None,
) -> Tuned | None:
    """Return the tuned ladder for this shape and device, cut to the backends that are able to run.

    Rungs share the weight layout of the last one that can run (it serves the largest batches). The evidence names
    what was dropped. ``None`` if no table exists, not even of another shape or of a kin device, or nothing of any can
    run. A rung whose configuration does not fit the shape (:func:`fitted`) runs by its backend's own rule. Rungs of a
    kin device have no times.

    Raises
    ------
    TunedTableError
        The table is not one, or has a configuration for a backend that takes none; the file is named.
    """
    found = lookup(layer, cfg, device, able, known)
    if found is None:
        return None
    rows, dropped = ladder_of(found.table, able)
    layout = able[rows[-1]["backend"]].weight_layout
    dropped |= {row["backend"]: "another weight layout" for row in rows if able[row["backend"]].weight_layout != layout}
    rows = [row for row in rows if row["backend"] not in dropped]
    if rows[-1]["max_tokens"] is not None:  # it serves more than it did: its time there is another
        rows[-1] = {**rows[-1], "max_tokens": None, "microseconds": _time_of(found.table, rows[-1])}
    for row in rows:
        if row.get("config") and not _takes_config(able[row["backend"]]):
            raise TunedTableError(f"tuned table {found.path}: backend {row['backend']!r} takes no config")
    rows = fitted(rows, cfg, able, lent=not found.exact and found.table.get("key") != key_of(cfg))
    if found.kin:
        rows = [{**row, "microseconds": None} for row in rows]
    rungs = tuple(
        Rung(r["max_tokens"], able[r["backend"]], r.get("microseconds"), tuple(sorted(r.get("config", {}).items())))
        for r in rows
    )
    if not found.exact:
        _announce(layer, cfg, device, found, able)
    unbuilt = {name for name, why in (refused or {}).items() if why.startswith(builds.UNBUILT)}
    dropped |= dict.fromkeys(dropped.keys() & unbuilt, builds.UNBUILT)
    cut = "".join(f"; without its rungs of {name}: {why}" for name, why in dropped.items())
    return Tuned(rungs, found.evidence + cut)


def ladder_of(
    table: Mapping[str, Any], able: Collection[str] | None = None
) -> tuple[list[Mapping[str, Any]], dict[str, str]]:
    """Return the rungs of a table's ladder that are ``able`` to run, and of what is not why it is left out.

    The first of the ladder and its alternatives that can run as a whole; if none can, what can of the first that has
    anything; no rungs, if nothing has.
    """
    ladders = [table["ladder"], *table.get("alternatives", [])]
    if able is None:
        return ladders[0], {}
    dropped = {row["backend"]: "it cannot run here" for row in ladders[0] if row["backend"] not in able}
    for rows in ladders:
        if all(row["backend"] in able for row in rows):
            return rows, dropped
    cut = ([row for row in rows if row["backend"] in able] for rows in ladders)
    return next((rows for rows in cut if rows), []), dropped


def fitted(
    rows: Sequence[Mapping[str, Any]], cfg: Any, able: Mapping[str, Backend], *, lent: bool = False
) -> list[Mapping[str, Any]]:
    """Return the rungs without configurations that do not fit the shape, as a table of another one may have them.

    A backend says so by ``fits(cfg, config)``, beside its ``candidates``; without it every configuration fits. What
    another shape has ``lent`` must also suit, by ``suits(cfg, config)``: measured elsewhere, it may be slow here.
    """
    asked = ("fits", "suits") if lent else ("fits",)

    def fits(row: Mapping[str, Any]) -> bool:
        says = [getattr(able[row["backend"]].load(), name, None) for name in asked if row.get("config")]
        return all(each is None or each(cfg, row["config"]) for each in says)

    return [row if fits(row) else {**row, "config": {}} for row in rows]


def times_of(table: Mapping[str, Any]) -> tuple[list[int], dict[str, list[float | None]]]:
    """Return a table's token counts, and the best time of each backend at each of them."""
    if "times" in table:
        return table["tokens"], table["times"]
    best: dict[str, dict[int, float]] = {}
    for row in table.get("measured", []):
        times = best.setdefault(row["backend"], {})
        times[row["tokens"]] = min(row["us"], times.get(row["tokens"], math.inf))
    counts = sorted({count for times in best.values() for count in times})
    return counts, {name: [times.get(count) for count in counts] for name, times in best.items()}


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


def lookup(
    layer: str, cfg: Any, device: Device, able: Mapping[str, Backend], known: Collection[str] | None = None
) -> Found | None:
    """Return the table that serves a shape: the nearest of which a rung is ``able`` to run, its own first.

    Then a warm-up's, and what is lent (:func:`~fastlayers.tuning.table.lenders`).

    Raises
    ------
    TunedTableError
        A table is not one; the file is named.
    """
    key = key_of(cfg)
    if key is None:
        return None
    own_path = find(layer, key, device)
    if own_path is None and (found := _probed(layer, key, device, able)) is not None:
        return found
    own = [(own_path, device)] if own_path is not None else []
    for path, other in chain(own, lenders(layer, key, device)):
        table = read(path, layer, other, known)
        used = {row["backend"] for row in ladder_of(table, able)[0]}
        if not used:
            continue
        changed = changes(table, [able[name] for name in sorted(used)])
        if other.name == device.name:
            return Found(path, table, path == own_path, changed)
        nearest = "" if path.name == path_of(path.parent, layer, key, other).name else "nearest "
        return Found(path, table, False, changed, f"{other.name}'s {nearest}tuned table", other.name)
    return None


def _probed(layer: str, key: str, device: Device, able: Mapping[str, Backend]) -> Found | None:
    """Return a shape's table from a warm-up, unless something is other than it was then: it is probed again."""
    path = path_of(probed_dir(), layer, key, device)
    if not path.is_file():
        return None
    try:
        table = read(path, layer, device)
    except TunedTableError:
        return None  # it is made anew
    used = {row["backend"] for row in ladder_of(table, able)[0]}
    if not used or changes(table, [able[name] for name in sorted(used)]):
        return None
    return Found(path, table, True, (), "probed at a warm-up:")


# ---- the nearest shape's ladder ----

_announced: set[str] = set()


def _announce(layer: str, cfg: Any, device: Device, found: Found, able: Collection[str]) -> None:
    """Say once per layer that a ladder is borrowed, what that may cost, and how to have an own one.

    Of a kin device all layers' are, as a rule: that is said once.
    """
    about = f"{device.name} by {found.kin}" if found.kin else layer
    if about in _announced:
        return
    _announced.add(about)
    command = f"fastlayers tune --layer {layer} --shape {shlex.quote(shape_text(cfg))}"
    if found.kin:
        log.warning(
            "%s: no tuned table for %s on %s; %s serves it, as tables of %s, also %s, serve what else has none here; "
            "that may cost an unknown amount; to tune it: %s",
            layer, key_of(cfg), device.name, found.path.name, found.kin, device.sm, command,
        )  # fmt: skip
        return
    loss = borrowed_loss(layer, device, able)
    cost = f"up to {100 * loss:.0f} % where it was measured" if loss is not None else "an unknown amount"
    log.warning(
        "%s: no tuned table for %s on %s; the ladder of %s serves it, which may cost %s; to tune it: %s",
        layer, key_of(cfg), device.name, found.path.name, cost, command,
    )  # fmt: skip


def borrowed_loss(layer: str, device: Device, able: Collection[str] | None = None) -> float | None:
    """Return what the installed tables' shapes would lose with their nearest neighbours' ladders.

    The largest median over the token counts of a shape, from the times in the tables; 0.1 is 10 %. ``None`` if there
    are not two comparable tables with times. ``able``: only these backends count.
    """
    tables = [read(path, layer, device) for _, path in tables_by_key(layer, device)]
    losses = [table["borrowed"] - 1 for table in tables if "borrowed" in table]
    losses += [statistics.median(ratios) - 1 for ratios in borrowed_ratios(layer, device, able).values()]
    return max(losses) if losses else None


def borrowed_ratios(
    layer: str, device: Device, able: Collection[str] | None = None, whole: bool = False
) -> dict[str, list[float]]:
    """Return for each shape with a table what its nearest neighbour's ladder takes at each token count, over the best.

    Times are those in the shape's own table. A configuration without one was slower than ``KEPT_WITHIN`` times the
    best, or never timed: it counts as that, or as its backend's own rule if that is slower. ``able``: as if these
    were the only backends. ``whole``: of shipped tables, too, by the measurements that they were made from.
    """
    found = {}
    for key, path in tables_by_key(layer, device):
        rungs = _rungs_of(((near, device) for near in neighbours(layer, key, device)), layer, able)
        table = read_whole(path, layer, device) if whole else read(path, layer, device)
        measured = [row for row in table.get("measured", []) if able is None or row["backend"] in able]
        if rungs and (ratios := _ratios(measured, rungs)):
            found[key] = ratios
    return found


def lent_rungs(layer: str, key: str, device: Device, able: Collection[str] | None = None) -> list[Mapping[str, Any]]:
    """Return what a shape's ladder is without an own table, without what is not ``able``; empty if nobody lends one."""
    return _rungs_of(lenders(layer, key, device), layer, able)


def _rungs_of(lent: Iterable[tuple[Path, Device]], layer: str, able: Collection[str] | None) -> list[Mapping[str, Any]]:
    for path, other in lent:
        rungs, _ = ladder_of(read(path, layer, other), able)
        if rungs:
            return rungs
    return []


def rung_at(rungs: Sequence[Mapping[str, Any]], tokens: int) -> Mapping[str, Any]:
    """Return the rung that serves so many tokens."""
    return next((row for row in rungs if row["max_tokens"] is None or tokens <= row["max_tokens"]), rungs[-1])


def _ratios(measured: Sequence[Mapping[str, Any]], rungs: Sequence[Mapping[str, Any]]) -> list[float]:
    times: dict[int, dict[tuple[str, str], float]] = {}
    for row in measured:
        option = (row["backend"], json.dumps(row.get("config", {}), sort_keys=True))
        times.setdefault(row["tokens"], {})[option] = row["us"]
    ratios = []
    for tokens, candidates in times.items():
        rung = rung_at(rungs, tokens)
        configured = (rung["backend"], json.dumps(rung.get("config", {}), sort_keys=True))
        plain, best = candidates.get((rung["backend"], "{}")), min(candidates.values())
        if configured in candidates:
            ratios.append(candidates[configured] / best)
        elif plain is not None:
            ratios.append(max(KEPT_WITHIN, plain / best))
    return ratios
