"""Every example in a docstring runs, and every public layer has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest
from torch import nn

import fastlayers
import fastlayers_models

PUBLIC = importlib.import_module("fastlayers")._PUBLIC


def modules() -> list[str]:
    """Return the modules that may hold examples (kernel files hold none)."""
    found = []
    for package in (fastlayers, fastlayers_models):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "triton" not in info.name.rsplit(".", 1)[-1]:
                found.append(info.name)
    return found


@pytest.mark.parametrize("name", modules())
def test_examples_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_every_public_layer_has_an_example() -> None:
    layers = [v for n in PUBLIC if inspect.isclass(v := getattr(fastlayers, n)) and issubclass(v, nn.Module)]
    without = [layer.__name__ for layer in layers if ">>>" not in (layer.__doc__ or "")]
    assert layers and without == []


def test_every_public_name_has_a_docstring() -> None:
    assert [name for name in PUBLIC if not inspect.getdoc(getattr(fastlayers, name))] == []
