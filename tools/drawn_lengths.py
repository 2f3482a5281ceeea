"""Ladders that steps of drawn lengths have a say in, by what ``benchmarks/performance.py`` measured.

A tuned table times decode steps whose requests are equally long. In a server's they are not, and what gains a percent
or two with equal lengths may leave the longest request to a few threads. At a count of rows where options were timed
with drawn lengths as well (its points that are "ragged", and its part "drawn"), both count alike: an option's time is
the geometric mean of what it takes of the fastest's in either. Options that were not timed so do not count there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fastlayers.tuning.samples import Option, Sample
from fastlayers.tuning.sweep import parse_shape

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
# Of one shape by count of rows: what each option took.
Drawn = Mapping[int, Mapping[Option, float]]


def drawn_of(layer: str, key: str, device: str, results: Path = RESULTS) -> Drawn:
    """Return what steps of drawn lengths of a device say of a shape."""
    there, found = "", dict[int, dict[Option, float]]()
    # The page's points have few options; where all that the tuner tries was timed, that counts.
    paths = [path for path in (results / f"performance/{layer}.jsonl", results / "drawn_h200.jsonl") if path.is_file()]
    for row in (json.loads(line) for path in paths for line in path.read_text().splitlines()):
        there = row["run"]["device"].split()[0] if "run" in row else there
        told = row.get("ragged") and row["layer"] == layer and "us" in row and there == device
        if told and parse_shape(layer, row["cfg"]).tuning_key() == key:
            found.setdefault(row["tokens"], {})[Option.of(row)] = row["us"]
    return found


def with_drawn(samples: Sequence[Sample], drawn: Drawn) -> list[Sample]:
    """Return the samples, those of both lengths in place of equal ones where there are some."""
    found = list(samples)
    for tokens, took in drawn.items():
        both = [s for s in samples if s.tokens == tokens and s.option in took]
        if both:
            equal, other = min(s.us for s in both), min(took[s.option] for s in both)
            found = [s for s in found if s.tokens != tokens]
            found += [replace(s, us=math.sqrt(s.us * equal * took[s.option] / other)) for s in both]
    return found
