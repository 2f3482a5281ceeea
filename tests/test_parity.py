"""Every backend × every case of every layer against the fp32 reference, through one function."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastlayers.device import as_device
from fastlayers.registry import LAYERS, registry
from fastlayers.testing.parity import check_capture, check_parity
from fastlayers.testing.spec import spec_of


def cpu_triples() -> Iterator[tuple[str, str, str]]:
    """Yield (layer, backend, case) for what a machine without a GPU must run: rows that run on it, small cases."""
    cpu = as_device("cpu")
    for layer in LAYERS:
        for backend in registry(layer).ranked:
            for case in spec_of(layer).cases:
                if case.small and backend.name != "reference" and backend.why_not(case.cfg, cpu) is None:
                    yield layer, backend.name, case.name


def gpu_triples() -> Iterator[tuple[str, str, str]]:
    """Yield (layer, backend, case) for a GPU machine: every row but the oracle, every case."""
    for layer in LAYERS:
        for backend in registry(layer).ranked:
            for case in spec_of(layer).cases:
                if backend.name != "reference":
                    yield layer, backend.name, case.name


@pytest.mark.parametrize(("layer", "backend", "case"), [pytest.param(*t, id="-".join(t)) for t in cpu_triples()])
def test_parity(layer: str, backend: str, case: str) -> None:
    errors = check_parity(layer, backend, case, "cpu")
    assert errors


def skip_if_refused(layer: str, backend: str, case: str) -> None:
    """Skip with the backend's own sentence."""
    row, chosen = registry(layer).named(backend), spec_of(layer).case(case)
    if row.guard:
        pytest.skip(f"{layer}/{backend}: {row.guard}")
    if (why := row.why_not(chosen.cfg, as_device("cuda"))) is not None:
        pytest.skip(f"{layer}/{backend}: {why}")


@pytest.mark.gpu
@pytest.mark.parametrize(("layer", "backend", "case"), [pytest.param(*t, id="-".join(t)) for t in gpu_triples()])
def test_parity_gpu(layer: str, backend: str, case: str) -> None:
    skip_if_refused(layer, backend, case)
    assert check_parity(layer, backend, case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("layer", "backend", "case"), [pytest.param(*t, id="-".join(t)) for t in gpu_triples()])
def test_capture_gpu(layer: str, backend: str, case: str) -> None:
    skip_if_refused(layer, backend, case)
    assert check_capture(layer, backend, case)
