"""What ``patch`` did: entries, reasons, and counters of what really ran."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

ACTIONS = ("swapped", "packed", "captured", "skipped")
ALREADY = "already patched"


@dataclass(frozen=True)
class PatchEntry:
    """What happened to one module.

    Attributes
    ----------
    name : str
        Module name inside the model that was given.
    kind : str
        ``attention``, ``moe``, ``linear``, ``norm`` or ``mlp``.
    original_class : str
    action : str
        ``swapped`` (the instance has a subclass now), ``packed`` (weights moved side by side), ``captured`` (decode
        steps are replays of CUDA graphs), ``skipped``.
    implementation : str
        What runs now; empty if skipped.
    reason : str
        Why it was skipped, or a remark. The word before the first colon is the reason code.
    bytes_moved : int
        Bytes of weights that were copied into another place or are held in addition.
    """

    name: str
    kind: str
    original_class: str
    action: str
    implementation: str = ""
    reason: str = ""
    bytes_moved: int = 0


@dataclass
class PatchReport:
    """The entries of one ``patch`` call, and counters that go on counting afterwards.

    Counters belong to the modules; a report counts from the moment it was made.
    """

    entries: tuple[PatchEntry, ...]
    dry_run: bool = False
    _counters: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False)
    _start: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    _replays: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict, repr=False)
    _reasons: dict[str, Counter[str]] = field(default_factory=dict, repr=False)
    _packs: list[weakref.ref[Any]] = field(default_factory=list, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packs": []}  # a copy elsewhere knows of no modules

    def watch_product(self, module: Any) -> None:
        """Look at the product of ``module``'s linears whenever a summary is asked for; ``module`` may go."""
        self._packs.append(weakref.ref(module))

    def watch(
        self, name: str, hits: torch.Tensor, fallbacks: torch.Tensor, replays: tuple[torch.Tensor, ...] = (),
        reasons: Counter[str] | None = None,
    ) -> None:  # fmt: skip
        """Count ``name`` from now on.

        ``replays``: of the graphs that contain it, each of which runs it once; ``reasons``: why it fell back.
        """
        self._counters[name] = (hits, fallbacks)
        self._reasons[name] = Counter() if reasons is None else reasons
        self._replays[name] = replays
        self._start[name] = (self._hits(name), int(fallbacks))

    def _hits(self, name: str) -> int:
        return int(self._counters[name][0]) + sum(int(replays) for replays in self._replays.get(name, ()))

    @property
    def replaced(self) -> tuple[PatchEntry, ...]:
        """Entries of modules that run our code now."""
        return tuple(entry for entry in self.entries if entry.action != "skipped")

    @property
    def skipped(self) -> tuple[PatchEntry, ...]:
        """Entries of modules that were left alone, with the reason."""
        return tuple(entry for entry in self.entries if entry.action == "skipped")

    def hits(self) -> dict[str, int]:
        """Return module name -> times its fast path ran since the patch, in graphs too; "cuda_graph" -> replays."""
        return {name: self._hits(name) - self._start[name][0] for name in self._counters}

    def fallbacks(self) -> dict[str, int]:
        """Return module name -> times a patched module ran the original code all the same."""
        return {name: int(falls) - self._start[name][1] for name, (_, falls) in self._counters.items()}

    def summary(self) -> str:
        """Return a table: how many modules of which class, what runs there, and why not."""
        rows: Counter[tuple[str, ...]] = Counter()
        for entry in self.entries:
            rows[entry.action, entry.kind, entry.original_class, entry.implementation, entry.reason] += 1
        order = sorted(rows, key=lambda row: (ACTIONS.index(row[0]), row[1:]))
        table: list[tuple[str, ...]] = [("", "kind", "class", "implementation", "reason")]
        table += [(f"{rows[row]} {row[0]}", *row[1:]) for row in order]
        widths = [max(len(row[column]) for row in table) for column in range(4)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in table]
        already = sum(entry.reason == ALREADY for entry in self.entries)
        counts = f"{len(self.replaced) - already} {'to replace' if self.dry_run else 'replaced'}"
        counts += f", {already} {ALREADY}" if already else ""
        counts += f", {len(self.skipped)} skipped"
        if not self.dry_run:
            counts += f", {sum(entry.bytes_moved for entry in self.entries) / 2**20:.1f} MiB moved"
        head = f"fastlayers.patch{' (dry run)' if self.dry_run else ''}: {counts}"
        return "\n".join([head, *(line.rstrip() for line in lines), *self._apart_lines(), *self._fallback_lines()])

    def _apart_lines(self) -> list[str]:
        """Return a line for each reason why linears that were one product at the patch are not now."""
        reasons: Counter[str] = Counter()
        for each in self._packs:
            packed = getattr(each(), "_fl_packed", None)  # none of a module that is gone or unpatched
            if packed is not None and (why := packed.apart or packed.why(each())):
                reasons[why] += 1
        return [f"no longer one product: {count} of {len(self._packs)}: {why}" for why, count in reasons.most_common()]

    def _fallback_lines(self) -> list[str]:
        """Return a line for each reason why patched modules ran the original's code since the patch."""
        calls: Counter[str] = Counter()
        modules: Counter[str] = Counter()
        for name, falls in self.fallbacks().items():
            reasons = self._reasons[name] if falls else {}
            for reason, times in (reasons or {"not known": falls}).items() if falls else ():
                calls[reason] += times
                modules[reason] += 1
        return [f"fell back: {n} calls of {modules[reason]} modules: {reason}" for reason, n in calls.most_common()]

    def to_json(self) -> str:
        """Return entries, hits and fallbacks as JSON."""
        data: dict[str, Any] = {
            "dry_run": self.dry_run,
            "entries": [asdict(entry) for entry in self.entries],
            "hits": self.hits(),
            "fallbacks": self.fallbacks(),
        }
        return json.dumps(data, indent=1)

    def __str__(self) -> str:
        return self.summary()
