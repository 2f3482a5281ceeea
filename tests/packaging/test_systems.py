"""docs/systems.md says where each of the 66 systems is: what it names exists, and "done" has something behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import fastlayers as fl
from fastlayers.registry import LAYERS, registry
from fastlayers.registry.layers import COLLECTIVES

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "systems.md"
RESULTS = REPO / "benchmarks" / "results"
GUARD = "not run on this hardware"


@dataclass(frozen=True)
class System:
    """One row of the page."""

    item: int
    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]
    evidence: str
    state: str


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows() -> list[System]:
    """Return the 66 rows, as they stand on the page."""
    found = []
    for line in PAGE.read_text().splitlines():
        if re.match(r"\| \d+ \|", line):
            item, name, files, tests, evidence, state = _cells(line)
            code = [tuple(re.findall(r"`([^`]+)`", cell)) for cell in (files, tests)]
            found.append(System(int(item), name, code[0], code[1], evidence, state))
    return found


ROWS = rows()


def path_of(name: str) -> Path:
    """Return the file that the page means: below the library, or below the repository's other roots."""
    return REPO / name if name.split("/")[0] in ("models", "server", "benchmarks") else REPO / "src/fastlayers" / name


@cache
def functions(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))


def guards() -> Iterator[tuple[str, str]]:
    """Yield (layer, row) of the page's guards."""
    for row in ROWS:
        yield from re.findall(r"guard: ([a-z0-9_]+)/([a-z0-9_]+)", row.evidence)


def test_every_item_has_one_row() -> None:
    assert [row.item for row in ROWS] == list(range(1, 67))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.item))
def test_what_a_row_names_exists(row: System) -> None:
    missing = [name for name in row.files if not path_of(name).is_file()]
    for test in row.tests:
        file, _, function = test.partition("::")
        path = REPO / "tests" / file
        if not path.is_file() or function not in functions(path):
            missing.append(test)
    for result in re.findall(r"`([^`]+\.jsonl?(?:#[^`]+)?)`", row.evidence):
        file, _, word = result.partition("#")
        path = RESULTS / file
        if not path.is_file() or word not in path.read_text():
            missing.append(result)
    assert missing == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.item))
def test_a_state_has_something_behind_it(row: System) -> None:
    reason = re.fullmatch(r"none: (.+)", row.evidence)
    has_figure, has_guard = ".json" in row.evidence, "guard: " in row.evidence
    assert reason or has_figure or has_guard, f"{row.item}: evidence {row.evidence!r}"
    assert re.fullmatch(r"done|guard|not done: .{10,}", row.state), f"{row.item}: state {row.state!r}"
    if row.state == "done":
        assert row.files and row.tests
        assert not (reason and re.match(r"(not|nothing|no )", reason[1])), f"{row.item} is done without evidence"
    if row.state == "guard":
        assert has_guard and row.tests
    if not row.files:
        assert row.state.startswith("not done: nothing")


def test_guards_refuse_in_words_and_are_never_chosen() -> None:
    for layer, name in guards():
        other, meant = ({row.name: row for row in fl.backends(layer, device=device)} for device in ("H200", "B200"))
        assert name in other, f"{layer} has no row {name}"
        assert not other[name].hardware and "needs sm_100, this is sm_90" in other[name].reason
        assert meant[name].hardware and not meant[name].automatic and GUARD in meant[name].reason


def test_no_guard_of_the_registry_is_left_out() -> None:
    named = set(guards())
    notes = {(layer, row.name) for layer in LAYERS for row in registry(layer).ranked if GUARD in row.note}
    assert notes == named


def test_every_layer_belongs_to_an_item() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| ([\d, ]+) \|$", PAGE.read_text(), re.MULTILINE))
    assert set(listed) == {*LAYERS, *COLLECTIVES}
    wrong = [layer for layer, items in listed.items() if not all(0 < int(i) < 67 for i in items.split(","))]
    assert wrong == []
