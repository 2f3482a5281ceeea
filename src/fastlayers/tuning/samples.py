"""What the tuner has timed: options, their times, the journal of a run, and what an earlier table holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastlayers import tuning
from fastlayers.device import Device
from fastlayers.registry import Backend, registry

Config = tuple[tuple[str, int], ...]
# More candidates of one backend than these are thinned out: in a full run, in a quick one.
ALL, QUICK = 40, 14


@dataclass(frozen=True, order=True)
class Option:
    """A backend, with a configuration of its kernels or (``()``) by its own rule."""

    backend: str
    config: Config = ()

    @staticmethod
    def of(row: Mapping[str, Any]) -> Option:
        """Return what a rung, or another row of a table, runs."""
        return Option(row["backend"], tuple(sorted(row.get("config", {}).items())))

    def __str__(self) -> str:
        return self.backend + (f"({', '.join(f'{k}={v}' for k, v in self.config)})" if self.config else "")


@dataclass(frozen=True)
class Sample:
    """What one option took for one token count."""

    tokens: int
    option: Option
    us: float
    spread_us: float

    def as_json(self) -> dict[str, Any]:
        """Return a row of a table's ``measured``."""
        row = {"tokens": self.tokens, "backend": self.option.backend, "us": round(self.us, 2)}
        row["spread_us"] = round(self.spread_us, 2)
        return row | ({"config": dict(self.option.config)} if self.option.config else {})

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Sample:
        """Read a row of a table's ``measured``."""
        return Sample(row["tokens"], Option.of(row), row["us"], row.get("spread_us", 0.0))


class Journal:
    """What was timed so far, on disk: a header, then a line per token count.

    A journal of other kernels or versions is begun anew; one that is damaged is cut there.

    Attributes
    ----------
    samples : dict of int to list of Sample
    between : set of int
        Token counts at which rules and winners were timed, and no candidates.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path, self.samples, self.between = path, dict[int, list[Sample]](), set[int]()
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        if lines and _parsed(lines[0]) == header:
            for line in lines[1:]:
                if (row := _row(_parsed(line))) is None:
                    break
                self._take(*row)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [header] + [self._line(count, found) for count, found in self.samples.items()]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))

    def add(self, tokens: int, samples: list[Sample], between: bool = False) -> None:
        """Append one token count."""
        self._take(tokens, samples, between)
        with self.path.open("a") as file:
            file.write(json.dumps(self._line(tokens, samples)) + "\n")

    @property
    def searched(self) -> set[int]:
        """Token counts at which candidates were timed, too."""
        return self.samples.keys() - self.between

    def _take(self, tokens: int, samples: list[Sample], between: bool) -> None:
        self.samples[tokens] = samples
        self.between = self.between | {tokens} if between else self.between - {tokens}

    def _line(self, tokens: int, samples: list[Sample]) -> dict[str, Any]:
        line: dict[str, Any] = {"tokens": tokens, "samples": [sample.as_json() for sample in samples]}
        return line | ({"between": True} if tokens in self.between else {})


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:  # the line that was being written when the run was interrupted
        return None


def _row(parsed: Any) -> tuple[int, list[Sample], bool] | None:
    """Return a line's token count, its samples and whether it lies between, ``None`` if it is not whole."""
    try:
        between = parsed.get("between", False)
        tokens, samples = parsed["tokens"], [Sample.from_json(sample) for sample in parsed["samples"]]
        whole = type(tokens) is int and all(s.tokens == tokens and s.us > 0 and s.spread_us >= 0 for s in samples)
    except (TypeError, KeyError, AttributeError):
        return None
    return (tokens, samples, between is True) if whole and samples else None


@dataclass(frozen=True)
class Earlier:
    """What a table holds that still counts: samples per token count, from how many candidates each, and failures."""

    samples: Mapping[int, list[Sample]] = field(default_factory=dict)
    candidates: Mapping[int, int] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def lacks(self, counts: Sequence[int], candidates: int) -> list[int]:
        """Return which of ``counts`` were not measured, or with fewer candidates than these."""
        return [count for count in counts if self.candidates.get(count, 0) < candidates]


def earlier(path: Path, layer: str, device: Device, able: Sequence[Backend]) -> Earlier:
    """Return what counts of a table: nothing if it was made with other versions, kernels, or fewer backends.

    A table that does not say from how many candidates its times are counts as one of a quick run.
    """
    if not path.is_file():
        return Earlier()
    try:
        table = tuning.read_whole(path, layer, device)
    except tuning.TunedTableError:
        return Earlier()  # it is made anew
    known = table.get("metadata", {}).get("versions", {})
    timed = [backend for backend in registry(layer).ranked if backend.name in known]
    if not {backend.name for backend in able} <= known.keys() or tuning.changes(table, timed):
        return Earlier()
    samples: dict[int, list[Sample]] = {}
    for row in table.get("measured", []):
        samples.setdefault(row["tokens"], []).append(Sample.from_json(row))
    said = table.get("candidates", {})
    return Earlier(samples, {count: said.get(str(count), QUICK) for count in samples}, table.get("failed", {}))
