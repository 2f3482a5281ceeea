"""What a backend's hash covers: every kernel of ours, through every form of import, and no host code."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fastlayers as fl
from fastlayers.registry import LAYERS, registry
from fastlayers.tuning.provenance import combined, source_hash
from fastlayers.tuning.sources import Definition, Sources, installed

PACKAGE = Path(fl.__file__).parent


def targets() -> Iterator[tuple[str, str, str]]:
    for layer in LAYERS:
        for backend in registry(layer).ranked:
            if isinstance(backend.target, str):
                yield layer, backend.name, backend.target


def reached(target: str) -> dict[tuple[str, str], Definition]:
    sources = installed()
    where, _, name = target.partition(":")
    root = sources._named(sources.module(where, where), name)  # type: ignore[arg-type]
    return {each.key: each for each in sources._counting([root], "fastlayers")}  # type: ignore[list-item]


def edited(module: str, node: ast.stmt, text: str) -> Sources:
    """Return sources in which a function begins with one more statement."""

    def read(name: str) -> tuple[str, bool] | None:
        found = installed()._read(name)
        if name != module or found is None:
            return found
        lines = found[0].split("\n")
        first = node.body[0]  # type: ignore[attr-defined]
        lines.insert(first.lineno - 1, " " * first.col_offset + text)
        return "\n".join(lines), found[1]

    return Sources(read)


def test_every_kernel_of_ours_belongs_to_a_backend() -> None:
    known = {key for _, _, target in targets() for key in reached(target)}
    missing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(("fastlayers", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        module = installed().module(name)
        assert module is not None
        for symbol, nodes in module.definitions.items():
            if Definition(module, symbol, tuple(nodes)).jitted and (name, symbol) not in known:
                missing.append(f"{name}:{symbol}")
    assert missing == []
    assert len(known) > 100


@pytest.mark.parametrize("layer", ["fused_moe", "gqa", "mla", "fp8_linear"])
def test_an_edit_of_any_kernel_changes_the_hash_wherever_it_stands(layer: str) -> None:
    target = registry(layer).named("triton").target
    assert isinstance(target, str)
    plain, modules = installed().kernel_hash(target), dict[str, Definition]()
    for definition in reached(target).values():
        modules.setdefault(definition.module.name, definition)
    assert modules.keys() - {target.partition(":")[0]}  # not all of them in the target's own file
    for definition in modules.values():
        changed = edited(definition.module.name, definition.nodes[-1], "edited = 1")
        assert changed.kernel_hash(target) != plain, definition.key


@pytest.mark.parametrize("layer", ["fused_moe", "gqa", "mla", "linear"])
def test_an_edit_of_the_rules_changes_the_hash(layer: str) -> None:
    """What ``candidates`` calls, in whichever file: its first candidate is the backend's own rule."""
    target = registry(layer).named("triton").target
    assert isinstance(target, str)
    sources, (where, _, name) = installed(), target.partition(":")
    root = sources._named(sources.module(where), name)  # type: ignore[arg-type]
    ((module, rule),) = sources._rules(root)  # type: ignore[arg-type]
    called = [sources._resolve(module, (use.id,)) for use in ast.walk(rule) if isinstance(use, ast.Name)]
    called += [
        sources._resolve(module, (use.value.id, use.attr))
        for use in ast.walk(rule)
        if isinstance(use, ast.Attribute) and isinstance(use.value, ast.Name)
    ]
    functions = [each for each in called if each is not None and isinstance(each.nodes[-1], ast.FunctionDef)]
    assert functions
    for each in functions:
        changed = edited(each.module.name, each.nodes[-1], "edited = 1")
        assert changed.kernel_hash(target) != sources.kernel_hash(target), each.key


def test_an_edit_on_the_host_changes_nothing() -> None:
    target = "fastlayers.norm.rms_norm.triton:TritonRMSNorm"
    module = installed().module("fastlayers.norm.rms_norm.triton")
    assert module is not None
    (node,) = module.definitions["TritonRMSNorm"]
    call = next(each for each in node.body if getattr(each, "name", "") == "__call__")  # type: ignore[attr-defined]
    assert edited(module.name, call, "edited = 1").kernel_hash(target) == installed().kernel_hash(target)


FORMS = {
    "from package import module": ("from package import kernels", "kernels.scale"),
    "import as": ("import package.kernels as other", "other.scale"),
    "import": ("import package.kernels", "package.kernels.scale"),
    "from module import name": ("from package.kernels import scale", "scale"),
    "from module import name as": ("from package.kernels import scale as grow", "grow"),
    "relative module": ("from . import kernels", "kernels.scale"),
    "relative name": ("from .kernels import scale", "scale"),
    "through the package": ("from package import scale", "scale"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inside", [False, True], ids=["at the top", "in a function"])
def test_every_form_of_import_is_followed(form: str, inside: bool) -> None:
    statement, use = FORMS[form]
    top, within = ("", statement) if inside else (statement, "pass")
    files = {
        "package": "from package.kernels import scale\n",
        "package.backend": f"{top}\n\nclass Backend:\n  def __call__(self, x):\n    {within}\n    return {use}[x]\n",
        "package.kernels": "import triton\n\nFACTOR = 2\n\n@triton.jit\ndef scale(x):\n    return x * FACTOR\n",
    }

    def hashed(**changes: str) -> str:
        known = files | {f"package.{name}": text for name, text in changes.items()}
        read: Callable[[str], tuple[str, bool] | None] = lambda name: (  # noqa: E731
            (known[name], name == "package") if name in known else None
        )
        return Sources(read).kernel_hash("package.backend:Backend")

    kernels = files["package.kernels"]
    assert hashed(kernels=kernels.replace("x * FACTOR", "x * FACTOR * FACTOR")) != hashed()
    assert hashed(kernels=kernels.replace("FACTOR = 2", "FACTOR = 3")) != hashed()
    assert hashed(kernels=kernels.replace("FACTOR", "GROWTH")) == hashed()  # a name is no code
    assert hashed(kernels=kernels + "\nUNUSED = 1  # here\n") == hashed()
    assert hashed(kernels=kernels.replace("triton.jit", "kernel")) == hashed()
    assert hashed(kernels=kernels.replace("triton.jit", "kernel(do_not_specialize=('x',))")) != hashed()


def test_a_base_class_gives_the_rules() -> None:
    files = {
        "fastlayers.x": "from fastlayers.y import Base\n\nclass Backend(Base):\n    pass\n",
        "fastlayers.y": "WIDTH = 1\n\nclass Base:\n  @staticmethod\n  def candidates(c, n):\n    return [WIDTH]\n",
    }

    def hashed(width: int) -> str:
        known = files | {"fastlayers.y": files["fastlayers.y"].replace("WIDTH = 1", f"WIDTH = {width}")}
        return Sources(lambda name: (known[name], False) if name in known else None).kernel_hash("fastlayers.x:Backend")

    assert hashed(1) != hashed(2) and hashed(1) == hashed(1)


def test_the_hash_of_sources_is_what_git_lists(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "inner" / "b.py").write_text("y = «2»\n", encoding="utf-8")
    (tmp_path / "c.txt").write_text("no code\n")
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    listed = subprocess.run([*git, "ls-files", "-s"], check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [line.split(maxsplit=3) for line in listed]
    assert source_hash(tmp_path) == combined((path, blob) for _, blob, _, path in rows if path.endswith(".py"))
    source_hash.cache_clear()
    before = source_hash(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    source_hash.cache_clear()
    assert source_hash(tmp_path) != before
