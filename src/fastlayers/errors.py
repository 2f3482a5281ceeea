"""Every exception that fastlayers raises on purpose, and the checks that raise them.

A message names the layer, the argument, what was given and what is accepted.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from operator import index
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


class FastlayersError(Exception):
    """Base class of all errors that fastlayers raises on purpose."""


class ArgumentError(FastlayersError, ValueError):
    """An argument of a layer is not one that the layer accepts.

    Parameters
    ----------
    layer, argument : str
        Where the problem is.
    given : object
        What was passed, in words or as a value.
    accepted : str
        What would have been accepted.
    """

    def __init__(self, layer: str, argument: str, given: object, accepted: str) -> None:
        self.layer, self.argument, self.given, self.accepted = layer, argument, given, accepted
        super().__init__(f"{layer}: {argument} is {given}; accepted: {accepted}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.layer, self.argument, self.given, self.accepted)


class NoBackendError(FastlayersError, RuntimeError):
    """No backend of a layer accepts this configuration on this device; every reason is listed.

    ``source``: the environment variable that asked for it, if one did.
    """

    def __init__(
        self, layer: str, cfg: object, device: object, asked: str, refused: Mapping[str, str], source: str = ""
    ) -> None:
        self.layer, self.cfg, self.device, self.asked, self.refused = layer, cfg, device, asked, dict(refused)
        self.source = source
        reasons = "\n".join(f"  {name}: {why}" for name, why in refused.items())
        told = f" (from {source})" if source else ""
        super().__init__(f"{layer}: no backend for backend={asked!r}{told} on {device} with {cfg}\n{reasons}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.layer, self.cfg, self.device, self.asked, self.refused, self.source)


class UnknownNameError(FastlayersError, LookupError):
    """A layer, backend or device name that is not registered; the known ones are listed."""


class EnvironmentVariableError(FastlayersError, ValueError):
    """An environment variable of ours does not follow its grammar."""


class CheckpointError(FastlayersError):
    """A checkpoint file is missing, truncated, corrupt, or its tensors do not fit the model."""


class UnknownModelError(FastlayersError, LookupError):
    """A model configuration names an architecture that is not implemented."""


class PatchError(FastlayersError, RuntimeError):
    """A Hugging Face model could not be patched as asked; the model is as it was before the call."""


class AllocatorOverflowError(FastlayersError, MemoryError):
    """A bump allocator or page pool has no room left for the named requester."""


class LayoutError(FastlayersError, ValueError):
    """Two layouts between which the communicator knows no transition."""


class CollectiveMismatch(FastlayersError, RuntimeError):
    """Ranks that must agree do not: the message names the ranks and what each has. Nothing was launched."""


class CollectiveOrderError(FastlayersError, RuntimeError):
    """Ranks make different calls to each other, or one makes none: the message has both. Nothing was launched."""


class RankLostError(FastlayersError, RuntimeError):
    """Another rank did not answer within the deadline; the message names it where it is known.

    Attributes
    ----------
    rank : int or None
        Which one; ``None``: unknown.
    operation : str
        In which it was waited for.
    step : int or None
        The last that this process had begun, counted from 1; ``None``: none yet.
    records : tuple of str
        The last calls and replays of this process between ranks, and between which; the newest last.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        operation: str = "",
        step: int | None = None,
        records: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.rank, self.operation, self.step, self.records = rank, operation, step, tuple(records)


class CaptureError(FastlayersError, RuntimeError):
    """Something that must not happen inside a CUDA graph capture was asked for there."""


def describe(tensor: object) -> str:
    """Return a tensor's dtype, shape, stride and device as one short phrase (other objects: their repr, cut short)."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        text = repr(tensor)
        if len(text) <= MOST_SHOWN:
            return text
        return f"{' '.join(text[: 4 * MOST_SHOWN].split())[: MOST_SHOWN - 1]}…"  # of a list of caches, say
    dtype = dtype_name(tensor.dtype)
    layout = "" if tensor.is_contiguous() else f", stride {tuple(tensor.stride())}"
    return f"{dtype}{list(tensor.shape)}{layout} on {tensor.device}"


def check_tensor(
    layer: str,
    argument: str,
    tensor: object,
    *,
    shape: tuple[int | None, ...] | None = None,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
    last_dim_contiguous: bool = False,
    contiguous: bool = False,
) -> None:
    """Raise :class:`ArgumentError` unless ``tensor`` has this shape (``None`` = any), dtype, device and strides.

    ``last_dim_contiguous`` asks for at least one dimension, too: rows of numbers next to each other.

    Host-side only: reads no data, never synchronises, safe under capture.
    """
    import torch

    # Every layer that is called by itself comes by here: the usual answer first, without a call.
    if (
        isinstance(tensor, torch.Tensor)
        and (dtype is None or tensor.dtype is dtype or (isinstance(dtype, tuple) and tensor.dtype in dtype))
        and (shape is None or tensor.shape == shape or _shape_fits(tuple(tensor.shape), shape))
        and (device is None or tensor.device == device or _same_device(tensor.device, device))
        and (not last_dim_contiguous or _rows_are_contiguous(tensor))
        and (not contiguous or tensor.is_contiguous())
    ):
        return
    dtypes = dtype if isinstance(dtype, tuple) or dtype is None else (dtype,)
    # Words only on failure: torch.compile cannot print a symbolic size.
    wanted = []
    if dtypes is not None:
        wanted.append(" or ".join(map(dtype_name, dtypes)))
    if shape is not None:
        wanted.append("[" + ", ".join("*" if s is None else str(s) for s in shape) + "]")
    if device is not None:
        wanted.append(f"on {device}")
    if last_dim_contiguous:
        wanted.append("last stride 1")
    if contiguous:
        wanted.append("contiguous")
    raise ArgumentError(layer, argument, describe(tensor), " ".join(wanted) or "a tensor")


def free_to_look(tensor: torch.Tensor) -> bool:
    """Return whether somebody may read a tensor's values, and that without waiting for a device.

    Not a compiler, a trace, or a dispatch mode, which would record it; fake tensors and what ``torch.func`` passes have
    none.
    """
    import torch

    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if torch.compiler.is_compiling() or not plain or tensor.device.type != "cpu":
        return False
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return not transformed and not torch._C._len_torch_dispatch_stack() and torch._C._get_tracing_state() is None


def _rows_are_contiguous(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and (tensor.shape[-1] <= 1 or tensor.numel() == 0 or tensor.stride(-1) == 1)


def _shape_fits(given: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(given) == len(wanted) and all(w is None or g == w for g, w in zip(given, wanted, strict=True))


def _same_device(given: torch.device, wanted: torch.device) -> bool:
    return given.type == wanted.type and (wanted.index is None or given.index == wanted.index)


# Of a value that is none of a few, in a message.
MOST_SHOWN = 400
# One more than any tensor can have of anything.
MOST = 2**63


def _is_integer(value: Any) -> bool:
    # An int first: asking an abstract class takes longer. NumPy's integers are Integral, too.
    whole = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    return whole and -MOST <= value < MOST


def _is_positive(value: Any) -> bool:
    return _is_integer(value) and value > 0


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _is_pair(value: object, good: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(good, value))


def _is_finite(value: Any, least: float = -math.inf) -> bool:
    number = type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))
    return number and bool(least <= value and abs(value) < math.inf)


# Annotation -> (is this one, what is accepted); of a number also with its least value.
_PLAIN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda v: isinstance(v, bool), "True or False"),
    "str": (_is_string, "a string"),
    "int": (_is_integer, "an integer"),
    "int >= 0": (lambda v: _is_integer(v) and v >= 0, "an integer, 0 or more"),
    "int > 0": (_is_positive, "a positive integer"),
    "float": (_is_finite, "a finite number"),
    "float >= 0": (lambda v: _is_finite(v, 0), "a finite number, 0 or more"),
    "float > 0": (lambda v: _is_finite(v, 0) and v != 0, "a finite number above 0"),
    "tuple[int, ...]": (lambda v: isinstance(v, tuple) and all(map(_is_integer, v)), "a tuple of integers"),
    "tuple[str, ...]": (lambda v: isinstance(v, tuple) and all(map(_is_string, v)), "a tuple of strings"),
    "tuple[int, int]": (lambda v: _is_pair(v, _is_integer), "two integers"),
    "tuple[str, str]": (lambda v: _is_pair(v, _is_string), "two strings"),
    "Callable": (callable, "a function, or an object to call"),
}


def check_plain(layer: str, kind: str, /, **values: object) -> None:
    """Raise :class:`ArgumentError` for the first of ``values`` that is not of this plain type.

    Parameters
    ----------
    layer : str
    kind : str
        As in an annotation: ``"bool"``, ``"str"``, ``"int"``, ``"float"`` (any finite number), ``"tuple[int, ...]"``,
        ``"tuple[str, str]"`` (or a list of two) and so on; of numbers also ``"int > 0"`` or ``"float >= 0"``; each with
        ``" | None"`` or without.
    """
    name = kind.removesuffix(" | None")
    good, accepted = _PLAIN[name]
    for argument, value in values.items():
        if not (good(value) or (value is None and name != kind)):
            if isinstance(value, Integral) and int(value) >= MOST:
                accepted = f"{accepted} below 2^63"
            raise ArgumentError(layer, argument, describe(value), accepted + " or None" * (name != kind))


def check_fields(layer: str, given: object) -> None:
    """Raise :class:`ArgumentError` for the first field of a dataclass that is not of the plain type it is annotated as.

    Fields of other types than :func:`check_plain` knows are left to the caller; so is what is no dataclass. A pair
    given as a list becomes a tuple, so that what holds it is hashable; NumPy's numbers become Python's, whose ``repr``
    can be evaluated.
    """
    for field in dataclasses.fields(given) if dataclasses.is_dataclass(given) else ():
        if str(field.type).removesuffix(" | None") in _PLAIN:
            value = getattr(given, field.name)
            check_plain(layer, str(field.type), **{field.name: value})
            if (plain := _python_value(value)) is not value:
                object.__setattr__(given, field.name, plain)


def _python_value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        inner = tuple(map(_python_value, value))
        return value if isinstance(value, tuple) and all(a is b for a, b in zip(inner, value, strict=True)) else inner
    if isinstance(value, Integral) and not isinstance(value, int):
        return int(value)
    # A float of NumPy's is one of Python's, too, but not by its repr.
    return float(value) if isinstance(value, Real) and not isinstance(value, int) else value


def check_device(layer: str, device: torch.device | str | int | None) -> torch.device:
    """Return ``device`` (``None``: torch's default), or raise :class:`ArgumentError` if none like that is here."""
    import torch

    try:
        found = torch.get_default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(layer, "device", describe(device), "a torch device, its name, or None") from error
    if found.type not in ("cpu", "meta"):
        try:
            torch.empty(0, device=found)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AssertionError) as error:  # as torch says that it has none
            why = str(error).partition("\n")[0]
            accepted = "a torch device of this machine, its name, or None"
            raise ArgumentError(layer, "device", f"{str(found)!r} ({why})", accepted) from error
    return found


def check_path(layer: str, argument: str, path: object) -> Path:
    """Return ``path`` as a path; raise :class:`ArgumentError` if it is none, or no file can have that name."""
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(layer, argument, describe(path), "a string or a path")
    try:
        found = Path(path)
        found.stat()
    except (TypeError, ValueError) as error:  # of bytes; a NUL, or what the file system's encoding does not have
        raise ArgumentError(layer, argument, ascii(path), f"a name that a file can have ({error})") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ArgumentError(layer, argument, f"{path!a:.60}…", "a shorter name") from error
    return found


def check_positive(layer: str, /, **values: int) -> None:
    """Raise :class:`ArgumentError` for the first of ``values`` that is not a positive integer."""
    if not all(map(_is_positive, values.values())):  # what describes a step is checked in every step
        check_plain(layer, "int > 0", **values)


def as_integers(*sizes: Any) -> tuple[Any, ...]:
    """Return sizes that were checked as integers of Python's (``None`` stays): NumPy's wrap around in products."""
    return tuple(size if size is None else index(size) for size in sizes)


def _article(name: str) -> str:
    return "an" if name[0] in "AEIOUaeiou" else "a"


def check_kind(layer: str, kind: type | UnionType, /, **values: object) -> None:
    """Raise :class:`ArgumentError` for the first of ``values`` that is no ``kind``: a class, or ``cls | None``."""
    for name, value in values.items():
        if not isinstance(value, kind):
            kinds = [each for each in get_args(kind) or (kind,) if each is not NoneType]
            accepted = " or ".join(f"{_article(each.__name__)} {each.__name__} of {each.__module__}" for each in kinds)
            raise ArgumentError(layer, name, describe(value), accepted + " or None" * isinstance(None, kind))


def check_pair(layer: str, argument: str, given: Any) -> tuple[int, int]:
    """Return ``given`` as a tuple; raise :class:`ArgumentError` unless it is two positive integers."""
    if not _is_pair(given, _is_positive):
        raise ArgumentError(layer, argument, describe(given), "two positive integers")
    return given[0], given[1]


def check_names(layer: str, names: object, count: int) -> None:
    """Raise :class:`ArgumentError` unless ``names`` is ``None`` or a sequence of ``count`` strings."""
    if names is None:
        return
    accepted = f"{count} checkpoint name{'s' * (count > 1)} in a tuple"
    if not isinstance(names, tuple | list) or len(names) != count or not all(isinstance(n, str) for n in names):
        raise ArgumentError(layer, "names", describe(names), accepted)


def check_keys(
    layer: str, argument: str, given: Mapping[str, Any], accepted: Sequence[str], optional: Sequence[str] = ()
) -> None:
    """Raise :class:`ArgumentError` unless ``given`` has these keys, all but ``optional`` ones, and no others."""
    if not set(accepted) - set(optional) <= given.keys() <= set(accepted):
        raise ArgumentError(layer, argument, dict(given), f"the keys {', '.join(accepted)}")


def check_float(layer: str, /, **values: object) -> None:
    """Raise :class:`ArgumentError` for the first of ``values`` that is neither ``None`` nor a floating-point dtype."""
    import torch

    accepted = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for name, value in values.items():
        check_choice(layer, name, value, accepted)


def check_number(layer: str, /, **values: object) -> None:
    """Raise :class:`ArgumentError` for the first of ``values`` that is neither ``None`` nor a finite number."""
    check_plain(layer, "float | None", **values)


def check_choice(layer: str, argument: str, given: object, accepted: tuple[object, ...]) -> None:
    """Raise :class:`ArgumentError` unless ``given`` is one of ``accepted``."""
    try:
        known = given in accepted
    except (ValueError, RuntimeError):  # arrays and tensors compare by element
        known = False
    if not known:
        raise ArgumentError(layer, argument, describe(given), "one of " + ", ".join(map(repr, accepted)))
