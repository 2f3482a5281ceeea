"""What a backend's hash covers: every kernel of ours, through every form of import, and no host code."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastlayers as fl
from fastlayers import tuning
from fastlayers.device import DESCRIBED
from fastlayers.registry import LAYERS, registry
from fastlayers.tuning import staleness
from fastlayers.tuning.provenance import combined, source_hash
from fastlayers.tuning.sources import Definition, Sources, installed
from fastlayers.tuning.sweep import parse_shape

PACKAGE = Path(fl.__file__).parent
# What launches kernels without being a backend of a layer: no tuned table holds their times.
WITHOUT_TABLES = (
    "fastlayers.attention.mla.joined_heads:join_heads", "fastlayers.comm.triton_exchange:Exchange",
    "fastlayers.linear.dense.triton_bf12:BF12Linear",
    "fastlayers.comm.triton_push:PushSum", "fastlayers.comm.triton_tokens:TokenExchange",
    "fastlayers.moe.placement.triton:TritonSlots", "fastlayers.norm.rms_norm.split:split_norm",
    "fastlayers.patching.triton_dense:TritonDense", "fastlayers.patching.triton_turn:TritonTurn",
    "fastlayers.sampler.triton_drafts:settle_drafts",
)  # fmt: skip


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

    made = Sources(read)
    # What is as before is not parsed and looked through again.
    plain = installed()
    made._modules = {name: found for name, found in plain._modules.items() if name != module}
    made._used = {
        key: used for key, used in plain._used.items() if module not in (key[0], *(each.module.name for each in used))
    }
    return made


def test_every_kernel_of_ours_belongs_to_a_backend() -> None:
    known = {key for _, _, target in targets() for key in reached(target)}
    known |= {key for target in WITHOUT_TABLES for key in reached(target)}
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


@pytest.mark.parametrize("layer", ["fused_moe", "mla", "linear", "fp8_linear"])
def test_another_rule_makes_a_table_stale_and_another_way_to_write_it_does_not(
    layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = registry(layer).named("triton")
    tables = [tuning.read(path, layer, DESCRIBED["H200"]) for path in tuning.tables(layer, DESCRIBED["H200"])]
    table = next(table for table in tables if "triton" in table["metadata"]["rules"])
    # As a tuner would write it today; which tables were measured by another rule, doctor says.
    table = table | {"metadata": {"rules": staleness.rules(table, parse_shape(layer, table["cfg"]), [row])}}
    assert tuning.changes(table, [row]) == ()
    own = row.load().candidates  # type: ignore[attr-defined]

    def other(cfg: Any, tokens: int) -> list[dict[str, int]]:
        first, *rest = own(cfg, tokens)
        return [{name: 2 * value for name, value in first.items()}, *rest]

    for rule, expected in (
        (lambda cfg, tokens: list(own(cfg, tokens)), ()),
        (other, ("the rule of triton has changed",)),
    ):
        staleness._rule_now.cache_clear()
        monkeypatch.setattr(row.load(), "candidates", staticmethod(rule))
        assert tuning.changes(table, [row]) == expected
    staleness._rule_now.cache_clear()
    broken = table | {"cfg": "NoSuchConfig(1)"}
    assert tuning.changes(broken, [row]) == ("the rule of triton has changed",)


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


def test_a_local_name_is_not_the_module_s() -> None:
    text = "import triton\n\ndef place():\n  return 1\n\n@triton.jit\ndef kernel(x):\n  place = x * 2\n  return place\n"

    def hashed(source: str) -> str:
        backend = source + "\nclass Backend:\n  def __call__(self):\n    kernel\n"
        return Sources(lambda name: (backend, False)).kernel_hash("fastlayers.x:Backend")

    assert hashed(text) == hashed(text.replace("return 1", "return 2"))
    assert hashed(text) != hashed(text.replace("x * 2", "x * 3"))


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
