"""Old public names tell the new ones, and every new one exists."""

from __future__ import annotations

import importlib

import pytest

from fastlayers import moved


@pytest.mark.parametrize("old", moved.MODULES)
def test_an_old_module_names_the_new_one(old: str) -> None:
    with pytest.raises(ImportError, match=rf"^{old} is now {moved.MODULES[old]}$"):
        importlib.import_module(old)
    assert importlib.import_module(moved.MODULES[old]).__name__ == moved.MODULES[old]


def test_from_package_import_old_names_the_new_one() -> None:
    with pytest.raises(ImportError, match=r"fastlayers\.graphs is now fastlayers\.runtime\.graphs"):
        from fastlayers import graphs  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize(("old", "new"), [("accepts_all", "supports_all"), ("NotRun", "UnverifiedBackend")])
def test_an_old_name_of_the_registry_names_the_new_one(old: str, new: str) -> None:
    module = importlib.import_module("fastlayers.registry")
    with pytest.raises(ImportError, match=rf"registry\.{old} is now {new}$"):
        getattr(module, old)
    assert getattr(module, new) is not None
    assert not hasattr(module, "something_else")
