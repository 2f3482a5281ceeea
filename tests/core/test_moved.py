"""Old public names tell the new ones, and every new one exists."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from fastlayers import moved


@pytest.mark.parametrize("old", moved.MODULES)
def test_an_old_module_names_the_new_one(old: str) -> None:
    with pytest.raises(ImportError) as raised:
        importlib.import_module(old)
    also = f" ({moved.NAMES[old]})" if old in moved.NAMES else ""
    assert str(raised.value) == f"{old} is now {moved.MODULES[old]}{also}"
    assert importlib.import_module(moved.MODULES[old]).__name__ == moved.MODULES[old]


@pytest.mark.parametrize("old", moved.NAMES)
def test_what_an_old_module_had_under_another_name_is_there(old: str) -> None:
    for each in moved.NAMES[old].split("; "):
        assert pkgutil.resolve_name(each.split(": ")[1]) is not None


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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fastlayers.MXFP8Quant", "fastlayers.quant.mxfp8_quant.layer.MXFP8Quant"),
        ("fastlayers.attention.meta.StepPlan", "fastlayers.attention.meta.BackendScratch"),
        ("fastlayers.attention.meta.StepPlans", "fastlayers.attention.meta.StepScratch"),
        ("fastlayers.layer.PHASES", "fastlayers.attention.core.PHASES"),
        ("fastlayers.layer.before_the_cache", "fastlayers.attention.core.AttentionCore.before_the_cache"),
        ("fastlayers.linear.case_inputs.calling", "fastlayers.registry.spec.calling"),
        ("fastlayers_models.blocks.Build", "fastlayers_models.blocks.ModelContext"),
        ("fastlayers_models.blocks.SideBySide", "fastlayers_models.concat.ConcatLinears"),
        ("fastlayers_models.checkpoint.load_weights", "fastlayers_models.loading.load_weights"),
    ],
)
def test_an_old_name_of_a_module_names_the_new_one(old: str, new: str) -> None:
    module, name = old.rsplit(".", 1)
    with pytest.raises(ImportError) as raised:
        exec(f"from {module} import {name}", {})
    told = str(raised.value).removeprefix(f"{old} is now ")
    assert told in (new, new.rsplit(".", 1)[1])
    assert pkgutil.resolve_name(new) is not None
