"""docs/systems.md says where each of the 66 systems is: what it names exists, and "done" has something behind it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import fastlayers as fl
from fastlayers.errors import NoBackendError
from fastlayers.moe.placement.triton import TritonSlots
from fastlayers.registry import COLLECTIVES, LAYERS, PARTS, builtin_registry, registry
from fastlayers.registry.spec import spec_of
from fastlayers_server.ablation import SWITCHES

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
    for line in PAGE.read_text().partition("\n## Ablation")[0].splitlines():
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
    """Each is meant for one of two generations, refuses the other, and says that it was not run."""
    for layer, name in guards():
        found = [next(r for r in fl.backends(layer, device=d) if r.name == name) for d in ("H200", "B200")]
        meant, other = sorted(found, key=lambda row: not row.hardware)
        wanted = "needs sm_100, this is sm_90" if found[1].hardware else "needs sm_90, this is sm_100"
        assert not other.hardware and wanted in other.reason, f"{layer}/{name}"
        assert meant.hardware and not meant.automatic and GUARD in meant.reason
        with pytest.raises(NoBackendError, match="this row is a guard"):
            registry(layer).named(name).load()(spec_of(layer).cases[0].cfg)


def test_no_guard_of_the_registry_is_left_out() -> None:
    named = set(guards())
    notes = {(layer, row.name) for layer in LAYERS for row in registry(layer).ranked if GUARD in row.note}
    assert notes == named


def test_every_layer_belongs_to_an_item() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| ([\d, ]+) \|$", PAGE.read_text(), re.MULTILINE))
    assert set(listed) == {*LAYERS, *COLLECTIVES}
    wrong = [layer for layer, items in listed.items() if not all(0 < int(i) < 67 for i in items.split(","))]
    assert wrong == []


def test_parts_that_are_no_layer_have_rows() -> None:
    for part in PARTS:
        for device in ("H200", "cpu"):
            rows = fl.backends(part, device=device)
            assert rows and all(row.layer == part and row.reason for row in rows)
            assert any(row.hardware and row.installed and row.automatic for row in rows)
    (kernels,) = [row for row in fl.backends("communicator", device="cpu") if row.name == "triton_symm_mem"]
    assert not kernels.hardware and "this is cpu" in kernels.reason
    assert next(row for row in fl.backends("communicator", device="H200") if row.name == "triton_symm_mem").hardware
    first = {part: builtin_registry(part).ranked[0].load() for part in PARTS}
    wanted = {"bump_allocator": fl.BumpAllocator, "communicator": fl.LayerCommunicator}
    assert first == wanted | {"expert_placement": TritonSlots}


def callers() -> dict[str, set[str]]:
    """Return for each name the files, tests excluded, that load it: `fl.Name`, `Name`, or "module:Name"."""
    found: dict[str, set[str]] = {}
    for root in ("src", "models", "server", "benchmarks"):
        for path in (REPO / root).rglob("*.py"):
            if path.name == "cases.py" or path == Path(fl.__file__):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                name = None
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fl":
                    name = node.attr
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                    name = node.id
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    target = re.fullmatch(r"[\w.]+:(\w+)", node.value)
                    name = target[1] if target else None
                if name:
                    found.setdefault(name, set()).add(str(path))
    return found


def test_every_public_class_has_a_caller_or_a_reason_on_the_page() -> None:
    reasons = dict(re.findall(r"^\| `(\w+)` \| ([^|\d]{40,}) \|$", PAGE.read_text(), re.MULTILINE))
    used, without = callers(), set()
    for name in fl.__all__:
        made = getattr(fl, name)
        if inspect.isclass(made):
            # Rows of the registry for parts name their own class.
            home = inspect.getsourcefile(made)
            if not used.get(name, set()) - {home}:
                without.add(name)
    assert without == set(reasons)


def test_the_ablations_table_is_what_was_measured() -> None:
    """Written by tools/systems_table.py; each optimisation that is on the page stands beside what its item quotes."""
    found = importlib.util.spec_from_file_location("systems_table", REPO / "tools" / "systems_table.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert module.written(PAGE.read_text()) == PAGE.read_text(), "run: python tools/systems_table.py"
    measured = {row["what"] for row in module.rows()[1]}
    assert set(module.REASONS) <= measured == {"captured steps", *(switch.what for switch in SWITCHES)}
