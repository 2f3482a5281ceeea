"""Who imports whom: no cycle among modules, and nothing of the product from ``testing/``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = {"fastlayers": ROOT / "src", "fastlayers_models": ROOT / "models", "fastlayers_server": ROOT / "server"}


def modules(package: str) -> dict[str, tuple[Path, bool]]:
    found = {}
    for path in sorted((ROOTS[package] / package).rglob("*.py")):
        parts = path.relative_to(ROOTS[package]).with_suffix("").parts
        whole = parts[-1] == "__init__"
        found[".".join(parts[:-1] if whole else parts)] = (path, whole)
    return found


@cache
def imported(path: Path, everywhere: bool) -> list[tuple[str, str | None]]:
    """Return what a file imports when it is loaded (``everywhere``: also later), what is for type checkers left out."""

    def visit(node: ast.AST) -> Iterator[tuple[str, str | None]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not everywhere:
            return
        if isinstance(node, ast.Import):
            yield from ((name.name, None) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, name.name) for name in node.names)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # none holds a statement
                yield from visit(child)

    return list(visit(ast.parse(path.read_text(encoding="utf-8"))))


def edges(package: str) -> dict[str, set[str]]:
    known = modules(package)
    graph: dict[str, set[str]] = {}
    for name, (path, _) in known.items():
        found = {f"{m}.{a}" if f"{m}.{a}" in known else m for m, a in imported(path, False)}
        graph[name] = (found & known.keys()) - {name}
    return graph


@pytest.mark.parametrize("package", ROOTS)
def test_no_module_imports_itself_through_others(package: str) -> None:
    graph, state, cycles = edges(package), dict[str, int](), list[str]()

    def walk(name: str, path: list[str]) -> None:
        state[name] = 1
        for other in sorted(graph[name]):
            if state.get(other) == 1:
                cycles.append(" → ".join([*path[path.index(other) :], other]))
            elif other not in state:
                walk(other, [*path, other])
        state[name] = 2

    for name in graph:
        if name not in state:
            walk(name, [name])
    assert cycles == []


@pytest.mark.parametrize("package", ROOTS)
def test_nothing_of_the_product_imports_testing(package: str) -> None:
    wrong = []
    for name, (path, _) in modules(package).items():
        if not name.startswith("fastlayers.testing"):
            used = {module for module, _ in imported(path, True) if module.startswith("fastlayers.testing")}
            wrong += [f"{name} imports {module}" for module in used]
    assert wrong == []


def test_the_direction_of_the_three_packages() -> None:
    order = list(ROOTS)
    for index, package in enumerate(order):
        for name, (path, _) in modules(package).items():
            above = {module.partition(".")[0] for module, _ in imported(path, True)} & set(order[index + 1 :])
            assert not above, f"{name} imports {above}"
