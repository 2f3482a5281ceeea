"""What a layer tells tests, benchmarks and the tuner about itself: cases, inputs, costs, bounds."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fastlayers.errors import ArgumentError, UnknownNameError
from fastlayers.registry.layers import LAYERS, PARTS
from fastlayers.registry.registry import registry


@dataclass(frozen=True)
class Case:
    """One named shape of a layer.

    Parameters
    ----------
    name : str
    cfg : object
        The layer's frozen configuration, as given to its backends.
    shape : mapping
        Whatever ``make_inputs`` needs beyond the configuration (``num_tokens`` and the like).
    small : bool
        Cheap enough for Triton's interpreter; others run on a GPU only.
    """

    name: str
    cfg: Any
    shape: Mapping[str, Any] = field(default_factory=dict)
    small: bool = True


@dataclass(frozen=True)
class Cost:
    """Cost of one call: operations, compulsory bytes (each input and output once), bytes of this dataflow."""

    flops: float
    min_bytes: float
    dataflow_bytes: float

    def floors(self, bandwidth: float, flops: float) -> tuple[float, float]:
        """Return the two lower bounds in seconds: arithmetic, memory."""
        return self.flops / flops, self.min_bytes / bandwidth


@dataclass(frozen=True)
class Bound:
    """Largest accepted error of one output against the fp32 reference.

    ``rel_rms``: ‖out − ref‖ / ‖ref‖. ``row_max``: over rows (last dimension), max|out − ref| / max|ref|.
    ``Bound(0, 0)`` asks for equality.
    """

    rel_rms: float
    row_max: float


EXACT = Bound(0.0, 0.0)
# Bounds belong to the number format of the output.
BOUNDS = {
    torch.float32: Bound(1e-5, 1e-4),
    torch.float16: Bound(1e-3, 5e-3),
    torch.bfloat16: Bound(5e-3, 2e-2),
}


def exact(*outputs: str) -> Callable[[Case], dict[str, Bound]]:
    """Return ``bounds`` that ask for equality of these outputs."""
    return lambda case: dict.fromkeys(outputs, EXACT)


def giving(*names: str) -> Callable[[Any, dict[str, Any], Any], Any]:
    """Return a ``call`` that gives a backend these inputs, in this order."""
    return lambda impl, inputs, context: impl(*(inputs[name] for name in names))


def calling(*names: str, outputs: tuple[str, ...] = ("y",)) -> Callable[..., dict[str, torch.Tensor]]:
    """Return a ``run`` that does the same and names what comes back; of several results ``None`` is left out."""
    call = giving(*names)

    def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
        found = call(impl, inputs, context)
        results = (found,) if len(outputs) == 1 else found
        return {name: each for name, each in zip(outputs, results, strict=True) if each is not None}

    return run


@dataclass(frozen=True)
class Oracle:
    """What stands in for a layer's reference: ``"module:Class"``, and the bounds against it (as ``bounds`` below)."""

    target: str
    bounds: Callable[[Case], dict[str, Bound]]


def _no_context(impl: Any, inputs: dict[str, Any]) -> Any:
    return None


def _no_oracle(backend: str) -> Oracle | None:
    return None


def _no_bounds(case: Case) -> dict[str, Bound]:
    return {}


def zero_rows(layer: Any, count: int, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return ``[count, width]`` zeros where a layer is, of the dtype that it takes (``None``: as it says itself)."""
    dtype = dtype or next((p.dtype for p in layer.parameters() if p.dtype.itemsize > 1), layer.fixed_dtype)
    configured = getattr(layer.cfg, "dtype", None)
    dtype = dtype or (configured if isinstance(configured, torch.dtype) and configured.itemsize > 1 else torch.bfloat16)
    return torch.zeros(count, width, dtype=dtype, device=place_of(layer))


def place_of(layer: Any) -> torch.device:
    """Return the device of a layer's parameters, or the type of device that it was constructed for."""
    found: torch.device = next((p.device for p in layer.parameters()), layer.device_type)
    return found


def with_tokens(shape: dict[str, Any], cfg: Any, tokens: int, context: int) -> dict[str, Any]:
    """Return a case's shape with another number of tokens, its cache grown with them."""
    if "num_tokens" not in shape:
        raise ArgumentError("case_at", "layer", type(cfg).__name__, "a layer whose cases have num_tokens")
    if isinstance(pages := shape.get("pages"), tuple):  # a cache: (pages, page size)
        shape["pages"] = (max(pages[0], -(-tokens // pages[1]) + 2), pages[1])
    return shape | {"num_tokens": tokens}


def _by_format(cfg: Any) -> bool:
    return getattr(cfg, "quant", "none") in ("fp8_block", "int8") or getattr(cfg, "format", "none") == "fp8"


@dataclass(frozen=True)
class LayerSpec:
    """What a layer's ``cases.py`` exports as ``SPEC``.

    Parameters
    ----------
    cases : tuple[Case, ...]
    make_inputs : callable
        ``(case, device, seed) -> dict``; equal seeds give equal values, shapes never depend on the seed.
    run : callable
        ``(impl, inputs, context) -> dict[str, Tensor]``: only what a captured region may do. Outputs are
        canonical (dequantised, sorted where order is free) and hold valid positions only.
    cost : callable
        ``(case) -> Cost``.
    prepare : callable
        ``(impl, inputs) -> context``: host work before the region (packing weights, planning metadata).
    refresh : callable or None
        ``(impl, inputs, context) -> None``: bring ``context`` up to date with new ``inputs`` in place, as between
        replays of a captured graph. ``None``: the context does not depend on what a replay changes.
    bounds : callable
        ``(case) -> {output name: Bound}``; what it leaves out is judged by the output's dtype.
    mutates : tuple[str, ...]
        Inputs that a call writes.
    oracle : callable
        ``(backend name) -> Oracle or None``: another oracle than the layer's reference, for backends that round an
        intermediate result where the layer's formula leaves the choice.
    call : callable or None
        ``run`` without what it does only so that outputs can be judged (dequantising, reading caches): what is timed.
        ``None``: ``run``.
    examples : callable or None
        ``(layer, count) -> [arguments, ...]``: calls of the module that together need what ``count`` tokens need; for
        warm-up. ``None``: the module's configuration does not say what it is called with; ``unknown`` says what lacks.
    at_tokens : callable
        ``(shape, cfg, tokens, context) -> shape``: a case's shape at another token count.
    checked_tokens : int
        Tokens of the case on which the tuner and ``bench`` check what they time. Few, where an error is one of every
        element; where few of many roundings decide it, as many as make it a number of the format.
    counts_requests : bool
        Token counts are of requests: few are enough.
    eight_bits : callable
        ``(cfg) -> bool``: the products run on tensor cores of 8 bits.
    heavy : int
        Place among the layers that decide a step's time, 1 the first; 0: none of them.
    """

    cases: tuple[Case, ...]
    make_inputs: Callable[[Case, torch.device, int], dict[str, Any]]
    run: Callable[[Any, dict[str, Any], Any], dict[str, torch.Tensor]]
    cost: Callable[[Case], Cost]
    prepare: Callable[[Any, dict[str, Any]], Any] = _no_context
    refresh: Callable[[Any, dict[str, Any], Any], None] | None = None
    bounds: Callable[[Case], dict[str, Bound]] = _no_bounds
    mutates: tuple[str, ...] = ()
    oracle: Callable[[str], Oracle | None] = _no_oracle
    call: Callable[[Any, dict[str, Any], Any], Any] | None = None
    examples: Callable[[Any, int], list[tuple[Any, ...]]] | None = None
    unknown: str = "what it is called with"
    at_tokens: Callable[[dict[str, Any], Any, int, int], dict[str, Any]] = with_tokens
    checked_tokens: int = 5
    counts_requests: bool = False
    eight_bits: Callable[[Any], bool] = _by_format
    heavy: int = 0

    @property
    def timed(self) -> Callable[[Any, dict[str, Any], Any], Any]:
        """What benchmarks, the tuner and the probe time."""
        return self.call if self.call is not None else self.run

    def case(self, name: str) -> Case:
        """Return the case of this name."""
        for case in self.cases:
            if case.name == name:
                return case
        raise UnknownNameError(f"case {name!r} is unknown; known: {', '.join(c.name for c in self.cases)}")


def spec_of(layer: str) -> LayerSpec:
    """Return the :class:`LayerSpec` of a layer by name; parts have none, as nobody chooses among them by shape."""
    table = registry(layer)
    if layer in PARTS:
        raise UnknownNameError(f"{layer!r} is a part without cases; layers that have some: {', '.join(LAYERS)}")
    found: LayerSpec = importlib.import_module(table.cases).SPEC
    return found
