"""A layer at any shape and token count: what benchmarks and the tuner run instead of the named cases."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastlayers.device import Device
from fastlayers.errors import ArgumentError
from fastlayers.registry.spec import Case, spec_of

# Token counts of a table: dense where backends cross, thin above.
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
QUICK = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Requests of a decode step, for attention.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
QUICK_BATCHES = (1, 16, 64, 128)
CONTEXT = 4096
# Cached tokens of all requests of a step together, at most: what fits next to the other operands.
MOST_CACHED = 1 << 21

# What a plain call looks like, whatever case it is derived from.
_PLAIN = {
    "strided": False, "padded": 0, "padding": 0, "load": "uneven", "views": False, "special": False, "replanned": False,
    "bucket": None, "starts": (),
}  # fmt: skip


def case_at(layer: str, cfg: Any, tokens: int, context: int | None = None) -> Case:
    """Return a case of ``layer`` with this configuration and token count (attention: see the notes).

    Notes
    -----
    Attention in the phase ``"decode"``: ``tokens`` requests with ``context`` cached tokens each; default: the
    configuration's own, or ``CONTEXT``. In other phases: one prompt of ``tokens`` tokens without a prefix.
    """
    spec = spec_of(layer)
    usual = [case for case in spec.cases if not case.small] or list(spec.cases)
    same = [case for case in usual if case.cfg == cfg] or [case for case in spec.cases if case.cfg == cfg]
    base = (same or usual)[0]
    shape = dict(base.shape) | {name: value for name, value in _PLAIN.items() if name in base.shape}
    dtype = getattr(cfg, "dtype", None)
    if "dtype" in shape and isinstance(dtype, torch.dtype) and dtype.itemsize > 1:  # 8 bits: of codes, not of inputs
        shape["dtype"] = dtype
    cached = context if context is not None else getattr(cfg, "context", CONTEXT)
    return Case(f"T={tokens}", cfg, spec.at_tokens(shape, cfg, tokens, cached), small=False)


class _Drawn(TorchFunctionMode):
    """Leaves out generators of the host: the device's own takes their place."""

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self.place = place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # Where transformers loads a model, torch.linspace is another function for a while: torch, if it asks just then
        # which functions make tensors, remembers that one, and the true one makes its tensors on the host ever after.
        if getattr(func, "__name__", "") == "linspace":
            kwargs.setdefault("device", self.place)
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type == "cpu":
            del kwargs["generator"]
        return func(*args, **kwargs)


@contextlib.contextmanager
def drawn_on(device: torch.device | str) -> Iterator[None]:
    """Draw random inputs on ``device`` itself: cases use generators of the host, which cost seconds at real sizes.

    On a CPU nothing changes. Elsewhere the values are not those of the same seed on the host.
    """
    place = torch.device(device)
    if place.type == "cpu":
        yield
        return
    with place, _Drawn(place):
        yield


def inputs_of(layer: str, case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Return random inputs of a case, drawn on the device."""
    place = torch.device(device)
    torch.manual_seed(seed)
    with drawn_on(place):
        return spec_of(layer).make_inputs(case, place, seed)


def tokens_of(layer: str, cfg: Any, quick: bool = False) -> tuple[int, ...]:
    """Return the token counts at which a layer is tuned and benchmarked; ``quick``: few of them."""
    batches = QUICK_BATCHES if quick else BATCHES
    if getattr(cfg, "phase", "") == "decode":
        return tuple(batch for batch in batches if batch * getattr(cfg, "context", CONTEXT) <= MOST_CACHED)
    return batches if spec_of(layer).counts_requests else QUICK if quick else TOKENS


def between(counts: Iterable[int]) -> list[int]:
    """Return the powers of two between token counts that are more than a factor of two apart."""
    known = sorted(set(counts))
    return [
        1 << power
        for low, high in pairwise(known)
        for power in range(low.bit_length(), high.bit_length())
        if low < 1 << power < high and high > 2 * low
    ]


# ---- configurations from the command line ----------------------------------------------------------------------

# Short names of the kernel people's, where they differ from our fields.
_SHORT = {"N": "out_features", "K": "in_features", "E": "num_experts", "D": "hidden_size", "I": "intermediate_size"}
# As the command line's other options name them.
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "e4m3": "float8_e4m3fn"}


def parse_shape(layer: str, text: str) -> Any:
    """Return a configuration from ``"N=2112,K=7168"``, from field names, or from a configuration's repr.

    Fields that are not given have their defaults, and without one the value of the layer's first real case.

    Raises
    ------
    ArgumentError
        An unknown field, or a value that the configuration refuses.
    """
    spec = spec_of(layer)
    base = next((case.cfg for case in spec.cases if not case.small), spec.cases[0].cfg)
    kind = type(base)
    if (given := re.fullmatch(rf"\s*{kind.__name__}\((.*)\)\s*", text, re.DOTALL)) is not None:
        text = given.group(1)
    if not is_dataclass(base) or isinstance(base, type):
        raise ArgumentError(layer, "--shape", repr(text), f"the repr of a {kind.__name__}")
    known = {field.name: getattr(base, field.name) for field in fields(base)}
    defaults = {field.name: field.default for field in fields(base) if field.default is not MISSING}
    changes: dict[str, Any] = {}
    for piece in filter(None, re.split(r",(?![^()]*\))", text)):
        name, separator, value = (part.strip() for part in piece.partition("="))
        name = _SHORT.get(name, name) if name not in known else name
        if not separator or name not in known:
            names = ", ".join([*known, *(short for short, full in _SHORT.items() if full in known)])
            raise ArgumentError(layer, "--shape", repr(piece), f"NAME=VALUE with NAME one of {names}")
        if name in changes:
            raise ArgumentError(layer, "--shape", repr(piece), f"every name once; {name} was given before")
        changes[name] = _value(layer, piece, value, known[name])
    return replace(base, **defaults | changes)


def _value(layer: str, piece: str, text: str, like: Any) -> Any:
    if isinstance(like, str) and text[:1] not in ("'", '"'):
        return text
    found = getattr(torch, _SHORT_DTYPES.get(text, text.removeprefix("torch.")), None)
    if isinstance(found, torch.dtype):
        return found
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ArgumentError(layer, "--shape", repr(piece), f"a value like {like!r}") from error


def peak_flops(layer: str, cfg: Any, device: Device) -> float:
    """Return the operations a second of the tensor cores that this layer's format runs on."""
    eight_bits = spec_of(layer).eight_bits(cfg)
    return device.flops * (2 if eight_bits and (device.has_fp8_dot or device.type == "cpu") else 1)
