"""What a backend's measured times depend on: versions of its packages, and the code of its kernels."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import tokenize
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlayers import device as device_module

if TYPE_CHECKING:
    from fastlayers.registry import Backend


def packages_of(backend: Backend) -> tuple[str, ...]:
    """Return the import names of the packages behind a backend; ``("torch",)`` if it names none."""
    tops = dict.fromkeys(need.partition(":")[0].split(".")[0] for need in backend.needs)
    return tuple(name for name in tops if name != "torch") or ("torch",)


def version_of(package: str) -> str | None:
    """Return an installed package's version, without importing it; ``None`` if it is absent."""
    if package == "torch":
        import torch

        return str(torch.__version__)
    return device_module.package(package, load=False).version


def kernel_hash(target: str | Callable[..., Any]) -> str:
    """Return a hash of the code behind a backend's target: comments, docstrings and layout do not count.

    Covers the target's module and what it imports from this library's ``kernels`` and ``…triton…`` modules.
    """
    module = target.partition(":")[0] if isinstance(target, str) else target.__module__
    return _hash(module)


@lru_cache
def _hash(module: str) -> str:
    digest = hashlib.sha256()
    source = _source(module)
    for name in [module, *sorted(_imported(source))] if source is not None else []:
        part = source if name == module else _source(name)
        digest.update(_bare(part).encode() if part is not None else b"")
    return digest.hexdigest()[:12]


def _source(module: str) -> str | None:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return None
    return Path(found.origin).read_text(encoding="utf-8")


def _bare(source: str) -> str:
    """Return source text without comments, docstrings and white space.

    Text, not a syntax tree: each version of Python writes trees in its own way, and tables travel between versions.
    """
    lines = source.encode().split(b"\n")
    spans = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            spans.append(((text.lineno, text.col_offset), (text.end_lineno or 0, text.end_col_offset or 0)))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            first = len(token.line[:column].encode())
            spans.append(((row, first), (row, first + len(token.string.encode()))))
    for (row, column), (last, end) in sorted(spans, reverse=True):
        kept = lines[row - 1][:column] + lines[last - 1][end:]
        lines[row - 1 : last] = [kept, *[b""] * (last - row)]
    return "".join(b"\n".join(lines).decode().split())


def _imported(source: str) -> set[str]:
    tree = ast.parse(source)
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    last = {name: name.rsplit(".", 1)[-1] for name in names if name.startswith("fastlayers.")}
    return {name for name, piece in last.items() if "triton" in piece or piece == "kernels"}


def metadata(layer: str, backends: Sequence[Backend]) -> dict[str, Any]:
    """Return what a table's figures depend on: packages, kernels, commit, date."""
    import datetime
    import subprocess

    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return {
        "versions": {b.name: {name: version_of(name) for name in packages_of(b)} for b in backends},
        "kernels": {b.name: kernel_hash(b.target) for b in backends},
        "commit": commit, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def changes(table: Mapping[str, Any], backends: Sequence[Backend]) -> tuple[str, ...]:
    """Return in words which packages and kernels of these backends are other than when the table was made."""
    about = table.get("metadata", {})
    versions, kernels = about.get("versions", {}), about.get("kernels", {})
    found: dict[str, None] = {}
    for backend in backends:
        for name, then in versions.get(backend.name, {}).items():
            if (now := version_of(name)) != then:
                found[f"{name} {then}, now {now or 'absent'}"] = None
        if backend.name in kernels and kernels[backend.name] != kernel_hash(backend.target):
            found[f"kernels of {backend.name} have changed"] = None
    return tuple(found)
