"""Modules with a planted fault: a kernel's text changed in one place, which its tests must notice."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def planted(module: ModuleType, folder: Path, *changes: tuple[str, str], once: bool = False) -> ModuleType:
    """Return a module with ``module``'s text, in which each of ``changes`` replaced something.

    It is written to ``folder``, and named ``mutant_`` and the file's name. ``once``: what is replaced is there once.
    """
    assert module.__file__ is not None
    text, name = Path(module.__file__).read_text(), f"mutant_{Path(module.__file__).stem}"
    for before, after in changes:
        assert text.count(before) == 1 if once else before in text, f"{module.__name__} no longer has {before!r}"
        text = text.replace(before, after)
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    sys.modules[name] = mutant  # by which its classes look up their annotations
    try:
        spec.loader.exec_module(mutant)
    finally:
        del sys.modules[name]
    return mutant
