"""The parity function: one backend, one case, one device, against the fp32 reference.

Real backends and planted bugs go through the same function. Uninitialised memory is poisoned with NaN, inputs
must come back unchanged, and a second run must give the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fastlayers.device import as_device
from fastlayers.errors import FastlayersError
from fastlayers.registry import Backend, Registry, reference_backend, registry
from fastlayers.registry.spec import BOUNDS, EXACT, Bound, Case, LayerSpec, spec_of
from fastlayers.runtime.streams import side_stream


class ParityError(FastlayersError, AssertionError):
    """A backend's output differs from the reference by more than its number format allows."""


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every uninitialised tensor with NaN (integers: the maximum) while the block runs."""
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def _clone(inputs: dict[str, Any]) -> dict[str, Any]:
    cloned: dict[str, Any] = pytree.tree_map_only(torch.Tensor, _clone_strided, inputs)
    return cloned


def _clone_strided(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def check_parity(
    layer: str,
    backend: str | Backend,
    case: str | Case,
    device: Any = "cpu",
    seed: int = 0,
    draw: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> dict[str, float]:
    """Run one backend on one case and compare it with the layer's reference.

    Parameters
    ----------
    layer : str
        Name in :data:`fastlayers.registry.LAYERS`.
    backend : str or Backend
        A registered name, or a row that is not registered (a planted bug, an out-of-tree backend).
    case : str or Case
    device : torch device
    seed : int
    draw : callable
        Gives the context in which inputs are drawn, and nothing else runs.

    Returns
    -------
    dict[str, float]
        Relative RMS error per output.

    Raises
    ------
    ParityError
        Wrong values, NaN, a changed input, or a second run with other bits.
    NoBackendError
        The backend refuses; the sentence is in the message.
    """
    spec, table, device = spec_of(layer), registry(layer), torch.device(device)
    case = spec.case(case) if isinstance(case, str) else case
    row = table.named(backend) if isinstance(backend, str) else backend
    refuse_to_skip(layer, row, case, device)
    with torch.inference_mode():
        with draw():
            inputs = spec.make_inputs(case, device, seed)
        expected = _evaluate(spec, _oracle(spec, table, row), case, _clone(inputs))
        where = f"{layer}/{row.name}/{case.name} on {device}"
        given = _clone(inputs)
        with poisoned_memory():
            actual = _evaluate(spec, row, case, given)
        _check_unchanged(where, spec, inputs, given)
        again = _evaluate(spec, row, case, _clone(inputs))
        for name, first in actual.items():
            if not _same_bits(first, again[name]):
                raise ParityError(f"{where}: {name} has other bits in a second run")
        return _compare_all(where, _bounds(spec, row, case), actual, expected)


def check_capture(layer: str, backend: str | Backend, case: str | Case, seed: int = 0) -> dict[str, float]:
    """Capture one call in a CUDA graph, replay it with other inputs and metadata, compare with the reference.

    Raises
    ------
    ParityError
        The replay does not compute the new inputs' result.
    """
    spec, table, device = spec_of(layer), registry(layer), torch.device("cuda")
    case = spec.case(case) if isinstance(case, str) else case
    row = table.named(backend) if isinstance(backend, str) else backend
    refuse_to_skip(layer, row, case, device)
    with torch.inference_mode():
        static, fresh = (spec.make_inputs(case, device, s) for s in (seed, seed + 1))
        expected = _evaluate(spec, _oracle(spec, table, row), case, _clone(fresh))
        impl = row.load()(case.cfg)
        context = spec.prepare(impl, static)
        warm_up = _clone({name: static[name] for name in spec.mutates})
        stream = side_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                spec.run(impl, static, context)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = spec.run(impl, static, context)
        del warm_up
        _copy_into(static, fresh)
        if spec.refresh is not None:
            spec.refresh(impl, static, context)
        graph.replay()
        torch.cuda.synchronize()
        return _compare_all(f"{layer}/{row.name}/{case.name} replayed", _bounds(spec, row, case), outputs, expected)


def refuse_to_skip(layer: str, row: Backend, case: Case, device: torch.device) -> None:
    """Raise :class:`NoBackendError` if the backend cannot run the case: the caller decides whether that is a skip."""
    from fastlayers.errors import NoBackendError

    described = as_device(device)
    if (why := row.why_not(case.cfg, described)) is not None:
        raise NoBackendError(layer, case.cfg, described, row.name, {row.name: why})


def _oracle(spec: LayerSpec, table: Registry, row: Backend) -> Backend:
    other = spec.oracle(row.name)
    return table.named("reference") if other is None else reference_backend(other.target)


def _bounds(spec: LayerSpec, row: Backend, case: Case) -> dict[str, Bound]:
    other = spec.oracle(row.name)
    return spec.bounds(case) if other is None else other.bounds(case)


def _evaluate(spec: LayerSpec, row: Backend, case: Case, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    impl = row.load()(case.cfg)
    return spec.run(impl, inputs, spec.prepare(impl, inputs))


def _copy_into(static: dict[str, Any], fresh: dict[str, Any]) -> None:
    targets, structure = pytree.tree_flatten(static)
    sources, other = pytree.tree_flatten(fresh)
    if structure != other:
        raise ParityError("make_inputs gives another structure for another seed")
    for target, source in zip(targets, sources, strict=True):
        if isinstance(target, torch.Tensor):
            target.copy_(source)


def _check_unchanged(where: str, spec: LayerSpec, before: dict[str, Any], after: dict[str, Any]) -> None:
    for name in before.keys() - set(spec.mutates):
        for old, new in zip(pytree.tree_leaves(before[name]), pytree.tree_leaves(after[name]), strict=True):
            if isinstance(old, torch.Tensor) and not _same_bits(old, new):
                raise ParityError(f"{where}: input {name} was overwritten")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_floating_point:
        size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        a, b = a.contiguous().view(size), b.contiguous().view(size)
    return torch.equal(a, b)


def _compare_all(
    where: str, bounds: dict[str, Bound], actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, float]:
    if actual.keys() != expected.keys():
        raise ParityError(f"{where}: outputs {sorted(actual)} instead of {sorted(expected)}")
    return {name: compare(f"{where}: {name}", actual[name], expected[name], bounds.get(name)) for name in expected}


def compare(where: str, actual: torch.Tensor, expected: torch.Tensor, bound: Bound | None = None) -> float:
    """Return the relative RMS error of ``actual``, or raise :class:`ParityError` if it exceeds ``bound``.

    ``bound`` defaults to the one of ``actual``'s dtype (integers and booleans: equality). Infinities must match;
    NaN never passes.
    """
    if actual.shape != expected.shape:
        raise ParityError(f"{where}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    if bound is None:
        bound = BOUNDS.get(actual.dtype, EXACT)
    a, e = actual.detach().double(), expected.detach().double()
    if a.numel() == 0:
        return 0.0
    if a.isnan().any() or e.isnan().any():
        raise ParityError(f"{where}: {int(a.isnan().sum())} of {a.numel()} values are NaN")
    infinite = e.isinf()
    if not torch.equal(infinite, a.isinf()) or not torch.equal(a[infinite], e[infinite]):
        raise ParityError(f"{where}: infinities differ")
    a, e = a.masked_fill(infinite, 0.0), e.masked_fill(infinite, 0.0)
    error = (a - e).reshape(-1, a.shape[-1] if a.dim() else 1)
    scale = e.norm().item()
    rel_rms = error.norm().item() / scale if scale else error.norm().item()
    floor = 1e-3 * scale / max(1, e.numel()) ** 0.5
    row_scale = e.reshape(error.shape).abs().amax(-1).clamp_min(max(floor, 1e-30))
    row_max = (error.abs().amax(-1) / row_scale).max().item()
    if rel_rms > bound.rel_rms or row_max > bound.row_max:
        raise ParityError(
            f"{where}: relative RMS error {rel_rms:.3g} (bound {bound.rel_rms:.3g}), "
            f"worst row {row_max:.3g} (bound {bound.row_max:.3g})"
        )
    return rel_rms
