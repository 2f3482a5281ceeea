"""Layer × mutant: every planted bug is caught by the parity function that passes the real backends."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastlayers.errors import NoBackendError
from fastlayers.registry import LAYERS, Backend
from fastlayers.testing.parity import ParityError, check_parity
from fastlayers.testing.spec import spec_of

FOLDER = Path(__file__).parent / "mutants"


def mutants_of(layer: str) -> dict[str, Backend]:
    """Return the planted bugs of a layer, classes by name in ``tests/mutants/<layer>.py``, as backends of it."""
    name = f"fastlayers_mutants_{layer}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{layer}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    planted: dict[str, type] = sys.modules[name].MUTANTS
    return {bug: Backend(f"mutant_{bug}", target, auto_on=()) for bug, target in planted.items()}


def pairs() -> Iterator[tuple[str, str]]:
    for layer in LAYERS:
        for name in mutants_of(layer):
            yield layer, name


def first_catch(layer: str, backend: Backend) -> str | None:
    """Return the first small case on which the parity function rejects ``backend``."""
    for case in spec_of(layer).cases:
        if case.small:
            try:
                check_parity(layer, backend, case, "cpu")
            except ParityError:
                return case.name
            except NoBackendError:
                continue
    return None


@pytest.mark.parametrize(("layer", "mutant"), [pytest.param(*p, id="-".join(p)) for p in pairs()])
def test_mutant_is_caught(layer: str, mutant: str, record_property: pytest.FixtureRequest) -> None:
    case = first_catch(layer, mutants_of(layer)[mutant])
    record_property("caught_by", f"{layer}|{mutant}|{case}")  # type: ignore[operator]
    assert case is not None, f"{layer}: no case catches {mutant}"


def test_every_layer_has_mutants() -> None:
    assert {layer: len(mutants_of(layer)) for layer in LAYERS if len(mutants_of(layer)) < 3} == {}
