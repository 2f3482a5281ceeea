"""Ladders that whole steps have a say in, by what ``benchmarks/whole_steps.py`` measured.

A tuned table times calls alone. Where its options were timed in whole decode steps as well, at so many rows, those
figures take the place of theirs: what was chosen there counts as its call alone, each other option as that and what it
took more in a step. From them and the table's other times :func:`fastlayers.tuning.rungs.choose_ladder` makes the
ladder as ever. ``tools/tuned_tables.py summarise`` does so for each table, also one that was measured anew since.

Rows of other kernels than today's are not applied, and ``summarise`` says which: a table that they made before stays as
it is until its calls are timed anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastlayers.linear.split_rows import LEAVE
from fastlayers.registry import registry
from fastlayers.tuning.samples import Option, Sample
from fastlayers.tuning.staleness import kernel_hash

RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "whole_steps_h200.jsonl"
# Of one shape by count of rows: what each option took more a call than the one that was chosen.
Steps = Mapping[int, Mapping[Option, float]]


def changed(row: Mapping[str, Any]) -> list[str]:
    """Return the backends of a row's options whose kernels are not known to be today's."""
    targets = {backend.name: backend.target for backend in registry(row["layer"]).ranked}
    then = row.get("kernels", {})
    names = sorted({option["backend"] for option in row["options"]})
    return [name for name in names if name not in targets or then.get(name) != kernel_hash(targets[name])]


def steps_of(layer: str, key: str, device: str, result: Path = RESULT) -> tuple[Steps, dict[str, Any], list[str]]:
    """Return what whole steps of a device say of a shape, the table's note about it, and what is left out, and why.

    The note names the counts of rows that were applied, and their sources.
    """
    lines = [json.loads(line) for line in result.read_text().splitlines()] if result.is_file() else []
    found: dict[int, dict[Option, float]] = {}
    head: dict[str, Any] = {}
    applied: dict[int, tuple[str, str, str]] = {}
    left: list[str] = []
    for row in lines:
        head = row if "sources" in row else head
        if (row.get("layer"), row.get("key")) != (layer, key) or head["device"].split()[0] != device:
            continue
        if others := changed(row):
            left.append(f"{layer} {key}, {row['rows']} rows: steps had other kernels of {', '.join(others)}")
            continue
        found[row["rows"]] = {Option.of(each): each["us_more"] for each in row["options"]}
        applied[row["rows"]] = row["model"], head["commit"], head["sources"]
    names = ("model", "commit", "sources")
    told = {name: ", ".join(dict.fromkeys(applied[rows][i] for rows in sorted(found))) for i, name in enumerate(names)}
    return found, {"rows": sorted(found), **told} if found else {}, left


def alone(samples: Sequence[Sample], option: Option, tokens: int) -> float:
    """Return what an option's call takes alone; where it was not timed, what the best of its neighbours say.

    Alone it adds the splits that it leaves in a step.
    """
    option = Option(option.backend, tuple(each for each in option.config if each[0] != LEAVE))
    counts = sorted({sample.tokens for sample in samples})

    def best(count: int) -> float:
        here = [sample for sample in samples if sample.tokens == count]
        own = [sample.us for sample in here if sample.option == option]
        return min(own or [sample.us for sample in here])

    low = max((count for count in counts if count <= tokens), default=counts[0])
    high = min((count for count in counts if count >= tokens), default=counts[-1])
    if low == high:
        return best(low)
    part = math.log(tokens / low) / math.log(high / low)
    return math.exp((1 - part) * math.log(best(low)) + part * math.log(best(high)))


def in_steps(
    samples: Iterable[Sample], steps: Steps, names: Collection[str], offered: Collection[str] = ()
) -> list[Sample]:
    """Return the samples of backends with these names, those of whole steps in place of calls alone.

    Other backends' stay, and so do all at a count where none of ``names`` was timed in steps. Those that are always
    ``offered`` to steps and have no figure of the last ones there were given up on the way: they do not count there.
    """
    timed = calls = [sample for sample in samples if sample.option.backend in names]
    for tokens, told in steps.items():
        here = {option: more for option, more in told.items() if option.backend in names}
        if not here:
            continue
        # What was chosen, unless its backend is not among them: then the fastest.
        chosen = min(here, key=lambda option: (here[option] != 0.0, here[option]))
        usual = alone(calls, chosen, tokens)
        backends = {option.backend for option in here} | set(offered)
        timed = [s for s in timed if s.tokens != tokens or s.option.backend not in backends]
        # A search that was cut leaves some that were faster, each exchanged alone: together nobody has timed them, so
        # they count as all but equal.
        more = {o: us - here[chosen] if us >= here[chosen] else 1e-4 * usual for o, us in here.items()}
        timed += [Sample(tokens, o, usual + us, 0.0) for o, us in more.items()]
    return timed
