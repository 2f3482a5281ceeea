"""Nothing is there for tests alone: what nothing else reaches has a reason on docs/systems.md."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from functools import cache
from pathlib import Path

import pytest

import fastlayers as fl
from fastlayers.registry import COLLECTIVES, LAYERS, PARTS, builtin_registry
from fastlayers.runtime.gc_pause import gc_pause

sys.path.insert(0, str(Path(__file__).parent))
from reach import Key, Tree

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("src", "models", "server")
PUBLIC = "Public classes that nothing here calls"
OTHERS = "Functions and classes for others"
METHODS = "Methods for others"


def reasons(heading: str) -> dict[str, str]:
    """Return what the page's table below a heading says of each name."""
    section = (REPO / "docs/systems.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([\w.]+)` \| ([^|\d]{40,}) \|$", section, re.MULTILINE))


@cache
def tree() -> Tree:
    """Return all that is no test: modules of the three packages by name, programs by that of their file."""
    found = {}
    for root in (*PACKAGES, "benchmarks", "tools"):
        for path in (REPO / root).rglob("*.py"):
            parts = list(path.relative_to(REPO / root).with_suffix("").parts)
            if package := parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts if root in PACKAGES else [root, *parts])] = path.read_text(), package
    with gc_pause():  # half of the time would go into looking through trees
        return Tree(found)


def roots(*programs: str, cases: bool) -> list[Key]:
    """Return what someone starts: the command, modules run by name, folders of programs, and targets of the registry.

    ``cases``: also what `fastlayers.testing` has, which is for tests of plug-ins, and what layers say of their cases.
    """
    made = tree()
    found = [("fastlayers_server.__main__", "main")]
    for name, source in made.modules.items():
        own = name.partition(".")[0]
        guarded = own.startswith("fastlayers") and "__main__" in source.compared_strings()
        if guarded:
            found.append((name, ""))
        if own in programs or (cases and name.startswith("fastlayers.testing")):
            found += [(name, ""), *((name, each) for each in source.definitions)]
    for layer in (*LAYERS, *COLLECTIVES):
        table = builtin_registry(layer)
        found += [(table.cases, "SPEC")] if cases else []
        for row in table.ranked:
            module, _, name = row.target.partition(":") if isinstance(row.target, str) else ("", "", "")
            target = made.named(module, name)
            assert target is not None or module.partition(".")[0] != "fastlayers", row.target
            found += [target] if target is not None else []
    return found


def of_packages(keys: set[Key]) -> set[Key]:
    return {key for key in keys if key[0].partition(".")[0] not in ("benchmarks", "tools")}


@cache
def alone() -> set[Key]:
    """Return functions and classes of the packages that neither a command, nor a row, nor a tool reaches."""
    return of_packages(set(tree().made()) - tree().reached(roots("tools", cases=True)))


@cache
def reached() -> set[Key]:
    """Return what runs without tests and benchmarks, and what names with a reason on the page bring with them."""
    named = [key for key in alone() if key[1] in reasons(OTHERS)]
    return tree().reached([*roots("tools", cases=True), *named])


def test_every_public_class_has_a_caller_or_a_reason_on_the_page() -> None:
    """In the library, the models, the server, the benchmarks or the tools; that a row of a part names it is none."""
    named = [tuple(each.split(":")) for each in PARTS.values()]
    seen = {name for _, name in tree().reached(roots("benchmarks", "tools", cases=False), named)}
    public = {name for name in fl.__all__ if inspect.isclass(getattr(fl, name))}
    assert public - seen == set(reasons(PUBLIC))


def test_nothing_is_there_for_tests_alone_without_a_reason_on_the_page() -> None:
    """Of each module's functions and classes without an underscore.

    What benchmarks alone read is timed, but not used.
    """
    given = sorted(name for _, name in alone() if name in reasons(OTHERS))
    assert given == sorted(reasons(OTHERS)), "a name has a caller now, or two have it"
    # Others are reached from those that have a reason.
    assert of_packages(set(tree().made()) - reached()) == set()


def test_no_method_is_there_for_tests_alone_without_a_reason_on_the_page() -> None:
    """Of what is reached; methods that a class of another package has too are that package's to call."""
    seen = reached() | tree().reached(roots("benchmarks", cases=False))
    found = set()
    for module, name, method in tree().unread_methods(seen):
        if module.startswith("fastlayers") and name not in reasons(PUBLIC):
            owner = getattr(importlib.import_module(module), name)
            others = [base for base in owner.__mro__ if not base.__module__.startswith("fastlayers")]
            found |= set() if any(method in vars(base) for base in others) else {f"{name}.{method}"}
    assert found == set(reasons(METHODS))


# ---- what reaches what, by small trees ---------------------------------------------------------------------------

MAIN = "from package import used\n\ndef main():\n    used.run()\n"


def unreached(**modules: str) -> set[str]:
    """Return what nothing reaches from ``package.main:main``."""
    sources = {f"package.{name}": (text, False) for name, text in ({"main": MAIN} | modules).items()}
    made = Tree(sources | {"package": ("", True)})
    return {name for _, name in set(made.made()) - made.reached([("package.main", "main")])}


RUN = "def run():\n    {}\n"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (RUN.format("other()") + "def other():\n    pass\n", set()),
        ("def run():\n    pass\ndef other():\n    pass\n", {"other"}),
        # Two islands that call each other, and one that calls itself.
        (RUN.format("pass") + "def a():\n    b()\ndef b():\n    a()\ndef c():\n    c()\n", {"a", "b", "c"}),
        # Named only by an annotation, of a private function that nobody calls or of one that runs.
        (RUN.format("pass") + "class A:\n    pass\ndef _unused(x: A) -> A:\n    return x\n", {"A"}),
        ("def run(x: 'A' = None, *, y: A = None) -> A:\n    z: A = x\n\nclass A:\n    pass\n", {"A"}),
        (RUN.format("return A()") + "class A:\n    field: B\n\nclass B:\n    pass\n", set()),
        # Under a decorator, and by names that others have as methods.
        ("from functools import lru_cache\n" + RUN.format("pass") + "@lru_cache\ndef a():\n    pass\n", {"a"}),
        (RUN.format("x.load(y.forward)") + "def load():\n    pass\nclass forward:\n    pass\n", {"forward", "load"}),
        ("import app\n" + RUN.format("pass") + "@app.command()\ndef registered():\n    pass\n", set()),
        # By a string, through a module, and from what a module does when it is imported.
        (RUN.format("'package.more:Target'"), set()),
        (RUN.format("f'{x}.more:Target'"), set()),
        (RUN.format("import_module('package.more').Target"), set()),
        ("from package import more\n" + RUN.format("more.Target()"), set()),
        ("from package.more import Target as T\nX = T()\n" + RUN.format("pass"), set()),
        ("from package.more import Target\n" + RUN.format("pass"), {"Target"}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    X = Target()\n" + RUN.format("pass"), {"Target"}),
        # What only lists names for others reads none; types are made elsewhere.
        ("_PUBLIC = {'Target': 'package.more'}\n__all__ = ['Target']\n" + RUN.format("pass"), {"Target"}),
        ("from typing import Protocol\nclass Kind(Protocol):\n    pass\n" + RUN.format("'package.more:Target'"), set()),
    ],
)  # fmt: skip
def test_what_runs_is_what_something_that_runs_reads(text: str, left: set[str]) -> None:
    more = {"more": "class Target:\n    pass\n"} if "Target" in text else {}
    assert unreached(used=text, **more) == left


def test_methods_are_read_by_name() -> None:
    text = (
        "def run():\n    A().one()\n    f(two=1)\n    getattr(x, 'three')\n    'not four'\n    getattr(x, 'own_' + y)\n"
        "class A:\n"
    ) + "".join(
        f"    def {name}(self):\n        pass\n" for name in ("one", "two", "three", "four", "own_five", "_six")
    )
    made = Tree({"package.used": (text, False)})
    assert made.unread_methods(made.reached([("package.used", "run")])) == {("package.used", "A", "four")}
